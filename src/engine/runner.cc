// SPDX-License-Identifier: Apache-2.0
#include "engine/runner.h"

#include <algorithm>

#include "core/touch.h"
#include "engine/draft_length.h"

namespace moat {

Result<DryRun> dry_run(const Model& model, const RunnerOptions& options, const CacheSizes& sizes, ThreadPool& pool,
                       Drafter* drafter) {
  const ModelConfig& config = model.config();
  KernelPlan plan(default_buckets(options.max_batched_tokens));
  const CacheView caches = dry_cache_view(config, sizes);
  const Sampler sampler(config.vocab_size, config.eos_token_id);
  const int64_t max_drafts = drafter == nullptr ? 0 : drafter->max_drafts();
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
      // A sequence that wants a token has a row of logits, and one for each draft.
      const int64_t seqs = std::min(tokens, options.max_num_seqs);
      const int64_t rows = std::min(tokens, seqs + sizes.verify_rows);
      ForwardInput input = batch.build_dry(tokens, options.max_model_len, rows, sizes.block_size);
      if (drafter != nullptr) {
        drafter->dry_propose(exec, seqs, input.max_blocks, upper);
        input.tap_layers = drafter->tap_layers();
        input.tap_stream = drafter->tap_stream();
        // The laws of the drafts stay while their rows are computed and judged. A sequence with a draft takes two
        // records at least, and every one gets laws for as many drafts as the longest round has.
        arena.alloc(DType::kF32, {std::min(seqs, sizes.verify_rows / 2) * max_drafts, config.vocab_size});
      }
      const ForwardOutput output = model.forward(exec, input, caches);
      if (drafter != nullptr && !drafter->tap_layers().empty()) drafter->dry_extend(exec, tokens);
      sampler.dry(exec, output.logits, max_drafts);
      if (sizes.verify_rows > 0) {
        const std::vector<int32_t> none(static_cast<size_t>(seqs), 0);
        model.commit(exec, {.begins = none, .ends = none, .slots = none}, caches);
      }
      arena_bytes = std::max(arena_bytes, static_cast<int64_t>(arena.high_water()));
    }
  }
  MOAT_RETURN_IF_ERROR(plan.freeze());
  return DryRun{std::move(plan), arena_bytes};
}

Runner::Runner(const Model& model, CacheMemory& caches, ThreadPool& pool, const RunnerOptions& options, DryRun dry,
               Drafter* drafter)
    : model_(model),
      caches_(caches),
      pool_(pool),
      options_(options),
      plan_(std::move(dry.plan)),
      arena_bytes_(dry.arena_bytes),
      arena_(static_cast<size_t>(dry.arena_bytes)),
      sampler_(model.config().vocab_size, model.config().eos_token_id),
      drafter_(drafter) {
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

// Proposes for every sequence that the plan has room for drafts of, and cuts what does not pay or cannot be part of the
// reply.
Runner::Drafted Runner::draft(Exec& exec, const StepPlan& plan, Scheduler& scheduler) {
  Drafted out;
  std::vector<DraftSequence> sequences;
  std::vector<int32_t> limits;
  std::vector<size_t> members;  // of the plan
  for (size_t s = 0; s < plan.num_drafts.size(); ++s) {
    if (plan.num_drafts[s] == 0) continue;
    const SequenceId id = plan.sequences[s];
    sequences.push_back({.tokens = scheduler.tokens(id),
                         .params = &scheduler.request(id).sampling,
                         .block_table = plan.block_tables.data() + s * static_cast<size_t>(plan.max_blocks)});
    limits.push_back(plan.num_drafts[s]);
    members.push_back(s);
  }
  if (drafter_ == nullptr || members.empty()) return out;
  const double start = now_seconds();
  exec.begin_step(static_cast<int64_t>(members.size()));
  const int64_t wanted = *std::max_element(limits.begin(), limits.end());
  Drafts drafts = drafter_->propose(exec, sequences, plan.max_blocks, std::min(wanted, drafter_->max_drafts()));
  const auto width = static_cast<size_t>(drafts.width);
  for (size_t m = 0; m < members.size(); ++m) {
    // Nothing is drafted past a token that ends the reply. Where one may not come yet (min_tokens) it is not accepted.
    const SamplingParams& params = *sequences[m].params;
    const auto ends = [&](int32_t id) { return is_stop_token(params, model_.config().eos_token_id, id); };
    const auto first = drafts.ids.begin() + static_cast<int64_t>(m * width);
    const auto stop = std::find_if(first, first + static_cast<int64_t>(width), ends);
    limits[m] = std::min(limits[m], static_cast<int32_t>(stop - first) + 1);
  }
  const std::vector<int32_t> lengths = draft_lengths(plan.drafting, drafts, limits);
  out.step.counts.assign(plan.sequences.size(), 0);
  out.first_row.assign(plan.sequences.size(), -1);
  for (size_t m = 0; m < members.size(); ++m) {
    if (lengths[m] == 0) continue;
    out.step.counts[members[m]] = lengths[m];
    out.first_row[members[m]] = static_cast<int32_t>(m * width);
    const auto first = drafts.ids.begin() + static_cast<int64_t>(m * width);
    out.step.ids.insert(out.step.ids.end(), first, first + lengths[m]);
  }
  out.confidence = std::move(drafts.confidence);
  out.laws = drafts.laws;
  out.seconds = now_seconds() - start;
  return out;
}

StepResult Runner::run(const StepPlan& plan, Scheduler& scheduler) {
  Exec exec = make_exec();
  const ArenaScope scope(arena_);
  const Drafted drafted = draft(exec, plan, scheduler);
  ForwardInput input = batch_.build(plan, caches_.view().block_size, drafted.step);
  if (drafter_ != nullptr) {
    input.tap_layers = drafter_->tap_layers();
    input.tap_stream = drafter_->tap_stream();
  }
  first_record_.clear();
  for (int64_t v = 0; v < input.num_verify_seqs; ++v) {
    const auto s = static_cast<size_t>(batch_.order()[static_cast<size_t>(v)]);
    first_record_[plan.sequences[s]] = input.cu_seqlens[static_cast<size_t>(v)];
  }
  exec.begin_step(input.num_tokens());
  caches_.copy_states(plan.restores, pool_);
  const ForwardOutput output = model_.forward(exec, input, caches_.view());
  if (output.taps.is_set()) drafter_->extend(exec, output.taps, input);
  caches_.copy_states(plan.saves, pool_);
  StepResult result = sample(exec, plan, drafted, output.logits, scheduler);
  result.draft_seconds = drafted.seconds;
  return result;
}

StepResult Runner::sample(Exec& exec, const StepPlan& plan, const Drafted& drafted, const Tensor& logits,
                          Scheduler& scheduler) {
  std::vector<VerifySequence> sequences;  // in the order of the batch
  std::vector<size_t> first_draft;        // [plan seqs], in drafted.step.ids
  size_t num_drafts = 0;
  for (const int32_t count : drafted.step.counts) {
    first_draft.push_back(num_drafts);
    num_drafts += static_cast<size_t>(count);
  }
  for (const int32_t index : batch_.order()) {
    const auto s = static_cast<size_t>(index);
    if (!plan.wants_token[s]) continue;
    const SequenceId id = plan.sequences[s];
    Request& request = scheduler.request(id);
    VerifySequence& sequence = sequences.emplace_back();
    sequence = {.params = &request.sampling,
                .constraint = request.constraint.get(),
                .tokens = scheduler.tokens(id),
                .num_generated = scheduler.num_generated(id),
                .counts = &scheduler.token_counts(id)};
    if (first_draft.empty()) continue;
    sequence.drafts = std::span(drafted.step.ids).subspan(first_draft[s], static_cast<size_t>(drafted.step.counts[s]));
    if (drafted.laws.is_set() && is_drawn(request.sampling)) sequence.law_row = drafted.first_row[s];
  }
  StepResult result;
  if (sequences.empty()) return result;
  std::vector<VerifiedSequence> verified = sampler_.verify(exec, logits, sequences, drafted.laws);

  std::vector<StepResult::Row> rows(plan.sequences.size());
  size_t next = 0;
  for (const int32_t index : batch_.order()) {
    const auto s = static_cast<size_t>(index);
    if (!plan.wants_token[s]) continue;
    VerifiedSequence& v = verified[next++];
    rows[s] = {.sequence = plan.sequences[s], .tokens = std::move(v.tokens), .error = std::move(v.error)};
    if (drafted.step.counts.empty() || drafted.step.counts[s] == 0) continue;
    rows[s].num_drafts = static_cast<int32_t>(v.num_drafts);
    if (drafted.confidence.empty()) continue;
    const auto begin = drafted.confidence.begin() + drafted.first_row[s];
    rows[s].confidence.assign(begin, begin + rows[s].num_drafts);
  }
  for (size_t s = 0; s < rows.size(); ++s) {
    if (plan.wants_token[s]) result.rows.push_back(std::move(rows[s]));
  }
  return result;
}

void Runner::commit(const StateCommits& commits) {
  if (commits.entries.empty() && commits.saves.empty()) return;
  Exec exec = make_exec();
  const ArenaScope scope(arena_);
  exec.begin_step(std::max<int64_t>(1, static_cast<int64_t>(commits.entries.size())));
  // Rows up to a checkpoint, the checkpoints, the rest.
  for (const bool to_save : {true, false}) {
    std::vector<int32_t> begins, ends, slots;
    for (const StateCommits::Entry& e : commits.entries) {
      const auto found = first_record_.find(e.sequence);
      MOAT_CHECK(found != first_record_.end(), "a commit of sequence {}, of which the last step has no records",
                 e.sequence);
      const int32_t first = found->second;
      const int32_t begin = to_save ? 0 : e.rows_to_save;
      const int32_t end = to_save ? e.rows_to_save : e.rows;
      if (begin == end) continue;
      begins.push_back(first + begin);
      ends.push_back(first + end);
      slots.push_back(e.slot);
    }
    if (!slots.empty()) model_.commit(exec, {.begins = begins, .ends = ends, .slots = slots}, caches_.view());
    if (to_save) caches_.copy_states(commits.saves, pool_);
  }
}

}  // namespace moat
