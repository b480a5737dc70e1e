// SPDX-License-Identifier: Apache-2.0
// The bytes of one rank's part of a stored tensor, and what loading does to them: copy, convert to f32, check, touch.
// Pure functions over untrusted but bounded memory; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/tensor.h"
#include "model/parallel.h"
#include "model/safetensors.h"
#include "model/weight_map.h"

namespace moat {

// Rows of equal length at equal distance. A contiguous part has row_bytes == stride_bytes.
struct Region {
  const std::byte* base = nullptr;
  int64_t rows = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;
  Dims dims;  // of this rank's part, as stored (codes: bytes)

  bool is_contiguous() const { return row_bytes == stride_bytes || rows == 1; }
  int64_t bytes() const { return rows * row_bytes; }
};

// This rank's part of `entry`, whose shape is known to agree with `spec`. Fails when the split does not divide.
Result<Region> make_region(const WeightSpec& spec, const SafetensorsEntry& entry, std::span<const std::byte> file,
                           const Parallel& parallel);

// Rows [begin, end) to `to`, which is where row `begin` goes; packed.
void copy_rows(const Region& region, int64_t begin, int64_t end, std::byte* to);
void convert_rows_to_f32(const Region& region, DType from, int64_t begin, int64_t end, float* to);

// Flat index within the part of the first byte 255 of rows [begin, end), or -1. E8M0 spells NaN that way.
int64_t find_nan_scale(const Region& region, int64_t begin, int64_t end);

// Position of the first element in [begin, end) of a float tensor that is not zero, or -1.
int64_t find_nonzero(const std::byte* data, DType dtype, int64_t begin, int64_t end);

// Reads one byte of every page of rows [begin, end).
void touch_rows(const Region& region, int64_t begin, int64_t end);

}  // namespace moat
