// SPDX-License-Identifier: Apache-2.0
// `moat bench scheduler`: what the bookkeeping of a step costs, without a model: schedule() and advance() of many
// decoding sequences with long block tables, and the names of a long prompt's blocks.
#include <algorithm>
#include <numeric>

#include "base/rng.h"
#include "engine/scheduler.h"
#include "main/commands.h"
#include "ops/select.h"

namespace moat {
namespace {

std::vector<int32_t> random_ids(Rng& rng, int64_t count) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(rng.below(160'000)));
  return ids;
}

}  // namespace

Status bench_scheduler_command(const BenchSchedulerOptions& o) {
  constexpr int64_t kBlock = 64;
  const int64_t length = o.blocks * kBlock;
  const int64_t generate = o.steps + kBlock;
  Scheduler scheduler({.max_num_seqs = o.sequences,
                       .max_batched_tokens = o.sequences * length,
                       .max_model_len = length + generate + 1,
                       .eos_token_id = -1},
                      {.block_size = kBlock,
                       .num_blocks = o.sequences * ((length + generate) / kBlock + 2),
                       .num_slots = o.sequences * 2});
  Rng rng(1);
  for (int64_t s = 0; s < o.sequences; ++s) {
    Request request;
    request.prompt_ids = random_ids(rng, length - 1 - rng.below(kBlock));  // blocks fill at different steps
    request.sampling.max_tokens = static_cast<int32_t>(generate);
    scheduler.add(static_cast<SequenceId>(s + 1), std::move(request));
  }
  StepPlan plan;
  StepResult result;
  std::vector<SequenceEvent> events;
  const auto step = [&] {
    const double start = now_seconds();
    scheduler.schedule(plan, events);
    const double scheduled = now_seconds();
    result.rows.clear();
    for (size_t s = 0; s < plan.sequences.size(); ++s) {
      if (plan.wants_token[s]) result.rows.push_back({.sequence = plan.sequences[s], .tokens = {{.token_id = 7}}});
    }
    const double answered = now_seconds();
    scheduler.advance(plan, result, events);
    const double end = now_seconds();
    events.clear();
    return std::pair{scheduled - start, end - answered};
  };
  while (plan.num_decode_seqs < o.sequences) step();
  std::vector<double> both;
  double schedule_sum = 0;
  for (int64_t i = 0; i < o.steps; ++i) {
    const auto [schedule, advance] = step();
    schedule_sum += schedule;
    both.push_back(schedule + advance);
  }
  const double mean = std::accumulate(both.begin(), both.end(), 0.0) / static_cast<double>(both.size());
  std::sort(both.begin(), both.end());

  const std::vector<int32_t> prompt = random_ids(rng, o.hash_tokens);
  std::vector<double> hash;
  for (int i = 0; i < 9; ++i) {
    KeyChain chain(root_key(static_cast<uint64_t>(i), 0, ""), kBlock);
    const double start = now_seconds();
    chain.extend(prompt);
    hash.push_back(now_seconds() - start);
  }
  std::sort(hash.begin(), hash.end());

  const auto quantile = [&](double q) { return both[static_cast<size_t>(q * static_cast<double>(both.size() - 1))]; };
  const double schedule_mean = schedule_sum / static_cast<double>(o.steps);
  if (o.json) {
    fmt::print("{}\n", Json::object({{"sequences", o.sequences},
                                     {"blocks", o.blocks},
                                     {"step_mean_us", mean * 1e6},
                                     {"step_p50_us", quantile(0.5) * 1e6},
                                     {"step_p99_us", quantile(0.99) * 1e6},
                                     {"schedule_mean_us", schedule_mean * 1e6},
                                     {"hash_tokens", o.hash_tokens},
                                     {"hash_ms", hash[hash.size() / 2] * 1e3}})
                           .dump());
    return {};
  }
  fmt::print("{} decoding sequences of {} blocks, {} steps\n", o.sequences, o.blocks, o.steps);
  fmt::print("schedule + advance: mean {:.1f} us (schedule {:.1f}), p50 {:.1f}, p99 {:.1f}\n", mean * 1e6,
             schedule_mean * 1e6, quantile(0.5) * 1e6, quantile(0.99) * 1e6);
  fmt::print("block keys of {} tokens: {:.2f} ms\n", o.hash_tokens, hash[hash.size() / 2] * 1e3);
  return {};
}

}  // namespace moat
