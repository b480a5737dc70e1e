// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/matmul_hwy.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "ops/matmul_kernels.h"
#include "ops/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// Rows first .. of x and out, which may be strided.
struct RowPointers {
  const float* x[kPanelRows];
  float* out[kPanelRows];
};

// Threads take (panel of outputs, block of rows), all blocks of a panel in a row so that its weights come from memory
// once.
void matmul_impl(Exec& exec, const MatmulArgs& a) {
  const int64_t rows = a.x.dim(0), n = a.weight.dim(0);
  const int64_t panels = (n + kPanelCols - 1) / kPanelCols;
  const int64_t blocks = (rows + kPanelRows - 1) / kPanelRows;
  exec.pool().parallel_for(panels * blocks, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / blocks * kPanelCols;
      const int64_t row = item % blocks * kPanelRows;
      const int64_t count = std::min(kPanelRows, rows - row);
      RowPointers p;
      for (int64_t r = 0; r < count; ++r) {
        p.x[r] = a.x.row(row + r);
        p.out[r] = a.out.row(row + r);
      }
      multiply_panel(p.x, count, a.weight, first, std::min(kPanelCols, n - first), p.out);
    }
  });
}

// out[r] = sum over j of x[r][j] * weight row j, in order of j, a piece of j at a time.
template <class W>
void multiply_transposed(const W* weight, int64_t k, int64_t n, const RowPointers& p, int64_t rows) {
  constexpr int64_t kPiece = 64;
  float ones[kPanelRows];
  std::fill_n(ones, rows, 1.0F);
  const W* w[kPiece];
  const float* x[kPanelRows];
  for (int64_t begin = 0; begin < k; begin += kPiece) {
    const int64_t count = std::min(kPiece, k - begin);
    for (int64_t j = 0; j < count; ++j) w[j] = weight + (begin + j) * n;
    for (int64_t r = 0; r < rows; ++r) x[r] = p.x[r] + begin;
    mix_rows<W>(x, begin == 0 ? nullptr : ones, rows, w, count, n, p.out);
  }
}

void head_matmul_block(const HeadMatmulArgs& a, int64_t h, int64_t token, int64_t count) {
  RowPointers p;
  for (int64_t r = 0; r < count; ++r) {
    p.x[r] = a.x.f32() + (token + r) * a.x.strides[0] + h * a.x.strides[1];
    p.out[r] = a.out.f32() + (token + r) * a.out.strides[0] + h * a.out.strides[1];
  }
  const int64_t k = a.x.dim(2), n = a.out.dim(2);
  const int64_t first = h * (a.weight.dim(0) / a.x.dim(1)) + a.row_offset;
  if (!a.transposed) {
    const Tensor weight = a.weight.rows(first, first + n);
    for (int64_t c = 0; c < n; c += kPanelCols)
      multiply_panel(p.x, count, weight, c, std::min(kPanelCols, n - c), p.out);
  } else if (a.weight.dtype == DType::kBF16) {
    multiply_transposed(a.weight.bf16() + first * n, k, n, p, count);
  } else {
    multiply_transposed(static_cast<const float*>(a.weight.f32()) + first * n, k, n, p, count);
  }
}

void head_matmul_impl(Exec& exec, const HeadMatmulArgs& a) {
  const int64_t tokens = a.x.dim(0);
  const int64_t blocks = (tokens + kPanelRows - 1) / kPanelRows;
  exec.pool().parallel_for(a.x.dim(1) * blocks, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t token = item % blocks * kPanelRows;
      head_matmul_block(a, item / blocks, token, std::min(kPanelRows, tokens - token));
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(matmul_impl);
HWY_EXPORT(head_matmul_impl);

void matmul_hwy(Exec& exec, const MatmulArgs& args) { HWY_DYNAMIC_DISPATCH(matmul_impl)(exec, args); }
void head_matmul_hwy(Exec& exec, const HeadMatmulArgs& args) { HWY_DYNAMIC_DISPATCH(head_matmul_impl)(exec, args); }

}  // namespace moat
#endif  // HWY_ONCE
