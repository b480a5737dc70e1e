// SPDX-License-Identifier: Apache-2.0
// Kernels of the drafter's ops. `cpu` is portable C++, `simd` is Highway with run-time dispatch.
#pragma once

#include "ops/draft.h"

namespace moat {

constexpr int64_t kMaxDraftRows = 64;  // of a block: one block of keys

namespace cpu {
void norm_rope(Exec& exec, const NormRopeArgs& args);
int64_t norm_rope_workspace(const NormRopeArgs& args, const Exec& exec);
void block_attention(Exec& exec, const BlockAttentionArgs& args);
void markov_gate(Exec& exec, const MarkovGateArgs& args);
void markov_cell(Exec& exec, const MarkovCellArgs& args);
void confidence(Exec& exec, const ConfidenceArgs& args);
void scatter_probs(Exec& exec, const ScatterProbsArgs& args);
}  // namespace cpu

namespace simd {
void block_attention(Exec& exec, const BlockAttentionArgs& args);
}  // namespace simd

}  // namespace moat
