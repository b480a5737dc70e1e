// SPDX-License-Identifier: Apache-2.0
// Portable kernels of kda.h but the chunked form. Threads split by rows, or by sequence and head or channel block.
#include <cstring>

#include "ops/kda_verify_kernels.h"
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
      static constexpr float kZeros[kBlock] = {};
      // Channels from c0 of input `i` of the sequence, counted from its first row; negative: from the tail.
      const auto input = [&](int64_t i) -> const float* {
        if (i >= 0) return a.x.row(seq.begin + i) + c0;
        return seq.first == 0 ? kZeros : tail + (width - 1 + i) * channels + c0;
      };
      for (int64_t t = 0; t < seq.end - seq.begin; ++t) {
        float sums[kBlock] = {};
        for (int64_t j = 0; j < width; ++j) {
          const float* in = input(t - width + 1 + j);
          for (int64_t c = c0; c < c1; ++c) sums[c - c0] += a.weight.f32()[c * width + j] * in[c - c0];
        }
        float* out = a.out.row(seq.begin + t);
        for (int64_t c = c0; c < c1; ++c) out[c] = sums[c - c0] * sigmoid_f32(sums[c - c0]);
      }
      const int64_t rows = seq.end - seq.begin;
      const auto bytes = static_cast<size_t>(c1 - c0) * sizeof(float);
      if (a.record.is_set()) {
        for (int64_t t = 0; t < rows; ++t) std::memcpy(a.record.row(seq.begin + t) + c0, input(t), bytes);
        continue;
      }
      // Oldest first: entry j is never read again once it is written, since the inputs move forward.
      for (int64_t j = 0; j < width - 1; ++j) {
        std::memcpy(tail + j * channels + c0, input(rows - width + 1 + j), bytes);
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

// S = diag(exp(g)) S; u = beta (v - S^T k); S += k u^T, for one token and head. `u` holds dim floats.
void update_state(float* state, int64_t dim, const float* k, const float* v, const float* g, float beta_logit,
                  float* u) {
  std::fill(u, u + dim, 0.0F);
  for (int64_t d = 0; d < dim; ++d) {
    const float decay = flush_tiny(std::exp(g[d]));
    float* s = state + d * dim;
    for (int64_t j = 0; j < dim; ++j) {
      s[j] *= decay;
      u[j] += s[j] * k[d];
    }
  }
  const float beta = sigmoid_f32(beta_logit);
  for (int64_t j = 0; j < dim; ++j) u[j] = beta * (v[j] - u[j]);
  for (int64_t d = 0; d < dim; ++d) {
    float* s = state + d * dim;
    for (int64_t j = 0; j < dim; ++j) s[j] += k[d] * u[j];
  }
}

// The rows of one head of one sequence, from the state at `state`, which advances. `u` holds dim floats.
void recurrent_head(const KdaArgs& a, const StateSequence& seq, int64_t head, float* state, float* u) {
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  for (int64_t t = seq.begin; t < seq.end; ++t) {
    const int64_t at = (t * heads + head) * dim;
    const float* q = a.q.f32() + at;
    float* out = a.out.f32() + at;
    update_state(state, dim, a.k.f32() + at, a.v.f32() + at, a.g.f32() + at, a.beta_logits.f32()[t * heads + head], u);
    std::fill(out, out + dim, 0.0F);
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t j = 0; j < dim; ++j) out[j] += state[d * dim + j] * q[d];
    }
  }
}

}  // namespace

void kda_recurrent(Exec& exec, const KdaArgs& a) {
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  exec.pool().parallel_for(a.seqs.num_seqs() * heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> u(static_cast<size_t>(dim));
    for (int64_t task = begin; task < end; ++task) {
      const StateSequence seq = state_sequence(a.seqs, task / heads);
      float* state = state_of(a.states, seq.slot, task % heads);
      if (seq.first == 0) std::fill(state, state + dim * dim, 0.0F);
      recurrent_head(a, seq, task % heads, state, u.data());
    }
  });
}

void kda_verify(Exec& exec, const KdaVerifyArgs& v) {
  const KdaArgs& a = v.rows;
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  for_each_scratch_state(exec, a.seqs.num_seqs() * heads, dim, [&](int64_t task, float* state) {
    const StateSequence seq = state_sequence(a.seqs, task / heads);
    if (seq.begin == seq.end) return;
    std::vector<float> u(static_cast<size_t>(dim));
    load_state(a.states, seq, task % heads, state);
    recurrent_head(a, seq, task % heads, state, u.data());
    record_rows(v, seq, task % heads);
  });
}

void kda_commit(Exec& exec, const KdaCommitArgs& a) {
  const int64_t heads = a.states.dim(2);
  const int64_t dim = a.states.dim(3);
  const int64_t per_layer = a.ranges.num_seqs() * heads;
  exec.pool().parallel_for(a.states.dim(0) * per_layer, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> u(static_cast<size_t>(dim));
    for (int64_t task = begin; task < end; ++task) {
      const CommitTask t = commit_task(a, task / per_layer, task % per_layer / heads, task % heads);
      for (int64_t row = t.begin; row < t.end; ++row) {
        const KdaRecord r = record_at(a.records.at(task / per_layer), row, task % heads);
        update_state(t.state, dim, r.k, r.v, r.g, *r.beta_logit, u.data());
      }
    }
  });
}

void conv_commit(Exec& exec, const ConvCommitArgs& a) {
  const int64_t kept = a.tails.dim(3);  // W - 1
  const int64_t channels = a.tails.dim(4);
  const int64_t seqs = a.ranges.num_seqs();
  exec.pool().parallel_for(a.tails.dim(0) * seqs * 3, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const auto s = static_cast<size_t>(task / 3 % seqs);
      const int64_t which = task % 3;
      const Tensor tail = a.tails.at(task / 3 / seqs).at(a.ranges.slots[s]).at(which);  // [W - 1, channels]
      const Tensor record = a.records.at(task / 3 / seqs);                              // [rows, 3, channels]
      const int64_t rows = a.ranges.ends[s] - a.ranges.begins[s];
      // Oldest first: entry j is never read again once it is written.
      for (int64_t j = 0; j < kept; ++j) {
        const int64_t input = rows - kept + j;  // counted from the first committed row; negative: from the tail
        const float* from = input < 0 ? tail.row(kept + input) : record.at(a.ranges.begins[s] + input).row(which);
        if (from != tail.row(j)) std::memcpy(tail.row(j), from, static_cast<size_t>(channels) * sizeof(float));
      }
    }
  });
}

}  // namespace moat::cpu
