// SPDX-License-Identifier: Apache-2.0
// The fixed summation order of the portable rows: element i of a dot product goes to partial sum i % 16, in order of i,
// and the 16 partial sums meet in one tree. So the bits of a result depend on its two operands alone.
#pragma once

#include <array>
#include <cstdint>

#include "core/tensor.h"

namespace moat {

constexpr int64_t kDotLanes = 16;

inline float weight_f32(const float* w, int64_t i) { return w[i]; }
inline float weight_f32(const uint16_t* w, int64_t i) { return bf16_to_f32(w[i]); }

inline float sum_lanes(std::array<float, kDotLanes>& lanes) {
  for (size_t half = kDotLanes / 2; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// W is float or uint16_t (bf16).
template <class W>
float dot(const float* x, const W* w, int64_t k) {
  std::array<float, kDotLanes> lanes{};
  int64_t i = 0;
  for (; i + kDotLanes <= k; i += kDotLanes) {
    for (int64_t l = 0; l < kDotLanes; ++l) lanes[static_cast<size_t>(l)] += x[i + l] * weight_f32(w, i + l);
  }
  for (int64_t l = 0; i + l < k; ++l) lanes[static_cast<size_t>(l)] += x[i + l] * weight_f32(w, i + l);
  return sum_lanes(lanes);
}

// One row of MXFP4: k / 2 bytes of codes, k / 32 scale bytes.
inline float dot_mxfp4(const float* x, const uint8_t* codes, const uint8_t* scales, int64_t k) {
  std::array<float, kDotLanes> lanes{};
  for (int64_t i = 0; i < k; i += kMxfp4Group) {
    const float scale = e8m0_to_f32(scales[i / kMxfp4Group]);
    for (int64_t j = 0; j < kMxfp4Group; ++j) {
      const uint8_t byte = codes[(i + j) / 2];
      lanes[static_cast<size_t>(j % kDotLanes)] += x[i + j] * (kE2m1[j % 2 ? byte >> 4 : byte & 15] * scale);
    }
  }
  return sum_lanes(lanes);
}

// x . row n of `weight` [n, k] f32, bf16 or mxfp4, contiguous.
inline float dot_row(const float* x, const Tensor& weight, int64_t n) {
  const int64_t k = weight.dim(1);
  if (weight.dtype == DType::kMxfp4)
    return dot_mxfp4(x, weight.u8() + n * k / 2, weight.scales + n * k / kMxfp4Group, k);
  return weight.dtype == DType::kBF16 ? dot(x, weight.bf16() + n * k, k) : dot(x, weight.f32() + n * k, k);
}

}  // namespace moat
