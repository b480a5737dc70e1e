// SPDX-License-Identifier: Apache-2.0
// Portable kernels of kda.h but the chunked form. Threads split by rows, or by sequence and head or channel block.
#include <cstring>

#include "ops/kda_kernels.h"
#include "ops/op_parts.h"

namespace moat::cpu {

void short_conv(Exec& exec, const ShortConvArgs& a) {
  constexpr int64_t kBlock = 256;  // channels a task
  const int64_t channels = a.x.dim(1);
  const int64_t width = a.weight.dim(2);
  const int64_t blocks = (channels + kBlock - 1) / kBlock;
  exec.pool().parallel_for(a.seqs.num_seqs() * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const StateSequence seq = state_sequence(a.seqs, task / blocks);
      if (seq.begin == seq.end) continue;
      const int64_t c0 = task % blocks * kBlock;
      const int64_t c1 = std::min(channels, c0 + kBlock);
      float* tail = a.tails.f32() + seq.slot * a.tails.strides[0];
      if (seq.first == 0) {
        for (int64_t j = 0; j < width - 1; ++j) std::fill(tail + j * channels + c0, tail + j * channels + c1, 0.0F);
      }
      // Input `i` of the sequence, counted from its first row; negative: from the tail.
      const auto input = [&](int64_t i) -> const float* {
        return i >= 0 ? a.x.row(seq.begin + i) : tail + (width - 1 + i) * channels;
      };
      for (int64_t t = 0; t < seq.end - seq.begin; ++t) {
        float sums[kBlock] = {};
        for (int64_t j = 0; j < width; ++j) {
          const float* in = input(t - width + 1 + j);
          for (int64_t c = c0; c < c1; ++c) sums[c - c0] += a.weight.f32()[c * width + j] * in[c];
        }
        float* out = a.out.row(seq.begin + t);
        for (int64_t c = c0; c < c1; ++c) out[c] = sums[c - c0] * sigmoid_f32(sums[c - c0]);
      }
      // Oldest first: entry j is never read again once it is written, since the inputs move forward.
      const int64_t rows = seq.end - seq.begin;
      for (int64_t j = 0; j < width - 1; ++j) {
        std::memcpy(tail + j * channels + c0, input(rows - width + 1 + j) + c0,
                    static_cast<size_t>(c1 - c0) * sizeof(float));
      }
    }
  });
}

void kda_gate(Exec& exec, const KdaGateArgs& a) {
  const int64_t heads = a.raw.dim(1);
  const int64_t dim = a.raw.dim(2);
  exec.pool().parallel_for(a.raw.dim(0), row_grain(heads * dim * 4), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        const float rate = std::exp(a.a_log.f32()[h]);
        const float* bias = a.dt_bias.f32() + h * dim;
        const float* raw = a.raw.f32() + (r * heads + h) * dim;
        float* out = a.out.f32() + (r * heads + h) * dim;
        for (int64_t d = 0; d < dim; ++d) {
          const float z = raw[d] + bias[d];
          out[d] = a.lower_bound < 0.0F ? a.lower_bound * sigmoid_f32(rate * z)
                                        : -rate * (std::max(z, 0.0F) + std::log1p(std::exp(-std::fabs(z))));
        }
      }
    }
  });
}

namespace {

// One head of one sequence. `u` holds dim floats.
void recurrent_head(const KdaArgs& a, const StateSequence& seq, int64_t head, float* u) {
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  float* state = a.states.f32() + seq.slot * a.states.strides[0] + head * dim * dim;
  if (seq.first == 0) std::fill(state, state + dim * dim, 0.0F);
  for (int64_t t = seq.begin; t < seq.end; ++t) {
    const int64_t at = (t * heads + head) * dim;
    const float* q = a.q.f32() + at;
    const float* k = a.k.f32() + at;
    const float* v = a.v.f32() + at;
    const float* g = a.g.f32() + at;
    float* out = a.out.f32() + at;
    const float beta = sigmoid_f32(a.beta_logits.f32()[t * heads + head]);
    std::fill(u, u + dim, 0.0F);
    for (int64_t d = 0; d < dim; ++d) {
      const float decay = flush_tiny(std::exp(g[d]));
      float* s = state + d * dim;
      for (int64_t j = 0; j < dim; ++j) {
        s[j] *= decay;
        u[j] += s[j] * k[d];
      }
    }
    for (int64_t j = 0; j < dim; ++j) u[j] = beta * (v[j] - u[j]);
    std::fill(out, out + dim, 0.0F);
    for (int64_t d = 0; d < dim; ++d) {
      float* s = state + d * dim;
      for (int64_t j = 0; j < dim; ++j) {
        s[j] += k[d] * u[j];
        out[j] += s[j] * q[d];
      }
    }
  }
}

}  // namespace

void kda_recurrent(Exec& exec, const KdaArgs& a) {
  const int64_t heads = a.q.dim(1);
  exec.pool().parallel_for(a.seqs.num_seqs() * heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> u(static_cast<size_t>(a.q.dim(2)));
    for (int64_t task = begin; task < end; ++task) {
      recurrent_head(a, state_sequence(a.seqs, task / heads), task % heads, u.data());
    }
  });
}

}  // namespace moat::cpu
