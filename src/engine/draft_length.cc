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
// Share of the time that later trials may cost, and what one costs at least, in steps without drafts.
constexpr double kTrialShare = 0.01;
constexpr double kLeastLoss = 0.25;
// Lengths that are tried: one order of magnitude of rows after the other.
constexpr std::array<int64_t, 3> kTrials = {1, 3, 7};
// Drafting has to promise this much more than not drafting: times are known to a few percent.
constexpr double kMargin = 1.03;
// Drafting for some of the sequences has to promise this much more than for all of them: the best records are partly luck.
constexpr double kSubsetMargin = 1.05;
// Sequences for which a promise is believed before it was seen what comes of it.
constexpr double kPriorPromise = 64;

size_t log2_up(int64_t n) {
  size_t bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

// Steps differ by whole tiles of the kernels: each number of rows up to 16 is measured by itself, then four an octave.
size_t factor_index(int64_t rows) {
  constexpr int64_t kSingly = 16;
  if (rows <= kSingly) return static_cast<size_t>(rows);
  return kSingly + static_cast<size_t>(std::ceil(4 * std::log2(static_cast<double>(rows) / kSingly)));
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
  const auto width = static_cast<size_t>(drafts.width);
  std::vector<int32_t> there(limits.size());  // drafts that may be verified
  for (size_t s = 0; s < limits.size(); ++s) {
    while (there[s] < limits[s] && there[s] < drafts.width &&
           drafts.ids[s * width + static_cast<size_t>(there[s])] >= 0) {
      ++there[s];
    }
  }
  if (!policy.automatic || drafts.confidence.empty()) return there;

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
    return before * std::clamp(double{drafts.confidence[s * width + position]} * policy.factor[position], 0.0, 1.0);
  };
  std::priority_queue<Candidate> queue;
  for (size_t s = 0; s < limits.size(); ++s) {
    if (there[s] > 0) queue.push({survival(1.0, s, 0), 0, static_cast<int32_t>(s)});
  }
  const auto rate = [&](double tokens, size_t rows) {
    return tokens / (policy.seconds[std::min(rows, policy.seconds.size() - 1)] + policy.draft_seconds);
  };
  std::vector<int32_t> lengths(limits.size(), 0);
  auto tokens = static_cast<double>(policy.num_decodes);
  double best = rate(tokens, 0);
  for (size_t rows = 1; !queue.empty(); ++rows) {
    const Candidate c = queue.top();
    queue.pop();
    // The draft by itself, or with as many after it as the round could have: where it really ends is not to be known.
    bool pays = false;
    double more = 0, chance = c.survival;
    for (size_t k = static_cast<size_t>(c.position), ahead = 0; k < width && !pays; ++k, ++ahead) {
      if (ahead > 0 && k >= policy.acceptance.size()) break;
      if (ahead > 0) chance *= policy.acceptance[k];
      more += chance;
      pays = rate(tokens + more, rows + ahead) > best;
    }
    if (!pays) break;
    tokens += c.survival;
    best = std::max(best, rate(tokens, rows));
    const auto s = static_cast<size_t>(c.sequence);
    ++lengths[s];
    if (lengths[s] < there[s]) queue.push({survival(c.survival, s, lengths[s]), lengths[s], c.sequence});
  }
  return lengths;
}

void DraftLength::Measured::add(double seen) {
  constexpr size_t kLast = 5;
  ++count;
  last.push_back(seen);
  if (last.size() > kLast) last.erase(last.begin());
  std::vector<double> sorted = last;
  std::sort(sorted.begin(), sorted.end());
  value = sorted[(sorted.size() - 1) / 2];
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

// Between row counts that were measured linear, beside them as the nearest.
double DraftLength::verify_factor(int64_t rows) const {
  const auto size = static_cast<int64_t>(verify_factors_.size());
  const auto at = static_cast<int64_t>(factor_index(rows));
  const auto measured = [&](int64_t i) { return verify_factors_[static_cast<size_t>(i)].count > 0; };
  int64_t low = std::min(at, size - 1), high = at;
  while (low >= 0 && !measured(low)) --low;
  while (high < size && !measured(high)) ++high;
  if (low < 0 && high >= size) return 1.0;
  if (low < 0) low = high;
  if (high >= size) high = low;
  const double share = high == low ? 0 : static_cast<double>(at - low) / static_cast<double>(high - low);
  const double below = verify_factors_[static_cast<size_t>(low)].value;
  return below + share * (verify_factors_[static_cast<size_t>(high)].value - below);
}

double DraftLength::Load::kept() const { return (gained + kPriorPromise) / (promised + kPriorPromise); }

double DraftLength::plain_seconds(int64_t num_seqs, double context, const StepCost& cost) {
  const Measured& factor = load_of(num_seqs).plain_factor;
  return cost.seconds(num_seqs, static_cast<double>(num_seqs) * context, 0) * (factor.count > 0 ? factor.value : 1.0);
}

// A step of another kind than the chosen one, if it is time for it. prospects[drafts]: of a step in which every
// sequence drafts so many.
std::optional<DraftDemand> DraftLength::trial(Load& load, double plain_seconds, std::span<const Prospect> prospects,
                                              const DraftDemand& chosen) {
  const auto size = static_cast<int64_t>(kTrials.size());
  const auto lost_by = [&](int64_t drafts) {
    // A step without drafts instead of one that gains, or one with drafts that does not. Never nothing: gains are guesses.
    if (drafts == 0) return std::max(1 - 1 / promise_.gain, kLeastLoss) * plain_seconds;
    return std::max(prospects[static_cast<size_t>(drafts)].loss(), kLeastLoss) * plain_seconds;
  };
  if (load.drafted_steps < kFirstDrafted) {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t drafts = std::min(kTrials[static_cast<size_t>(load.num_trials++ % size)], max_drafts_);
      if (lost_by(drafts) > kFirstLoss * plain_seconds) continue;
      load.seconds_since_trial = 0;
      promise_.gain = 0;
      return DraftDemand{.max_drafts = drafts, .prior = chosen.prior, .measures = true};
    }
    return std::nullopt;
  }
  // While drafting, every other trial is a step without: the two are compared, and the machine changes its speed.
  const bool is_plain = chosen.max_drafts > 0 && load.num_trials % 2 == 1;
  const int64_t turn = chosen.max_drafts > 0 ? load.num_trials / 2 : load.num_trials;
  const int64_t drafts = is_plain ? 0 : std::min(kTrials[static_cast<size_t>(turn % size)], max_drafts_);
  if (lost_by(drafts) > kTrialShare * load.seconds_since_trial) return std::nullopt;
  ++load.num_trials;
  load.seconds_since_trial = 0;
  promise_.gain = 0;
  return DraftDemand{.max_drafts = drafts, .prior = chosen.prior, .measures = true};
}

DraftDemand DraftLength::demand(std::span<const DraftRecord> records, double context, const StepCost& cost) {
  promise_ = {};
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
  std::vector<Prospect> prospects = {{}};              // [1 + max_drafts], if every sequence drafts so many
  const auto seqs = static_cast<double>(num_seqs);
  const double plain = plain_seconds(num_seqs, context, cost);
  promise_.plain_seconds = plain;
  double best = kMargin / load.kept();
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
      const double seconds =
          cost.seconds(rows, static_cast<double>(rows) * context, 0) * verify_factor(rows) + draft_seconds(drafted);
      const Prospect prospect{.tokens = (seqs + more) / seqs, .seconds = seconds / plain};
      if (drafted == num_seqs) prospects.push_back(prospect);
      const double gain = prospect.tokens / prospect.seconds;
      const double weighed = drafted == num_seqs ? gain : gain / kSubsetMargin;
      if (weighed <= best) continue;
      best = weighed;
      promise_.gain = gain;
      demand.max_drafts = drafts;
      demand.min_acceptance = chances[n];
    }
  }
  if (const auto other = trial(load, plain, prospects, demand)) return *other;
  // Confidences say where a sequence can use more than the average one.
  if (demand.max_drafts > 0 && has_confidence_) demand.max_drafts = std::min(demand.max_drafts + 2, max_drafts_);
  return demand;
}

DraftPolicy DraftLength::policy(const StepPlan& plan, const StepCost& cost) const {
  DraftPolicy policy;
  if (fixed_ > 0 || !has_confidence_) return policy;
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
  policy.seconds.push_back(cost.seconds(rows, decode_pairs, prefill_pairs));
  const double pairs = draft_pairs / static_cast<double>(drafts);
  for (int64_t n = 1; n <= drafts; ++n) {
    const double seconds = cost.seconds(rows + n, decode_pairs + static_cast<double>(n) * pairs, prefill_pairs);
    policy.seconds.push_back(std::max(policy.seconds.back(), seconds * verify_factor(rows + n)));
  }
  policy.draft_seconds = draft_seconds(drafted_seqs);
  for (const Rate& rate : rates_) {
    // What makes the mean of the confidences that of the measured acceptance.
    policy.factor.push_back(static_cast<float>((rate.hits + kPriorHits) / (rate.promised + kPriorHits)));
  }
  for (const double chance : acceptance()) policy.acceptance.push_back(static_cast<float>(chance));
  return policy;
}

// After a step that drafting was to speed up.
void DraftLength::compare(Load& load, int64_t decodes, const StepResult& result, double seconds) {
  int64_t tokens = 0;
  for (const StepResult::Row& row : result.rows) tokens += static_cast<int64_t>(row.tokens.size());
  const auto seqs = static_cast<double>(decodes);
  const double rate = static_cast<double>(tokens) / (seconds + result.draft_seconds);
  const double forget = std::pow(kForget, seqs);
  load.promised = forget * load.promised + seqs * promise_.gain;
  load.gained = forget * load.gained + seqs * rate * promise_.plain_seconds / seqs;
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
  const bool only_decodes = plan.num_decode_seqs == static_cast<int64_t>(plan.sequences.size());
  if (planned > 0 && promise_.gain > 0 && only_decodes) compare(load, decodes, result, seconds);
  if (verified == 0) {
    ++load.plain_steps;
    if (planned > 0) return;
    if (expected > 0 && only_decodes) load.plain_factor.add(seconds / expected);
    load.promised *= kForget;  // what drafting was worth long ago says less and less
    load.gained *= kForget;
    return;
  }
  ++load.drafted_steps;
  const size_t bucket = factor_index(rows);
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
