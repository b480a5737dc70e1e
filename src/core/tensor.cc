// SPDX-License-Identifier: Apache-2.0
#include "core/tensor.h"

#include <cmath>
#include <cstdlib>
#include <limits>

namespace moat {

std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kF64: return "f64";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
    case DType::kMxfp4: return "mxfp4";
  }
  return "?";
}

int64_t dtype_bytes(DType dtype, int64_t count) {
  switch (dtype) {
    case DType::kF32:
    case DType::kI32: return 4 * count;
    case DType::kBF16:
    case DType::kF16: return 2 * count;
    case DType::kF64:
    case DType::kI64: return 8 * count;
    case DType::kU8: return count;
    case DType::kMxfp4: return count / 2;
  }
  return 0;
}

std::string_view backend_name(Backend backend) { return backend == Backend::kCpu ? "cpu" : "gpu"; }

Dims::Dims(std::initializer_list<int64_t> dims) : Dims(std::span<const int64_t>(dims.begin(), dims.size())) {}

Dims::Dims(std::span<const int64_t> dims) {
  MOAT_CHECK(dims.size() <= kMaxRank, "rank {}", dims.size());
  for (const int64_t d : dims) dims_[static_cast<size_t>(rank_++)] = d;
}

int64_t Dims::count() const {
  int64_t product = 1;
  for (const int64_t d : span()) product *= d;
  return product;
}

bool Dims::operator==(const Dims& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i) {
    if ((*this)[i] != other[i]) return false;
  }
  return true;
}

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (int i = 0; i < dims.rank(); ++i) text += fmt::format("{}{}", i ? ", " : "", dims[i]);
  return text + "]";
}

namespace {

Dims contiguous_strides(const Dims& dims) {
  Dims strides = dims;
  int64_t step = 1;
  for (int i = dims.rank() - 1; i >= 0; --i) {
    strides[i] = step;
    step *= dims[i];
  }
  return strides;
}

void* advance(const Tensor& tensor, int64_t elements) {
  return tensor.data == nullptr ? nullptr : static_cast<std::byte*>(tensor.data) + dtype_bytes(tensor.dtype, elements);
}

}  // namespace

bool Tensor::is_contiguous() const {
  int64_t step = 1;
  for (int i = dims.rank() - 1; i >= 0; --i) {
    if (dims[i] != 1 && strides[i] != step) return false;
    step *= dims[i];
  }
  return true;
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  MOAT_CHECK(0 <= begin && begin <= end && end <= dims[0], "rows {}..{} of {}", begin, end, describe());
  Tensor view = *this;
  view.data = advance(*this, begin * strides[0]);
  if (scales != nullptr) view.scales = scales + begin * strides[0] / kMxfp4Group;
  view.dims[0] = end - begin;
  return view;
}

Tensor Tensor::cols(int64_t begin, int64_t end) const {
  const int last = dims.rank() - 1;
  MOAT_CHECK(0 <= begin && begin <= end && end <= dims[last] && dtype != DType::kMxfp4, "cols {}..{} of {}", begin, end,
             describe());
  Tensor view = *this;
  view.data = advance(*this, begin);
  view.dims[last] = end - begin;
  return view;
}

Tensor Tensor::at(int64_t i) const {
  const Tensor slice = rows(i, i + 1);
  Tensor view = slice;
  view.dims = Dims(slice.dims.span().subspan(1));
  view.strides = Dims(slice.strides.span().subspan(1));
  return view;
}

Tensor Tensor::reshape(Dims new_dims) const {
  MOAT_CHECK(is_contiguous() && new_dims.count() == count(), "reshape {} to {}", describe(), to_string(new_dims));
  Tensor view = *this;
  view.dims = new_dims;
  view.strides = contiguous_strides(new_dims);
  return view;
}

std::string Tensor::describe() const { return fmt::format("{}{}", dtype_name(dtype), to_string(dims)); }

Tensor make_tensor(void* data, DType dtype, Dims dims, Backend device) {
  Tensor tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.dims = dims;
  tensor.strides = contiguous_strides(dims);
  tensor.device = device;
  return tensor;
}

Tensor make_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols) {
  Tensor tensor = make_tensor(const_cast<uint8_t*>(codes), DType::kMxfp4, {rows, cols});
  tensor.scales = scales;
  return tensor;
}

int64_t storage_bytes(DType dtype, const Dims& dims) {
  const int64_t codes = dtype_bytes(dtype, dims.count());
  return dtype == DType::kMxfp4 ? codes + dims.count() / kMxfp4Group : codes;
}

Buffer::Buffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  data_.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  MOAT_CHECK(data_ != nullptr, "out of memory: {} bytes", bytes);
}

void Buffer::Free::operator()(void* p) const { std::free(p); }

float f16_to_f32(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000U) << 16;
  const uint32_t exponent = value >> 10 & 0x1fU;
  const uint32_t fraction = value & 0x3ffU;
  if (exponent == 0) return (sign ? -1.0F : 1.0F) * std::ldexp(static_cast<float>(fraction), -24);
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000U : (exponent + 112) << 23) | fraction << 13;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

float element_f32(const Tensor& tensor, int64_t row, int64_t col) {
  const int64_t i = (tensor.rank() == 2 ? row * tensor.strides[0] : 0) + col;
  switch (tensor.dtype) {
    case DType::kF32: return tensor.ptr<float>()[i];
    case DType::kBF16: return bf16_to_f32(tensor.bf16()[i]);
    case DType::kF16: return f16_to_f32(tensor.ptr<uint16_t>()[i]);
    case DType::kMxfp4: {
      const uint8_t byte = tensor.u8()[i / 2];
      return kE2m1[i % 2 ? byte >> 4 : byte & 15] * e8m0_to_f32(tensor.scales[i / kMxfp4Group]);
    }
    default: MOAT_CHECK(false, "element_f32 of {}", tensor.describe());
  }
  return std::numeric_limits<float>::quiet_NaN();
}

void mxfp4_encode_group(const float* values, uint8_t* codes, uint8_t* scale) {
  float amax = 0.0F;
  for (int i = 0; i < kMxfp4Group; ++i) amax = std::max(amax, std::fabs(values[i]));
  int exponent = -126;
  if (amax > 0.0F) {
    std::frexp(amax / 6.0F, &exponent);  // amax / 6 = m 2^exponent, m in [0.5, 1)
    while (exponent > -126 && std::ldexp(6.0F, exponent - 1) >= amax) --exponent;
    while (std::ldexp(6.0F, exponent) < amax) ++exponent;
    exponent = std::min(std::max(exponent, -126), 127);
  }
  *scale = static_cast<uint8_t>(exponent + 127);
  uint8_t group[kMxfp4Group];
  for (int i = 0; i < kMxfp4Group; ++i) {
    const float scaled = std::ldexp(values[i], -exponent);
    const float mag = std::fabs(scaled);
    const int code =
        (mag > 0.25F) + (mag >= 0.75F) + (mag > 1.25F) + (mag >= 1.75F) + (mag > 2.5F) + (mag >= 3.5F) + (mag > 5.0F);
    group[i] = static_cast<uint8_t>(code | (std::signbit(scaled) && code > 0 ? 8 : 0));
  }
  for (int i = 0; i < kMxfp4Group / 2; ++i) codes[i] = static_cast<uint8_t>(group[2 * i] | group[2 * i + 1] << 4);
}

}  // namespace moat
