// SPDX-License-Identifier: Apache-2.0
// Register tiles of the vectorised kernels, compiled once per instruction set.
//
// dot_tile: out[r][c] = x[r] . w[c]. Element i of a product goes to lane i % L of one vector, in order of i, and the
// lanes meet in one tree: whatever the tile, the bits of an output depend on its two operands alone. A tail shorter
// than a vector is padded with zeros. mix_rows: out[r] = factor[r] out[r] + sum over j in order of p[r][j] rows[j].
//
// No include guard in the usual sense: the file is read once per instruction set.
#if defined(MOAT_OPS_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOAT_OPS_TILES_INL_H_
#undef MOAT_OPS_TILES_INL_H_
#else
#define MOAT_OPS_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using F32Vec = hn::Vec<F32>;
constexpr int64_t kLanes = HWY_LANES(float);

// With 32 vector registers a tile keeps 16 sums, with 16 registers 8.
#if HWY_TARGET <= HWY_AVX3
constexpr int kTileCols = 4;
#else
constexpr int kTileCols = 2;
#endif
constexpr int kTileRows = 4;
constexpr int kRowCols = 8;  // outputs of a tile of one row

// --- loads: f32 or bf16 (uint16_t), a whole vector or its first `count` lanes, zeros behind ---

HWY_INLINE F32Vec load(const float* p) { return hn::LoadU(F32(), p); }
HWY_INLINE F32Vec load(const uint16_t* p) {
  const hn::Rebind<uint16_t, F32> half;
  const hn::Rebind<uint32_t, F32> bits;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(bits, hn::LoadU(half, p))));
}
template <class W>
HWY_INLINE F32Vec load_first(const W* p, int64_t count) {
  W padded[kLanes] = {};
  std::memcpy(padded, p, sizeof(W) * static_cast<size_t>(count));
  return load(padded);
}
HWY_INLINE void store_first(F32Vec v, float* p, int64_t count) {
  float padded[kLanes];
  hn::StoreU(v, F32(), padded);
  std::memcpy(p, padded, sizeof(float) * static_cast<size_t>(count));
}
HWY_INLINE float sum_of_lanes(F32Vec v) { return hn::GetLane(hn::SumOfLanes(F32(), v)); }

// --- dot products ---

// sums[r][c] += x[r] . w[c] over k elements from x[r] + x_offset and w[c].
template <int R, int C, class W>
HWY_INLINE void add_products(const float* const* x, int64_t x_offset, const W* const* w, int64_t k,
                             F32Vec (&sums)[R][C]) {
  const float* xs[R];
  const W* ws[C];
  for (int r = 0; r < R; ++r) xs[r] = x[r] + x_offset;
  for (int c = 0; c < C; ++c) ws[c] = w[c];
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    F32Vec xv[R];
    for (int r = 0; r < R; ++r) xv[r] = load(xs[r] + i);
    for (int c = 0; c < C; ++c) {
      const F32Vec wv = load(ws[c] + i);
      for (int r = 0; r < R; ++r) sums[r][c] = hn::MulAdd(xv[r], wv, sums[r][c]);
    }
  }
  if (i == k) return;
  for (int c = 0; c < C; ++c) {
    const F32Vec wv = load_first(ws[c] + i, k - i);
    for (int r = 0; r < R; ++r) sums[r][c] = hn::MulAdd(load_first(xs[r] + i, k - i), wv, sums[r][c]);
  }
}

template <int R, int C, class W>
void dot_tile(const float* const* x, const W* const* w, int64_t k, float* const* out, int64_t column) {
  F32Vec sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) sums[r][c] = hn::Zero(F32());
  }
  add_products<R, C, W>(x, 0, w, k, sums);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) out[r][column + c] = sum_of_lanes(sums[r][c]);
  }
}

// All rows against C weight rows.
template <int C, class W>
void dot_rows(const float* const* x, int64_t rows, const W* const* w, int64_t k, float* const* out, int64_t column) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) dot_tile<kTileRows, C, W>(x + r, w, k, out + r, column);
  for (; r + 2 <= rows; r += 2) dot_tile<2, C, W>(x + r, w, k, out + r, column);
  if (r < rows) dot_tile<1, C, W>(x + r, w, k, out + r, column);
}

// out[r][column + c] = x[r] . w[c] for all rows and columns.
template <class W>
void dot_block(const float* const* x, int64_t rows, const W* const* w, int64_t columns, int64_t k, float* const* out,
               int64_t column) {
  int64_t c = 0;
  if (rows == 1) {
    for (; c + kRowCols <= columns; c += kRowCols) dot_tile<1, kRowCols, W>(x, w + c, k, out, column + c);
  }
  for (; c + kTileCols <= columns; c += kTileCols) dot_rows<kTileCols, W>(x, rows, w + c, k, out, column + c);
  for (; c < columns; ++c) dot_rows<1, W>(x, rows, w + c, k, out, column + c);
}

// --- weighted sums of rows ---

// What out[r] is multiplied with before the sum; null: out is not read and starts from zero.
template <int R, int C, class W>
HWY_INLINE void mix_tile(const float* const* p, const float* factor, const W* const* rows, int64_t count,
                         int64_t column, float* const* out) {
  F32Vec sums[R][C];
  for (int r = 0; r < R; ++r) {
    const F32Vec f = hn::Set(F32(), factor == nullptr ? 0.0F : factor[r]);
    for (int c = 0; c < C; ++c) {
      sums[r][c] = factor == nullptr ? hn::Zero(F32()) : hn::Mul(f, load(out[r] + column + c * kLanes));
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    F32Vec v[C];
    for (int c = 0; c < C; ++c) v[c] = load(rows[j] + column + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const F32Vec weight = hn::Set(F32(), p[r][j]);
      for (int c = 0; c < C; ++c) sums[r][c] = hn::MulAdd(weight, v[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) hn::StoreU(sums[r][c], F32(), out[r] + column + c * kLanes);
  }
}

// The columns past the last whole vector, of one row.
template <class W>
HWY_INLINE void mix_tail(const float* p, const float* factor, const W* const* rows, int64_t count, int64_t column,
                         int64_t columns, float* out) {
  F32Vec sum =
      factor == nullptr ? hn::Zero(F32()) : hn::Mul(hn::Set(F32(), *factor), load_first(out + column, columns));
  for (int64_t j = 0; j < count; ++j) {
    sum = hn::MulAdd(hn::Set(F32(), p[j]), load_first(rows[j] + column, columns), sum);
  }
  store_first(sum, out + column, columns);
}

template <int R, class W>
void mix_some(const float* const* p, const float* factor, const W* const* rows, int64_t count, int64_t width,
              float* const* out) {
  int64_t column = 0;
  for (; column + kTileCols * kLanes <= width; column += kTileCols * kLanes) {
    mix_tile<R, kTileCols, W>(p, factor, rows, count, column, out);
  }
  for (; column + kLanes <= width; column += kLanes) mix_tile<R, 1, W>(p, factor, rows, count, column, out);
  if (column == width) return;
  for (int r = 0; r < R; ++r) {
    mix_tail<W>(p[r], factor == nullptr ? nullptr : factor + r, rows, count, column, width - column, out[r]);
  }
}

// p[r] [count], rows[j] [width], out[r] [width].
template <class W>
void mix_rows(const float* const* p, const float* factor, int64_t num, const W* const* rows, int64_t count,
              int64_t width, float* const* out) {
  int64_t r = 0;
  for (; r + kTileRows <= num; r += kTileRows) {
    mix_some<kTileRows, W>(p + r, factor == nullptr ? nullptr : factor + r, rows, count, width, out + r);
  }
  for (; r < num; ++r) mix_some<1, W>(p + r, factor == nullptr ? nullptr : factor + r, rows, count, width, out + r);
}

}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#endif  // MOAT_OPS_TILES_INL_H_
