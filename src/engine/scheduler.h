// SPDX-License-Identifier: Apache-2.0
// Scheduler: decides what each step computes. Pure with respect to devices and clocks: the same calls give the same
// plans. There are no prefill and decode phases: a sequence has num_tokens and num_computed_tokens, and a step hands
// out tokens within max_batched_tokens until the second catches the first. One thread.
//
// Rules of schedule(), in order:
//   1. cancelled sequences end.
//   2. running sequences with one token to compute (decode) get it, in order of admission.
//   3. running sequences with more to compute (prefill) share what is left of the budget, in order of admission.
//   4. waiting requests are admitted by (priority, arrival) while a slot, blocks and budget are left; the first that
//      does not fit stops admission, so nobody is overtaken within a priority.
// A prefill piece that does not reach the end of the prompt ends at an absolute multiple of kKdaChunk where it can, so
// that how a prompt was cut does not show in the arithmetic.
//
// Life of a request: waiting -> running -> ended, with exactly one finish reason. All its blocks are reserved at
// admission, so a running sequence never waits for memory (docs/adr/0007).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/cache.h"
#include "engine/request.h"
#include "engine/token_counts.h"

namespace moat {

struct SchedulerOptions {
  int64_t max_num_seqs = 64;          // running at once
  int64_t max_batched_tokens = 2048;  // a step
  int64_t max_model_len = 0;          // prompt + generated tokens of one sequence
  int32_t eos_token_id = -1;
};

// What one step computes: plain data, no pointers, so that it can be sent to other ranks. Flat arrays over the step's
// sequences; those in decode form come first (model/forward.h).
struct StepPlan {
  std::vector<SequenceId> sequences;     // [seqs]
  std::vector<int32_t> num_tokens;       // [seqs], rows of each sequence, >= 1
  std::vector<int32_t> first_positions;  // [seqs]
  std::vector<int32_t> state_slots;      // [seqs]
  std::vector<uint8_t> wants_token;      // [seqs], the last row is sampled
  std::vector<int32_t> token_ids;        // [tokens]
  std::vector<int32_t> block_tables;     // [seqs, max_blocks], unused entries -1
  int64_t max_blocks = 0;
  int64_t num_decode_seqs = 0;

  void clear();
  bool empty() const { return sequences.empty(); }
};

// One entry per sequence of the plan that wanted a token, in plan order.
struct StepResult {
  struct Row {
    SequenceId sequence = 0;
    SampledToken token;  // token_id < 0: the row could not be sampled (not finite, nothing allowed)
    std::string error;   // then: why
  };
  std::vector<Row> rows;
};

struct SequenceEvent {
  SequenceId sequence = 0;
  TokenEvent event;
};

class Scheduler {
 public:
  Scheduler(const SchedulerOptions& options, const CacheSizes& cache_sizes);

  // Queues a valid request (the engine checks it first). Ids are unique for the scheduler's life.
  void add(SequenceId id, Request request);
  void cancel(SequenceId id);

  // Fills `plan` (cleared first) and appends the events of sequences that ended without computing.
  void schedule(StepPlan& plan, std::vector<SequenceEvent>& events);
  // Takes the results of the plan that schedule() made last and appends what became known.
  void advance(const StepPlan& plan, const StepResult& result, std::vector<SequenceEvent>& events);

  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  bool idle() const { return waiting_.empty() && running_.empty(); }
  const CacheLedger& ledger() const { return ledger_; }

  // What the sampler needs of a running sequence.
  const Request& request(SequenceId id) const;
  Request& request(SequenceId id);
  int64_t num_generated(SequenceId id) const;
  int64_t num_tokens(SequenceId id) const;
  std::span<const int32_t> tokens(SequenceId id) const;  // prompt, then generated; valid until the next advance()
  TokenCounts& token_counts(SequenceId id);              // as of the last time the sampler asked

  void check_invariants() const;

 private:
  struct Sequence {
    SequenceId id = 0;
    Request request;
    std::vector<int32_t> tokens;  // prompt, then generated
    TokenCounts counts;           // of `tokens`, as far as the sampler has needed it
    int64_t num_computed = 0;
    int64_t num_cached = 0;
    bool cancelled = false;
    int64_t num_prompt() const { return static_cast<int64_t>(request.prompt_ids.size()); }
    int64_t remaining() const { return static_cast<int64_t>(tokens.size()) - num_computed; }
  };

  void end(Sequence& sequence, TokenEvent event, std::vector<SequenceEvent>& events);
  void end_cancelled(std::vector<SequenceEvent>& events);
  bool admit_next();
  void append_to_plan(const Sequence& sequence, int64_t count, StepPlan& plan);
  int64_t prefill_piece(const Sequence& sequence, int64_t budget) const;
  void accept_token(Sequence& sequence, const StepResult::Row& row, std::vector<SequenceEvent>& events);

  SchedulerOptions options_;
  CacheLedger ledger_;
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::map<std::pair<int32_t, SequenceId>, Sequence*> waiting_;  // by priority, then arrival (ids ascend)
  std::vector<Sequence*> running_;                               // in order of admission
  bool any_cancelled_ = false;
};

}  // namespace moat
