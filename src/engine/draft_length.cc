// SPDX-License-Identifier: Apache-2.0
#include "engine/draft_length.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <queue>

namespace moat {
namespace {

// Rounds after which an observation counts half: some seconds of one reply.
constexpr double kForget = 1.0 - 1.0 / 256;
// Acceptance before anything is known: as often as not, so that drafting gets its chance.
constexpr double kPriorHits = 2.0, kPriorTries = 3.0;
// Steps of either kind that are measured before they are compared, the drafted ones only while one costs no more than so
// many steps without drafts.
constexpr int64_t kFirstPlain = 3, kFirstDrafted = 6;
constexpr double kFirstLoss = 4;
// Share of the time that later trials may cost.
constexpr double kTrialShare = 0.01;
// Lengths that are tried: one order of magnitude of rows after the other.
constexpr std::array<int64_t, 3> kTrials = {1, 3, 7};
// Drafting has to promise this much more than not drafting: times are known to a few percent.
constexpr double kMargin = 1.03;
// How fast a measured time replaces the older ones.
constexpr double kLearn = 0.1;

size_t log2_up(int64_t n) {
  size_t bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// The entry nearest to `index` that was measured, null if none was. `lower` says how far below it lies.
template <class T>
const T* nearest(const std::vector<T>& values, size_t index, int64_t& lower) {
  const auto size = static_cast<int64_t>(values.size());
  const auto at = static_cast<int64_t>(index);
  for (int64_t distance = 0; distance <= std::max(size, at); ++distance) {
    for (const int64_t i : {at - distance, at + distance}) {
      if (i < 0 || i >= size || values[static_cast<size_t>(i)].count == 0) continue;
      lower = at - i;
      return &values[static_cast<size_t>(i)];
    }
  }
  return nullptr;
}

}  // namespace

std::vector<int32_t> draft_lengths(const DraftPolicy& policy, const Drafts& drafts, std::span<const int32_t> limits) {
  std::vector<int32_t> there(limits.size());  // drafts that may be verified
  for (size_t s = 0; s < limits.size(); ++s) {
    while (there[s] < limits[s] && there[s] < drafts.width &&
           drafts.ids[s * static_cast<size_t>(drafts.width) + static_cast<size_t>(there[s])] >= 0) {
      ++there[s];
    }
  }
  if (!policy.automatic) return there;

  struct Candidate {
    double survival;  // chance that this draft and all before it are accepted
    int32_t position;
    int32_t sequence;
    // Best first; of equals the earlier position, so that a sequence's drafts come in order.
    bool operator<(const Candidate& o) const {
      if (survival != o.survival) return survival < o.survival;
      if (position != o.position) return position > o.position;
      return sequence > o.sequence;
    }
  };
  const auto survival = [&](double before, size_t s, int32_t k) {
    const auto position = static_cast<size_t>(k);
    const bool confident = !drafts.confidence.empty();
    const double chance = confident ? drafts.confidence[s * static_cast<size_t>(drafts.width) + position] : 1.0;
    return before * std::clamp(chance * policy.factor[position], 0.0, 1.0);
  };
  std::priority_queue<Candidate> queue;
  for (size_t s = 0; s < limits.size(); ++s) {
    if (there[s] > 0) queue.push({survival(1.0, s, 0), 0, static_cast<int32_t>(s)});
  }
  std::vector<int32_t> lengths(limits.size(), 0);
  double tokens = static_cast<double>(policy.num_decodes);
  double best = tokens / (policy.seconds + policy.draft_seconds);
  for (int64_t rows = 1; !queue.empty(); ++rows) {
    const Candidate c = queue.top();
    queue.pop();
    tokens += c.survival;
    const double rate =
        tokens / (policy.seconds + policy.draft_seconds + static_cast<double>(rows) * policy.seconds_per_draft);
    if (rate <= best) break;
    best = rate;
    const auto s = static_cast<size_t>(c.sequence);
    ++lengths[s];
    if (lengths[s] < there[s]) queue.push({survival(c.survival, s, lengths[s]), lengths[s], c.sequence});
  }
  return lengths;
}

void DraftLength::Measured::add(double seen) {
  if (count > 0 && seen < value / 2) count = 0;
  if (count > 0) seen = std::min(seen, 2 * value);
  value += std::max(kLearn, 1.0 / static_cast<double>(++count)) * (seen - value);
}

DraftLength::DraftLength(int64_t max_drafts, int64_t fixed, bool has_confidence)
    : max_drafts_(max_drafts),
      fixed_(std::min(fixed, max_drafts)),
      has_confidence_(has_confidence),
      rates_(static_cast<size_t>(max_drafts)) {}

std::vector<double> DraftLength::acceptance() const {
  std::vector<double> out;
  double prior = mean_acceptance();  // of a position that was seldom reached, until it is: as the one before it
  for (const Rate& rate : rates_) {
    prior = (rate.hits + kPriorTries * prior) / (rate.tries + kPriorTries);
    out.push_back(prior);
  }
  return out;
}

DraftLength::Load& DraftLength::load_of(int64_t num_seqs) {
  const size_t index = log2_up(num_seqs);
  if (loads_.size() <= index) loads_.resize(index + 1);
  return loads_[index];
}

double DraftLength::mean_acceptance() const {
  double hits = kPriorHits, tries = kPriorTries;
  for (const Rate& rate : rates_) {
    hits += rate.hits;
    tries += rate.tries;
  }
  return hits / tries;
}

// Between the powers of two that were measured linear, beside them in proportion.
double DraftLength::draft_seconds(int64_t num_seqs) const {
  std::vector<Measured> seconds;
  for (const Load& load : loads_) seconds.push_back(load.draft_seconds);
  const size_t high = log2_up(num_seqs);
  const auto n = static_cast<double>(num_seqs);
  const auto power = [](size_t index) { return std::exp2(static_cast<double>(index)); };
  if (high > 0 && high < seconds.size() && seconds[high].count > 0 && seconds[high - 1].count > 0) {
    const double share = (n - power(high - 1)) / (power(high) - power(high - 1));
    return seconds[high - 1].value + share * (seconds[high].value - seconds[high - 1].value);
  }
  int64_t lower = 0;
  const Measured* measured = nearest(seconds, high, lower);
  if (measured == nullptr) return 0;
  return measured->value * n / power(static_cast<size_t>(static_cast<int64_t>(high) - lower));
}

double DraftLength::verify_factor(int64_t rows) const {
  int64_t lower = 0;
  const Measured* measured = nearest(verify_factors_, log2_up(rows), lower);
  return measured == nullptr ? 1.0 : measured->value;
}

// A step of another kind than the chosen one, if it is time for it.
std::optional<DraftDemand> DraftLength::trial(Load& load, int64_t num_seqs, double context, const StepCost& cost,
                                              const DraftDemand& chosen) {
  const bool is_new = load.drafted_steps < kFirstDrafted;
  const auto seconds_of = [&](int64_t drafts) {
    const int64_t rows = num_seqs * (1 + drafts);
    const double seconds = cost.seconds(rows, static_cast<double>(rows) * context, 0);
    return drafts == 0 ? seconds : seconds * verify_factor(rows) + draft_seconds(num_seqs);
  };
  const double plain = seconds_of(0);
  // While drafting, every fourth trial is a step without.
  const size_t kinds = kTrials.size() + (chosen.max_drafts > 0 && !is_new ? 1 : 0);
  for (size_t i = 0; i < (is_new ? kinds : 1); ++i) {
    const size_t kind = static_cast<size_t>(load.num_trials) % kinds;
    const int64_t drafts = kind < kTrials.size() ? std::min(kTrials[kind], max_drafts_) : 0;
    const double loss = drafts == 0 ? plain : std::max(seconds_of(drafts) - plain, plain / 4);
    if (is_new ? loss > kFirstLoss * plain : loss > kTrialShare * load.seconds_since_trial) {
      if (is_new) ++load.num_trials;
      continue;
    }
    ++load.num_trials;
    load.seconds_since_trial = 0;
    return DraftDemand{.max_drafts = drafts, .prior = chosen.prior, .measures = true};
  }
  return std::nullopt;
}

DraftDemand DraftLength::demand(std::span<const DraftRecord> records, double context, const StepCost& cost) {
  DraftDemand demand{.prior = mean_acceptance()};
  if (max_drafts_ == 0 || records.empty()) return demand;
  demand.max_drafts = fixed_;
  if (fixed_ > 0) return demand;
  const auto num_seqs = static_cast<int64_t>(records.size());
  Load& load = load_of(num_seqs);
  if (load.plain_steps < kFirstPlain) return demand;

  // The best sequences first; how many of them, and how many drafts each.
  std::vector<double> chances;
  for (const DraftRecord& record : records) chances.push_back(record.acceptance(demand.prior));
  std::sort(chances.begin(), chances.end(), std::greater<>());
  const std::vector<double> accept = acceptance();
  std::vector<double> survivals(chances.size(), 1.0);  // of the drafts so far
  std::vector<double> tokens(chances.size(), 0.0);     // expected of them
  const auto seqs = static_cast<double>(num_seqs);
  double best = kMargin * seqs / cost.seconds(num_seqs, seqs * context, 0);
  const size_t stride = 1 + chances.size() / 64;  // of many sequences not every number is tried
  for (int64_t drafts = 1; drafts <= max_drafts_; ++drafts) {
    double more = 0;
    for (size_t n = 0; n < chances.size(); ++n) {
      const double chance = accept[static_cast<size_t>(drafts - 1)] * chances[n] / demand.prior;
      survivals[n] *= std::clamp(chance, 0.0, 0.99);
      tokens[n] += survivals[n];
      more += tokens[n];
      if ((n + 1) % stride != 0 && n + 1 < chances.size()) continue;
      const auto drafted = static_cast<int64_t>(n) + 1;
      const int64_t rows = num_seqs + drafted * drafts;
      const double seconds = cost.seconds(rows, static_cast<double>(rows) * context, 0) * verify_factor(rows);
      const double rate = (seqs + more) / (seconds + draft_seconds(drafted));
      if (rate <= best) continue;
      best = rate;
      demand.max_drafts = drafts;
      demand.min_acceptance = chances[n];
    }
  }
  if (const auto other = trial(load, num_seqs, context, cost, demand)) return *other;
  // Confidences say where a sequence can use more than the average one.
  if (demand.max_drafts > 0 && has_confidence_) demand.max_drafts = std::min(demand.max_drafts + 2, max_drafts_);
  return demand;
}

DraftPolicy DraftLength::policy(const StepPlan& plan, const StepCost& cost) const {
  DraftPolicy policy;
  if (fixed_ > 0) return policy;
  policy.automatic = true;
  int64_t rows = 0;
  int64_t drafts = 0;
  int64_t drafted_seqs = 0;
  double decode_pairs = 0, prefill_pairs = 0, draft_pairs = 0;
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    const double n = plan.num_tokens[s];
    (static_cast<int64_t>(s) < plan.num_decode_seqs ? decode_pairs : prefill_pairs) +=
        n * (plan.first_positions[s] + n / 2);
    rows += plan.num_tokens[s];
    policy.num_decodes += plan.wants_token[s];
    drafts += plan.num_drafts[s];
    drafted_seqs += plan.num_drafts[s] > 0;
    draft_pairs += static_cast<double>(plan.num_drafts[s]) * plan.first_positions[s];
  }
  if (drafts == 0) return policy;
  policy.seconds = cost.seconds(rows, decode_pairs, prefill_pairs);
  // A straight line to what all of them cost: the curve has steps, and stopping at the first would stop too soon.
  const double whole = cost.seconds(rows + drafts, decode_pairs + draft_pairs, prefill_pairs);
  const double more = whole * verify_factor(rows + drafts) - policy.seconds;
  policy.seconds_per_draft = std::max(0.0, more) / static_cast<double>(drafts);
  policy.draft_seconds = draft_seconds(drafted_seqs);
  for (size_t k = 0; k < rates_.size(); ++k) {
    const Rate& rate = rates_[k];
    // Without confidences the measured acceptance; with them, what makes their mean the measured one.
    policy.factor.push_back(static_cast<float>(has_confidence_ ? (rate.hits + kPriorHits) / (rate.promised + kPriorHits)
                                                               : acceptance()[k]));
  }
  return policy;
}

void DraftLength::observe(const StepPlan& plan, const StepResult& result, int64_t rows, double expected,
                          double seconds) {
  if (max_drafts_ == 0) return;
  int64_t decodes = 0, planned = 0, verified = 0;
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    decodes += static_cast<int64_t>(s) < plan.num_decode_seqs && plan.wants_token[s];
    planned += plan.num_drafts[s] > 0;
  }
  for (const StepResult::Row& row : result.rows) verified += row.num_drafts > 0;
  if (decodes == 0) return;
  Load& load = load_of(decodes);
  load.seconds_since_trial += seconds + result.draft_seconds;
  if (planned > 0) load_of(planned).draft_seconds.add(result.draft_seconds);
  if (verified == 0) {
    ++load.plain_steps;
    return;
  }
  ++load.drafted_steps;
  const size_t bucket = log2_up(rows);
  if (bucket >= verify_factors_.size()) verify_factors_.resize(bucket + 1);
  if (expected > 0) verify_factors_[bucket].add(seconds / expected);
  for (const StepResult::Row& row : result.rows) {
    const auto accepted = static_cast<int64_t>(row.tokens.size()) - 1;
    // Judged are the accepted ones and the first that was not.
    for (int64_t k = 0; k < std::min<int64_t>(row.num_drafts, accepted + 1); ++k) {
      Rate& rate = rates_[static_cast<size_t>(k)];
      const double promise = row.confidence.empty() ? 1.0 : row.confidence[static_cast<size_t>(k)];
      rate = {.hits = kForget * rate.hits + (k < accepted ? 1.0 : 0.0),
              .tries = kForget * rate.tries + 1.0,
              .promised = kForget * rate.promised + promise};
    }
  }
}

}  // namespace moat
