// SPDX-License-Identifier: Apache-2.0
// StepCost: how long a step is expected to take, as a value that the scheduler, drafting and the planner share. Made
// from the costs that the ops declare, each over the ceiling that binds it (bytes over bandwidth or operations over the
// arithmetic rate), and scaled by what real steps took.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace moat {

struct StepCost {
  // Expected seconds of a step of so many rows at no context; ascending in rows. Between the points linear, beyond the
  // last one by the slope of the last two. Empty: unknown, seconds() is 0 for everything.
  std::vector<std::pair<int64_t, double>> rows_seconds;
  double seconds_per_decode_pair = 0;   // for each (row, cached token) of sequences in decode form
  double seconds_per_prefill_pair = 0;  // ... in prefill form

  bool known() const { return !rows_seconds.empty(); }
  double seconds(int64_t rows, double decode_pairs, double prefill_pairs) const;
  StepCost scaled(double factor) const;  // all seconds times `factor`
};

}  // namespace moat
