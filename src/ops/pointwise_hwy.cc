// SPDX-License-Identifier: Apache-2.0
// Highway kernels of pointwise.h. Threads split by rows.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/pointwise_hwy.cc"
#include <hwy/foreach_target.h>
// foreach_target.h first.
#include "ops/op_parts.h"
#include "ops/pointwise_kernels.h"
#include "ops/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// out[i] = f(a[i], b[i]) over a row; the last elements are computed in a padded vector, so that position in the vector
// never changes a bit.
template <class F>
HWY_INLINE void map_row(const float* a, const float* b, float* out, int64_t width, const F& f) {
  const D d;
  const int64_t n = lanes();
  int64_t i = 0;
  for (; i + n <= width; i += n) hn::StoreU(f(hn::LoadU(d, a + i), hn::LoadU(d, b + i)), d, out + i);
  if (i < width) store_first(f(load_first(a + i, width - i), load_first(b + i, width - i)), out + i, width - i);
}

void GatedActRows(const GatedActArgs& a, int64_t begin, int64_t end) {
  const D d;
  const int64_t width = a.gate.dim(1);
  const V beta = hn::Set(d, a.situ_beta);
  const V linear_beta = hn::Set(d, a.linear_beta);
  for (int64_t r = begin; r < end; ++r) {
    const float* gate = a.gate.row(r);
    const float* up = a.up.row(r);
    float* out = a.out.row(r);
    if (a.situ_beta <= 0.0F) {
      map_row(gate, up, out, width, [](V g, V u) { return hn::Mul(hn::Mul(g, sigmoid(g)), u); });
    } else if (a.linear_beta <= 0.0F) {
      map_row(gate, up, out, width,
              [&](V g, V u) { return hn::Mul(hn::Mul(hn::Mul(beta, tanh_f32(hn::Div(g, beta))), sigmoid(g)), u); });
    } else {
      map_row(gate, up, out, width, [&](V g, V u) {
        const V left = hn::Mul(hn::Mul(beta, tanh_f32(hn::Div(g, beta))), sigmoid(g));
        return hn::Mul(left, hn::Mul(linear_beta, tanh_f32(hn::Div(u, linear_beta))));
      });
    }
  }
}

void SigmoidGateRows(const SigmoidGateArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    map_row(a.x.row(r), a.gate.row(r), a.x.row(r), a.x.dim(1), [](V x, V g) { return hn::Mul(x, sigmoid(g)); });
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(GatedActRows);
HWY_EXPORT(SigmoidGateRows);

namespace simd {

void gated_act(Exec& exec, const GatedActArgs& a) {
  exec.pool().parallel_for(a.gate.dim(0), row_grain(4 * a.gate.dim(1)), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(GatedActRows)(a, begin, end);
  });
}

void sigmoid_gate(Exec& exec, const SigmoidGateArgs& a) {
  exec.pool().parallel_for(a.x.dim(0), row_grain(2 * a.x.dim(1)), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SigmoidGateRows)(a, begin, end);
  });
}

}  // namespace simd
}  // namespace moat
#endif
