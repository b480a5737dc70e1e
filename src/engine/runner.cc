// SPDX-License-Identifier: Apache-2.0
#include "engine/runner.h"

#include <algorithm>

#include "core/touch.h"

namespace moat {

Result<DryRun> dry_run(const Model& model, const RunnerOptions& options, const CacheSizes& sizes, ThreadPool& pool) {
  const ModelConfig& config = model.config();
  KernelPlan plan(default_buckets(options.max_batched_tokens));
  const CacheView caches = dry_cache_view(config, sizes);
  const Sampler sampler(config.vocab_size, config.eos_token_id);
  SingleRank comm;
  int64_t arena_bytes = 0;
  for (size_t b = 0; b < plan.buckets().size(); ++b) {
    for (const bool upper : {true, false}) {
      const int64_t tokens = upper ? plan.buckets()[b].last : plan.buckets()[b].first;
      Arena arena;
      Exec exec(
          {.mode = ExecMode::kDry, .arch = options.arch, .pool = &pool, .arena = &arena, .comm = &comm, .plan = &plan});
      exec.begin_step(tokens, upper);
      Batch batch;
      const int64_t rows = std::min(tokens, options.max_num_seqs);
      const ForwardInput& input = batch.build_dry(tokens, options.max_model_len, rows, sizes.block_size);
      const ForwardOutput output = model.forward(exec, input, caches);
      sampler.dry(exec, output.logits);
      arena_bytes = std::max(arena_bytes, static_cast<int64_t>(arena.high_water()));
    }
  }
  MOAT_RETURN_IF_ERROR(plan.freeze());
  return DryRun{std::move(plan), arena_bytes};
}

Runner::Runner(const Model& model, CacheMemory& caches, ThreadPool& pool, const RunnerOptions& options, DryRun dry)
    : model_(model),
      caches_(caches),
      pool_(pool),
      options_(options),
      plan_(std::move(dry.plan)),
      arena_bytes_(dry.arena_bytes),
      arena_(static_cast<size_t>(dry.arena_bytes)),
      sampler_(model.config().vocab_size, model.config().eos_token_id) {
  touch(pool, arena_.memory());  // resident before the first request
}

void Runner::set_profile(Profile* profile) { profile_ = profile; }

Exec Runner::make_exec() {
  return Exec({.mode = options_.reference ? ExecMode::kReference : ExecMode::kRun,
               .arch = options_.arch,
               .pool = &pool_,
               .arena = &arena_,
               .comm = &comm_,
               .plan = &plan_,
               .profile = profile_});
}

Tensor Runner::forward(const StepPlan& plan) {
  Exec exec = make_exec();
  const ArenaScope scope(arena_);
  const ForwardInput& input = batch_.build(plan, caches_.view().block_size);
  exec.begin_step(input.num_tokens());
  return model_.forward(exec, input, caches_.view()).logits;
}

StepResult Runner::run(const StepPlan& plan, Scheduler& scheduler) {
  Exec exec = make_exec();
  const ArenaScope scope(arena_);
  const ForwardInput& input = batch_.build(plan, caches_.view().block_size);
  exec.begin_step(input.num_tokens());
  caches_.copy_states(plan.restores, pool_);
  const ForwardOutput output = model_.forward(exec, input, caches_.view());
  caches_.copy_states(plan.saves, pool_);

  StepResult result;
  std::vector<SampleRow> rows;
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    if (!plan.wants_token[s]) continue;
    const SequenceId id = plan.sequences[s];
    Request& request = scheduler.request(id);
    rows.push_back({.params = &request.sampling,
                    .constraint = request.constraint.get(),
                    .position = scheduler.num_tokens(id),
                    .num_generated = scheduler.num_generated(id),
                    .tokens = scheduler.tokens(id),
                    .counts = &scheduler.token_counts(id)});
    result.rows.push_back({.sequence = id});
  }
  if (rows.empty()) return result;
  std::vector<SampledRow> sampled = sampler_.sample(exec, output.logits, rows);
  for (size_t i = 0; i < sampled.size(); ++i) {
    result.rows[i].token = std::move(sampled[i].token);
    result.rows[i].error = std::move(sampled[i].error);
  }
  return result;
}

}  // namespace moat
