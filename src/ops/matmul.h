// SPDX-License-Identifier: Apache-2.0
// Dense products with weights as stored, [out, in]. Activations and accumulation f32, weights bf16 or f32. On the CPU the bits
// of a row do not depend on the other rows, on the number of threads or on the number of rows: each output element is summed
// over the inputs in one fixed order per instruction set.
#pragma once

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// out = x weight^T.
struct MatmulArgs {
  Tensor out;     // [rows, n] f32, row-strided
  Tensor x;       // [rows, k] f32, row-strided
  Tensor weight;  // [n, k] bf16 or f32
};
extern const Op<MatmulArgs> kMatmul;
inline void matmul(Exec& exec, const char* site, const MatmulArgs& args) { exec.call(site, kMatmul, args); }

// One small matrix per head. transposed == false: out[t, h] = weight[h] x[t, h] with weight[h] [n, k];
// transposed == true: out[t, h] = weight[h]^T x[t, h] with weight[h] [k, n].
// weight[h] is rows [row_offset, row_offset + (transposed ? k : n)) of the h-th of `heads` equal row groups of `weight`.
struct HeadMatmulArgs {
  Tensor out;     // [tokens, heads, n] f32; last dim contiguous, may be a column range of wider rows
  Tensor x;       // [tokens, heads, k] f32; likewise
  Tensor weight;  // [heads * group_rows, (transposed ? n : k)] bf16 or f32
  int64_t row_offset = 0;
  bool transposed = false;
};
extern const Op<HeadMatmulArgs> kHeadMatmul;
inline void head_matmul(Exec& exec, const char* site, const HeadMatmulArgs& args) {
  exec.call(site, kHeadMatmul, args);
}

}  // namespace moat
