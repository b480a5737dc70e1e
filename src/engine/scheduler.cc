// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <algorithm>

#include "base/status.h"
#include "model/forward.h"
#include "ops/kda.h"

namespace moat {

void StepPlan::clear() {
  sequences.clear();
  num_tokens.clear();
  first_positions.clear();
  state_slots.clear();
  wants_token.clear();
  token_ids.clear();
  block_tables.clear();
  max_blocks = 0;
  num_decode_seqs = 0;
}

Scheduler::Scheduler(const SchedulerOptions& options, const CacheSizes& cache_sizes)
    : options_(options), ledger_(cache_sizes) {
  MOAT_CHECK(options.max_batched_tokens > 0 && options.max_num_seqs > 0 && options.max_model_len > 0,
             "max_batched_tokens {}, max_num_seqs {}, max_model_len {}", options.max_batched_tokens,
             options.max_num_seqs, options.max_model_len);
}

void Scheduler::add(SequenceId id, Request request) {
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->tokens = request.prompt_ids;
  sequence->request = std::move(request);
  Sequence* raw = sequence.get();
  MOAT_CHECK(sequences_.emplace(id, std::move(sequence)).second, "sequence id {} is not new", id);
  waiting_.emplace(std::pair(raw->request.priority, id), raw);
}

void Scheduler::cancel(SequenceId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return;
  it->second->cancelled = true;
  any_cancelled_ = true;
}

// Gives back what the sequence holds, reports `event` and forgets the sequence.
void Scheduler::end(Sequence& sequence, TokenEvent event, std::vector<SequenceEvent>& events) {
  event.num_prompt_tokens = static_cast<int32_t>(sequence.num_prompt());
  event.num_cached_tokens = static_cast<int32_t>(sequence.num_cached);
  const SequenceId id = sequence.id;
  events.push_back({id, std::move(event)});
  if (waiting_.erase({sequence.request.priority, id}) == 0) {
    ledger_.free(id);
    std::erase(running_, &sequence);
  }
  sequences_.erase(id);
}

void Scheduler::end_cancelled(std::vector<SequenceEvent>& events) {
  if (!any_cancelled_) return;
  any_cancelled_ = false;
  std::vector<Sequence*> cancelled;
  for (auto& [key, sequence] : waiting_) {
    if (sequence->cancelled) cancelled.push_back(sequence);
  }
  for (Sequence* sequence : running_) {
    if (sequence->cancelled) cancelled.push_back(sequence);
  }
  for (Sequence* sequence : cancelled) {
    TokenEvent event;
    event.finish = FinishReason::kCancelled;
    end(*sequence, std::move(event), events);
  }
}

// Moves the first waiting request to running if a slot and all its blocks are free.
bool Scheduler::admit_next() {
  if (waiting_.empty() || num_running() >= options_.max_num_seqs) return false;
  Sequence& sequence = *waiting_.begin()->second;
  // The last token generated is never computed, so it needs no cache row.
  const int64_t reserve = sequence.num_prompt() + sequence.request.sampling.max_tokens - 1;
  const std::optional<int64_t> cached = ledger_.admit({.sequence = sequence.id,
                                                       .prompt_ids = sequence.request.prompt_ids,
                                                       .salt = sequence.request.cache_salt,
                                                       .reserve_tokens = reserve});
  if (!cached) return false;
  sequence.num_computed = sequence.num_cached = *cached;
  waiting_.erase(waiting_.begin());
  running_.push_back(&sequence);
  return true;
}

int64_t Scheduler::prefill_piece(const Sequence& sequence, int64_t budget) const {
  const int64_t remaining = sequence.remaining();
  if (remaining <= budget) return remaining;
  const int64_t end = sequence.num_computed + budget;
  const int64_t aligned = end / kKdaChunk * kKdaChunk;
  return aligned > sequence.num_computed ? aligned - sequence.num_computed : budget;
}

void Scheduler::append_to_plan(const Sequence& sequence, int64_t count, StepPlan& plan) {
  const int64_t first = sequence.num_computed;
  plan.sequences.push_back(sequence.id);
  plan.num_tokens.push_back(static_cast<int32_t>(count));
  plan.first_positions.push_back(static_cast<int32_t>(first));
  plan.state_slots.push_back(ledger_.state_slot(sequence.id));
  plan.wants_token.push_back(count == sequence.remaining());
  plan.token_ids.insert(plan.token_ids.end(), sequence.tokens.begin() + first, sequence.tokens.begin() + first + count);
}

void Scheduler::schedule(StepPlan& plan, std::vector<SequenceEvent>& events) {
  plan.clear();
  end_cancelled(events);
  int64_t budget = options_.max_batched_tokens;
  std::vector<std::pair<const Sequence*, int64_t>> prefills;

  for (const Sequence* sequence : running_) {
    if (sequence->remaining() == 1 && budget > 0) {
      append_to_plan(*sequence, 1, plan);
      --budget;
    }
  }
  const auto give = [&](const Sequence& sequence) {
    const int64_t count = prefill_piece(sequence, budget);
    budget -= count;
    // Short pieces take the decode form of the attention leaves, whatever the request's stage.
    if (count < kPrefillMinTokens) {
      append_to_plan(sequence, count, plan);
    } else {
      prefills.emplace_back(&sequence, count);
    }
  };
  for (const Sequence* sequence : running_) {
    if (sequence->remaining() > 1 && budget > 0) give(*sequence);
  }
  while (budget > 0 && admit_next()) give(*running_.back());

  plan.num_decode_seqs = static_cast<int64_t>(plan.sequences.size());
  for (const auto& [sequence, count] : prefills) append_to_plan(*sequence, count, plan);

  for (const SequenceId id : plan.sequences) {
    plan.max_blocks = std::max(plan.max_blocks, static_cast<int64_t>(ledger_.block_table(id).size()));
  }
  plan.block_tables.assign(plan.sequences.size() * static_cast<size_t>(plan.max_blocks), -1);
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    const auto table = ledger_.block_table(plan.sequences[s]);
    std::copy(table.begin(), table.end(), plan.block_tables.begin() + static_cast<int64_t>(s) * plan.max_blocks);
  }
}

// One sampled token of a sequence: append it and see whether it ends the request.
void Scheduler::accept_token(Sequence& sequence, const StepResult::Row& row, std::vector<SequenceEvent>& events) {
  TokenEvent event;
  if (row.token.token_id < 0) {
    event.finish = FinishReason::kError;
    event.error = internal_error("{}", row.error);
    return end(sequence, std::move(event), events);
  }
  const SamplingParams& sampling = sequence.request.sampling;
  const int32_t token = row.token.token_id;
  sequence.tokens.push_back(token);
  event.tokens.push_back(row.token);

  const int64_t generated = static_cast<int64_t>(sequence.tokens.size()) - sequence.num_prompt();
  const auto& stops = sampling.stop_token_ids;
  const bool is_stop = (token == options_.eos_token_id && !sampling.ignore_eos) ||
                       std::find(stops.begin(), stops.end(), token) != stops.end();
  Constraint* constraint = sequence.request.constraint.get();
  const bool constraint_stops = constraint != nullptr && constraint->accept(token) == ConstraintVerdict::kStop;
  if (is_stop && generated > sampling.min_tokens) {
    event.finish = FinishReason::kStop;
    event.stop_token_id = token;
  } else if (constraint_stops) {
    event.finish = FinishReason::kStop;
  } else if (generated >= sampling.max_tokens ||
             static_cast<int64_t>(sequence.tokens.size()) >= options_.max_model_len) {
    event.finish = FinishReason::kLength;
  }
  if (event.finish != FinishReason::kNone) return end(sequence, std::move(event), events);
  event.num_prompt_tokens = static_cast<int32_t>(sequence.num_prompt());
  event.num_cached_tokens = static_cast<int32_t>(sequence.num_cached);
  events.push_back({sequence.id, std::move(event)});
}

void Scheduler::advance(const StepPlan& plan, const StepResult& result, std::vector<SequenceEvent>& events) {
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    sequences_.at(plan.sequences[s])->num_computed += plan.num_tokens[s];
  }
  for (const StepResult::Row& row : result.rows) accept_token(*sequences_.at(row.sequence), row, events);
}

const Request& Scheduler::request(SequenceId id) const { return sequences_.at(id)->request; }
Request& Scheduler::request(SequenceId id) { return sequences_.at(id)->request; }

int64_t Scheduler::num_generated(SequenceId id) const {
  const Sequence& s = *sequences_.at(id);
  return static_cast<int64_t>(s.tokens.size()) - s.num_prompt();
}

int64_t Scheduler::num_tokens(SequenceId id) const { return static_cast<int64_t>(sequences_.at(id)->tokens.size()); }

std::span<const int32_t> Scheduler::tokens(SequenceId id) const { return sequences_.at(id)->tokens; }

TokenCounts& Scheduler::token_counts(SequenceId id) { return sequences_.at(id)->counts; }

void Scheduler::check_invariants() const {
  ledger_.check_invariants();
  MOAT_CHECK(waiting_.size() + running_.size() == sequences_.size(), "{} waiting + {} running != {} sequences",
             waiting_.size(), running_.size(), sequences_.size());
  MOAT_CHECK(ledger_.slots_used() == num_running(), "{} slots used by {} running sequences", ledger_.slots_used(),
             num_running());
  for (const Sequence* s : running_) {
    MOAT_CHECK(s->remaining() >= 1, "sequence {} has nothing to compute", s->id);
    MOAT_CHECK(static_cast<int64_t>(s->tokens.size()) <= options_.max_model_len, "sequence {} is too long", s->id);
  }
}

}  // namespace moat
