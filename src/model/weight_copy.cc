// SPDX-License-Identifier: Apache-2.0
#include "model/weight_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace moat {
namespace {

// Ranks of one expert-parallel group split each of its experts as tensor-parallel ranks would.
Parallel within_expert_group(const Parallel& p) {
  Parallel group = p;
  group.tp = p.tp / p.ep;
  group.rank = p.rank % p.tp % group.tp;
  return group;
}

// Unaligned reads: offsets in a file need not be multiples of the element size.
template <class T>
T read_at(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

float float_at(const std::byte* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kBF16: return bf16_to_f32(read_at<uint16_t>(data, index));
    case DType::kF16: return f16_to_f32(read_at<uint16_t>(data, index));
    case DType::kF32: return read_at<float>(data, index);
    default: MOAT_CHECK(false, "not a float: {}", dtype_name(dtype));
  }
  return 0.0F;
}

}  // namespace

Result<Region> make_region(const WeightSpec& spec, const SafetensorsEntry& entry, std::span<const std::byte> file,
                           const Parallel& parallel) {
  const Parallel p = spec.expert >= 0 ? within_expert_group(parallel) : parallel;
  MOAT_ASSIGN(const Slice slice, shard_slice(spec.shard, entry.dims, p, spec.live));
  const int64_t element = dtype_bytes(entry.dtype, 1);
  Region region;
  region.base = file.data() + entry.begin;
  if (spec.transform == Transform::kLeadF32) {
    // Any shape: the leading values in storage order; without a shard rule of its own, all that are real.
    region.dims = {slice.end - slice.begin};
  } else {
    region.dims = entry.dims;
    region.dims[slice.dim] = slice.end - slice.begin;
  }
  if (slice.dim == 1) {
    region.rows = entry.dims[0];
    region.row_bytes = (slice.end - slice.begin) * element;
    region.stride_bytes = entry.dims[1] * element;
    region.base += slice.begin * element;
  } else {
    region.rows = slice.end - slice.begin;
    region.row_bytes = region.rows == 0 ? 0 : region.dims.count() / region.rows * element;
    region.stride_bytes = region.row_bytes;
    region.base += slice.begin * region.row_bytes;
  }
  return region;
}

void copy_rows(const Region& region, int64_t begin, int64_t end, std::byte* to) {
  const std::byte* from = region.base + begin * region.stride_bytes;
  if (region.is_contiguous()) {
    std::memcpy(to, from, static_cast<size_t>((end - begin) * region.row_bytes));
    return;
  }
  for (int64_t row = begin; row < end; ++row, from += region.stride_bytes, to += region.row_bytes) {
    std::memcpy(to, from, static_cast<size_t>(region.row_bytes));
  }
}

void convert_rows_to_f32(const Region& region, DType from, int64_t begin, int64_t end, float* to) {
  const int64_t width = region.row_bytes / dtype_bytes(from, 1);
  for (int64_t row = begin; row < end; ++row) {
    const std::byte* data = region.base + row * region.stride_bytes;
    for (int64_t i = 0; i < width; ++i) *to++ = float_at(data, from, i);
  }
}

int64_t find_nan_scale(const Region& region, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const std::byte* data = region.base + row * region.stride_bytes;
    const void* hit = std::memchr(data, 255, static_cast<size_t>(region.row_bytes));
    if (hit != nullptr) return row * region.row_bytes + (static_cast<const std::byte*>(hit) - data);
  }
  return -1;
}

int64_t find_nonzero(const std::byte* data, DType dtype, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (float_at(data, dtype, i) != 0.0F) return i;  // NaN is not zero
  }
  return -1;
}

void touch_rows(const Region& region, int64_t begin, int64_t end) {
  constexpr int64_t kPage = 4096;
  const std::byte* first = region.base + begin * region.stride_bytes;
  const std::byte* last = region.base + (end - 1) * region.stride_bytes + region.row_bytes - 1;
  for (const std::byte* at = first; at < last; at += kPage) (void)*static_cast<const volatile std::byte*>(at);
  if (last >= first) (void)*static_cast<const volatile std::byte*>(last);
}

}  // namespace moat
