// SPDX-License-Identifier: Apache-2.0
#include "plan/step_cost.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace moat {

double StepCost::seconds(int64_t rows, double decode_pairs, double prefill_pairs) const {
  if (!known() || rows == 0) return 0;
  double time = rows_seconds.front().second;
  if (rows_seconds.size() > 1) {
    size_t i = 1;
    while (i + 1 < rows_seconds.size() && rows_seconds[i].first < rows) ++i;
    const auto& [low, low_seconds] = rows_seconds[i - 1];
    const auto& [high, high_seconds] = rows_seconds[i];
    time =
        low_seconds + (high_seconds - low_seconds) * static_cast<double>(rows - low) / static_cast<double>(high - low);
  }
  return time + seconds_per_decode_pair * decode_pairs + seconds_per_prefill_pair * prefill_pairs;
}

StepCostTracker::StepCostTracker(StepCost declared)
    : declared_(std::move(declared)), current_(declared_), factors_(declared_.rows_seconds.size(), 0.0) {}

void StepCostTracker::observe(int64_t rows, double decode_pairs, double prefill_pairs, double seconds) {
  const double expected = declared_.seconds(rows, decode_pairs, prefill_pairs);
  if (factors_.empty() || !(expected > 0) || !(seconds > 0)) return;
  constexpr double kWeight = 0.2;  // of the newest step
  const auto& points = declared_.rows_seconds;
  size_t nearest = 0;
  for (size_t i = 1; i < points.size(); ++i) {
    if (std::abs(points[i].first - rows) < std::abs(points[nearest].first - rows)) nearest = i;
  }
  double& factor = factors_[nearest];
  const double seen = seconds / expected;
  factor = factor == 0 ? seen : factor + kWeight * (seen - factor);
  rebuild();
}

void StepCostTracker::rebuild() {
  const auto factor_near = [&](size_t point) {
    for (size_t distance = 0; distance < factors_.size(); ++distance) {
      if (point >= distance && factors_[point - distance] > 0) return factors_[point - distance];
      if (point + distance < factors_.size() && factors_[point + distance] > 0) return factors_[point + distance];
    }
    return 1.0;
  };
  double last = 0;
  for (size_t i = 0; i < factors_.size(); ++i) {
    const double value = declared_.rows_seconds[i].second * factor_near(i);
    last = std::max(last, value);  // more rows never look cheaper
    current_.rows_seconds[i].second = last;
  }
  current_.seconds_per_decode_pair = declared_.seconds_per_decode_pair * factor_near(0);
  current_.seconds_per_prefill_pair = declared_.seconds_per_prefill_pair * factor_near(factors_.size() - 1);
}

}  // namespace moat
