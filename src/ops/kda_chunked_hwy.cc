// SPDX-License-Identifier: Apache-2.0
// The chunked delta rule with Highway; the formulas are in kda_chunked_cpu.cc. dim is a multiple of 16, so rows of the
// scratch are whole vectors. Products run in register tiles of rows x vectors, each element summed over its index in
// order.
//
// Scratch, as KdaChunkScratch but for: q_tile and k_tile are [tile][dim][16], transposed within each tile of 16 rows,
// and a and p are transposed too, [m][i], so that the scores of 16 rows with one earlier row are one vector product.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kda_chunked_hwy.cc"
#include <hwy/foreach_target.h>
// foreach_target.h first.
#include <algorithm>
#include <cstring>

#include "ops/kda_kernels.h"
#include "ops/op_parts.h"
#include "ops/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// Rows and vectors of a register tile.
constexpr int kTileRows = HWY_TARGET <= HWY_AVX3 ? 4 : 2;
constexpr int kTileVectors = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

// The rows of one chunk of one head in the call's tensors.
struct ChunkRows {
  const float* q;
  const float* k;
  const float* v;
  const float* g;
  float* out;
  int64_t stride;  // between rows
  int64_t rows;
  int64_t dim;
};

HWY_INLINE V decay_product(V a, V b) { return zero_below(hn::Mul(a, b), kTinyDecay); }

HWY_INLINE void fill_ones(float* to, int64_t dim) {
  for (int64_t c = 0; c < dim; c += lanes()) hn::Store(hn::Set(D(), 1.0F), D(), to + c);
}

void scale_rows(const KdaChunkScratch& s, const ChunkRows& c) {
  const D d;
  const int64_t n = lanes();
  const int64_t dim = c.dim;
  HWY_ALIGN float transposed[2][kMaxLanes];
  fill_ones(s.end_decay, dim);
  // Rows that the last tile lacks must be zero, not what an earlier chunk left.
  const int64_t last_tile = (c.rows - 1) / kKdaTile * kKdaTile;
  std::memset(s.q_tile + last_tile * dim, 0, static_cast<size_t>(kKdaTile * dim) * sizeof(float));
  std::memset(s.k_tile + last_tile * dim, 0, static_cast<size_t>(kKdaTile * dim) * sizeof(float));
  for (int64_t i = 0; i < c.rows; ++i) {
    if (i % kKdaTile == 0) fill_ones(s.running, dim);
    float* q_tile = s.q_tile + i / kKdaTile * kKdaTile * dim + i % kKdaTile;
    float* k_tile = s.k_tile + i / kKdaTile * kKdaTile * dim + i % kKdaTile;
    for (int64_t e = 0; e < dim; e += n) {
      const V alpha = zero_below(exp_f32(hn::LoadU(d, c.g + i * c.stride + e)), kTinyDecay);
      const V q = hn::LoadU(d, c.q + i * c.stride + e);
      const V k = hn::LoadU(d, c.k + i * c.stride + e);
      const V in_tile = decay_product(hn::Load(d, s.running + e), alpha);
      const V in_chunk = decay_product(hn::Load(d, s.end_decay + e), alpha);
      hn::Store(alpha, d, s.alpha + i * dim + e);
      hn::Store(in_tile, d, s.running + e);
      hn::Store(in_chunk, d, s.end_decay + e);
      hn::Store(hn::Mul(q, in_chunk), d, s.q_chunk + i * dim + e);
      hn::Store(hn::Mul(k, in_chunk), d, s.k_chunk + i * dim + e);
      hn::Store(hn::Mul(q, in_tile), d, transposed[0]);
      hn::Store(hn::Mul(k, in_tile), d, transposed[1]);
      for (int64_t lane = 0; lane < n; ++lane) {
        q_tile[(e + lane) * kKdaTile] = transposed[0][lane];
        k_tile[(e + lane) * kKdaTile] = transposed[1][lane];
      }
    }
  }
  fill_ones(s.running, dim);
  for (int64_t i = c.rows - 1; i >= 0; --i) {
    for (int64_t e = 0; e < dim; e += n) {
      const V running = hn::Load(d, s.running + e);
      hn::Store(hn::Mul(hn::LoadU(d, c.k + i * c.stride + e), running), d, s.k_end + i * dim + e);
      hn::Store(decay_product(running, hn::Load(d, s.alpha + i * dim + e)), d, s.running + e);
    }
  }
}

// Scores of the 16 rows of the tile at `start` with kRows earlier rows m .. , whose keys decayed to the start of the
// tile are `earlier` [kRows, dim].
template <int kRows>
HWY_INLINE void score_earlier(const KdaChunkScratch& s, int64_t start, int64_t m, const float* earlier, int64_t dim) {
  const D d;
  const int64_t n = lanes();
  for (int64_t lane = 0; lane < kKdaTile; lane += n) {
    const float* k_tile = s.k_tile + start * dim + lane;
    const float* q_tile = s.q_tile + start * dim + lane;
    V a[kRows];
    V p[kRows];
    for (int r = 0; r < kRows; ++r) a[r] = p[r] = hn::Zero(d);
    for (int64_t e = 0; e < dim; ++e) {
      const V k = hn::Load(d, k_tile + e * kKdaTile);
      const V q = hn::Load(d, q_tile + e * kKdaTile);
      for (int r = 0; r < kRows; ++r) {
        const V key = hn::Set(d, earlier[r * dim + e]);
        a[r] = hn::MulAdd(k, key, a[r]);
        p[r] = hn::MulAdd(q, key, p[r]);
      }
    }
    const V beta = hn::Load(d, s.beta + start + lane);
    for (int r = 0; r < kRows; ++r) {
      hn::Store(hn::Mul(beta, a[r]), d, s.a + (m + r) * kKdaChunk + start + lane);
      hn::Store(p[r], d, s.p + (m + r) * kKdaChunk + start + lane);
    }
  }
}

// Scores within the tile [start, end): decays are multiplied up row by row.
void score_tile(const KdaChunkScratch& s, const ChunkRows& c, int64_t start, int64_t end) {
  const D d;
  const int64_t n = lanes();
  for (int64_t m = start; m < end; ++m) {
    fill_ones(s.running, c.dim);
    for (int64_t i = m; i < end; ++i) {
      V a = hn::Zero(d);
      V p = hn::Zero(d);
      for (int64_t e = 0; e < c.dim; e += n) {
        V decay = hn::Load(d, s.running + e);
        if (i > m) {
          decay = decay_product(decay, hn::Load(d, s.alpha + i * c.dim + e));
          hn::Store(decay, d, s.running + e);
        }
        const V key = hn::Mul(hn::LoadU(d, c.k + m * c.stride + e), decay);
        a = hn::MulAdd(hn::LoadU(d, c.k + i * c.stride + e), key, a);
        p = hn::MulAdd(hn::LoadU(d, c.q + i * c.stride + e), key, p);
      }
      s.a[m * kKdaChunk + i] = s.beta[i] * sum_of_lanes(a);  // unused at i == m
      s.p[m * kKdaChunk + i] = sum_of_lanes(p);
    }
  }
}

// s.u holds the decayed keys of earlier rows until U is computed.
void score_rows(const KdaChunkScratch& s, const ChunkRows& c) {
  const D d;
  const int64_t n = lanes();
  for (int64_t start = 0; start < c.rows; start += kKdaTile) {
    fill_ones(s.running, c.dim);
    for (int64_t m = start - 1; m >= 0; --m) {
      for (int64_t e = 0; e < c.dim; e += n) {
        const V running = hn::Load(d, s.running + e);
        hn::Store(hn::Mul(hn::LoadU(d, c.k + m * c.stride + e), running), d, s.u + m * c.dim + e);
        hn::Store(decay_product(running, hn::Load(d, s.alpha + m * c.dim + e)), d, s.running + e);
      }
    }
    for (int64_t m = 0; m < start; m += 4)
      score_earlier<4>(s, start, m, s.u + m * c.dim, c.dim);  // start is whole tiles
    score_tile(s, c, start, std::min(c.rows, start + kKdaTile));
  }
}

// U and out of kRows rows from i, kVectors vectors of the value dimension from j. Rows before i are in s.u.
template <int kRows, int kVectors>
HWY_INLINE void solve_rows(const KdaChunkScratch& s, const ChunkRows& c, const float* state, int64_t i, int64_t j) {
  const D d;
  const int64_t n = lanes();
  const int64_t dim = c.dim;
  V u[kRows][kVectors];
  V o[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int w = 0; w < kVectors; ++w) u[r][w] = o[r][w] = hn::Zero(d);
  }
  for (int64_t e = 0; e < dim; ++e) {
    V in[kVectors];
    for (int w = 0; w < kVectors; ++w) in[w] = hn::LoadU(d, state + e * dim + j + w * n);
    for (int r = 0; r < kRows; ++r) {
      const V k = hn::Set(d, s.k_chunk[(i + r) * dim + e]);
      const V q = hn::Set(d, s.q_chunk[(i + r) * dim + e]);
      for (int w = 0; w < kVectors; ++w) {
        u[r][w] = hn::MulAdd(k, in[w], u[r][w]);
        o[r][w] = hn::MulAdd(q, in[w], o[r][w]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const V beta = hn::Set(d, s.beta[i + r]);
    for (int w = 0; w < kVectors; ++w) {
      u[r][w] = hn::Mul(beta, hn::Sub(hn::LoadU(d, c.v + (i + r) * c.stride + j + w * n), u[r][w]));
    }
  }
  for (int64_t m = 0; m < i; ++m) {
    V in[kVectors];
    for (int w = 0; w < kVectors; ++w) in[w] = hn::Load(d, s.u + m * dim + j + w * n);
    for (int r = 0; r < kRows; ++r) {
      const V a = hn::Set(d, s.a[m * kKdaChunk + i + r]);
      const V p = hn::Set(d, s.p[m * kKdaChunk + i + r]);
      for (int w = 0; w < kVectors; ++w) {
        u[r][w] = hn::NegMulAdd(a, in[w], u[r][w]);
        o[r][w] = hn::MulAdd(p, in[w], o[r][w]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int m = 0; m < r; ++m) {
      const V a = hn::Set(d, s.a[(i + m) * kKdaChunk + i + r]);
      for (int w = 0; w < kVectors; ++w) u[r][w] = hn::NegMulAdd(a, u[m][w], u[r][w]);
    }
    for (int m = 0; m <= r; ++m) {
      const V p = hn::Set(d, s.p[(i + m) * kKdaChunk + i + r]);
      for (int w = 0; w < kVectors; ++w) o[r][w] = hn::MulAdd(p, u[m][w], o[r][w]);
    }
    for (int w = 0; w < kVectors; ++w) {
      hn::Store(u[r][w], d, s.u + (i + r) * dim + j + w * n);
      hn::StoreU(o[r][w], d, c.out + (i + r) * c.stride + j + w * n);
    }
  }
}

// S' of kTileRows key channels from e, kVectors vectors of the value dimension from j.
template <int kVectors>
HWY_INLINE void update_state(const KdaChunkScratch& s, const ChunkRows& c, float* state, int64_t e, int64_t j) {
  const D d;
  const int64_t n = lanes();
  const int64_t dim = c.dim;
  V sum[kTileRows][kVectors];
  for (int r = 0; r < kTileRows; ++r) {
    const V decay = hn::Set(d, s.end_decay[e + r]);
    for (int w = 0; w < kVectors; ++w) sum[r][w] = hn::Mul(decay, hn::LoadU(d, state + (e + r) * dim + j + w * n));
  }
  for (int64_t m = 0; m < c.rows; ++m) {
    V in[kVectors];
    for (int w = 0; w < kVectors; ++w) in[w] = hn::Load(d, s.u + m * dim + j + w * n);
    for (int r = 0; r < kTileRows; ++r) {
      const V k = hn::Set(d, s.k_end[m * dim + e + r]);
      for (int w = 0; w < kVectors; ++w) sum[r][w] = hn::MulAdd(k, in[w], sum[r][w]);
    }
  }
  for (int r = 0; r < kTileRows; ++r) {
    for (int w = 0; w < kVectors; ++w) hn::StoreU(sum[r][w], d, state + (e + r) * dim + j + w * n);
  }
}

template <int kVectors>
HWY_INLINE void finish_columns(const KdaChunkScratch& s, const ChunkRows& c, float* state, int64_t j) {
  // Twice as many accumulators as in update_state: half the vectors at a time.
  constexpr int kHalf = kVectors > 1 ? kVectors / 2 : 1;
  for (int64_t part = 0; part < kVectors; part += kHalf) {
    int64_t i = 0;
    for (; i + kTileRows <= c.rows; i += kTileRows) solve_rows<kTileRows, kHalf>(s, c, state, i, j + part * lanes());
    for (; i < c.rows; ++i) solve_rows<1, kHalf>(s, c, state, i, j + part * lanes());
  }
  for (int64_t e = 0; e < c.dim; e += kTileRows) update_state<kVectors>(s, c, state, e, j);
}

// Rows [row, row + rows) of the call, all in one chunk, for one head.
void Chunk(const KdaArgs& a, const KdaChunkScratch& s, float* state, int64_t row, int64_t head, int64_t rows) {
  const int64_t n = lanes();
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  const int64_t at = (row * heads + head) * dim;
  const ChunkRows c{a.q.f32() + at,   a.k.f32() + at, a.v.f32() + at, a.g.f32() + at,
                    a.out.f32() + at, heads * dim,    rows,           dim};
  for (int64_t i = 0; i < kKdaChunk; ++i) {
    s.beta[i] = i < rows ? sigmoid_f32(a.beta_logits.f32()[(row + i) * heads + head]) : 0.0F;
  }
  scale_rows(s, c);
  score_rows(s, c);
  int64_t j = 0;
  for (; j + kTileVectors * n <= dim; j += kTileVectors * n) finish_columns<kTileVectors>(s, c, state, j);
  for (; j < dim; j += n) finish_columns<1>(s, c, state, j);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(Chunk);

namespace simd {

void kda_chunked(Exec& exec, const KdaArgs& a) {
  const int64_t dim = a.q.dim(2);
  for_each_chunked_head(exec, a, [&](const StateSequence& seq, int64_t head, const KdaChunkScratch& scratch) {
    float* state = a.states.f32() + seq.slot * a.states.strides[0] + head * dim * dim;
    if (seq.first == 0) std::fill(state, state + dim * dim, 0.0F);
    for (int64_t row = seq.begin; row < seq.end;) {
      const int64_t position = seq.first + row - seq.begin;
      const int64_t rows = std::min(seq.end - row, kKdaChunk - position % kKdaChunk);
      HWY_DYNAMIC_DISPATCH(Chunk)(a, scratch, state, row, head, rows);
      row += rows;
    }
  });
}

}  // namespace simd
}  // namespace moat
#endif
