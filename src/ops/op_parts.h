// SPDX-License-Identifier: Apache-2.0
// Small parts that the ops' definitions and portable kernels share.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/tensor.h"
#include "ops/case_data.h"

namespace moat {

// Bytes of a tensor's elements, for costs.
inline double bytes_of(const Tensor& tensor) {
  return tensor.is_set() ? static_cast<double>(storage_bytes(tensor.dtype, tensor.dims)) : 0.0;
}

// Element i of a rank-1 (or one-row) weight, bf16 or f32.
inline float weight_at(const Tensor& weight, int64_t i) {
  return weight.dtype == DType::kF32 ? weight.f32()[i] : bf16_to_f32(weight.bf16()[i]);
}

// Whether the address ranges that two tensors span intersect. False in dry passes, where there are no addresses.
inline bool overlap(const Tensor& a, const Tensor& b) {
  if (a.data == nullptr || b.data == nullptr || a.count() == 0 || b.count() == 0) return false;
  const auto end = [](const Tensor& t) {
    int64_t last = 0;
    for (int i = 0; i < t.rank(); ++i) last += (t.dims[i] - 1) * t.strides[i];
    return reinterpret_cast<uintptr_t>(t.data) + static_cast<uintptr_t>(dtype_bytes(t.dtype, last + 1));
  };
  return reinterpret_cast<uintptr_t>(a.data) < end(b) && reinterpret_cast<uintptr_t>(b.data) < end(a);
}

// Rows that a thread should at least take so that handing them out costs little: about 16k elements.
inline int64_t row_grain(int64_t width) { return width <= 0 ? 1 : 1 + 16384 / (width + 1); }

inline double sigmoid_f64(double x) { return x >= 0 ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x) / (1.0 + std::exp(x)); }
inline float sigmoid_f32(float x) {
  const float e = std::exp(-std::fabs(x));
  return (x >= 0.0F ? 1.0F : e) / (1.0F + e);
}

// --- for build functions ---

// Columns [pad, pad + width) of a random [rows, width + 2 pad] tensor: what a fused projection leaves behind.
inline Tensor normal_cols(CaseData& data, int64_t rows, int64_t width, int64_t pad, double deviation = 1.0) {
  return data.normal({rows, width + 2 * pad}, deviation).cols(pad, pad + width);
}
// The same, written by the call: the whole wide tensor is compared, so a write outside shows.
inline Tensor in_out_cols(CaseData& data, const char* name, int64_t rows, int64_t width, int64_t pad,
                          double deviation = 1.0) {
  return data.in_out(name, data.normal({rows, width + 2 * pad}, deviation)).cols(pad, pad + width);
}

}  // namespace moat
