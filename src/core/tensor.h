// SPDX-License-Identifier: Apache-2.0
// Tensor is a view (pointer, dtype, dims, strides, device); Buffer owns memory. A Tensor with a null pointer but real
// dims is valid in dry passes, which compute shapes and costs only. Copying a Tensor copies the view.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moat {

enum class DType : uint8_t {
  kF32,
  kBF16,
  kF16,
  kF64,
  kI32,
  kI64,
  kU8,
  kMxfp4,  // E2M1 codes, two a byte (even index = low nibble), and one E8M0 scale byte per 32 elements of a row
};

constexpr int64_t kMxfp4Group = 32;

std::string_view dtype_name(DType dtype);
// Bytes of `count` consecutive elements of a row (kMxfp4: codes only; count must be even).
int64_t dtype_bytes(DType dtype, int64_t count);

enum class Backend : uint8_t { kCpu, kGpu };
std::string_view backend_name(Backend backend);

class Dims {
 public:
  static constexpr int kMaxRank = 5;
  Dims() = default;
  Dims(std::initializer_list<int64_t> dims);  // NOLINT: {2, 3} reads as dims
  explicit Dims(std::span<const int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t& operator[](int i) { return dims_[static_cast<size_t>(i)]; }
  int64_t count() const;  // product; 1 for rank 0
  std::span<const int64_t> span() const { return {dims_.data(), static_cast<size_t>(rank_)}; }
  bool operator==(const Dims& other) const;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

std::string to_string(const Dims& dims);  // "[2, 3]"

struct Tensor {
  void* data = nullptr;
  const uint8_t* scales = nullptr;  // kMxfp4 only: [..., rows, cols / 32], contiguous
  Dims dims;                        // logical elements
  Dims strides;                     // in elements; the last is 1
  DType dtype = DType::kF32;
  Backend device = Backend::kCpu;

  int rank() const { return dims.rank(); }
  int64_t dim(int i) const { return dims[i < 0 ? dims.rank() + i : i]; }
  int64_t count() const { return dims.count(); }
  bool is_contiguous() const;
  bool is_set() const { return dims.rank() > 0; }  // a default Tensor stands for "absent"

  template <class T>
  T* ptr() const {
    return static_cast<T*>(data);
  }
  float* f32() const { return static_cast<float*>(data); }
  const uint16_t* bf16() const { return static_cast<const uint16_t*>(data); }
  const uint8_t* u8() const { return static_cast<const uint8_t*>(data); }
  int32_t* i32() const { return static_cast<int32_t*>(data); }

  // Row r of a rank-2 tensor, f32.
  float* row(int64_t r) const { return f32() + r * strides[0]; }

  // View of [begin, end) along the first dimension.
  Tensor rows(int64_t begin, int64_t end) const;
  // View of [begin, end) along the last dimension; not for kMxfp4.
  Tensor cols(int64_t begin, int64_t end) const;
  // The i-th slice along the first dimension, one rank less.
  Tensor at(int64_t i) const;
  // The same elements under other dims; *this must be contiguous.
  Tensor reshape(Dims new_dims) const;

  std::string describe() const;  // "f32[2, 3]"
};

// A contiguous view.
Tensor make_tensor(void* data, DType dtype, Dims dims, Backend device = Backend::kCpu);
Tensor make_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t rows, int64_t cols);

// Bytes of all elements of a contiguous tensor of these dims, scales included.
int64_t storage_bytes(DType dtype, const Dims& dims);

// Owner of host memory, 64-byte aligned, uninitialised.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  void* data() const { return data_.get(); }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(data_.get()), size_}; }

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t size_ = 0;
};

// --- scalar formats ---

inline float bf16_to_f32(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Round to nearest even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<uint16_t>(bits >> 16 | 0x40U);
  return static_cast<uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

float f16_to_f32(uint16_t value);

// E2M1 magnitudes, sign in bit 3 (index 8 is -0).
constexpr std::array<float, 16> kE2m1 = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                         -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};

// 2^(byte - 127); byte 0 is the subnormal 2^-127, byte 255 is NaN (OCP MX 1.0).
inline float e8m0_to_f32(uint8_t byte) {
  const uint32_t bits = byte == 0 ? 0x00400000U : byte == 255 ? 0x7fc00000U : static_cast<uint32_t>(byte) << 23;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Element (row, col) of a floating-point or MXFP4 tensor of rank 1 or 2, as f32: for references and tests.
float element_f32(const Tensor& tensor, int64_t row, int64_t col);

// Encodes 32 values: the smallest power-of-two scale with amax / scale <= 6, nearest magnitude, ties to the even code,
// zero is code 0. Writes 16 code bytes and the scale byte.
void mxfp4_encode_group(const float* values, uint8_t* codes, uint8_t* scale);

}  // namespace moat
