// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>

#include "ops/dot_cpu.h"
#include "ops/draft_kernels.h"
#include "ops/op_parts.h"

namespace moat::cpu {
namespace {

constexpr int64_t kSums = 8;  // partial sums, so that the compiler may use vectors

float sum_of_squares(const float* x, int64_t n) {
  std::array<float, kSums> sums{};
  for (int64_t i = 0; i < n; ++i) sums[static_cast<size_t>(i % kSums)] += x[i] * x[i];
  float sum = 0.0F;
  for (const float s : sums) sum += s;
  return sum;
}

// weight [columns first .. first + n) . x, in f64.
double dot_weight(const float* x, const Tensor& weight, int64_t first, int64_t n) {
  std::array<double, kSums> sums{};
  for (int64_t i = 0; i < n; ++i) {
    sums[static_cast<size_t>(i % kSums)] += static_cast<double>(x[i]) * weight_at(weight, first + i);
  }
  double sum = 0;
  for (const double s : sums) sum += s;
  return sum;
}

// One head: `turns` has cos then sin, each [dim / 2].
void rotate(float* x, const float* turns, int64_t half, RopeLayout layout) {
  const bool pairs = layout == RopeLayout::kPairs;
  const int64_t step = pairs ? 2 : 1, partner = pairs ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + partner];
    x[i * step] = a * turns[i] - b * turns[half + i];
    x[i * step + partner] = b * turns[i] + a * turns[half + i];
  }
}

// Calls body(row) for every cached or own row that row `r` of the blocks sees, in order.
template <class Body>
void for_rows_seen(const BlockAttentionArgs& a, int64_t r, const Body& body) {
  const int64_t s = r / a.gamma;
  for (int64_t p = 0; p < a.context_lens[static_cast<size_t>(s)]; ++p) {
    const int64_t slot = a.slot_of(s, p);
    MOAT_CHECK(slot >= 0 && slot < a.cache.dim(0), "slot {} of {}", slot, a.cache.dim(0));
    body(a.cache.row(slot));
  }
  const int64_t own = a.causal ? r % a.gamma + 1 : a.gamma;
  for (int64_t j = 0; j < own; ++j) body(a.rows.row(s * a.gamma + j));
}

}  // namespace

// cos and sin of every row.
int64_t norm_rope_workspace(const NormRopeArgs& a, const Exec&) {
  return dtype_bytes(DType::kF32, a.x.dim(0) * a.x.dim(2));
}

void norm_rope(Exec& exec, const NormRopeArgs& a) {
  const int64_t rows = a.x.dim(0), heads = a.x.dim(1), dim = a.x.dim(2), half = dim / 2;
  const Tensor turns = exec.arena().alloc(DType::kF32, {rows, dim});
  exec.pool().parallel_for(rows, row_grain(heads * dim), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* turn = turns.row(r);
      const auto position = static_cast<float>(a.positions[static_cast<size_t>(r)]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * a.inv_freq.f32()[i];
        turn[i] = std::cos(angle) * a.magnitude;
        turn[half + i] = std::sin(angle) * a.magnitude;
      }
      for (int64_t h = 0; h < heads; ++h) {
        float* x = a.x.f32() + r * a.x.strides[0] + h * a.x.strides[1];
        if (a.weight.is_set()) {
          const float factor = 1.0F / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + a.eps);
          for (int64_t i = 0; i < dim; ++i) x[i] *= factor * weight_at(a.weight, i);
        }
        rotate(x, turn, half, a.layout);
      }
    }
  });
}

// Scores are computed twice, for their maximum and for the weights, so that none are kept.
void block_attention(Exec& exec, const BlockAttentionArgs& a) {
  const int64_t heads = a.q.dim(1), k_dim = a.q.dim(2), v_dim = a.out.dim(2), group = heads / a.num_kv_heads;
  exec.pool().parallel_for(a.q.dim(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t r = item / heads, kv_head = item % heads / group;
      const float* q = a.q.f32() + item * k_dim;
      const auto score = [&](const float* row) { return a.scale * dot(q, row + kv_head * k_dim, k_dim); };
      float largest = -INFINITY;
      for_rows_seen(a, r, [&](const float* row) { largest = std::max(largest, score(row)); });
      float* out = a.out.f32() + item * v_dim;
      std::fill_n(out, v_dim, 0.0F);
      float sum = 0.0F;
      for_rows_seen(a, r, [&](const float* row) {
        const float weight = std::exp(score(row) - largest);
        const float* value = row + a.value_offset + kv_head * v_dim;
        for (int64_t d = 0; d < v_dim; ++d) out[d] += weight * value[d];
        sum += weight;
      });
      for (int64_t d = 0; d < v_dim; ++d) out[d] /= sum;
    }
  });
}

void markov_gate(Exec& exec, const MarkovGateArgs& a) {
  const int64_t rank = a.x.dim(1);
  exec.pool().parallel_for(a.x.dim(0), row_grain(rank), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < rank; ++i) a.x.row(r)[i] *= sigmoid_f32(a.gate.row(r)[i] + a.bias.f32()[i]);
    }
  });
}

void markov_cell(Exec& exec, const MarkovCellArgs& a) {
  const int64_t rank = a.state.dim(1);
  exec.pool().parallel_for(a.state.dim(0), row_grain(rank), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float *gates = a.gates.row(r), *bias = a.bias.f32();
      float *state = a.state.row(r), *out = a.out.row(r);
      for (int64_t i = 0; i < rank; ++i) {
        const float keep = sigmoid_f32(gates[i] + bias[i]);
        state[i] = keep * state[i] + (1.0F - keep) * std::tanh(gates[rank + i] + bias[rank + i]);
        out[i] = std::tanh(gates[2 * rank + i] + bias[2 * rank + i]);
      }
    }
  });
}

void confidence(Exec& exec, const ConfidenceArgs& a) {
  const int64_t width = a.x.dim(1), rank = a.y.is_set() ? a.y.dim(1) : 0;
  exec.pool().parallel_for(a.x.dim(0), row_grain(width + rank), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double logit = dot_weight(a.x.row(r), a.weight, 0, width) + a.bias.f32()[0];
      if (rank > 0) logit += dot_weight(a.y.row(r), a.weight, width, rank);
      *a.out.row(r) = static_cast<float>(sigmoid_f64(logit));
    }
  });
}

void scatter_probs(Exec& exec, const ScatterProbsArgs& a) {
  exec.pool().parallel_for(a.out.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::fill_n(a.out.row(r), a.out.dim(1), 0.0F);
      for (size_t i = 0; i < a.ids.size(); ++i) a.out.row(r)[a.ids[i]] = a.x.row(r)[i];
    }
  });
}

}  // namespace moat::cpu
