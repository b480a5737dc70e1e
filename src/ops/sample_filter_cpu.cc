// SPDX-License-Identifier: Apache-2.0
// top_k_renorm, top_p_renorm and min_p_renorm without sorting the row: one pass counts values (and sums them) by the
// leading bits of their representation, which order like the values; only the bin that holds the threshold is looked at
// closely. The thresholds are exactly those of the definitions.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "ops/sample_kernels.h"

namespace moat::cpu {
namespace {

// Eight bins an octave of f32: sign 0, exponent and three bits. Negative values (not probabilities) share the bin of
// zero.
constexpr size_t kBins = 1 << 11;

size_t bin_of(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits < 0 ? 0 : static_cast<size_t>(bits >> 20);
}

struct Histogram {
  std::array<int64_t, kBins> count;
  std::array<double, kBins> mass;
};

void fill(Histogram& h, const float* row, int64_t vocab) {
  h.count.fill(0);
  h.mass.fill(0.0);
  for (int64_t i = 0; i < vocab; ++i) {
    const size_t bin = bin_of(row[i]);
    ++h.count[bin];
    h.mass[bin] += row[i];
  }
}

std::vector<float> values_of_bin(const float* row, int64_t vocab, size_t bin, int64_t count) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < vocab; ++i) {
    if (bin_of(row[i]) == bin) values.push_back(row[i]);
  }
  return values;
}

float top_k_threshold(Histogram& h, const float* row, int64_t vocab, int64_t k) {
  fill(h, row, vocab);
  size_t bin = kBins - 1;
  int64_t above = 0;
  while (above + h.count[bin] < k) above += h.count[bin--];
  std::vector<float> values = values_of_bin(row, vocab, bin, h.count[bin]);
  const auto kth = values.begin() + (k - above - 1);
  std::nth_element(values.begin(), kth, values.end(), std::greater<>());
  return *kth;
}

float top_p_threshold_sorted(const float* row, int64_t vocab, float limit) {
  std::vector<float> values(row, row + vocab);
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const float value : values) {
    sum += value;
    if (static_cast<float>(sum) >= limit) return value;
  }
  return values.back();
}

float top_p_threshold(Histogram& h, const float* row, int64_t vocab, float limit) {
  // Sums in another order than ascending differ by far less than this; a sum that close to where rounding to f32
  // reaches the limit is decided by the definition itself.
  constexpr double kDoubt = 1e-9;
  const double boundary = (static_cast<double>(limit) + static_cast<double>(std::nextafter(limit, -1.0F))) / 2.0;
  fill(h, row, vocab);
  double sum = 0;
  for (size_t bin = 0; bin < kBins; ++bin) {
    if (h.count[bin] == 0) continue;
    if (sum + h.mass[bin] < boundary - kDoubt) {
      sum += h.mass[bin];
      continue;
    }
    std::vector<float> values = values_of_bin(row, vocab, bin, h.count[bin]);
    std::sort(values.begin(), values.end());
    for (const float value : values) {
      sum += value;
      if (std::fabs(sum - boundary) <= kDoubt) return top_p_threshold_sorted(row, vocab, limit);
      if (sum > boundary) return value;
    }
  }
  return *std::max_element(row, row + vocab);
}

// Calls filter(row, r, histogram) for every row whose filter is on; rows with a NaN or infinity become zero.
template <class IsOn, class Filter>
void for_each_row(Exec& exec, const Tensor& probs, const IsOn& is_on, const Filter& filter) {
  const int64_t vocab = probs.dim(1);
  exec.pool().parallel_for(probs.dim(0), 1, [&](int64_t begin, int64_t end) {
    const auto histogram = std::make_unique<Histogram>();
    for (int64_t r = begin; r < end; ++r) {
      if (!is_on(static_cast<size_t>(r))) continue;
      float* row = probs.row(r);
      if (has_nonfinite(row, vocab)) {
        std::fill(row, row + vocab, 0.0F);
      } else {
        keep_and_renormalise(row, vocab, filter(row, static_cast<size_t>(r), *histogram));
      }
    }
  });
}

}  // namespace

void top_k_renorm(Exec& exec, const TopKRenormArgs& a) {
  const int64_t vocab = a.probs.dim(1);
  for_each_row(
      exec, a.probs, [&](size_t r) { return std::max<int64_t>(a.k[r], 1) < vocab; },
      [&](const float* row, size_t r, Histogram& h) {
        return top_k_threshold(h, row, vocab, std::max<int64_t>(a.k[r], 1));
      });
}

void top_p_renorm(Exec& exec, const TopPRenormArgs& a) {
  const int64_t vocab = a.probs.dim(1);
  for_each_row(
      exec, a.probs, [&](size_t r) { return !(a.p[r] >= 1.0F); },
      [&](const float* row, size_t r, Histogram& h) {
        return a.p[r] > 0.0F ? top_p_threshold(h, row, vocab, top_p_limit(a.p[r]))
                             : *std::max_element(row, row + vocab);
      });
}

void min_p_renorm(Exec& exec, const MinPRenormArgs& a) {
  const int64_t vocab = a.probs.dim(1);
  for_each_row(
      exec, a.probs, [&](size_t r) { return a.min_p[r] > 0.0F; },
      [&](const float* row, size_t r, Histogram&) { return a.min_p[r] * *std::max_element(row, row + vocab); });
}

}  // namespace moat::cpu
