// SPDX-License-Identifier: Apache-2.0
#include "engine/batch.h"

#include <algorithm>

namespace moat {

const ForwardInput& Batch::build(const StepPlan& plan, int64_t block_size) {
  positions_.clear();
  slot_mapping_.clear();
  cu_seqlens_.assign(1, 0);
  context_lens_.clear();
  logits_rows_.clear();
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    const int32_t* table = plan.block_tables.data() + s * static_cast<size_t>(plan.max_blocks);
    const int32_t first = plan.first_positions[s];
    for (int32_t i = 0; i < plan.num_tokens[s]; ++i) {
      const int64_t position = first + i;
      positions_.push_back(static_cast<int32_t>(position));
      slot_mapping_.push_back(table[position / block_size] * block_size + position % block_size);
    }
    cu_seqlens_.push_back(cu_seqlens_.back() + plan.num_tokens[s]);
    context_lens_.push_back(first + plan.num_tokens[s]);
    if (plan.wants_token[s]) logits_rows_.push_back(cu_seqlens_.back() - 1);
  }
  input_ = {.token_ids = plan.token_ids,
            .positions = positions_,
            .cu_seqlens = cu_seqlens_,
            .first_positions = plan.first_positions,
            .context_lens = context_lens_,
            .slot_mapping = slot_mapping_,
            .block_tables = plan.block_tables,
            .max_blocks = plan.max_blocks,
            .state_slots = plan.state_slots,
            .num_decode_seqs = plan.num_decode_seqs,
            .logits_rows = logits_rows_};
  return input_;
}

const ForwardInput& Batch::build_dry(int64_t tokens, int64_t context, int64_t logit_rows, int64_t block_size) {
  set_dry({tokens}, std::max(context, tokens) - tokens, block_size);
  logits_rows_.assign(static_cast<size_t>(logit_rows), 0);
  input_.logits_rows = logits_rows_;
  input_.num_decode_seqs = 1;
  return input_;
}

const ForwardInput& Batch::build_dry(const DryStep& step, int64_t block_size) {
  std::vector<int64_t> rows(static_cast<size_t>(step.decode), 1);
  if (step.prefill_rows > 0) rows.push_back(step.prefill_rows);
  set_dry(rows, step.cached, block_size);
  logits_rows_.assign(rows.size(), 0);
  input_.logits_rows = logits_rows_;
  input_.num_decode_seqs = step.decode;
  return input_;
}

// Sequences of so many rows each, after `cached` tokens.
void Batch::set_dry(const std::vector<int64_t>& rows, int64_t cached, int64_t block_size) {
  cu_seqlens_.assign(1, 0);
  context_lens_.clear();
  int64_t max_context = 0;
  for (const int64_t n : rows) {
    cu_seqlens_.push_back(cu_seqlens_.back() + static_cast<int32_t>(n));
    context_lens_.push_back(static_cast<int32_t>(cached + n));
    max_context = std::max(max_context, cached + n);
  }
  const size_t seqs = rows.size();
  const auto tokens = static_cast<size_t>(cu_seqlens_.back());
  const int64_t blocks = (max_context + block_size - 1) / block_size;
  token_ids_.assign(tokens, 0);
  positions_.assign(tokens, 0);
  slot_mapping_.assign(tokens, 0);
  first_positions_.assign(seqs, static_cast<int32_t>(cached));
  slots_.assign(seqs, 0);
  block_tables_.assign(seqs * static_cast<size_t>(blocks), 0);
  input_ = {.token_ids = token_ids_,
            .positions = positions_,
            .cu_seqlens = cu_seqlens_,
            .first_positions = first_positions_,
            .context_lens = context_lens_,
            .slot_mapping = slot_mapping_,
            .block_tables = block_tables_,
            .max_blocks = blocks,
            .state_slots = slots_};
}

}  // namespace moat
