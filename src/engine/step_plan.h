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

// Flat arrays over the step's sequences; those in decode form come first (model/forward.h).
struct StepPlan {
  std::vector<SequenceId> sequences;     // [seqs]
  std::vector<int32_t> num_tokens;       // [seqs], rows of each sequence, >= 1
  std::vector<int32_t> first_positions;  // [seqs]
  std::vector<int32_t> state_slots;      // [seqs]
  std::vector<uint8_t> wants_token;      // [seqs], the last row is sampled
  std::vector<int32_t> token_ids;        // [tokens]
  std::vector<int32_t> block_tables;     // [seqs, max_blocks], unused entries -1
  std::vector<uint64_t> table_versions;  // [seqs]; rows of equal version and width are equal, from step to step, too
  int64_t max_blocks = 0;
  int64_t num_decode_seqs = 0;
  std::vector<StateCopy> restores;  // before the forward, in order
  std::vector<StateCopy> saves;     // after it, in order

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

}  // namespace moat
