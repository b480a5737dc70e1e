// SPDX-License-Identifier: Apache-2.0
// `moat bench engine`: prefill and decode through the scheduler and the runner, without sockets and text, on a real
// checkpoint. The figures are medians over repeats, with their share of the read bandwidth measured in the same run.
#include <algorithm>

#include "base/rng.h"
#include "core/ceilings.h"
#include "engine/drafter.h"
#include "engine/local_engine.h"
#include "main/commands.h"
#include "plan/capacity.h"
#include "plan/decode_bytes.h"

namespace moat {
namespace {

struct Figures {
  int64_t batch = 0;
  double prefill_tokens_per_second = 0;
  double decode_tokens_per_second = 0;  // all sequences together
  double tokens_per_step = 0;           // of one sequence: more than 1 with drafts
  double decode_gb_per_second = 0;      // fewest bytes a step without drafts must move / time
  double decode_share = 0;              // of the measured read bandwidth
};

// Tokens that the first sequences may generate while later ones are still in their prefill.
int64_t head_start(const BenchEngineOptions& o, int64_t batch) { return batch * o.prefill / 1024 + batch + 2; }

struct RunTimes {
  double prefill_seconds = 0;
  double step_seconds = 0;     // of a decode step
  double tokens_per_step = 0;  // of all sequences
};

// One run: `batch` sequences of `prefill` random prompt tokens, then `decode` steps.
RunTimes run_once(EngineParts& parts, const BenchEngineOptions& o, int64_t batch, uint64_t seed) {
  Scheduler scheduler(parts.scheduler_options, parts.capacity.cache, parts.ledger_options);
  Stepper stepper(parts, scheduler);
  Rng rng(seed);
  for (int64_t s = 0; s < batch; ++s) {
    Request request;
    for (int64_t i = 0; i < o.prefill; ++i) {
      request.prompt_ids.push_back(static_cast<int32_t>(rng.below(parts.info.vocab_size)));
    }
    request.sampling.temperature = 0.0F;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = static_cast<int32_t>(parts.info.max_model_len - o.prefill);  // nobody ends meanwhile
    scheduler.add(static_cast<SequenceId>(s + 1), std::move(request));
  }
  StepPlan plan;
  std::vector<SequenceEvent> events;
  int64_t generated = 0;
  const auto step = [&] {
    stepper.schedule(plan, events, 0);
    stepper.run(plan, events);
    for (const SequenceEvent& e : events) generated += static_cast<int64_t>(e.event.tokens.size());
    events.clear();
  };
  // Prefill ends with the step that gives the last sequence its first token; from then on every step is a pure decode
  // step. A decode step that ran beside a prefill piece belongs to the prefill's time, and its tokens to neither
  // figure.
  const double start = now_seconds();
  const auto all_started = [&] {
    if (scheduler.num_waiting() > 0) return false;
    for (int64_t s = 1; s <= batch; ++s) {
      if (scheduler.num_generated(static_cast<SequenceId>(s)) == 0) return false;
    }
    return true;
  };
  do step();
  while (!all_started());
  const double prefilled = now_seconds();
  generated = 0;
  for (int64_t i = 0; i < o.decode; ++i) step();
  const auto steps = static_cast<double>(o.decode);
  return {prefilled - start, (now_seconds() - prefilled) / steps, static_cast<double>(generated) / steps};
}

Figures measure(EngineParts& parts, const BenchEngineOptions& o, int64_t batch, double bandwidth) {
  std::vector<double> prefill, step, rate, tokens;
  run_once(parts, o, batch, 0);  // warm up
  for (int r = 1; r <= o.repeats; ++r) {
    const RunTimes times = run_once(parts, o, batch, static_cast<uint64_t>(r));
    prefill.push_back(times.prefill_seconds);
    step.push_back(times.step_seconds);
    rate.push_back(times.tokens_per_step / times.step_seconds);
    tokens.push_back(times.tokens_per_step);
  }
  Figures f;
  f.batch = batch;
  f.prefill_tokens_per_second = static_cast<double>(batch * o.prefill) / median(prefill);
  f.decode_tokens_per_second = median(rate);
  f.tokens_per_step = median(tokens) / static_cast<double>(batch);
  const double bytes = decode_step_bytes(parts.model->config(), batch, o.prefill + o.decode / 2);
  f.decode_gb_per_second = bytes / median(step) / 1e9;
  f.decode_share = bytes / median(step) / bandwidth;
  return f;
}

void print_profile(const Profile& profile, double bandwidth) {
  std::vector<std::pair<std::string, Profile::Site>> sites(profile.sites.begin(), profile.sites.end());
  std::sort(sites.begin(), sites.end(),
            [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  double total = 0;
  for (const auto& [name, s] : sites) total += s.seconds;
  fmt::print("{:<24} {:>9} {:>10} {:>7} {:>9} {:>10} {:>8}\n", "site", "calls", "ms", "share", "GB/s", "GFLOP/s",
             "of bw");
  for (const auto& [name, s] : sites) {
    fmt::print("{:<24} {:>9} {:>10.2f} {:>6.1f}% {:>9.2f} {:>10.2f} {:>7.1f}%\n", name, s.calls, s.seconds * 1e3,
               100 * s.seconds / total, s.cost.bytes / s.seconds / 1e9, s.cost.flops / s.seconds / 1e9,
               100 * s.cost.bytes / s.seconds / bandwidth);
  }
  fmt::print("{:<24} {:>9} {:>10.2f}\n", "sum of ops", "", total * 1e3);
}

}  // namespace

Status bench_engine_command(const BenchEngineOptions& o) {
  MOAT_ASSIGN(const std::vector<int64_t> batches, parse_counts("--batch", o.batches));
  if (o.prefill < 1 || o.decode < 1 || o.repeats < 1) {
    return invalid_argument("--prefill {}, --decode {}, --repeats {}: expected at least 1", o.prefill, o.decode,
                            o.repeats);
  }
  MOAT_ASSIGN(OpenModel open, open_model(o.model));
  const int64_t largest = *std::max_element(batches.begin(), batches.end());
  constexpr int64_t kMostTokensPerStep = 16;
  const int64_t max_len = std::min(open.loaded->config.max_position_embeddings,
                                   o.prefill + kMostTokensPerStep * (o.decode + 1 + head_start(o, largest)));
  if (o.prefill + o.decode + 1 + head_start(o, largest) > max_len) {
    return invalid_argument("--prefill {} and --decode {} need {} tokens, the model's context is {}", o.prefill,
                            o.decode, o.prefill + o.decode + 1 + head_start(o, largest), max_len);
  }
  MOAT_ASSIGN(const std::unique_ptr<LoadedDspark> drafter, open_drafter(o.draft, *open.pool));
  MOAT_ASSIGN(EngineParts parts, make_engine_parts(*open.loaded,
                                                   {.max_model_len = max_len,
                                                    .max_num_seqs = largest,
                                                    .reference = open.reference,
                                                    .drafter = drafter.get(),
                                                    .ngram_drafter = o.draft.ngram,
                                                    .num_draft_tokens = o.draft.num_draft_tokens},
                                                   *open.pool));
  if (parts.capacity.max_num_seqs < largest) {
    return resource_exhausted("batch {} does not fit: {}", largest, parts.capacity.bound);
  }
  const double bandwidth = measure_read_bandwidth(*open.pool);
  Profile profile;
  if (o.profile) parts.runner->set_profile(&profile);
  std::vector<Figures> all;
  for (const int64_t batch : batches) all.push_back(measure(parts, o, batch, bandwidth));

  if (o.json) {
    Json results = Json::array();
    for (const Figures& f : all) {
      results.push_back(Json::object({{"batch", f.batch},
                                      {"prefill_tokens_per_second", f.prefill_tokens_per_second},
                                      {"decode_tokens_per_second", f.decode_tokens_per_second},
                                      {"tokens_per_step", f.tokens_per_step},
                                      {"decode_gb_per_second", f.decode_gb_per_second},
                                      {"decode_bandwidth_share", f.decode_share}}));
    }
    Json json = Json::object({{"model", o.model.model_dir},
                              {"backend", parts.info.backend},
                              {"threads", open.pool->num_threads()},
                              {"prefill", o.prefill},
                              {"decode", o.decode},
                              {"read_bandwidth_gb_per_second", bandwidth / 1e9},
                              {"prefill_tokens_per_second", all.front().prefill_tokens_per_second},
                              {"decode_tokens_per_second", all.front().decode_tokens_per_second},
                              {"decode_bandwidth_share", all.front().decode_share},
                              {"results", std::move(results)}});
    fmt::print("{}\n", json.dump());
    return {};
  }
  fmt::print("model {}  backend {}  threads {}  prefill {}  decode {}  activations f32\n", o.model.model_dir,
             parts.info.backend, open.pool->num_threads(), o.prefill, o.decode);
  fmt::print("{}\nread bandwidth {:.1f} GB/s (measured now)\n", parts.runner->kernel_plan().summary(), bandwidth / 1e9);
  fmt::print("speculation: {}\n", parts.drafter == nullptr ? "off" : parts.drafter->describe());
  fmt::print("{:>6} {:>16} {:>16} {:>12} {:>12} {:>10}\n", "batch", "prefill tok/s", "decode tok/s", "tokens/step",
             "decode GB/s", "share");
  for (const Figures& f : all) {
    fmt::print("{:>6} {:>16.1f} {:>16.1f} {:>12.2f} {:>12.2f} {:>9.1f}%\n", f.batch, f.prefill_tokens_per_second,
               f.decode_tokens_per_second, f.tokens_per_step, f.decode_gb_per_second, 100 * f.decode_share);
  }
  if (o.profile) print_profile(profile, bandwidth);
  return {};
}

}  // namespace moat
