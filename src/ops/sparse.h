// SPDX-License-Identifier: Apache-2.0
// Distributions that are zero but for a few ids. With a top-k, what a row needs of its logits is one pass over them and
// a few dozen entries; the dense path (sample.h) writes and reads the vocabulary several times. Both give the same
// distribution.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// Entries [0, counts[r]) of row r; what follows them is id -1 with probability 0.
struct CompactRows {
  Tensor ids;     // [rows, width] i32, ascending
  Tensor probs;   // [rows, width] f32, > 0
  Tensor counts;  // [rows] i32; 0: the row cannot be used; -1: more entries than `width`, compute it densely

  bool is_set() const { return ids.is_set(); }
};

// The non-zero entries of min_p_renorm(top_p_renorm(top_k_renorm(softmax(logits / temperature)))), each stage as in
// sample.h, for 1 <= k < vocab: k <= 0 acts as 1, k >= vocab keeps all. Ties at rank k are kept, so more than k entries
// may survive: `width` should leave room for some. Compared are logits; values so close that only their rounded
// probabilities tie do not. counts 0: NaN, +inf or nothing finite among the logits (or min_p > 1); such a row is zero
// on the dense path.
struct TopKProbsArgs {
  CompactRows out;
  Tensor logits;                       // [rows, vocab] f32
  std::span<const float> temperature;  // [rows] > 0
  std::span<const int32_t> k;          // [rows]
  std::span<const float> top_p;        // [rows], >= 1: off
  std::span<const float> min_p;        // [rows], <= 0: off
};
extern const Op<TopKProbsArgs> kTopKProbs;
inline void top_k_probs(Exec& exec, const char* site, const TopKProbsArgs& args) { exec.call(site, kTopKProbs, args); }

// As draw of sample.h, from compact rows: ids[row] = first id whose cumulative probability (f64) exceeds
// uniform[row] * total; -1 where counts is not positive or the total is not finite.
struct DrawCompactArgs {
  Tensor ids;  // [rows] i32
  CompactRows probs;
  std::span<const double> uniform;  // [rows] in [0, 1)
};
extern const Op<DrawCompactArgs> kDrawCompact;
inline void draw_compact(Exec& exec, const char* site, const DrawCompactArgs& args) {
  exec.call(site, kDrawCompact, args);
}

}  // namespace moat
