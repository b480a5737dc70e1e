// SPDX-License-Identifier: Apache-2.0
#include "plan/step_cost.h"

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

StepCost StepCost::scaled(double factor) const {
  StepCost cost = *this;
  for (auto& [rows, seconds] : cost.rows_seconds) seconds *= factor;
  cost.seconds_per_decode_pair *= factor;
  cost.seconds_per_prefill_pair *= factor;
  return cost;
}

}  // namespace moat
