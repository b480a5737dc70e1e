// SPDX-License-Identifier: Apache-2.0
// Products with a few weight rows ("panel") of f32, bf16 or MXFP4: straight from the weights when there are few
// activations, else through a copy of the panel decoded to f32 that stays in the first-level cache while all
// activations pass. Sums wait in memory as whole vectors between the pieces of k, so both ways give the same bits.
// Compiled once per instruction set.
#if defined(MOAT_OPS_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOAT_OPS_PANEL_INL_H_
#undef MOAT_OPS_PANEL_INL_H_
#else
#define MOAT_OPS_PANEL_INL_H_
#endif

#include <algorithm>
#include <array>
#include <bit>

#include "core/tensor.h"
#include "ops/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

constexpr int64_t kPanelCols = 32;      // weight rows that a thread takes at once
constexpr int64_t kPanelRows = 64;      // activation rows that pass them
constexpr int64_t kFewRows = 32;        // up to here dense weights are converted in registers
constexpr int64_t kFewMxfp4Rows = 4;    // up to here MXFP4 is decoded in long pieces of few weight rows
constexpr int64_t kPanelFloats = 8192;  // of the decoded copy: 32 KiB

// --- decoding to f32, elements begin .. end of weight row n ---

// Factors of all scale bytes, so that one load spreads a factor over a vector.
constexpr std::array<float, 256> make_scales() {
  std::array<float, 256> scales{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    scales[byte] = std::bit_cast<float>(byte == 0 ? 0x00400000U : byte == 255 ? 0x7fc00000U : byte << 23);
  }
  return scales;
}
inline constexpr std::array<float, 256> kScales = make_scales();

// 32 elements, exact.
#if HWY_TARGET <= HWY_AVX3
// Byte i / 2 goes to lane i, its high nibble is shifted down in odd lanes, and the nibble picks from a vector of magnitudes.
HWY_INLINE void decode_group(const uint8_t* codes, uint8_t scale, float* HWY_RESTRICT out) {
  const F32 d;
  const hn::Repartition<uint8_t, F32> u8;
  const hn::Rebind<uint32_t, F32> u32;
  const hn::Rebind<int32_t, F32> i32;
  alignas(64) static constexpr uint32_t kLow[16] = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
  alignas(64) static constexpr uint32_t kHigh[16] = {8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
  alignas(64) static constexpr uint32_t kShifts[16] = {0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4};
  const auto bytes = hn::LoadDup128(u8, codes);
  const auto table = hn::LoadU(d, kE2m1.data());
  const auto shifts = hn::Load(u32, kShifts);
  const auto mask = hn::Set(u32, 15);
  const F32Vec factor = hn::Set(d, kScales[scale]);
  for (int half = 0; half < 2; ++half) {
    // The upper bytes of an index also fetch something; the mask drops it.
    const auto spread = hn::TableLookupBytes(bytes, hn::BitCast(u8, hn::Load(u32, half == 0 ? kLow : kHigh)));
    const auto nibbles = hn::And(hn::Shr(hn::BitCast(u32, spread), shifts), mask);
    const auto values = hn::TableLookupLanes(table, hn::IndicesFromVec(d, hn::BitCast(i32, nibbles)));
    hn::StoreU(hn::Mul(values, factor), d, out + half * kLanes);
  }
}
#elif HWY_TARGET == HWY_SCALAR
HWY_INLINE void decode_group(const uint8_t* codes, uint8_t scale, float* HWY_RESTRICT out) {
  for (int64_t i = 0; i < kMxfp4Group; ++i)
    out[i] = kScales[scale] * kE2m1[i % 2 ? codes[i / 2] >> 4 : codes[i / 2] & 15];
}
#else
// Twice a magnitude fits a byte, so codes are looked up as bytes; the factor is half the scale.
HWY_INLINE void decode_group(const uint8_t* codes, uint8_t scale, float* HWY_RESTRICT out) {
  const hn::Full128<uint8_t> d8;
  const hn::Full128<int8_t> i8;
  const hn::Rebind<int8_t, F32> quarter;
  const hn::Rebind<int32_t, F32> i32;
  alignas(16) static constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const auto table = hn::Load(i8, kTwice);
  const auto bytes = hn::LoadU(d8, codes);
  const auto low = hn::And(bytes, hn::Set(d8, 0x0F));
  const auto high = hn::ShiftRight<4>(bytes);
  alignas(32) int8_t values[kMxfp4Group];
  hn::Store(hn::TableLookupBytes(table, hn::BitCast(i8, hn::InterleaveLower(d8, low, high))), i8, values);
  hn::Store(hn::TableLookupBytes(table, hn::BitCast(i8, hn::InterleaveUpper(d8, low, high))), i8, values + 16);
  const F32Vec factor = hn::Set(F32(), 0.5F * kScales[scale]);
  for (int64_t i = 0; i < kMxfp4Group; i += kLanes) {
    const auto integers = hn::PromoteTo(i32, hn::LoadU(quarter, values + i));
    hn::StoreU(hn::Mul(hn::ConvertTo(F32(), integers), factor), F32(), out + i);
  }
}
#endif

template <class W>
HWY_INLINE void decode_dense(const W* row, int64_t count, float* HWY_RESTRICT out) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(load(row + i), F32(), out + i);
  if (i < count) store_first(load_first(row + i, count - i), out + i, count - i);
}

inline void decode_row(const Tensor& weight, int64_t n, int64_t begin, int64_t end, float* out) {
  const int64_t k = weight.dim(1);
  if (weight.dtype == DType::kMxfp4) {
    const uint8_t* codes = weight.u8() + n * (k / 2);
    const uint8_t* scales = weight.scales + n * (k / kMxfp4Group);
    for (int64_t i = begin; i < end; i += kMxfp4Group) {
      decode_group(codes + i / 2, scales[i / kMxfp4Group], out + (i - begin));
    }
  } else if (weight.dtype == DType::kBF16) {
    decode_dense(weight.bf16() + n * k + begin, end - begin, out);
  } else {
    decode_dense(static_cast<const float*>(weight.f32()) + n * k + begin, end - begin, out);
  }
}

// --- through a decoded copy ---

// Sums of a tile, `sums[r * stride + c * kLanes]`: continued from memory, or from zero at the first piece of k.
template <int R, int C>
void continue_tile(const float* const* x, int64_t x_offset, const float* const* w, int64_t k, float* memory,
                   int64_t stride) {
  F32Vec sums[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      sums[r][c] = x_offset == 0 ? hn::Zero(F32()) : hn::Load(F32(), memory + r * stride + c * kLanes);
    }
  }
  add_products<R, C, float>(x, x_offset, w, k, sums);
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) hn::Store(sums[r][c], F32(), memory + r * stride + c * kLanes);
  }
}

template <int C>
void continue_rows(const float* const* x, int64_t rows, int64_t x_offset, const float* const* w, int64_t k,
                   float* memory, int64_t stride) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) {
    continue_tile<kTileRows, C>(x + r, x_offset, w, k, memory + r * stride, stride);
  }
  for (; r + 2 <= rows; r += 2) continue_tile<2, C>(x + r, x_offset, w, k, memory + r * stride, stride);
  if (r < rows) continue_tile<1, C>(x + r, x_offset, w, k, memory + r * stride, stride);
}

// Weight rows first .. first + columns <= kMaxCols; rows <= kMaxRows. kMaxCols * the piece of k is kPanelFloats.
template <int64_t kMaxRows, int64_t kMaxCols>
void multiply_decoded(const float* const* x, int64_t rows, const Tensor& weight, int64_t first, int64_t columns,
                      float* const* out) {
  constexpr int64_t kPiece = kPanelFloats / kMaxCols;
  constexpr int64_t kStride = kMaxCols * kLanes;
  HWY_ALIGN float panel[kPanelFloats];
  HWY_ALIGN float sums[kMaxRows * kStride];
  const float* w[kMaxCols];
  for (int64_t c = 0; c < kMaxCols; ++c) w[c] = panel + c * kPiece;
  const int64_t k = weight.dim(1);
  for (int64_t begin = 0; begin < k; begin += kPiece) {
    const int64_t count = std::min(kPiece, k - begin);
    for (int64_t c = 0; c < columns; ++c) decode_row(weight, first + c, begin, begin + count, panel + c * kPiece);
    int64_t c = 0;
    if (rows == 1) {
      for (; c + kRowCols <= columns; c += kRowCols) {
        continue_tile<1, kRowCols>(x, begin, w + c, count, sums + c * kLanes, kStride);
      }
    }
    for (; c + kTileCols <= columns; c += kTileCols) {
      continue_rows<kTileCols>(x, rows, begin, w + c, count, sums + c * kLanes, kStride);
    }
    for (; c < columns; ++c) continue_rows<1>(x, rows, begin, w + c, count, sums + c * kLanes, kStride);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      out[r][first + c] = sum_of_lanes(hn::Load(F32(), sums + r * kStride + c * kLanes));
    }
  }
}

// --- out[r][n] = x[r] . weight[n] for n in first .. first + columns <= kPanelCols, rows <= kPanelRows ---

template <class W>
void multiply_dense(const float* const* x, int64_t rows, const W* weight, int64_t k, int64_t first, int64_t columns,
                    float* const* out) {
  const W* w[kPanelCols];
  for (int64_t c = 0; c < columns; ++c) w[c] = weight + (first + c) * k;
  dot_block<W>(x, rows, w, columns, k, out, first);
}

inline void multiply_panel(const float* const* x, int64_t rows, const Tensor& weight, int64_t first, int64_t columns,
                           float* const* out) {
  if (rows == 0) return;
  if (rows > (weight.dtype == DType::kMxfp4 ? kFewMxfp4Rows : kFewRows)) {
    multiply_decoded<kPanelRows, kPanelCols>(x, rows, weight, first, columns, out);
  } else if (weight.dtype == DType::kBF16) {
    multiply_dense(x, rows, weight.bf16(), weight.dim(1), first, columns, out);
  } else if (weight.dtype == DType::kF32) {
    multiply_dense(x, rows, static_cast<const float*>(weight.f32()), weight.dim(1), first, columns, out);
  } else {
    // Longer pieces are what memory delivers better.
    constexpr int64_t kCols = 8;
    for (int64_t c = 0; c < columns; c += kCols) {
      multiply_decoded<kFewMxfp4Rows, kCols>(x, rows, weight, first + c, std::min(kCols, columns - c), out);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#endif  // MOAT_OPS_PANEL_INL_H_
