// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <algorithm>

#include "base/status.h"
#include "model/forward.h"
#include "ops/kda.h"

namespace moat {
namespace {

// Time that prefill gets at least, as a share of what the step's decodes take: where those alone reach the limit, more
// and longer streams must not keep prompts out for good.
constexpr double kLeastPrefillShare = 1.0 / 3;

// Where a piece in prefill form ends if no multiple of kKdaChunk is within the budget. One in decode form ends anywhere:
// its rows do not depend on that.
constexpr int64_t kSmallUnit = 16;

int64_t round_down(int64_t value, int64_t unit) { return value / unit * unit; }

}  // namespace

void DraftRecord::add(bool accepted) {
  constexpr double kKeep = 1.0 - 1.0 / 32;  // a few rounds
  hits = kKeep * hits + (accepted ? 1.0 : 0.0);
  tries = kKeep * tries + 1.0;
}

void DraftRecord::fade() {
  constexpr double kKeep = 1.0 - 1.0 / 32;
  hits *= kKeep;
  tries *= kKeep;
}

double DraftRecord::acceptance(double prior) const {
  constexpr double kPrior = 16.0;  // drafts' worth
  return (hits + kPrior * prior) / (tries + kPrior);
}

void StepPlan::clear() {
  sequences.clear();
  num_tokens.clear();
  first_positions.clear();
  state_slots.clear();
  wants_token.clear();
  num_drafts.clear();
  token_ids.clear();
  num_decode_seqs = 0;
  drafting = {};
  restores.clear();
  saves.clear();
}

Scheduler::Scheduler(const SchedulerOptions& options, const CacheSizes& cache_sizes,
                     const LedgerOptions& ledger_options)
    : options_(options), ledger_(cache_sizes, ledger_options) {
  MOAT_CHECK(options.max_batched_tokens > 0 && options.max_num_seqs > 0 && options.max_model_len > 0,
             "max_batched_tokens {}, max_num_seqs {}, max_model_len {}", options.max_batched_tokens,
             options.max_num_seqs, options.max_model_len);
  MOAT_CHECK(cache_sizes.num_slots >= options.max_num_seqs, "{} slots for {} sequences", cache_sizes.num_slots,
             options.max_num_seqs);
}

void Scheduler::add(SequenceId id, Request request, double now) {
  auto sequence = std::make_unique<Sequence>();
  Sequence& s = *sequence;
  s.id = id;
  s.rank = {now + options_.seconds_per_priority * static_cast<double>(request.priority), id};
  if (request.timeout_seconds > 0) s.deadline = now + request.timeout_seconds;
  next_deadline_ = std::min(next_deadline_, s.deadline);
  s.tokens = request.prompt_ids;
  s.request = std::move(request);
  if (ledger_.caching()) {
    s.chain = ledger_.new_chain(s.request.cache_salt);
    s.chain.extend(s.tokens);
    if (s.request.restore_prefix) ledger_.note_waiting(s.tokens, s.chain.keys());
  }
  MOAT_CHECK(sequences_.emplace(id, std::move(sequence)).second, "sequence id {} is not new", id);
  waiting_.emplace(s.rank, &s);
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
  if (sequence.lease < 0) {
    waiting_.erase(sequence.rank);
  } else {
    ledger_.free(sequence.lease, event.finish != FinishReason::kError);
    std::erase(running_, &sequence);
  }
  events.push_back({id, std::move(event)});
  sequences_.erase(id);
}

void Scheduler::end_overdue(double now, std::vector<SequenceEvent>& events) {
  if (!any_cancelled_ && now < next_deadline_) return;
  any_cancelled_ = false;
  next_deadline_ = std::numeric_limits<double>::infinity();
  std::vector<Sequence*> ending;
  const auto look_at = [&](Sequence* s) {
    const bool over = s->cancelled || now >= s->deadline;
    if (over && s->in_flight == 0) return ending.push_back(s);
    any_cancelled_ |= s->cancelled;
    next_deadline_ = std::min(next_deadline_, s->deadline);
  };
  for (auto& [rank, sequence] : waiting_) look_at(sequence);
  for (Sequence* sequence : running_) look_at(sequence);
  for (Sequence* s : ending) {
    TokenEvent event;
    event.finish = s->cancelled ? FinishReason::kCancelled : FinishReason::kTimeout;
    if (!s->cancelled) {
      event.error = deadline_exceeded("the request's {} s are over: {} of {} prompt tokens computed, {} generated",
                                      s->request.timeout_seconds, std::min(s->num_computed, s->num_prompt()),
                                      s->num_prompt(), s->size() - s->num_prompt());
    }
    end(*s, std::move(event), events);
  }
}

// Back to the queue, at its old place; what it computed is computed again unless the prefix cache still has it.
void Scheduler::preempt(Sequence& s) {
  ledger_.free(s.lease);
  s.lease = -1;
  s.num_computed = s.num_planned = 0;
  s.boundaries.clear();
  ++s.num_preempted;
  ++stats_.preemptions;
  std::erase(running_, &s);
  waiting_.emplace(s.rank, &s);
}

// Blocks for one more token of `sequence`, taken from less urgent sequences if need be. False: `sequence` itself had to
// go. Those that come after it in rank are not in the plan yet (schedule() goes by rank).
bool Scheduler::make_room(const Sequence& sequence) {
  while (!ledger_.extend(sequence.lease, sequence.num_planned + 1)) {
    const auto victim =
        std::find_if(running_.rbegin(), running_.rend(), [](const Sequence* s) { return s->in_flight == 0; });
    Sequence& s = **victim;  // at the latest `sequence`, which waits for this very token
    const bool is_self = &s == &sequence;
    preempt(s);
    if (is_self) return false;
  }
  return true;
}

// Where checkpoints of the state are wanted between what is computed and the end.
void Scheduler::plan_boundaries(Sequence& s) const {
  s.boundaries.clear();
  if (!ledger_.caching()) return;
  const int64_t block = ledger_.sizes().block_size;
  const int64_t last = round_down(s.size() - 1, block);
  if (last <= s.num_computed) return;
  // From the end to the start; the end of the first message is what other conversations share.
  std::vector<Boundary>& b = s.boundaries;
  b.push_back({last});
  const std::vector<int32_t>& ends = s.request.message_ends;
  for (size_t i = ends.size(); i-- > 0;) {
    const int64_t position = round_down(ends[i], block);
    const bool is_apart = b.back().position - position >= (i == 0 ? block : options_.checkpoint_gap);
    if (position > s.num_computed && position < last && is_apart) b.push_back({position});
  }
  std::reverse(b.begin(), b.end());
  if (options_.checkpoint_interval <= 0) return;
  const int64_t interval = std::max(round_down(options_.checkpoint_interval, block), block);
  const size_t wanted = b.size();
  for (int64_t p = round_down(s.num_computed, interval) + interval; p < last; p += interval) {
    const bool is_apart = std::none_of(b.begin(), b.begin() + static_cast<int64_t>(wanted), [&](const Boundary& other) {
      return std::abs(other.position - p) < options_.checkpoint_gap;
    });
    if (is_apart) b.push_back({p, true});
  }
  std::sort(b.begin(), b.end(), [](const Boundary& x, const Boundary& y) { return x.position < y.position; });
}

// True while a running sequence is about to leave a checkpoint from which this one could go on, and is at least as far
// as this one could start: computing the same tokens twice would delay both.
bool Scheduler::waits_for_another(const Sequence& s) const {
  if (!ledger_.caching() || !s.request.restore_prefix) return false;
  const int64_t block = ledger_.sizes().block_size;
  const std::span<const BlockKey> keys = s.chain.keys();
  int64_t restorable = -1;
  for (const Sequence* other : running_) {
    for (const Boundary& boundary : other->boundaries) {
      const auto b = static_cast<size_t>(boundary.position / block);
      if (boundary.position >= s.size() || b > keys.size()) break;
      if (!(keys[b - 1] == other->chain.keys()[b - 1])) break;  // later ones differ, too
      if (restorable < 0) restorable = ledger_.restorable(s.tokens, keys);
      if (boundary.position > restorable && other->num_planned >= restorable) return true;
    }
  }
  return false;
}

bool Scheduler::admit(Sequence& s, StepPlan& plan) {
  // Room for each running sequence to grow by a block; more for one that was sent back before, so that it is not again.
  const int64_t headroom = running_.empty() ? 0 : num_running() + std::min<int64_t>(s.num_preempted, 8);
  const auto admitted = ledger_.admit(
      {.ids = s.tokens, .keys = s.chain.keys(), .restore = s.request.restore_prefix, .headroom = headroom},
      plan.restores);
  if (!admitted) return false;
  s.lease = admitted->lease;
  s.num_computed = s.num_planned = admitted->cached_tokens;
  if (!s.admitted_once) {
    s.admitted_once = true;
    s.num_cached = admitted->cached_tokens;
    stats_.admitted_prompt_tokens += s.num_prompt();
    stats_.cached_prompt_tokens += s.num_cached;
  }
  plan_boundaries(s);
  return true;
}

void Scheduler::insert_running(Sequence& s) {
  const auto later = std::upper_bound(running_.begin(), running_.end(), &s,
                                      [](const Sequence* a, const Sequence* b) { return a->rank < b->rank; });
  running_.insert(later, &s);
}

bool Scheduler::in_decode_form(int64_t count) const { return options_.deterministic || count < kPrefillMinTokens; }

void Scheduler::spend(const Sequence& s, int64_t count, Budget& budget) const {
  const double pairs =
      static_cast<double>(count) * (static_cast<double>(s.num_planned) + static_cast<double>(count) / 2);
  budget.rows_left -= count;
  budget.rows += count;
  (in_decode_form(count) ? budget.decode_pairs : budget.prefill_pairs) += pairs;
}

// The largest part of `count` rows with which the step is still expected to end in time.
int64_t Scheduler::rows_within_time(const Sequence& s, int64_t count, const Budget& budget,
                                    const StepCost& cost) const {
  if (budget.seconds_limit <= 0) return count;
  const auto is_in_time = [&](int64_t rows) {
    Budget with = budget;
    spend(s, rows, with);
    return cost.seconds(with.rows, with.decode_pairs, with.prefill_pairs) <= budget.seconds_limit;
  };
  if (is_in_time(count)) return count;
  int64_t fits = 0;
  for (int64_t too_many = count; too_many - fits > 1;) {
    const int64_t middle = (fits + too_many) / 2;
    (is_in_time(middle) ? fits : too_many) = middle;
  }
  return fits;
}

// Rows of a prefill that this step takes; 0: none.
int64_t Scheduler::piece(const Sequence& s, const Budget& budget, const StepCost& cost) const {
  const auto next = std::find_if(s.boundaries.begin(), s.boundaries.end(),
                                 [&](const Boundary& b) { return b.position > s.num_planned; });
  const int64_t whole = (next == s.boundaries.end() ? s.size() : next->position) - s.num_planned;
  int64_t rows = std::min(whole, budget.rows_left);
  if (rows <= 0) return 0;
  rows = rows_within_time(s, rows, budget, cost);
  if (rows == 0) {
    if (budget.has_prefill) return 0;
    rows = 1;  // a step without time to spare still takes a row of the first prompt in line, so that prompts end, too
  }
  if (rows == whole || in_decode_form(rows)) return rows;
  const int64_t end = s.num_planned + rows;
  for (const int64_t unit : {kKdaChunk, kSmallUnit}) {
    if (round_down(end, unit) > s.num_planned) return round_down(end, unit) - s.num_planned;
  }
  return rows;
}

void Scheduler::append_to_plan(Sequence& s, int64_t count, StepPlan& plan) {
  const int64_t first = s.num_planned;
  plan.sequences.push_back(s.id);
  plan.num_tokens.push_back(static_cast<int32_t>(count));
  plan.first_positions.push_back(static_cast<int32_t>(first));
  plan.state_slots.push_back(ledger_.state_slot(s.lease));
  plan.wants_token.push_back(count == s.remaining());
  plan.num_drafts.push_back(0);
  plan.token_ids.insert(plan.token_ids.end(), s.tokens.begin() + first, s.tokens.begin() + first + count);
  s.num_planned += count;
  ++s.in_flight;
}

// A checkpoint where the planned rows end, if that is a place for one.
void Scheduler::plan_saves(Sequence& s, StepPlan& plan) {
  if (!ledger_.caching() || s.num_planned % ledger_.sizes().block_size != 0) return;
  using Kind = CacheLedger::SaveKind;
  for (const Boundary& b : s.boundaries) {
    if (b.position != s.num_planned) continue;
    return ledger_.plan_save(s.lease, s.chain.keys(), b.position, b.optional ? Kind::kOptional : Kind::kWanted,
                             plan.saves);
  }
  if (s.num_planned >= s.num_prompt()) {
    ledger_.plan_save(s.lease, s.chain.keys(), s.num_planned, Kind::kRolling, plan.saves);
  }
}

// Rows that the plan has from the step before are left alone: most tables are longer than what changes in a step.
void Scheduler::fill_block_tables(const std::vector<Sequence*>& sequences, StepPlan& plan) const {
  int64_t longest = 0;
  for (const Sequence* s : sequences) {
    longest = std::max(longest, static_cast<int64_t>(ledger_.block_table(s->lease).size()));
  }
  constexpr int64_t kWidthUnit = 16;  // so that the width seldom changes
  const int64_t width = (longest + kWidthUnit - 1) / kWidthUnit * kWidthUnit;
  if (width != plan.max_blocks) plan.table_versions.clear();
  plan.max_blocks = width;
  plan.table_versions.resize(sequences.size(), 0);
  plan.block_tables.resize(sequences.size() * static_cast<size_t>(width));
  for (size_t s = 0; s < sequences.size(); ++s) {
    const uint64_t version = ledger_.table_version(sequences[s]->lease);
    if (plan.table_versions[s] == version) continue;
    plan.table_versions[s] = version;
    const auto table = ledger_.block_table(sequences[s]->lease);
    const auto row = plan.block_tables.begin() + static_cast<int64_t>(s) * width;
    std::fill(std::copy(table.begin(), table.end(), row), row + width, -1);
  }
}

// Drafts for the sequences of the plan so far, which decode: as many as the request can still use and as fit into half
// of the rows that are left, into the records of verified rows, into the step's time and into blocks that nobody else
// holds.
void Scheduler::plan_drafts(const std::vector<Sequence*>& planned, const DraftDemand& demand, const StepCost& cost,
                            Budget& budget, StepPlan& plan) {
  int64_t rows_left = budget.rows_left / 2;
  int64_t records_left = ledger_.sizes().verify_rows;
  for (size_t i = 0; i < planned.size() && rows_left > 0; ++i) {
    Sequence& s = *planned[i];
    const SamplingParams& sampling = s.request.sampling;
    if (!s.request.speculative || s.drafts.acceptance(demand.prior) < demand.min_acceptance) continue;
    const int64_t to_come =
        std::min(sampling.max_tokens - (s.size() - s.num_prompt()), options_.max_model_len - s.size());
    int64_t count = std::min({demand.max_drafts, rows_left, to_come - 1, records_left - 1});
    if (count <= 0) continue;
    count = rows_within_time(s, count, budget, cost);
    ledger_.extend(s.lease, s.num_planned + count);
    const auto blocks = static_cast<int64_t>(ledger_.block_table(s.lease).size());
    count = std::min(count, blocks * ledger_.sizes().block_size - s.num_planned);
    if (count <= 0) continue;
    spend(s, count, budget);
    rows_left -= count;
    records_left -= 1 + count;
    plan.num_drafts[i] = static_cast<int32_t>(count);
  }
}

void Scheduler::schedule(StepPlan& plan, std::vector<SequenceEvent>& events, double now, const StepCost& cost,
                         const DraftDemand& drafts) {
  plan.clear();
  end_overdue(now, events);
  Budget budget{.rows_left = options_.max_batched_tokens};
  std::vector<std::pair<Sequence*, int64_t>> long_pieces;
  std::vector<Sequence*>& planned = in_flight_.emplace_back();  // in plan order
  planned.reserve(running_.size());
  const auto append = [&](Sequence& s, int64_t count) {
    append_to_plan(s, count, plan);
    plan_saves(s, plan);
    planned.push_back(&s);
  };

  for (size_t i = 0; i < running_.size() && budget.rows_left > 0; ++i) {
    Sequence& s = *running_[i];
    if (s.remaining() != 1) continue;
    if (!make_room(s)) break;  // it was the last in rank
    spend(s, 1, budget);
    append_to_plan(s, 1, plan);
    planned.push_back(&s);
  }
  double decode_seconds = 0;
  if (options_.max_step_seconds > 0 && cost.known()) {
    decode_seconds = cost.seconds(budget.rows, budget.decode_pairs, 0);
    budget.seconds_limit = options_.max_step_seconds;
  }
  if (drafts.max_drafts > 0) plan_drafts(planned, drafts, cost, budget, plan);
  // With drafts nobody knows yet where the rows that stay will end.
  for (size_t i = 0; i < planned.size(); ++i) {
    if (plan.num_drafts[i] == 0) plan_saves(*planned[i], plan);
  }
  if (budget.seconds_limit > 0) {
    budget.seconds_limit = std::max(budget.seconds_limit, decode_seconds * (1 + kLeastPrefillShare));
  }
  const auto give = [&](Sequence& s, int64_t count) {
    spend(s, count, budget);
    budget.has_prefill = true;
    // Short pieces take the decode form of the attention leaves, whatever the request's stage, and stand first.
    if (!in_decode_form(count)) {
      long_pieces.emplace_back(&s, count);
      return;
    }
    append(s, count);
  };
  for (Sequence* s : running_) {
    if (s->remaining() <= 1) continue;
    if (const int64_t count = piece(*s, budget, cost); count > 0) give(*s, count);
  }
  for (auto it = waiting_.begin(); it != waiting_.end() && num_running() < options_.max_num_seqs;) {
    Sequence& s = *it->second;
    if (piece(s, budget, cost) == 0) break;  // no budget is left
    if (waits_for_another(s)) {
      ++it;
      continue;
    }
    if (!admit(s, plan)) break;
    it = waiting_.erase(it);
    insert_running(s);
    if (const int64_t count = piece(s, budget, cost); count > 0) give(s, count);
  }

  plan.num_decode_seqs = static_cast<int64_t>(plan.sequences.size());
  for (const auto& [s, count] : long_pieces) append(*s, count);
  fill_block_tables(planned, plan);
  if (planned.empty()) in_flight_.pop_back();
}

// Appends one token; true if it ends the request.
bool Scheduler::take_token(Sequence& sequence, const SampledToken& sampled, TokenEvent& event) {
  const SamplingParams& sampling = sequence.request.sampling;
  const int32_t token = sampled.token_id;
  sequence.tokens.push_back(token);
  event.tokens.push_back(sampled);

  const int64_t generated = sequence.size() - sequence.num_prompt();
  const bool is_stop = is_stop_token(sampling, options_.eos_token_id, token);
  Constraint* constraint = sequence.request.constraint.get();
  const bool constraint_stops = constraint != nullptr && constraint->accept(token) == ConstraintVerdict::kStop;
  if (is_stop && generated > sampling.min_tokens) {
    event.finish = FinishReason::kStop;
    event.stop_token_id = token;
  } else if (constraint_stops) {
    event.finish = FinishReason::kStop;
  } else if (generated >= sampling.max_tokens || sequence.size() >= options_.max_model_len) {
    event.finish = FinishReason::kLength;
  }
  return event.finish != FinishReason::kNone;
}

// Appends what a step sampled, up to a token that ends the request.
TokenEvent Scheduler::take_tokens(Sequence& sequence, const StepResult::Row& row) {
  TokenEvent event;
  event.num_prompt_tokens = static_cast<int32_t>(sequence.num_prompt());
  event.num_cached_tokens = static_cast<int32_t>(sequence.num_cached);
  event.num_drafted_tokens = row.num_drafts;
  if (row.tokens.empty()) {
    event.finish = FinishReason::kError;
    event.error = internal_error("{}", row.error);
    return event;
  }
  for (const SampledToken& token : row.tokens) {
    if (take_token(sequence, token, event)) break;
  }
  // The last token of a round is the target's own, unless the reply ended on a draft before it.
  const auto kept = static_cast<int64_t>(event.tokens.size());
  event.num_accepted_drafts =
      static_cast<int32_t>(std::min<int64_t>(kept, static_cast<int64_t>(row.tokens.size()) - 1));
  if (ledger_.caching()) sequence.chain.extend(sequence.tokens);
  return event;
}

void Scheduler::count_round(Sequence& sequence, const StepResult::Row& row, int64_t num_kept) {
  const int64_t judged = static_cast<int64_t>(row.tokens.size()) - 1;
  const int64_t accepted = std::min(judged, num_kept);
  ++stats_.draft_rounds;
  stats_.drafted_tokens += row.num_drafts;
  stats_.accepted_tokens += accepted;
  stats_.drafted_at.resize(std::max(stats_.drafted_at.size(), static_cast<size_t>(row.num_drafts)));
  stats_.accepted_at.resize(stats_.drafted_at.size());
  for (int64_t k = 0; k < row.num_drafts; ++k) {
    ++stats_.drafted_at[static_cast<size_t>(k)];
    stats_.accepted_at[static_cast<size_t>(k)] += k < accepted;
    if (k <= judged) sequence.drafts.add(k < judged);
  }
}

// The last `num_kept` computed rows, of a step that might have drafts: if it had, the states are to take them, with a
// checkpoint where they reach or cross a block boundary.
void Scheduler::commit_rows(Sequence& s, int64_t num_kept, bool drafted, bool ends, StateCommits& commits) {
  StateCommits::Entry entry{.sequence = s.id, .slot = ledger_.state_slot(s.lease)};
  const int64_t boundary = round_down(s.num_computed, ledger_.sizes().block_size);
  if (ledger_.caching() && boundary > s.num_computed - num_kept && boundary >= s.num_prompt()) {
    const size_t before = commits.saves.size();
    ledger_.plan_save(s.lease, s.chain.keys(), boundary, CacheLedger::SaveKind::kRolling, commits.saves);
    if (commits.saves.size() > before) {
      entry.rows_to_save = static_cast<int32_t>(num_kept - (s.num_computed - boundary));
    }
  }
  entry.rows = ends ? entry.rows_to_save : static_cast<int32_t>(num_kept);
  if (drafted && entry.rows > 0) commits.entries.push_back(entry);
}

StateCommits Scheduler::advance(const StepPlan& plan, const StepResult& result, std::vector<SequenceEvent>& events) {
  StateCommits commits;
  if (plan.empty()) return commits;
  MOAT_CHECK(!in_flight_.empty() && in_flight_.front().size() == plan.sequences.size(),
             "advance() of a plan that is not the oldest in flight");
  const std::vector<Sequence*> planned = std::move(in_flight_.front());
  in_flight_.pop_front();
  size_t next_row = 0;
  for (size_t i = 0; i < planned.size(); ++i) {
    Sequence& s = *planned[i];
    const StepResult::Row* row = nullptr;
    TokenEvent event;
    if (plan.wants_token[i]) {
      MOAT_CHECK(next_row < result.rows.size() && result.rows[next_row].sequence == s.id,
                 "the results are not those of the plan");
      row = &result.rows[next_row++];
      MOAT_CHECK(
          row->num_drafts <= plan.num_drafts[i] && static_cast<int64_t>(row->tokens.size()) <= 1 + row->num_drafts,
          "{} tokens of {} drafts, {} were planned", row->tokens.size(), row->num_drafts, plan.num_drafts[i]);
      event = take_tokens(s, *row);
    }
    const bool ends = event.finish != FinishReason::kNone;
    const bool drafted = row != nullptr && row->num_drafts > 0 && !row->tokens.empty();
    // Of a round with drafts a row stays for each token kept: the last token's own row is not computed yet.
    const int64_t kept = drafted ? static_cast<int64_t>(event.tokens.size()) : plan.num_tokens[i];
    const int64_t before = s.num_computed;
    s.num_computed += kept;
    s.num_planned += drafted ? kept - 1 : 0;
    --s.in_flight;
    stats_.recomputed_tokens += std::max<int64_t>(0, std::min(s.high_water, s.num_computed) - before);
    s.high_water = std::max(s.high_water, s.num_computed);
    if (drafted) {
      count_round(s, *row, kept);
    } else {
      s.drafts.fade();
    }
    if (plan.num_drafts[i] > 0 && !row->tokens.empty()) commit_rows(s, kept, drafted, ends, commits);
    if (ledger_.caching()) ledger_.commit(s.lease, s.tokens, s.chain.keys(), s.num_computed);
    std::erase_if(s.boundaries, [&](const Boundary& b) { return b.position <= s.num_computed; });
    if (ends) {
      end(s, std::move(event), events);
    } else if (row != nullptr) {
      events.push_back({s.id, std::move(event)});
    }
  }
  MOAT_CHECK(next_row == result.rows.size(), "{} results, {} were wanted", result.rows.size(), next_row);
  return commits;
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

void Scheduler::list_draft_records(std::vector<DraftRecord>& records) const {
  records.clear();
  for (const Sequence* s : running_) {
    if (s->remaining() == 1 && s->request.speculative) records.push_back(s->drafts);
  }
}

std::string Scheduler::describe() const {
  std::string text =
      fmt::format("{} running, {} waiting; blocks {} used, {} cached of {}; slots {} used, {} cached of {}",
                  num_running(), num_waiting(), ledger_.blocks_used(), ledger_.blocks_cached(),
                  ledger_.sizes().num_blocks, ledger_.slots_used(), ledger_.checkpoints(), ledger_.sizes().num_slots);
  const auto line = [&](const char* state, const Sequence& s) {
    text += fmt::format("\n  {} {} rank {:.3f}: {} tokens, {} computed, {} planned, in flight {}, preempted {}", state,
                        s.id, s.rank.first, s.size(), s.num_computed, s.num_planned, s.in_flight, s.num_preempted);
  };
  for (const Sequence* s : running_) line("running", *s);
  for (const auto& [rank, s] : waiting_) line("waiting", *s);
  return text;
}

void Scheduler::check_invariants() const {
  ledger_.check_invariants();
  MOAT_CHECK(waiting_.size() + running_.size() == sequences_.size(), "S1: {} waiting + {} running != {} sequences",
             waiting_.size(), running_.size(), sequences_.size());
  MOAT_CHECK(ledger_.slots_used() == num_running(), "S1: {} slots used by {} running sequences", ledger_.slots_used(),
             num_running());
  MOAT_CHECK(num_running() <= options_.max_num_seqs, "S4: {} run, {} may", num_running(), options_.max_num_seqs);
  for (const auto& [rank, s] : waiting_) {
    MOAT_CHECK(s->lease < 0 && s->num_planned == 0 && s->in_flight == 0, "S1: waiting sequence {} holds something",
               s->id);
    MOAT_CHECK(rank == s->rank, "S4: sequence {} waits at another rank", s->id);
  }
  for (size_t i = 0; i < running_.size(); ++i) {
    const Sequence& s = *running_[i];
    MOAT_CHECK(s.lease >= 0, "S1: running sequence {} holds nothing", s.id);
    MOAT_CHECK(i == 0 || running_[i - 1]->rank < s.rank, "S4: sequence {} runs out of order", s.id);
    MOAT_CHECK(s.num_computed <= s.num_planned && s.num_planned <= s.size() && s.size() <= options_.max_model_len,
               "S2: sequence {}: {} computed, {} planned, {} tokens", s.id, s.num_computed, s.num_planned, s.size());
    MOAT_CHECK(s.in_flight > 0 || (s.num_computed == s.num_planned && s.remaining() >= 1),
               "S2: sequence {} has nothing to compute", s.id);
    const auto blocks = static_cast<int64_t>(ledger_.block_table(s.lease).size());
    MOAT_CHECK(blocks >= ledger_.blocks_for(s.num_planned), "S3: sequence {} has {} blocks for {} tokens", s.id, blocks,
               s.num_planned);
  }
}

}  // namespace moat
