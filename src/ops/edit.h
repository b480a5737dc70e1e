// SPDX-License-Identifier: Apache-2.0
// Ops that move values, and ops that change or mask chosen logits.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// out = x; both may be column ranges of wider rows.
struct CopyArgs {
  Tensor out;  // [rows, heads, width] f32, last dim contiguous
  Tensor x;    // [rows, heads, width] f32, last dim contiguous
};
extern const Op<CopyArgs> kCopy;
inline void copy(Exec& exec, const char* site, const CopyArgs& args) { exec.call(site, kCopy, args); }

// logits[r, i] = -inf where bit i % 32 of allowed[r, i / 32] is 0. Bits beyond the vocabulary are ignored.
struct MaskLogitsArgs {
  Tensor logits;   // [rows, vocab] f32, in place
  Tensor allowed;  // [rows, ceil(vocab / 32)] i32, as bits
};
extern const Op<MaskLogitsArgs> kMaskLogits;
inline void mask_logits(Exec& exec, const char* site, const MaskLogitsArgs& args) {
  exec.call(site, kMaskLogits, args);
}

// Tokens listed by row: entries [starts[r], starts[r + 1]) are row r's, its ids distinct and in [0, vocab). A row
// without entries keeps its bits.
struct TokenLists {
  std::span<const int32_t> starts;  // [rows + 1], from 0, ascending
  std::span<const int32_t> ids;     // [entries]
};

// For each token of row r's list: x = logits[r, id]; x = x > 0 ? x / repetition[r] : x * repetition[r];
//   logits[r, id] = x - frequency[r] * count - (count > 0 ? presence[r] : 0).
// A finite logit stays finite; -inf stays -inf, and NaN and +inf are left for the sample ops to refuse.
struct ApplyPenaltiesArgs {
  Tensor logits;                      // [rows, vocab] f32, in place
  TokenLists tokens;                  // what prompt and reply hold so far
  std::span<const int32_t> counts;    // [entries], times generated; 0: only in the prompt
  std::span<const float> repetition;  // [rows], > 0; 1: off
  std::span<const float> frequency;   // [rows], finite; 0: off
  std::span<const float> presence;    // [rows], finite; 0: off
};
extern const Op<ApplyPenaltiesArgs> kApplyPenalties;
inline void apply_penalties(Exec& exec, const char* site, const ApplyPenaltiesArgs& args) {
  exec.call(site, kApplyPenalties, args);
}

// logits[r, id] += bias for each token of row r's list. A finite logit stays finite.
struct BiasLogitsArgs {
  Tensor logits;                // [rows, vocab] f32, in place
  TokenLists tokens;            // the biased ones
  std::span<const float> bias;  // [entries], finite
};
extern const Op<BiasLogitsArgs> kBiasLogits;
inline void bias_logits(Exec& exec, const char* site, const BiasLogitsArgs& args) {
  exec.call(site, kBiasLogits, args);
}

}  // namespace moat
