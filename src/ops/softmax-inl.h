// SPDX-License-Identifier: Apache-2.0
// The running softmax of the vectorised attention kernels, compiled once per instruction set.
#if defined(MOAT_OPS_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOAT_OPS_SOFTMAX_INL_H_
#undef MOAT_OPS_SOFTMAX_INL_H_
#else
#define MOAT_OPS_SOFTMAX_INL_H_
#endif

#include <limits>

#include "ops/mla_kernels.h"
#include "ops/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// exp(x) for x <= 0, to within 2 units in the last place; 0 below -87 (a softmax weight that small counts for nothing),
// NaN for NaN. exp(x) = 2^n exp(r), |r| <= ln(2) / 2, with the Taylor polynomial of degree 7 (error below 6e-9).
HWY_INLINE F32Vec exp_of_negative(F32Vec x) {
  const F32 d;
  const hn::Rebind<int32_t, F32> i32;
  const auto n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504F)));
  // ln(2) in two parts, the first of which has few bits: n times it is exact.
  auto r = hn::MulAdd(n, hn::Set(d, -0.693359375F), x);
  r = hn::MulAdd(n, hn::Set(d, 2.12194440e-4F), r);
  auto p = hn::Set(d, 1.0F / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0F / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5F));
  p = hn::MulAdd(hn::Mul(r, r), p, hn::Add(r, hn::Set(d, 1.0F)));
  const auto power = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(i32, n), hn::Set(i32, 127))));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0F)), hn::Mul(p, power));
}

// Weights of what is summed so far are relative to the largest score so far.
struct RunningSoftmax {
  float largest = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;
};

// Turns the first `count` of kKeyBlock products into weights, the others into zeros; returns what earlier sums must be
// multiplied with.
inline float add_scores(RunningSoftmax& softmax, float* scores, int64_t count, float scale) {
  const F32 d;
  std::fill(scores + count, scores + kKeyBlock, -std::numeric_limits<float>::infinity());
  F32Vec top = hn::Set(d, softmax.largest);
  for (int64_t j = 0; j < kKeyBlock; j += kLanes) {
    const F32Vec score = hn::Mul(hn::LoadU(d, scores + j), hn::Set(d, scale));
    hn::StoreU(score, d, scores + j);
    top = hn::Max(top, score);
  }
  const F32Vec largest = hn::MaxOfLanes(d, top);
  F32Vec sum = hn::Zero(d);
  for (int64_t j = 0; j < kKeyBlock; j += kLanes) {
    const F32Vec weight = exp_of_negative(hn::Sub(hn::LoadU(d, scores + j), largest));
    hn::StoreU(weight, d, scores + j);
    sum = hn::Add(sum, weight);
  }
  const float factor = hn::GetLane(exp_of_negative(hn::Sub(hn::Set(d, softmax.largest), largest)));
  softmax.largest = hn::GetLane(largest);
  softmax.sum = softmax.sum * factor + sum_of_lanes(sum);
  return factor;
}

// out /= sum.
HWY_INLINE void finish_row(const RunningSoftmax& softmax, float* out, int64_t width) {
  const float factor = 1.0F / softmax.sum;
  for (int64_t i = 0; i < width; ++i) out[i] *= factor;
}

}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#endif  // MOAT_OPS_SOFTMAX_INL_H_
