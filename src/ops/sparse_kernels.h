// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of sparse.h: portable in sparse_cpu.cc, the pass over the vocabulary also in sparse_hwy.cc.
#pragma once

#include <algorithm>

#include "ops/sparse.h"

namespace moat {

// Logits that share one entry of the table of block maxima. Smaller blocks mean a longer table to select from, larger
// ones more values to look at again.
constexpr int64_t kLogitBlock = 128;

inline int64_t num_logit_blocks(int64_t vocab) { return (vocab + kLogitBlock - 1) / kLogitBlock; }

// Fills maxima[begin, end) with the largest logit of each block of one row; NaN if the block holds a NaN or +inf.
using BlockMaxima = void (*)(const float* logits, int64_t vocab, float* maxima, int64_t begin, int64_t end);

// top_k_probs around a pass that finds the block maxima, the only one that reads the whole vocabulary.
void top_k_probs_by_blocks(Exec& exec, const TopKProbsArgs& a, BlockMaxima block_maxima);
int64_t top_k_probs_workspace(const TopKProbsArgs& a, const Exec& exec);

namespace cpu {
void top_k_probs(Exec& exec, const TopKProbsArgs& a);
void draw_compact(Exec& exec, const DrawCompactArgs& a);
}  // namespace cpu

namespace simd {
void top_k_probs(Exec& exec, const TopKProbsArgs& a);
}  // namespace simd

}  // namespace moat
