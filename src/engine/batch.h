// SPDX-License-Identifier: Apache-2.0
// StepPlan -> ForwardInput: the derived arrays of one step. The buffers are reused from step to step.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/step_plan.h"
#include "model/forward.h"

namespace moat {

// Drafts that a step verifies, for the sequences of its plan.
struct StepDrafts {
  std::vector<int32_t> counts;  // [seqs]; empty: none
  std::vector<int32_t> ids;     // of all sequences, one after the other
};

class Batch {
 public:
  // The result views `plan` and this object; both must outlive its use. Sequences with drafts come first; the logits of
  // their last 1 + drafts rows are wanted, of others that want a token the last row's.
  const ForwardInput& build(const StepPlan& plan, int64_t block_size, const StepDrafts& drafts = {});
  // The plan's sequences in the order of the batch.
  std::span<const int32_t> order() const { return order_; }

  // A step of `tokens` rows at `context` tokens for dry passes: one sequence, every row's logits, sizes real, values
  // arbitrary.
  const ForwardInput& build_dry(int64_t tokens, int64_t context, int64_t logit_rows, int64_t block_size);

  // The same for a step of several sequences: `decode` of them with one row each, then, if `prefill_rows` > 0, one of so
  // many rows, in prefill form. Each has `cached` tokens before the step.
  struct DryStep {
    int64_t decode = 0;
    int64_t prefill_rows = 0;
    int64_t cached = 0;
  };
  const ForwardInput& build_dry(const DryStep& step, int64_t block_size);

 private:
  void set_dry(const std::vector<int64_t>& rows, int64_t cached, int64_t block_size);

  void gather(const StepPlan& plan, const StepDrafts& drafts);

  std::vector<int32_t> order_;
  std::vector<int32_t> token_ids_, positions_, cu_seqlens_, first_positions_, context_lens_, block_tables_, slots_,
      logits_rows_;
  std::vector<int64_t> slot_mapping_;
  ForwardInput input_;
};

}  // namespace moat
