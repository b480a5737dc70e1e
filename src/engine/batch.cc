// SPDX-License-Identifier: Apache-2.0
#include "engine/batch.h"

#include <algorithm>
#include <numeric>

namespace moat {

// The arrays of a plan with drafts, in the order of the batch.
void Batch::gather(const StepPlan& plan, const StepDrafts& drafts) {
  std::stable_partition(order_.begin(), order_.begin() + plan.num_decode_seqs,
                        [&](int32_t s) { return drafts.counts[static_cast<size_t>(s)] > 0; });
  std::vector<int64_t> first_token = {0}, first_draft = {0};  // of each sequence of the plan
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    first_token.push_back(first_token.back() + plan.num_tokens[s]);
    first_draft.push_back(first_draft.back() + drafts.counts[s]);
  }
  token_ids_.clear();
  first_positions_.clear();
  slots_.clear();
  block_tables_.clear();
  for (const int32_t index : order_) {
    const auto s = static_cast<size_t>(index);
    const auto append = [](std::vector<int32_t>& to, const std::vector<int32_t>& from, int64_t begin, int64_t end) {
      to.insert(to.end(), from.begin() + begin, from.begin() + end);
    };
    append(token_ids_, plan.token_ids, first_token[s], first_token[s + 1]);
    append(token_ids_, drafts.ids, first_draft[s], first_draft[s + 1]);
    first_positions_.push_back(plan.first_positions[s]);
    slots_.push_back(plan.state_slots[s]);
    append(block_tables_, plan.block_tables, index * plan.max_blocks, (index + 1) * plan.max_blocks);
  }
}

const ForwardInput& Batch::build(const StepPlan& plan, int64_t block_size, const StepDrafts& drafts) {
  positions_.clear();
  slot_mapping_.clear();
  cu_seqlens_.assign(1, 0);
  context_lens_.clear();
  logits_rows_.clear();
  order_.resize(plan.sequences.size());
  std::iota(order_.begin(), order_.end(), 0);
  const bool has_drafts = std::any_of(drafts.counts.begin(), drafts.counts.end(), [](int32_t n) { return n > 0; });
  if (has_drafts) gather(plan, drafts);
  int64_t num_verify_seqs = 0;
  for (const int32_t index : order_) {
    const auto s = static_cast<size_t>(index);
    const int32_t* table = plan.block_tables.data() + index * plan.max_blocks;
    const int32_t first = plan.first_positions[s];
    const int32_t num_drafts = has_drafts ? drafts.counts[s] : 0;
    const int32_t rows = plan.num_tokens[s] + num_drafts;
    for (int32_t i = 0; i < rows; ++i) {
      const int64_t position = first + i;
      positions_.push_back(static_cast<int32_t>(position));
      slot_mapping_.push_back(table[position / block_size] * block_size + position % block_size);
    }
    cu_seqlens_.push_back(cu_seqlens_.back() + rows);
    context_lens_.push_back(first + rows);
    num_verify_seqs += num_drafts > 0;
    if (!plan.wants_token[s]) continue;
    for (int32_t r = 1 + num_drafts; r >= 1; --r) logits_rows_.push_back(cu_seqlens_.back() - r);
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
            .num_verify_seqs = num_verify_seqs,
            .logits_rows = logits_rows_};
  if (has_drafts) {
    input_.token_ids = token_ids_;
    input_.first_positions = first_positions_;
    input_.block_tables = block_tables_;
    input_.state_slots = slots_;
  }
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
