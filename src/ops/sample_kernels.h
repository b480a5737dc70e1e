// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of sample.h (sample_cpu.cc, sample_filter_cpu.cc), and what they share with the references.
#pragma once

#include <cmath>
#include <limits>

#include "ops/sample.h"

namespace moat {

// The limit of top-p as a number that rounded sums are compared with: float(1.0 - p), p clamped to [0, 1].
inline float top_p_limit(float p) {
  return static_cast<float>(1.0 - static_cast<double>(std::fmin(std::fmax(p, 0.0F), 1.0F)));
}

// Keeps values >= threshold and divides them by their sum (f64, in index order). Nothing left: a zero row.
inline void keep_and_renormalise(float* row, int64_t vocab, float threshold) {
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (row[i] >= threshold) sum += row[i];
  }
  for (int64_t i = 0; i < vocab; ++i) {
    row[i] = row[i] >= threshold && sum > 0 ? static_cast<float>(row[i] / sum) : 0.0F;
  }
}

// A row with a NaN or an infinity.
inline bool has_nonfinite(const float* row, int64_t vocab) {
  bool bad = false;
  for (int64_t i = 0; i < vocab; ++i) bad |= !(std::fabs(row[i]) <= std::numeric_limits<float>::max());
  return bad;
}

namespace cpu {
void softmax(Exec& exec, const SoftmaxArgs& a);
void top_k_renorm(Exec& exec, const TopKRenormArgs& a);
void top_p_renorm(Exec& exec, const TopPRenormArgs& a);
void min_p_renorm(Exec& exec, const MinPRenormArgs& a);
void draw(Exec& exec, const DrawArgs& a);
void argmax(Exec& exec, const ArgmaxArgs& a);
void logprobs(Exec& exec, const LogprobsArgs& a);
}  // namespace cpu

}  // namespace moat
