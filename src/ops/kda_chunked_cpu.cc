// SPDX-License-Identifier: Apache-2.0
// The chunked delta rule, portable. For a chunk of C rows with incoming state S, decay factors alpha_i = exp(g_i) and
// D(m, i) = alpha_{m+1} ... alpha_i per channel:
//   A_im = beta_i k_i^T D(m, i) k_m (m < i),  P_im = q_i^T D(m, i) k_m (m <= i)
//   (I + A) U = diag(beta) (V - (k_i D(0, i)) S)   by forward substitution
//   out = (q_i D(0, i)) S + P U,  S' = D(0, C) S + (k_m D(m, C))^T U
// D is only ever a product of factors <= 1, split at the start of the query tile, so no decay overflows it.
#include "ops/kda_kernels.h"
#include "ops/op_parts.h"

namespace moat::cpu {
namespace {

float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Decay factors, and q and k scaled from the starts of tile and chunk and (k) to the end of the chunk. q, k, g have row
// stride `stride`.
void scale_rows(const KdaChunkScratch& s, const float* q, const float* k, const float* g, int64_t stride, int64_t rows,
                int64_t dim) {
  std::fill(s.end_decay, s.end_decay + dim, 1.0F);
  for (int64_t i = 0; i < rows; ++i) {
    if (i % kKdaTile == 0) std::fill(s.running, s.running + dim, 1.0F);
    for (int64_t d = 0; d < dim; ++d) {
      const float alpha = flush_tiny(std::exp(g[i * stride + d]));
      s.alpha[i * dim + d] = alpha;
      s.running[d] = flush_tiny(s.running[d] * alpha);
      s.end_decay[d] = flush_tiny(s.end_decay[d] * alpha);
      s.q_tile[i * dim + d] = q[i * stride + d] * s.running[d];
      s.k_tile[i * dim + d] = k[i * stride + d] * s.running[d];
      s.q_chunk[i * dim + d] = q[i * stride + d] * s.end_decay[d];
      s.k_chunk[i * dim + d] = k[i * stride + d] * s.end_decay[d];
    }
  }
  std::fill(s.running, s.running + dim, 1.0F);
  for (int64_t i = rows - 1; i >= 0; --i) {
    for (int64_t d = 0; d < dim; ++d) {
      s.k_end[i * dim + d] = k[i * stride + d] * s.running[d];
      s.running[d] = flush_tiny(s.running[d] * s.alpha[i * dim + d]);
    }
  }
}

// A and P. s.u serves as a row of scratch before U exists.
void score_rows(const KdaChunkScratch& s, const float* q, const float* k, int64_t stride, int64_t rows, int64_t dim) {
  float* scaled = s.u;
  for (int64_t start = 0; start < rows; start += kKdaTile) {
    const int64_t end = std::min(rows, start + kKdaTile);
    std::fill(s.running, s.running + dim, 1.0F);
    for (int64_t m = start - 1; m >= 0; --m) {
      for (int64_t d = 0; d < dim; ++d) {
        scaled[d] = k[m * stride + d] * s.running[d];
        s.running[d] = flush_tiny(s.running[d] * s.alpha[m * dim + d]);
      }
      for (int64_t i = start; i < end; ++i) {
        s.a[i * kKdaChunk + m] = s.beta[i] * dot(s.k_tile + i * dim, scaled, dim);
        s.p[i * kKdaChunk + m] = dot(s.q_tile + i * dim, scaled, dim);
      }
    }
    for (int64_t m = start; m < end; ++m) {
      std::fill(s.running, s.running + dim, 1.0F);
      s.p[m * kKdaChunk + m] = dot(q + m * stride, k + m * stride, dim);
      for (int64_t i = m + 1; i < end; ++i) {
        for (int64_t d = 0; d < dim; ++d) {
          s.running[d] = flush_tiny(s.running[d] * s.alpha[i * dim + d]);
          scaled[d] = k[m * stride + d] * s.running[d];
        }
        s.a[i * kKdaChunk + m] = s.beta[i] * dot(k + i * stride, scaled, dim);
        s.p[i * kKdaChunk + m] = dot(q + i * stride, scaled, dim);
      }
    }
  }
}

void chunk(const KdaArgs& a, const KdaChunkScratch& s, float* state, int64_t row, int64_t head, int64_t rows) {
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  const int64_t stride = heads * dim;
  const int64_t at = row * stride + head * dim;
  const float* k = a.k.f32() + at;
  const float* q = a.q.f32() + at;
  for (int64_t i = 0; i < rows; ++i) s.beta[i] = sigmoid_f32(a.beta_logits.f32()[(row + i) * heads + head]);
  scale_rows(s, q, k, a.g.f32() + at, stride, rows, dim);
  score_rows(s, q, k, stride, rows, dim);
  for (int64_t i = 0; i < rows; ++i) {
    const float* v = a.v.f32() + at + i * stride;
    float* u = s.u + i * dim;
    float* out = a.out.f32() + at + i * stride;
    std::fill(u, u + dim, 0.0F);
    std::fill(out, out + dim, 0.0F);
    for (int64_t d = 0; d < dim; ++d) {
      const float kd = s.k_chunk[i * dim + d];
      const float qd = s.q_chunk[i * dim + d];
      const float* in = state + d * dim;
      for (int64_t j = 0; j < dim; ++j) {
        u[j] += kd * in[j];
        out[j] += qd * in[j];
      }
    }
    for (int64_t j = 0; j < dim; ++j) u[j] = s.beta[i] * (v[j] - u[j]);
    for (int64_t m = 0; m < i; ++m) {
      const float am = s.a[i * kKdaChunk + m];
      for (int64_t j = 0; j < dim; ++j) u[j] -= am * s.u[m * dim + j];
    }
    for (int64_t m = 0; m <= i; ++m) {
      const float pm = s.p[i * kKdaChunk + m];
      for (int64_t j = 0; j < dim; ++j) out[j] += pm * s.u[m * dim + j];
    }
  }
  for (int64_t d = 0; d < dim; ++d) {
    float* to = state + d * dim;
    for (int64_t j = 0; j < dim; ++j) to[j] *= s.end_decay[d];
    for (int64_t m = 0; m < rows; ++m) {
      const float km = s.k_end[m * dim + d];
      for (int64_t j = 0; j < dim; ++j) to[j] += km * s.u[m * dim + j];
    }
  }
}

}  // namespace

void kda_chunked(Exec& exec, const KdaArgs& a) {
  const int64_t dim = a.q.dim(2);
  for_each_chunked_head(exec, a, [&](const StateSequence& seq, int64_t head, const KdaChunkScratch& scratch) {
    float* state = a.states.f32() + seq.slot * a.states.strides[0] + head * dim * dim;
    if (seq.first == 0) std::fill(state, state + dim * dim, 0.0F);
    for (int64_t row = seq.begin; row < seq.end;) {
      const int64_t position = seq.first + row - seq.begin;
      const int64_t rows = std::min(seq.end - row, kKdaChunk - position % kKdaChunk);
      chunk(a, scratch, state, row, head, rows);
      row += rows;
    }
  });
}

}  // namespace moat::cpu
