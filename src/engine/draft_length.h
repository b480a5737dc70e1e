// SPDX-License-Identifier: Apache-2.0
// How many drafts a step verifies. A draft is worth its chance of being accepted and costs a row; what is maximised is
// expected tokens over expected time, for all sequences of the step together.
//
// Two decisions, made so that neither can bias the reply (docs/design/dspark.md sections 1.7 and 3.5):
//   before drafting, how many at most and whether at all: from earlier rounds alone, so any maximum may be looked for;
//   after it, which ones: best first, by the product of a sequence's confidences so far, until neither the next one nor
//     it with those that usually follow raises tokens over time. Whether draft k is verified then depends on drafts
//     before k alone, never on k or later ones. Drafts without confidences are all verified.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/drafter.h"
#include "engine/step_plan.h"
#include "plan/step_cost.h"

namespace moat {

// For each sequence how many of its drafts are verified, at most limits[s]: all that there are if !policy.automatic or
// without confidences.
std::vector<int32_t> draft_lengths(const DraftPolicy& policy, const Drafts& drafts, std::span<const int32_t> limits);

// Learns from steps and decides before them. One thread.
//
// Expected seconds of a step with drafts are those of a step of as many rows without, times what steps with drafts were
// measured to take of that: their rows share experts, a state and a context. Both kinds of step are measured for every
// order of magnitude of sequences: some at first, then one now and then, as long as that costs little of the time, so that
// neither is judged by a guess. What drafting gains is compared with what was promised: the sequences with the best
// records are partly those that were lucky, and where drafting keeps losing it must end.
class DraftLength {
 public:
  DraftLength() = default;
  // max_drafts: what the drafter can. fixed > 0: always so many; else as many as pay.
  DraftLength(int64_t max_drafts, int64_t fixed, bool has_confidence);

  bool is_on() const { return max_drafts_ > 0; }

  // What to draft in a step whose sequences that decode have these records, with `context` cached tokens on average.
  // `cost` is of steps without drafts. Nothing: drafting is not expected to pay, or this step is to be measured without.
  DraftDemand demand(std::span<const DraftRecord> records, double context, const StepCost& cost);

  // What the plan's drafts are cut by.
  DraftPolicy policy(const StepPlan& plan, const StepCost& cost) const;

  // After a step that took `seconds` besides making drafts; `expected` by `cost` for its rows, drafts included.
  void observe(const StepPlan& plan, const StepResult& result, int64_t rows, double expected, double seconds);

  // Chance that a draft is accepted if those before it in its round were, as measured, over all positions.
  double mean_acceptance() const;
  // ... at each position. [max_drafts]
  std::vector<double> acceptance() const;

 private:
  struct Rate {  // with older rounds counting less and less
    double hits = 0, tries = 0, promised = 0;
  };
  // The median of the last few values: one that something else held up does not count.
  struct Measured {
    double value = 0;
    int64_t count = 0;
    std::vector<double> last;
    void add(double seen);
  };
  // What is known of steps with about so many sequences.
  struct Load {
    int64_t plain_steps = 0, drafted_steps = 0;
    int64_t num_trials = 0;
    double seconds_since_trial = 0;
    Measured draft_seconds;           // of making drafts
    Measured plain_factor;            // on the expected seconds of steps without drafts
    double promised = 0, gained = 0;  // sums of gains over sequences, older ones counting less
    // What comes of a promise of 1.
    double kept() const;
  };
  // Tokens a second over those without drafts.
  struct Promise {
    double gain = 0;           // 0: none was made
    double plain_seconds = 0;  // of the step without drafts
  };
  struct Prospect {                                   // of a step
    double tokens = 1;                                // for each sequence
    double seconds = 0;                               // over those of the step without drafts
    double loss() const { return seconds - tokens; }  // against as many tokens without drafts, in steps without
  };
  std::optional<DraftDemand> trial(Load& load, double plain_seconds, std::span<const Prospect> prospects,
                                   const DraftDemand& chosen);
  void compare(Load& load, int64_t decodes, const StepResult& result, double seconds);

  Load& load_of(int64_t num_seqs);
  double plain_seconds(int64_t num_seqs, double context, const StepCost& cost);
  double draft_seconds(int64_t num_seqs) const;
  double verify_factor(int64_t rows) const;

  int64_t max_drafts_ = 0;
  int64_t fixed_ = 0;
  bool has_confidence_ = false;
  Promise promise_;                       // of the last demand()
  std::vector<Rate> rates_;               // [max_drafts]
  std::vector<Load> loads_;               // [log2 of the sequences, rounded up]
  std::vector<Measured> verify_factors_;  // [factor_index(rows)]
};

}  // namespace moat
