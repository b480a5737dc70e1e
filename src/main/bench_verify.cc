// SPDX-License-Identifier: Apache-2.0
// `moat bench verify`: from the target's logits to accepted drafts, by the dense path and by the sparse one, beside
// what reading the bytes takes at least.
#include <algorithm>
#include <functional>
#include <numeric>

#include "base/rng.h"
#include "core/ceilings.h"
#include "main/commands.h"
#include "ops/accept.h"
#include "ops/sample.h"

namespace moat {
namespace {

constexpr int64_t kVocab = 163'840;
constexpr int64_t kMostRows = 64;
constexpr int64_t kRowsOfSequence = 8;  // an anchor and seven drafts
constexpr int32_t kTopK = 20;
constexpr int64_t kWidth = 2 * kTopK;
constexpr float kTopP = 0.95F;

// Logits and draft laws of kMostRows rows. Each measurement takes other rows, so that they come from memory.
struct Inputs {
  Buffer logits_memory{static_cast<size_t>(kMostRows * kVocab) * 4};
  Buffer q_memory{static_cast<size_t>(kMostRows * kVocab) * 4};
  Tensor logits = make_tensor(logits_memory.data(), DType::kF32, {kMostRows, kVocab});
  Tensor q = make_tensor(q_memory.data(), DType::kF32, {kMostRows, kVocab});
  std::vector<int32_t> drafts;
  std::vector<double> accept_u, bonus_u;

  explicit Inputs(Exec& exec) {
    Rng rng(1);
    for (int64_t i = 0; i < logits.count(); ++i) {
      logits.f32()[i] = static_cast<float>(2.5 * rng.normal());
      q.f32()[i] = logits.f32()[i] + static_cast<float>(0.3 * rng.uniform(-1.0, 1.0));
    }
    const std::vector<float> temperature(kMostRows, 1.0F);
    const std::vector<int32_t> k(kMostRows, kTopK);
    softmax(exec, "bench.q", {.probs = q, .logits = q, .temperature = temperature});
    top_k_renorm(exec, "bench.q_top_k", {.probs = q, .k = k});
    for (int64_t r = 0; r < kMostRows; ++r) {
      accept_u.push_back(rng.uniform());
      bonus_u.push_back(rng.uniform());
    }
    drafts.resize(kMostRows);
    const Tensor ids = make_tensor(drafts.data(), DType::kI32, {kMostRows});
    draw(exec, "bench.drafts", {.ids = ids, .probs = q, .uniform = accept_u});
    for (double& u : accept_u) u = rng.uniform();
  }
};

struct Measured {
  double target_seconds = 0;  // logits to distributions
  double accept_seconds = 0;  // distributions to tokens
};

struct Step {
  Exec& exec;
  const Inputs& in;
  int64_t rows;

  // Rows [first, first + rows) by one path.
  Measured run(int64_t first, bool is_sparse) const {
    const ArenaScope scope(exec.arena());
    const Tensor logits = in.logits.rows(first, first + rows);
    const auto count = static_cast<size_t>(rows);
    const std::vector<float> temperature(count, 1.0F), top_p(count, kTopP), min_p(count, 0.0F);
    const std::vector<int32_t> k(count, kTopK);
    std::vector<int32_t> cu_rows = {0};
    while (cu_rows.back() < rows) {
      cu_rows.push_back(static_cast<int32_t>(std::min(rows, cu_rows.back() + kRowsOfSequence)));
    }
    const size_t seqs = cu_rows.size() - 1;
    const std::vector<AcceptRule> rules(seqs, AcceptRule::kBlock);
    AcceptDraftsArgs accept{.accepted = exec.arena().alloc(DType::kI32, {static_cast<int64_t>(seqs)}),
                            .bonus = exec.arena().alloc(DType::kI32, {static_cast<int64_t>(seqs)}),
                            .q = in.q.rows(first, first + rows),
                            .drafts = std::span(in.drafts).subspan(static_cast<size_t>(first), count),
                            .cu_rows = cu_rows,
                            .rules = rules,
                            .accept_uniforms = std::span(in.accept_u).subspan(static_cast<size_t>(first), count),
                            .bonus_uniforms = std::span(in.bonus_u).first(seqs)};
    if (is_sparse) {
      accept.target.compact = {exec.arena().alloc(DType::kI32, {rows, kWidth}),
                               exec.arena().alloc(DType::kF32, {rows, kWidth}),
                               exec.arena().alloc(DType::kI32, {rows})};
    } else {
      accept.target.dense = exec.arena().alloc(DType::kF32, {rows, kVocab});
    }
    const double start = now_seconds();
    if (is_sparse) {
      top_k_probs(exec, "verify.top_k_probs",
                  {.out = accept.target.compact,
                   .logits = logits,
                   .temperature = temperature,
                   .k = k,
                   .top_p = top_p,
                   .min_p = min_p});
    } else {
      softmax(exec, "verify.softmax", {.probs = accept.target.dense, .logits = logits, .temperature = temperature});
      top_k_renorm(exec, "verify.top_k", {.probs = accept.target.dense, .k = k});
      top_p_renorm(exec, "verify.top_p", {.probs = accept.target.dense, .p = top_p});
    }
    const double middle = now_seconds();
    accept_drafts(exec, "verify.accept", accept);
    return {middle - start, now_seconds() - middle};
  }
};

}  // namespace

Status bench_verify_command(const BenchVerifyOptions& o) {
  ThreadPool pool(o.threads > 0 ? o.threads : num_usable_cpus());
  Arena arena(static_cast<size_t>(kMostRows * kVocab) * 4 + (size_t{16} << 20));
  Exec exec({.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool, .arena = &arena});
  const double bandwidth = measure_read_bandwidth(pool);
  const Inputs inputs(exec);
  fmt::print("{}  threads {}  read bandwidth {:.1f} GB/s\n", host_arch().name, pool.num_threads(), bandwidth / 1e9);
  fmt::print("vocabulary {}, temperature 1, top_k {}, top_p {}, block rule, {} rows a sequence; medians of {}\n",
             kVocab, kTopK, kTopP, kRowsOfSequence, o.repeats);
  fmt::print("{:>5} {:>7} {:>12} {:>12} {:>10} {:>9} {:>12} {:>12}\n", "rows", "path", "target ms", "MB at least",
             "GB/s", "of read", "accept ms", "together ms");
  for (const int64_t rows : {int64_t{1}, kRowsOfSequence, kMostRows}) {
    for (const bool is_sparse : {false, true}) {
      const Step step{exec, inputs, rows};
      std::vector<double> target, accept, together;
      for (int64_t i = -1; i < o.repeats; ++i) {
        const Measured m = step.run((i + 1) * rows % kMostRows, is_sparse);
        if (i < 0) continue;  // warms up
        target.push_back(m.target_seconds);
        accept.push_back(m.accept_seconds);
        together.push_back(m.target_seconds + m.accept_seconds);
      }
      // Logits read once; a dense layout also has the probabilities written once.
      const double bytes = static_cast<double>(rows * kVocab) * (is_sparse ? 4 : 8);
      const double rate = bytes / median(target);
      fmt::print("{:>5} {:>7} {:>12.3f} {:>12.2f} {:>10.2f} {:>8.0f}% {:>12.4f} {:>12.3f}\n", rows,
                 is_sparse ? "sparse" : "dense", median(target) * 1e3, bytes / 1e6, rate / 1e9, 100 * rate / bandwidth,
                 median(accept) * 1e3, median(together) * 1e3);
    }
  }
  return {};
}

}  // namespace moat
