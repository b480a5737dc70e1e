// SPDX-License-Identifier: Apache-2.0
// Portable kernels of pointwise.h. Threads split by rows.
#include <cstring>

#include "ops/op_parts.h"
#include "ops/pointwise_kernels.h"

namespace moat::cpu {

void embed(Exec& exec, const EmbedArgs& a) {
  const int64_t hidden = a.table.dim(1);
  for (const int32_t id : a.ids) MOAT_CHECK(id >= 0 && id < a.table.dim(0), "embed: id {} of {}", id, a.table.dim(0));
  exec.pool().parallel_for(a.out.dim(0), row_grain(hidden), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = a.ids[static_cast<size_t>(t)] * a.table.strides[0];
      float* out = a.out.row(t);
      if (a.table.dtype == DType::kF32) {
        std::memcpy(out, a.table.f32() + row, static_cast<size_t>(hidden) * sizeof(float));
      } else {
        const uint16_t* in = a.table.bf16() + row;
        for (int64_t i = 0; i < hidden; ++i) out[i] = bf16_to_f32(in[i]);
      }
    }
  });
}

void add(Exec& exec, const AddArgs& a) {
  const int64_t width = a.x.dim(1);
  exec.pool().parallel_for(a.x.dim(0), row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = a.x.row(r);
      const float* y = a.y.row(r);
      for (int64_t i = 0; i < width; ++i) x[i] += y[i];
    }
  });
}

void gated_act(Exec& exec, const GatedActArgs& a) {
  const int64_t width = a.gate.dim(1);
  const float beta = a.situ_beta;
  const float linear_beta = beta > 0.0F ? a.linear_beta : 0.0F;
  exec.pool().parallel_for(a.gate.dim(0), row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* gate = a.gate.row(r);
      const float* up = a.up.row(r);
      float* out = a.out.row(r);
      for (int64_t i = 0; i < width; ++i) {
        const float left = beta > 0.0F ? beta * std::tanh(gate[i] / beta) : gate[i];
        const float right = linear_beta > 0.0F ? linear_beta * std::tanh(up[i] / linear_beta) : up[i];
        out[i] = left * sigmoid_f32(gate[i]) * right;
      }
    }
  });
}

void sigmoid_gate(Exec& exec, const SigmoidGateArgs& a) {
  const int64_t width = a.x.dim(1);
  exec.pool().parallel_for(a.x.dim(0), row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = a.x.row(r);
      const float* gate = a.gate.row(r);
      for (int64_t i = 0; i < width; ++i) x[i] *= sigmoid_f32(gate[i]);
    }
  });
}

}  // namespace moat::cpu
