// SPDX-License-Identifier: Apache-2.0
// StepCost: how long a step is expected to take, as a value that the scheduler, drafting and the planner share. Made
// from the costs that the ops declare, each over the ceiling that binds it (bytes over bandwidth or operations over the
// arithmetic rate), and scaled by what real steps took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace moat {

struct StepCost {
  // Expected seconds of a step of so many rows without what their pairs cost; ascending in rows. Between the points
  // linear, beyond the last one by the slope of the last two. Empty: unknown, seconds() is 0 for everything.
  std::vector<std::pair<int64_t, double>> rows_seconds;
  // A pair is a row and a token that it attends to, those of its own step included: n rows after c cached tokens are
  // about n (c + n / 2) pairs.
  double seconds_per_decode_pair = 0;   // of sequences in decode form
  double seconds_per_prefill_pair = 0;  // ... in prefill form

  bool known() const { return !rows_seconds.empty(); }
  double seconds(int64_t rows, double decode_pairs, double prefill_pairs) const;
};

// Brings a declared cost to what real steps take: one factor for each point of rows_seconds, because few rows and many
// come close to their ceilings to different degrees, and one for the pairs of either form. A step moves the factors of
// what it consists of, each by its share of the step (normalised least mean squares). One thread.
class StepCostTracker {
 public:
  StepCostTracker() = default;
  explicit StepCostTracker(StepCost declared);

  // A step of so many rows and pairs took `seconds`.
  void observe(int64_t rows, double decode_pairs, double prefill_pairs, double seconds);
  // The declared cost with what was learnt; what no step consisted of yet takes the factor of the nearest that did.
  const StepCost& current() const { return current_; }

 private:
  double factor_near(size_t point) const;
  void rebuild();

  StepCost declared_;
  StepCost current_;
  std::vector<double> factors_;  // [points]; 0: not observed
  double decode_factor_ = 0;
  double prefill_factor_ = 0;
};

}  // namespace moat
