// SPDX-License-Identifier: Apache-2.0
#include "engine/step_cost_fit.h"

#include <algorithm>

#include "engine/batch.h"
#include "engine/cache_memory.h"

namespace moat {
namespace {

// Two contexts at which what a row does besides its pairs is the same; long, so that attention is what bounds the
// attention leaves.
constexpr int64_t kNear = 4096;
constexpr int64_t kFar = 8192;
constexpr int64_t kPieceRows = 512;

double seconds_of(const Model& model, const StepCostOptions& o, const Batch::DryStep& step) {
  SingleRank comm;
  Arena arena;
  Profile profile;
  Exec exec({.mode = ExecMode::kCost, .arch = o.arch, .arena = &arena, .comm = &comm, .profile = &profile});
  Batch batch;
  const CacheSizes sizes{.block_size = o.block_size, .num_blocks = 1, .num_slots = 1};
  model.forward(exec, batch.build_dry(step, o.block_size), dry_cache_view(model.config(), sizes));
  double seconds = 0;
  for (const auto& [name, site] : profile.sites) {
    seconds += std::max(site.cost.bytes / o.read_bytes_per_second, site.cost.flops / o.flops_per_second);
  }
  return seconds;
}

// The rows of a mixed step. A prompt's piece that is too short for the prefill form is rows of sequences that decode.
Batch::DryStep mixed_step(int64_t rows, int64_t max_num_seqs) {
  if (rows < max_num_seqs + kPrefillMinTokens) return {.decode = rows};
  return {.decode = max_num_seqs - 1, .prefill_rows = rows - (max_num_seqs - 1)};
}

double own_pairs(int64_t rows) { return static_cast<double>(rows) * static_cast<double>(rows) / 2; }

double seconds_per_pair(const Model& model, const StepCostOptions& o, Batch::DryStep step) {
  step.cached = kNear;
  const double near = seconds_of(model, o, step);
  step.cached = kFar;
  const double far = seconds_of(model, o, step);
  return (far - near) / static_cast<double>((step.decode + step.prefill_rows) * (kFar - kNear));
}

}  // namespace

StepCost derive_step_cost(const Model& model, const StepCostOptions& o) {
  MOAT_CHECK(o.read_bytes_per_second > 0 && o.flops_per_second > 0, "ceilings of {} B/s and {} FLOP/s",
             o.read_bytes_per_second, o.flops_per_second);
  StepCost cost;
  cost.seconds_per_decode_pair = seconds_per_pair(model, o, {.decode = 1});
  cost.seconds_per_prefill_pair =
      seconds_per_pair(model, o, {.prefill_rows = std::min(kPieceRows, o.max_batched_tokens)});
  double before = 0;
  for (int64_t rows = 1;; rows = std::min(2 * rows, o.max_batched_tokens)) {
    const Batch::DryStep step = mixed_step(rows, o.max_num_seqs);
    const double pairs = static_cast<double>(step.decode) * own_pairs(1) * cost.seconds_per_decode_pair +
                         own_pairs(step.prefill_rows) * cost.seconds_per_prefill_pair;
    // A piece longer than kPieceRows has cheaper pairs than the slope says; never let more rows look like less work.
    before = std::max(before, seconds_of(model, o, step) - pairs);
    cost.rows_seconds.emplace_back(rows, before);
    if (rows == o.max_batched_tokens) break;
  }
  return cost;
}

}  // namespace moat
