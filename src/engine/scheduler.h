// SPDX-License-Identifier: Apache-2.0
// Scheduler: decides what each step computes. Pure with respect to devices and clocks: time and expected costs come in
// as values, and the same calls give the same plans. There are no prefill and decode phases: a sequence has tokens and
// a number of computed ones, and a step hands out tokens until the second catches the first. One thread.
//
// Order of service: by rank = arrival time + priority * seconds_per_priority, so a request that waits gains on more
// urgent ones and nobody starves; within a priority first come, first served. A preempted request keeps its rank.
//
// Rules of schedule(), in order:
//   1. cancelled sequences and those out of time end.
//   2. running sequences with one token to compute (decode) get it, most urgent first. One that needs a block when none
//      can be had takes those of the least urgent running sequence, which is computed again later; the most urgent one
//      always goes on.
//      What room is left, up to half of it, may be drafted into: nobody loses a block or a row of its own for drafts.
//   3. running sequences with more to compute (prefill) share what is left of the step's tokens and time.
//   4. waiting requests are admitted while a slot, blocks and budget are left; the first that does not fit stops
//      admission. One whose prefix a running sequence is about to compute waits for it instead (others may pass).
//
// Where a prefill piece ends: at planned checkpoints (below), and where the budget ends it, at an absolute multiple of
// kKdaChunk if there is one, so that how a prompt was cut does not show in the arithmetic.
//
// Checkpoints of a sequence's state are planned at the last block boundary at or before the end of the prompt (less one
// token: the last row is always computed) and of its messages, every checkpoint_interval tokens, and at each block
// boundary that decoding starts from or crosses, where the newest replaces the one before.
//
// Life of a request: waiting -> running -> (preempted: waiting -> running ...) -> ended, with exactly one finish reason.
// With drafts a step ends with more than one token of a sequence: those that verification accepted and one more. Tokens
// after one that ends the request are dropped, and its states take no row of them.
//
// schedule() may be called again before advance() of the last plan (one step ahead): sequences whose next token is not
// known yet are left out, and sequences in flight are neither preempted nor ended.
//
// Invariants, checked by check_invariants():
//   S1  waiting + running = live sequences; running ones hold a lease, waiting ones none.
//   S2  computed <= planned <= tokens <= max_model_len, and a running sequence out of flight has something to compute.
//   S3  the blocks of a running sequence hold its planned tokens.
//   S4  running <= max_num_seqs; both lists are in order of rank.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/cache.h"
#include "engine/request.h"
#include "engine/step_plan.h"
#include "engine/token_counts.h"
#include "plan/step_cost.h"

namespace moat {

struct SchedulerOptions {
  int64_t max_num_seqs = 64;          // running at once
  int64_t max_batched_tokens = 2048;  // a step
  int64_t max_model_len = 0;          // prompt + generated tokens of one sequence
  int32_t eos_token_id = -1;
  double max_step_seconds = 0;         // expected; 0: no limit. Decodes always run, and some prefill beside them
  double seconds_per_priority = 30;    // of waiting that make up for one level of priority
  int64_t checkpoint_interval = 4096;  // tokens; 0: none inside a prompt
  int64_t checkpoint_gap = 256;        // tokens that two checkpoints of one prompt are apart at least
  bool deterministic = false;          // every piece in the row-invariant decode form
};

struct SchedulerStats {
  int64_t preemptions = 0;
  int64_t admitted_prompt_tokens = 0;  // first admissions only
  int64_t cached_prompt_tokens = 0;    // of them, restored
  int64_t recomputed_tokens = 0;       // computed again after preemption
  int64_t draft_rounds = 0;            // steps of a sequence in which drafts were verified
  int64_t drafted_tokens = 0;          // verified ones
  int64_t accepted_tokens = 0;         // of them, that became part of a reply
  std::vector<int64_t> drafted_at;     // [position in the round] verified, and accepted
  std::vector<int64_t> accepted_at;
};

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, const CacheSizes& cache_sizes, const LedgerOptions& ledger_options = {});

  // Queues a valid request (the engine checks it first). Ids ascend; `now` is in seconds and never goes back.
  void add(SequenceId id, Request request, double now = 0);
  void cancel(SequenceId id);
  void flush_cache() { ledger_.flush(); }

  // Fills `plan` (cleared first) and appends the events of sequences that ended without computing. `cost` may be
  // unknown; then only max_batched_tokens bounds the step. Sequences that decode may be drafted for, as `drafts` says.
  void schedule(StepPlan& plan, std::vector<SequenceEvent>& events, double now = 0, const StepCost& cost = {},
                const DraftDemand& drafts = {});
  // Takes the results of a plan, in the order in which plans were made, and appends what became known. What it returns
  // must be done before the next plan runs.
  StateCommits advance(const StepPlan& plan, const StepResult& result, std::vector<SequenceEvent>& events);

  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  bool idle() const { return waiting_.empty() && running_.empty(); }
  const CacheLedger& ledger() const { return ledger_; }
  const SchedulerStats& stats() const { return stats_; }

  // What the sampler needs of a running sequence.
  const Request& request(SequenceId id) const;
  Request& request(SequenceId id);
  int64_t num_generated(SequenceId id) const;
  int64_t num_tokens(SequenceId id) const;
  std::span<const int32_t> tokens(SequenceId id) const;  // prompt, then generated; valid until the next advance()
  TokenCounts& token_counts(SequenceId id);              // of those tokens, kept from step to step

  // Of each running sequence that has a next token to compute and may be drafted for.
  void list_draft_records(std::vector<DraftRecord>& records) const;

  // One line a sequence, for logs.
  std::string describe() const;
  void check_invariants() const;

 private:
  using Rank = std::pair<double, SequenceId>;
  struct Boundary {
    int64_t position = 0;
    bool optional = false;
  };
  struct Sequence {
    SequenceId id = 0;
    Rank rank;
    double deadline = std::numeric_limits<double>::infinity();
    Request request;
    std::vector<int32_t> tokens;  // prompt, then generated
    DraftRecord drafts;
    TokenCounts counts;  // of `tokens`, brought up to date when the sampler asks
    KeyChain chain;      // names of the full blocks of `tokens`
    CacheLedger::Lease lease = -1;
    int64_t num_computed = 0;  // by steps that have been advanced
    int64_t num_planned = 0;   // by steps that have been scheduled
    int64_t num_cached = 0;    // of the prompt, at first admission
    int64_t num_preempted = 0;
    int64_t high_water = 0;            // most tokens ever computed
    int32_t in_flight = 0;             // plans that hold it and are not advanced
    std::vector<Boundary> boundaries;  // planned checkpoints that no advanced step has reached, ascending
    bool admitted_once = false;
    bool cancelled = false;
    int64_t size() const { return static_cast<int64_t>(tokens.size()); }
    int64_t num_prompt() const { return static_cast<int64_t>(request.prompt_ids.size()); }
    int64_t remaining() const { return size() - num_planned; }
  };
  // What the step holds so far.
  struct Budget {
    int64_t rows_left = 0;
    int64_t rows = 0;
    double decode_pairs = 0, prefill_pairs = 0;
    double seconds_limit = 0;  // expected, of the whole step; 0: none
    bool has_prefill = false;
  };

  void end(Sequence& sequence, TokenEvent event, std::vector<SequenceEvent>& events);
  void end_overdue(double now, std::vector<SequenceEvent>& events);
  void preempt(Sequence& sequence);
  bool make_room(const Sequence& sequence);
  void plan_boundaries(Sequence& sequence) const;
  bool waits_for_another(const Sequence& sequence) const;
  bool admit(Sequence& sequence, StepPlan& plan);
  void insert_running(Sequence& sequence);
  bool in_decode_form(int64_t count) const;
  void spend(const Sequence& sequence, int64_t count, Budget& budget) const;
  int64_t rows_within_time(const Sequence& sequence, int64_t count, const Budget& budget, const StepCost& cost) const;
  int64_t piece(const Sequence& sequence, const Budget& budget, const StepCost& cost) const;
  void append_to_plan(Sequence& sequence, int64_t count, StepPlan& plan);
  void plan_saves(Sequence& sequence, StepPlan& plan);
  void fill_block_tables(const std::vector<Sequence*>& sequences, StepPlan& plan) const;
  void plan_drafts(const std::vector<Sequence*>& planned, const DraftDemand& demand, const StepCost& cost,
                   Budget& budget, StepPlan& plan);
  TokenEvent take_tokens(Sequence& sequence, const StepResult::Row& row);
  bool take_token(Sequence& sequence, const SampledToken& token, TokenEvent& event);
  void count_round(Sequence& sequence, const StepResult::Row& row, int64_t num_kept);
  void commit_rows(Sequence& sequence, int64_t num_kept, bool drafted, bool ends, StateCommits& commits);

  SchedulerOptions options_;
  CacheLedger ledger_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::map<Rank, Sequence*> waiting_;
  std::vector<Sequence*> running_;                // by rank
  std::deque<std::vector<Sequence*>> in_flight_;  // the sequences of each plan that is not advanced, oldest first
  SchedulerStats stats_;
  double next_deadline_ = std::numeric_limits<double>::infinity();
  bool any_cancelled_ = false;
};

}  // namespace moat
