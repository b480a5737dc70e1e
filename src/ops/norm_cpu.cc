// SPDX-License-Identifier: Apache-2.0
// Portable kernels of norm.h. Threads split by rows; sums are f64 in index order.
#include <algorithm>

#include "ops/norm_kernels.h"
#include "ops/op_parts.h"

namespace moat::cpu {
namespace {

double sum_of_squares(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum;
}

float inverse_rms(const float* x, int64_t n, float eps) {
  return static_cast<float>(1.0 / std::sqrt(sum_of_squares(x, n) / static_cast<double>(n) + static_cast<double>(eps)));
}

}  // namespace

void rms_norm(Exec& exec, const RmsNormArgs& a) {
  const int64_t width = a.x.dim(1);
  exec.pool().parallel_for(a.x.dim(0), row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = a.x.row(r);
      float* out = a.out.row(r);
      const float scale = inverse_rms(x, width, a.eps);
      for (int64_t i = 0; i < width; ++i) out[i] = x[i] * scale * weight_at(a.weight, i);
    }
  });
}

void gated_rms_norm(Exec& exec, const GatedRmsNormArgs& a) {
  const int64_t dim = a.o.dim(2);
  const float* weight = a.weight.f32();
  exec.pool().parallel_for(a.o.dim(0) * a.o.dim(1), row_grain(dim), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* o = a.o.f32() + r * dim;
      const float* gate = a.gate.f32() + r * dim;
      float* out = a.out.f32() + r * dim;
      const float scale = inverse_rms(o, dim, a.eps);
      for (int64_t i = 0; i < dim; ++i) out[i] = o[i] * scale * weight[i] * sigmoid_f32(gate[i]);
    }
  });
}

void l2_norm(Exec& exec, const L2NormArgs& a) {
  const int64_t dim = a.x.dim(2);
  exec.pool().parallel_for(a.x.dim(0) * a.x.dim(1), row_grain(dim), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = a.x.f32() + r * dim;
      const double norm = std::sqrt(sum_of_squares(x, dim) + static_cast<double>(a.eps));
      const auto scale = static_cast<float>(static_cast<double>(a.scale) / norm);
      for (int64_t i = 0; i < dim; ++i) x[i] *= scale;
    }
  });
}

void attn_res_mix(Exec& exec, const AttnResMixArgs& a) {
  const int64_t hidden = a.prefix.dim(1);
  const int64_t count = a.num_blocks + 1;
  exec.pool().parallel_for(a.prefix.dim(0), row_grain(hidden * count), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* candidates[kMaxResidualCandidates];
      double weights[kMaxResidualCandidates];
      double largest = -INFINITY;
      for (int64_t j = 0; j < count; ++j) {
        const float* v = j < a.num_blocks ? a.blocks.f32() + j * a.blocks.strides[0] + t * hidden : a.prefix.row(t);
        double dot = 0;
        for (int64_t i = 0; i < hidden; ++i)
          dot += static_cast<double>(v[i]) * (weight_at(a.norm, i) * weight_at(a.proj, i));
        candidates[j] = v;
        weights[j] = dot * static_cast<double>(inverse_rms(v, hidden, a.eps));
        largest = std::max(largest, weights[j]);
      }
      double total = 0;
      for (int64_t j = 0; j < count; ++j) total += weights[j] = std::exp(weights[j] - largest);
      float* out = a.out.row(t);
      std::fill(out, out + hidden, 0.0F);
      for (int64_t j = 0; j < count; ++j) {
        const auto p = static_cast<float>(weights[j] / total);
        for (int64_t i = 0; i < hidden; ++i) out[i] += p * candidates[j][i];
      }
    }
  });
}

}  // namespace moat::cpu
