// SPDX-License-Identifier: Apache-2.0
// Runner: executes step plans on one rank: batch arrays, forward, sampling, with the kernels and the arena fixed at
// construction by a dry pass. One thread at a time.
#pragma once

#include <memory>

#include "engine/batch.h"
#include "engine/cache.h"
#include "engine/cache_memory.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "model/model.h"
#include "ops/select.h"

namespace moat {

struct RunnerOptions {
  Arch arch;
  bool reference = false;  // every op by its reference instead of the plan's kernels
  int64_t max_batched_tokens = 2048;
  int64_t max_num_seqs = 64;
  int64_t max_model_len = 0;
};

// What a dry pass over every bucket finds.
struct DryRun {
  KernelPlan plan;  // frozen
  int64_t arena_bytes = 0;
};
// Fails with every call site that has no kernel, and why.
Result<DryRun> dry_run(const Model& model, const RunnerOptions& options, const CacheSizes& sizes, ThreadPool& pool);

class Runner {
 public:
  // `model`, `caches` and `pool` must outlive the runner.
  Runner(const Model& model, CacheMemory& caches, ThreadPool& pool, const RunnerOptions& options, DryRun dry);

  // Sampling parameters and constraints are taken from `scheduler`, which made the plan.
  StepResult run(const StepPlan& plan, Scheduler& scheduler);

  // One forward over `plan`; the logits stay valid until the next call.
  Tensor forward(const StepPlan& plan);

  const KernelPlan& kernel_plan() const { return plan_; }
  int64_t arena_bytes() const { return arena_bytes_; }
  void set_profile(Profile* profile);

 private:
  Exec make_exec();

  const Model& model_;
  CacheMemory& caches_;
  ThreadPool& pool_;
  RunnerOptions options_;
  KernelPlan plan_;
  int64_t arena_bytes_;
  Arena arena_;
  SingleRank comm_;
  Sampler sampler_;
  Batch batch_;
  Profile* profile_ = nullptr;
};

}  // namespace moat
