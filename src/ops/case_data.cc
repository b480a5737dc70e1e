// SPDX-License-Identifier: Apache-2.0
#include "ops/case_data.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace moat {
namespace {

void store(const Tensor& tensor, int64_t i, double value) {
  if (tensor.dtype == DType::kF32) {
    tensor.f32()[i] = static_cast<float>(value);
  } else {
    MOAT_CHECK(tensor.dtype == DType::kBF16, "case data of type {}", dtype_name(tensor.dtype));
    tensor.ptr<uint16_t>()[i] = f32_to_bf16(static_cast<float>(value));
  }
}

// Any element as double, for comparison.
double load(const Tensor& tensor, int64_t i) {
  switch (tensor.dtype) {
    case DType::kF32: return tensor.f32()[i];
    case DType::kBF16: return bf16_to_f32(tensor.bf16()[i]);
    case DType::kF64: return tensor.ptr<double>()[i];
    case DType::kI32: return tensor.i32()[i];
    case DType::kI64: return static_cast<double>(tensor.ptr<int64_t>()[i]);
    case DType::kU8: return tensor.u8()[i];
    default: MOAT_CHECK(false, "compare {}", tensor.describe());
  }
  return 0;
}

}  // namespace

Tensor CaseData::alloc(DType dtype, Dims dims) {
  buffers_.emplace_back(static_cast<size_t>(std::max<int64_t>(storage_bytes(dtype, dims), 1)));
  return make_tensor(buffers_.back().data(), dtype, dims);
}

Tensor CaseData::normal(Dims dims, double deviation, DType dtype) {
  Tensor tensor = alloc(dtype, dims);
  for (int64_t i = 0; i < tensor.count(); ++i) store(tensor, i, deviation * rng_.normal());
  return tensor;
}

Tensor CaseData::uniform(Dims dims, double low, double high, DType dtype) {
  Tensor tensor = alloc(dtype, dims);
  for (int64_t i = 0; i < tensor.count(); ++i) store(tensor, i, rng_.uniform(low, high));
  return tensor;
}

Tensor CaseData::mxfp4(int64_t rows, int64_t cols) {
  const Tensor codes = alloc(DType::kU8, {rows, cols / 2});
  const Tensor scales = alloc(DType::kU8, {rows, cols / kMxfp4Group});
  for (int64_t i = 0; i < codes.count(); ++i) codes.ptr<uint8_t>()[i] = static_cast<uint8_t>(rng_.below(256));
  for (int64_t i = 0; i < scales.count(); ++i) scales.ptr<uint8_t>()[i] = static_cast<uint8_t>(115 + rng_.below(11));
  return make_mxfp4(codes.u8(), scales.u8(), rows, cols);
}

Tensor CaseData::ints(std::vector<int32_t> values) {
  Tensor tensor = alloc(DType::kI32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), tensor.i32());
  return tensor;
}

Tensor CaseData::random_ints(Dims dims, int64_t limit) {
  Tensor tensor = alloc(DType::kI32, dims);
  for (int64_t i = 0; i < tensor.count(); ++i) tensor.i32()[i] = static_cast<int32_t>(rng_.below(limit));
  return tensor;
}

Tensor CaseData::output(const char* name, Dims dims, DType dtype) {
  Tensor tensor = alloc(dtype, dims);
  std::memset(tensor.data, 0xFF, static_cast<size_t>(storage_bytes(dtype, dims)));  // NaN in f32 and bf16, -1 in i32
  outputs_.push_back({name, tensor});
  return tensor;
}

Tensor CaseData::in_out(const char* name, Tensor tensor) {
  outputs_.push_back({name, tensor});
  return tensor;
}

Comparison compare_outputs(const CaseData& got, const CaseData& want, double absolute, double relative) {
  Comparison result;
  double error_squares = 0;
  double want_squares = 0;
  for (size_t o = 0; o < want.outputs().size(); ++o) {
    const Tensor& g = got.outputs()[o].tensor;
    const Tensor& w = want.outputs()[o].tensor;
    for (int64_t i = 0; i < w.count(); ++i) {
      const double a = load(g, i);
      const double b = load(w, i);
      const bool both_finite = std::isfinite(a) && std::isfinite(b);
      const bool same = a == b || (std::isinf(a) && std::isinf(b) && std::signbit(a) == std::signbit(b));
      if (std::isnan(b) || (!both_finite && !same)) {
        result.equal = false;
        result.worst = std::numeric_limits<double>::infinity();
        result.message = fmt::format("{}[{}] = {}, reference {}", want.outputs()[o].name, i, a, b);
        return result;
      }
      if (same) {
        want_squares += both_finite ? b * b : 0;
        continue;
      }
      const double ratio = std::fabs(a - b) / (absolute + relative * std::fabs(b));
      error_squares += (a - b) * (a - b);
      want_squares += b * b;
      if (ratio > result.worst) {
        result.worst = ratio;
        result.message = fmt::format("{}[{}] = {}, reference {}", want.outputs()[o].name, i, a, b);
      }
    }
  }
  result.equal = result.worst <= 1.0;
  result.relative_norm = want_squares > 0 ? std::sqrt(error_squares / want_squares) : std::sqrt(error_squares);
  return result;
}

}  // namespace moat
