// SPDX-License-Identifier: Apache-2.0
// StepPlan: what one step computes, and StepResult: what came of it. Plain data without pointers, so that a plan can be
// sent to other ranks and made while the step before it still runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/cache.h"
#include "engine/request.h"

namespace moat {

// What the drafts of a step are cut by, once they are made (engine/draft_length.h). A value, so that every rank cuts alike.
struct DraftPolicy {
  bool automatic = false;         // false: as many as the plan gives room for
  int64_t num_decodes = 0;        // sequences that get a token
  std::vector<double> seconds;    // [1 + drafts], expected of the step with so many of them, at least one entry
  double draft_seconds = 0;       // ... of making drafts, which is spent by then
  std::vector<float> factor;      // [position] on the drafter's confidence
  std::vector<float> acceptance;  // [position], chance that a draft is accepted if those before it were, of drafts in
                                  // general: expected of drafts whose confidence must not be looked at yet
};

// How the drafts for one sequence fared, newer ones counting more.
struct DraftRecord {
  double hits = 0, tries = 0;

  void add(bool accepted);
  void fade();  // after a step without drafts: what was long ago says less and less
  // Chance that a draft is accepted if those before it were, where `prior` is that of drafts in general.
  double acceptance(double prior) const;
};

// Which sequences may be drafted for in a step, and how many tokens each.
struct DraftDemand {
  int64_t max_drafts = 0;
  double min_acceptance = 0;  // of a sequence's record
  double prior = 0;
  bool measures = false;  // all of them are verified, to see what that takes
};

// Flat arrays over the step's sequences; those in decode form come first (model/forward.h).
struct StepPlan {
  std::vector<SequenceId> sequences;     // [seqs]
  std::vector<int32_t> num_tokens;       // [seqs], rows of each sequence, >= 1
  std::vector<int32_t> first_positions;  // [seqs]
  std::vector<int32_t> state_slots;      // [seqs]
  std::vector<uint8_t> wants_token;      // [seqs], the last row is sampled
  std::vector<int32_t> num_drafts;    // [seqs], rows that whoever runs the plan may add: drafts after the last token;
                                      // their blocks are in the tables. 0 unless wants_token
  std::vector<int32_t> token_ids;     // [tokens]
  std::vector<int32_t> block_tables;  // [seqs, max_blocks], unused entries -1
  std::vector<uint64_t> table_versions;  // [seqs]; rows of equal version and width are equal, from step to step, too
  int64_t max_blocks = 0;
  int64_t num_decode_seqs = 0;
  DraftPolicy drafting;
  std::vector<StateCopy> restores;  // before the forward, in order
  std::vector<StateCopy> saves;     // after it, in order

  void clear();
  bool empty() const { return sequences.empty(); }
};

// One entry per sequence of the plan that wanted a token, in plan order.
struct StepResult {
  struct Row {
    SequenceId sequence = 0;
    std::vector<SampledToken> tokens;  // accepted drafts, then one more; empty: the row could not be sampled
    std::string error;                 // then: why (not finite, nothing allowed)
    int32_t num_drafts = 0;            // that were verified: the step had 1 + num_drafts rows of the sequence
    std::vector<float> confidence;     // [num_drafts]; empty if the drafter has none
  };
  std::vector<Row> rows;
  double draft_seconds = 0;  // of making drafts
};

// What the recurrent states take of a step's verified rows, known once its tokens are: first the rows up to a checkpoint
// that falls among them, then the copies, then the rest. Entries only of sequences with drafts.
struct StateCommits {
  struct Entry {
    SequenceId sequence = 0;
    int32_t slot = -1;
    int32_t rows_to_save = 0;  // 0: no checkpoint
    int32_t rows = 0;          // in all, >= rows_to_save
  };
  std::vector<Entry> entries;
  std::vector<StateCopy> saves;  // in order

  bool empty() const { return entries.empty(); }
};

struct SequenceEvent {
  SequenceId sequence = 0;
  TokenEvent event;
};

}  // namespace moat
