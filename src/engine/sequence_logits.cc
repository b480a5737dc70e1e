// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence_logits.h"

#include <algorithm>
#include <numeric>

namespace moat {

Result<std::unique_ptr<SequenceLogits>> SequenceLogits::create(const LoadedModel& loaded, const Options& options,
                                                               ThreadPool& pool) {
  std::unique_ptr<SequenceLogits> self(new SequenceLogits());
  self->options_ = options;
  self->pool_ = &pool;
  self->model_ = std::make_unique<KimiModel>(loaded.config, loaded.weights);
  self->arch_ = host_arch();
  CacheSizes sizes;
  sizes.num_blocks = (options.max_tokens + sizes.block_size - 1) / sizes.block_size;
  sizes.num_slots = 1;
  // Every row's logits are wanted, so the dry pass reserves them for a whole chunk.
  const RunnerOptions runner{.arch = self->arch_,
                             .reference = options.reference,
                             .max_batched_tokens = options.chunk,
                             .max_num_seqs = options.chunk,
                             .max_model_len = options.max_tokens};
  MOAT_ASSIGN(DryRun dry, dry_run(*self->model_, runner, sizes, pool));
  self->plan_ = std::move(dry.plan);
  self->arena_ = Arena(static_cast<size_t>(dry.arena_bytes));
  self->caches_ = std::make_unique<CacheMemory>(loaded.config, sizes);
  return self;
}

void SequenceLogits::restart() { num_tokens_ = 0; }

Status SequenceLogits::append(std::span<const int32_t> ids, int64_t chunk, const OnLogits& on_logits) {
  chunk = chunk > 0 ? std::min(chunk, options_.chunk) : options_.chunk;
  const int64_t count = static_cast<int64_t>(ids.size());
  if (num_tokens_ + count > options_.max_tokens) {
    return invalid_argument("the sequence has {} tokens, at most {} fit", num_tokens_ + count, options_.max_tokens);
  }
  for (const int32_t id : ids) {
    if (id < 0 || id >= model_->config().vocab_size) {
      return invalid_argument("token id {} is outside the vocabulary of {}", id, model_->config().vocab_size);
    }
  }
  StepPlan plan;
  const int64_t blocks = caches_->view().mla.dim(1) / caches_->view().block_size;
  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t rows = std::min(chunk, count - begin);
    plan.clear();
    plan.sequences = {1};
    plan.num_tokens = {static_cast<int32_t>(rows)};
    plan.first_positions = {static_cast<int32_t>(num_tokens_)};
    plan.state_slots = {0};
    plan.wants_token = {1};
    plan.token_ids.assign(ids.begin() + begin, ids.begin() + begin + rows);
    plan.block_tables.resize(static_cast<size_t>(blocks));
    std::iota(plan.block_tables.begin(), plan.block_tables.end(), 0);
    plan.max_blocks = blocks;
    plan.num_decode_seqs = rows < kPrefillMinTokens ? 1 : 0;
    ForwardInput input = batch_.build(plan, caches_->view().block_size);
    std::vector<int32_t> all_rows(static_cast<size_t>(rows));
    std::iota(all_rows.begin(), all_rows.end(), 0);
    input.logits_rows = all_rows;

    Exec exec({.mode = options_.reference ? ExecMode::kReference : ExecMode::kRun,
               .arch = arch_,
               .pool = pool_,
               .arena = &arena_,
               .comm = &comm_,
               .plan = &plan_});
    const ArenaScope scope(arena_);
    exec.begin_step(rows);
    const ForwardOutput output = model_->forward(exec, input, caches_->view());
    on_logits(num_tokens_, output.logits);
    num_tokens_ += rows;
  }
  return {};
}

}  // namespace moat
