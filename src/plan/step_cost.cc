// SPDX-License-Identifier: Apache-2.0
#include "plan/step_cost.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace moat {

namespace {

// Where a number of rows lies in rows_seconds: time is linear between the points, and goes on beyond the last.
struct Between {
  size_t low = 0, high = 0;
  double share = 0;  // of high; 1 - share of low
};

Between between(const std::vector<std::pair<int64_t, double>>& points, int64_t rows) {
  if (points.size() == 1) return {};
  size_t i = 1;
  while (i + 1 < points.size() && points[i].first < rows) ++i;
  const auto low = static_cast<double>(points[i - 1].first);
  const auto high = static_cast<double>(points[i].first);
  return {i - 1, i, (static_cast<double>(rows) - low) / (high - low)};
}

}  // namespace

double StepCost::seconds(int64_t rows, double decode_pairs, double prefill_pairs) const {
  if (!known() || rows == 0) return 0;
  const Between at = between(rows_seconds, rows);
  return (1 - at.share) * rows_seconds[at.low].second + at.share * rows_seconds[at.high].second +
         seconds_per_decode_pair * decode_pairs + seconds_per_prefill_pair * prefill_pairs;
}

StepCostTracker::StepCostTracker(StepCost declared)
    : declared_(std::move(declared)), current_(declared_), factors_(declared_.rows_seconds.size(), 0.0) {}

void StepCostTracker::observe(int64_t rows, double decode_pairs, double prefill_pairs, double seconds) {
  if (factors_.empty()) return;
  const Between at = between(declared_.rows_seconds, rows);
  struct Part {
    double declared = 0;  // seconds
    double* factor = nullptr;
  };
  const Part parts[] = {{(1 - at.share) * declared_.rows_seconds[at.low].second, &factors_[at.low]},
                        {at.share * declared_.rows_seconds[at.high].second, &factors_[at.high]},
                        {declared_.seconds_per_decode_pair * decode_pairs, &decode_factor_},
                        {declared_.seconds_per_prefill_pair * prefill_pairs, &prefill_factor_}};
  double declared = 0;
  for (const Part& p : parts) declared += p.declared;
  if (!(declared > 0) || !(seconds > 0)) return;
  double expected = 0;
  double squares = 0;
  for (const Part& p : parts) {
    if (!(p.declared > 0)) continue;
    if (*p.factor == 0) *p.factor = seconds / declared;
    const double part = *p.factor * p.declared;
    expected += part;
    squares += part * part;
  }
  constexpr double kWeight = 0.2;  // of the newest step
  constexpr double kMost = 0.5;    // of what was expected: a step that something else held up says little,
  constexpr double kHeldUp = 0.8;  // but one that took less than half says that those before it were held up
  const double weight = seconds < kMost * expected ? kHeldUp : kWeight;
  const double error = std::min(seconds - expected, kMost * expected);
  for (const Part& p : parts) {
    if (p.declared > 0) *p.factor *= 1 + weight * error * (*p.factor * p.declared) / squares;
  }
  rebuild();
}

double StepCostTracker::factor_near(size_t point) const {
  for (size_t distance = 0; distance < factors_.size(); ++distance) {
    if (point >= distance && factors_[point - distance] > 0) return factors_[point - distance];
    if (point + distance < factors_.size() && factors_[point + distance] > 0) return factors_[point + distance];
  }
  return 1.0;
}

void StepCostTracker::rebuild() {
  double last = 0;
  for (size_t i = 0; i < factors_.size(); ++i) {
    const double value = declared_.rows_seconds[i].second * factor_near(i);
    last = std::max(last, value);  // more rows never look cheaper
    current_.rows_seconds[i].second = last;
  }
  const auto factor_or = [&](double factor, size_t point) { return factor > 0 ? factor : factor_near(point); };
  current_.seconds_per_decode_pair = declared_.seconds_per_decode_pair * factor_or(decode_factor_, 0);
  current_.seconds_per_prefill_pair =
      declared_.seconds_per_prefill_pair * factor_or(prefill_factor_, factors_.size() - 1);
}

}  // namespace moat
