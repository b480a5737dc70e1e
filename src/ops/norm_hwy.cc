// SPDX-License-Identifier: Apache-2.0
// Highway kernels of norm.h. Threads split by rows. A row's sums run in four vector accumulators that are added in a
// fixed order, so they depend on nothing but the row and the instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/norm_hwy.cc"
#include <hwy/foreach_target.h>
// foreach_target.h first.
#include <cmath>

#include "ops/norm_kernels.h"
#include "ops/op_parts.h"
#include "ops/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// Sum over i of f(i-th vector of a, of b); f is called with zeros beyond the end, which must add nothing.
template <class F>
HWY_INLINE float sum_row(const float* a, const float* b, int64_t n, const F& f) {
  const D d;
  const int64_t step = lanes();
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * step <= n; i += 4 * step) {
    s0 = f(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
    s1 = f(hn::LoadU(d, a + i + step), hn::LoadU(d, b + i + step), s1);
    s2 = f(hn::LoadU(d, a + i + 2 * step), hn::LoadU(d, b + i + 2 * step), s2);
    s3 = f(hn::LoadU(d, a + i + 3 * step), hn::LoadU(d, b + i + 3 * step), s3);
  }
  for (; i + step <= n; i += step) s0 = f(hn::LoadU(d, a + i), hn::LoadU(d, b + i), s0);
  if (i < n) s1 = f(load_first(a + i, n - i), load_first(b + i, n - i), s1);
  return sum_of_lanes(hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

HWY_INLINE float dot(const float* a, const float* b, int64_t n) {
  return sum_row(a, b, n, [](V x, V y, V sum) { return hn::MulAdd(x, y, sum); });
}

HWY_INLINE float inverse_rms(const float* x, int64_t n, float eps) {
  return 1.0F / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

void RmsNormRows(const RmsNormArgs& a, int64_t begin, int64_t end) {
  const D d;
  const int64_t n = lanes();
  const int64_t width = a.x.dim(1);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = a.x.row(r);
    float* out = a.out.row(r);
    const V scale = hn::Set(d, inverse_rms(x, width, a.eps));
    int64_t i = 0;
    for (; i + n <= width; i += n) {
      hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + i), scale), load_weight(a.weight, i)), d, out + i);
    }
    if (i == width) continue;
    const V weight = load_weight_first(a.weight, i, width - i);
    store_first(hn::Mul(hn::Mul(load_first(x + i, width - i), scale), weight), out + i, width - i);
  }
}

// Rows are (token, head) pairs.
void GatedRmsNormRows(const GatedRmsNormArgs& a, int64_t begin, int64_t end) {
  const D d;
  const int64_t n = lanes();
  const int64_t dim = a.o.dim(2);
  const float* weight = a.weight.f32();
  for (int64_t r = begin; r < end; ++r) {
    const float* o = a.o.f32() + r * dim;
    const float* gate = a.gate.f32() + r * dim;
    float* out = a.out.f32() + r * dim;
    const V scale = hn::Set(d, inverse_rms(o, dim, a.eps));
    const auto value = [&](V x, V w, V g) { return hn::Mul(hn::Mul(hn::Mul(x, scale), w), sigmoid(g)); };
    int64_t i = 0;
    for (; i + n <= dim; i += n) {
      hn::StoreU(value(hn::LoadU(d, o + i), hn::LoadU(d, weight + i), hn::LoadU(d, gate + i)), d, out + i);
    }
    const int64_t left = dim - i;
    if (left == 0) continue;
    store_first(value(load_first(o + i, left), load_first(weight + i, left), load_first(gate + i, left)), out + i,
                left);
  }
}

void L2NormRows(const L2NormArgs& a, int64_t begin, int64_t end) {
  const D d;
  const int64_t n = lanes();
  const int64_t dim = a.x.dim(2);
  for (int64_t r = begin; r < end; ++r) {
    float* x = a.x.f32() + r * dim;
    const float factor = a.scale / std::sqrt(dot(x, x, dim) + a.eps);
    const V scale = hn::Set(d, factor);
    int64_t i = 0;
    for (; i + n <= dim; i += n) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), scale), d, x + i);
    for (; i < dim; ++i) x[i] *= factor;
  }
}

// `site` is norm * proj, [hidden].
void AttnResMixRows(const AttnResMixArgs& a, const float* site, int64_t begin, int64_t end) {
  const D d;
  const int64_t n = lanes();
  const int64_t hidden = a.prefix.dim(1);
  const int64_t count = a.num_blocks + 1;
  for (int64_t t = begin; t < end; ++t) {
    const float* candidates[kMaxResidualCandidates];
    float weights[kMaxResidualCandidates];
    float largest = -INFINITY;
    for (int64_t j = 0; j < count; ++j) {
      const float* v = j < a.num_blocks ? a.blocks.f32() + j * a.blocks.strides[0] + t * hidden : a.prefix.row(t);
      candidates[j] = v;
      weights[j] = dot(v, site, hidden) * inverse_rms(v, hidden, a.eps);
      largest = weights[j] > largest ? weights[j] : largest;
    }
    float total = 0;
    for (int64_t j = 0; j < count; ++j) total += weights[j] = std::exp(weights[j] - largest);
    for (int64_t j = 0; j < count; ++j) weights[j] /= total;
    float* out = a.out.row(t);
    int64_t i = 0;
    for (; i + n <= hidden; i += n) {
      V mix = hn::Zero(d);
      for (int64_t j = 0; j < count; ++j)
        mix = hn::MulAdd(hn::Set(d, weights[j]), hn::LoadU(d, candidates[j] + i), mix);
      hn::StoreU(mix, d, out + i);
    }
    for (; i < hidden; ++i) {
      out[i] = 0;
      for (int64_t j = 0; j < count; ++j) out[i] += weights[j] * candidates[j][i];
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(RmsNormRows);
HWY_EXPORT(GatedRmsNormRows);
HWY_EXPORT(L2NormRows);
HWY_EXPORT(AttnResMixRows);

namespace simd {

void rms_norm(Exec& exec, const RmsNormArgs& a) {
  exec.pool().parallel_for(a.x.dim(0), row_grain(a.x.dim(1)), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RmsNormRows)(a, begin, end);
  });
}

void gated_rms_norm(Exec& exec, const GatedRmsNormArgs& a) {
  exec.pool().parallel_for(a.o.dim(0) * a.o.dim(1), row_grain(2 * a.o.dim(2)), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(GatedRmsNormRows)(a, begin, end);
  });
}

void l2_norm(Exec& exec, const L2NormArgs& a) {
  exec.pool().parallel_for(a.x.dim(0) * a.x.dim(1), row_grain(a.x.dim(2)), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(L2NormRows)(a, begin, end);
  });
}

void attn_res_mix(Exec& exec, const AttnResMixArgs& a) {
  const int64_t hidden = a.prefix.dim(1);
  const Tensor site = exec.arena().alloc(DType::kF32, {hidden});
  for (int64_t i = 0; i < hidden; ++i) site.f32()[i] = weight_at(a.norm, i) * weight_at(a.proj, i);
  exec.pool().parallel_for(a.prefix.dim(0), row_grain(2 * hidden * a.num_blocks), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AttnResMixRows)(a, site.f32(), begin, end);
  });
}

}  // namespace simd
}  // namespace moat
#endif
