// SPDX-License-Identifier: Apache-2.0
// Ops that move or mask values without arithmetic.
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

}  // namespace moat
