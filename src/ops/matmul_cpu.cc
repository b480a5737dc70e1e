// SPDX-License-Identifier: Apache-2.0
#include "ops/dot_cpu.h"
#include "ops/matmul_kernels.h"

namespace moat {

// Threads take output columns, so that each weight row is read once and stays in cache for all rows.
void matmul_cpu(Exec& exec, const MatmulArgs& a) {
  const int64_t rows = a.x.dim(0);
  if (rows == 0) return;
  exec.pool().parallel_for(a.weight.dim(0), 4, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t r = 0; r < rows; ++r) a.out.row(r)[n] = dot_row(a.x.row(r), a.weight, n);
    }
  });
}

namespace {

// out[i] = sum over j of weight[first + j, i] x[j], for one token and head; W is float or uint16_t (bf16).
template <class W>
void multiply_transposed(const W* weight, int64_t k, int64_t n, const float* x, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = 0.0F;
  for (int64_t j = 0; j < k; ++j) {
    for (int64_t i = 0; i < n; ++i) out[i] += x[j] * weight_f32(weight + j * n, i);
  }
}

}  // namespace

void head_matmul_cpu(Exec& exec, const HeadMatmulArgs& a) {
  const int64_t tokens = a.x.dim(0), heads = a.x.dim(1), k = a.x.dim(2), n = a.out.dim(2);
  const int64_t group = a.weight.dim(0) / heads;
  exec.pool().parallel_for(tokens * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t h = item / tokens, t = item % tokens;
      const float* x = a.x.f32() + t * a.x.strides[0] + h * a.x.strides[1];
      float* out = a.out.f32() + t * a.out.strides[0] + h * a.out.strides[1];
      const int64_t first = h * group + a.row_offset;
      if (!a.transposed) {
        for (int64_t i = 0; i < n; ++i) out[i] = dot_row(x, a.weight, first + i);
      } else if (a.weight.dtype == DType::kBF16) {
        multiply_transposed(a.weight.bf16() + first * n, k, n, x, out);
      } else {
        multiply_transposed(static_cast<const float*>(a.weight.f32()) + first * n, k, n, x, out);
      }
    }
  });
}

}  // namespace moat
