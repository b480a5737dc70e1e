// SPDX-License-Identifier: Apache-2.0
// CaseData: the random arguments of one test or benchmark case. Inputs are random (never zero), outputs are poisoned
// with NaN or a byte pattern, and every tensor that a call writes is registered so that two runs can be compared.
#pragma once

#include <any>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "core/tensor.h"

namespace moat {

class CaseData {
 public:
  explicit CaseData(uint64_t seed) : rng_(seed) {}
  CaseData(const CaseData&) = delete;
  CaseData& operator=(const CaseData&) = delete;

  Rng& rng() { return rng_; }

  // Inputs: f32, bf16 or f16.
  Tensor normal(Dims dims, double deviation = 1.0, DType dtype = DType::kF32);
  Tensor uniform(Dims dims, double low, double high, DType dtype = DType::kF32);
  // [rows, cols] of random codes with scale bytes 115..125.
  Tensor mxfp4(int64_t rows, int64_t cols);
  // i32 inputs.
  Tensor ints(std::vector<int32_t> values);
  Tensor random_ints(Dims dims, int64_t limit);  // in [0, limit)
  // Written by the call: poisoned, compared.
  Tensor output(const char* name, Dims dims, DType dtype = DType::kF32);
  // Read and written by the call: compared.
  Tensor in_out(const char* name, Tensor tensor);
  // Host arrays that Args hold spans of.
  template <class T>
  std::span<const T> hold(std::vector<T> values) {
    auto owned = std::make_shared<std::vector<T>>(std::move(values));
    held_.push_back(owned);
    return {owned->data(), owned->size()};
  }

  struct Output {
    std::string name;
    Tensor tensor;
  };
  const std::vector<Output>& outputs() const { return outputs_; }

  std::any args;  // set by AnyOp::prepare

 private:
  Tensor alloc(DType dtype, Dims dims);

  Rng rng_;
  std::vector<Buffer> buffers_;
  std::vector<std::shared_ptr<void>> held_;
  std::vector<Output> outputs_;
};

struct Comparison {
  bool equal = true;         // within tolerance and the same NaN and infinity pattern
  double worst = 0;          // largest error over its allowance (<= 1 passes)
  double relative_norm = 0;  // ||out - ref|| / ||ref||
  std::string message;       // where the worst one is, or what is wrong
};

// Every output of `got` against the same output of `want`.
Comparison compare_outputs(const CaseData& got, const CaseData& want, double absolute, double relative);

}  // namespace moat
