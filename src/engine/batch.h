// SPDX-License-Identifier: Apache-2.0
// StepPlan -> ForwardInput: the derived arrays of one step. The buffers are reused from step to step.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/scheduler.h"
#include "model/forward.h"

namespace moat {

class Batch {
 public:
  // The result views `plan` and this object; both must outlive its use.
  const ForwardInput& build(const StepPlan& plan, int64_t block_size);

  // A step of `tokens` rows at `context` tokens for dry passes: one sequence, every row's logits, sizes real, values
  // arbitrary.
  const ForwardInput& build_dry(int64_t tokens, int64_t context, int64_t logit_rows, int64_t block_size);

 private:
  std::vector<int32_t> token_ids_, positions_, cu_seqlens_, first_positions_, context_lens_, block_tables_, slots_,
      logits_rows_;
  std::vector<int64_t> slot_mapping_;
  ForwardInput input_;
};

}  // namespace moat
