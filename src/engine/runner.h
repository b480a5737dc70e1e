// SPDX-License-Identifier: Apache-2.0
// Runner: executes step plans on one rank: drafting, batch arrays, forward, sampling, with the kernels and the arena fixed
// at construction by a dry pass. One thread at a time.
#pragma once

#include <memory>
#include <unordered_map>

#include "engine/batch.h"
#include "engine/cache.h"
#include "engine/cache_memory.h"
#include "engine/drafter.h"
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
// Fails with every call site that has no kernel, and why. `drafter`, over shapes without data, may be null.
Result<DryRun> dry_run(const Model& model, const RunnerOptions& options, const CacheSizes& sizes, ThreadPool& pool,
                       Drafter* drafter = nullptr);

class Runner {
 public:
  // `model`, `caches`, `pool` and `drafter`, which may be null, must outlive the runner.
  Runner(const Model& model, CacheMemory& caches, ThreadPool& pool, const RunnerOptions& options, DryRun dry,
         Drafter* drafter = nullptr);

  // Sampling parameters, tokens and constraints are taken from `scheduler`, which made the plan.
  StepResult run(const StepPlan& plan, Scheduler& scheduler);

  // What Scheduler::advance() answered to the result of the last run(); before the next one.
  void commit(const StateCommits& commits);

  // One forward over `plan` without drafts; the logits stay valid until the next call.
  Tensor forward(const StepPlan& plan);

  const KernelPlan& kernel_plan() const { return plan_; }
  int64_t arena_bytes() const { return arena_bytes_; }
  void set_profile(Profile* profile);

 private:
  // The drafts of one step.
  struct Drafted {
    StepDrafts step;
    std::vector<int32_t> first_row;  // [plan seqs], of laws, confidence; -1: no drafts
    std::vector<float> confidence;   // [drafted seqs * width]
    Tensor laws;
    double seconds = 0;
  };

  Exec make_exec();
  Drafted draft(Exec& exec, const StepPlan& plan, Scheduler& scheduler);
  StepResult sample(Exec& exec, const StepPlan& plan, const Drafted& drafted, const Tensor& logits,
                    Scheduler& scheduler);

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
  Drafter* drafter_ = nullptr;
  std::unordered_map<SequenceId, int32_t> first_record_;  // of the last run's sequences with drafts
  Profile* profile_ = nullptr;
};

}  // namespace moat
