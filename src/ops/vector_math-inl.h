// SPDX-License-Identifier: Apache-2.0
// Functions of f32 vectors for Highway kernels; included once per instruction set, after foreach_target.h. Errors are a
// few units in the last place. NaN stays NaN, which Highway's own exponential does not promise.
#if defined(MOAT_OPS_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOAT_OPS_VECTOR_MATH_INL_H_
#undef MOAT_OPS_VECTOR_MATH_INL_H_
#else
#define MOAT_OPS_VECTOR_MATH_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cstdint>

#include "core/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr int64_t kMaxLanes = 16;  // of f32 on any instruction set here

HWY_INLINE int64_t lanes() { return static_cast<int64_t>(hn::Lanes(D())); }

// Where x is NaN: x, else y.
HWY_INLINE V keep_nan(V x, V y) { return hn::IfThenElse(hn::Eq(x, x), y, x); }

// 0 where x < limit, else x.
HWY_INLINE V zero_below(V x, float limit) { return hn::IfThenZeroElse(hn::Lt(x, hn::Set(D(), limit)), x); }

// exp(x) for x <= 88.
HWY_INLINE V exp_f32(V x) { return keep_nan(x, hn::Exp(D(), x)); }

HWY_INLINE V sigmoid(V x) {
  const D d;
  const V one = hn::Set(d, 1.0F);
  const V e = hn::Exp(d, hn::Neg(hn::Abs(x)));
  const V inverse = hn::Div(one, hn::Add(one, e));
  return keep_nan(x, hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Mul(e, inverse), inverse));
}

HWY_INLINE V tanh_f32(V x) { return keep_nan(x, hn::Tanh(D(), x)); }

// log(1 + exp(x)).
HWY_INLINE V softplus(V x) {
  const D d;
  const V tail = hn::Log1p(d, hn::Exp(d, hn::Neg(hn::Abs(x))));
  return keep_nan(x, hn::Add(hn::Max(x, hn::Zero(d)), tail));
}

// The first `count` < lanes() elements, the rest zero.
HWY_INLINE V load_first(const float* from, int64_t count) {
  HWY_ALIGN float buffer[kMaxLanes] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  return hn::Load(D(), buffer);
}
HWY_INLINE void store_first(V value, float* to, int64_t count) {
  HWY_ALIGN float buffer[kMaxLanes];
  hn::Store(value, D(), buffer);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
}

HWY_INLINE V load_bf16(const uint16_t* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, from))));
}

// Elements i .. of a bf16 or f32 weight vector; `count` of them if fewer than lanes() are left.
HWY_INLINE V load_weight(const Tensor& weight, int64_t i) {
  return weight.dtype == DType::kF32 ? hn::LoadU(D(), weight.f32() + i) : load_bf16(weight.bf16() + i);
}
HWY_INLINE V load_weight_first(const Tensor& weight, int64_t i, int64_t count) {
  if (weight.dtype == DType::kF32) return load_first(weight.f32() + i, count);
  HWY_ALIGN uint16_t buffer[kMaxLanes] = {};
  for (int64_t k = 0; k < count; ++k) buffer[k] = weight.bf16()[i + k];
  return load_bf16(buffer);
}

HWY_INLINE float sum_of_lanes(V v) { return hn::GetLane(hn::SumOfLanes(D(), v)); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#endif  // MOAT_OPS_VECTOR_MATH_INL_H_
