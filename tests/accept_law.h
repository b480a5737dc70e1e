// SPDX-License-Identifier: Apache-2.0
// The exact law of what a verifier of drafts emits, found from outside: drafts are enumerated, the verifier is asked
// for one round at a time, and its acceptance probabilities are read off by moving one uniform number until its answer
// changes. A verifier is any function from a round to a verdict: an op, a whole sampler, or one with a planted mistake.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/rng.h"

namespace moat::test {

// Probabilities over [0, vocab), or over tuples of tokens, the first token most significant.
using Law = std::vector<double>;
// The law of the next token after `prefix`, the tokens since the anchor.
using Conditional = std::function<Law(std::span<const int32_t> prefix)>;

struct Toy {
  int vocab = 0;
  int num_drafts = 0;
  Conditional target;    // what has to come out
  Conditional draft;     // what drafts are really drawn from
  Conditional declared;  // the q that the verifier is told: in a right system the same
  std::function<int(std::span<const int32_t> drafts)> cut;  // how many drafts are verified; null: all
};

// What a verifier gets: l drafts, l + 1 target rows, l draft rows.
struct Round {
  std::vector<int32_t> drafts;
  std::vector<Law> p, q;
  std::vector<double> accept_u;  // [l]
  double bonus_u = 0;
};
struct Verdict {
  int accepted = 0;
  Law final_probs;  // what the bonus is drawn from; empty: not told, but `bonus` is, drawn from it in index order
  int32_t bonus = -1;
};
using Verify = std::function<Verdict(const Round&)>;

// How the uniforms decide. kFirstFailureStops: draft by draft. kLastSuccessWins: block verification.
enum class Decision { kFirstFailureStops, kLastSuccessWins };

constexpr double kJustBelowOne = 1.0 - 0x1.0p-53;

inline double total_variation(const Law& a, const Law& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::fabs(a[i] - b[i]);
  return sum / 2;
}

// Digits of `index` to base vocab, most significant first.
inline std::vector<int32_t> tuple_of(int64_t index, int length, int vocab) {
  std::vector<int32_t> tuple(static_cast<size_t>(length));
  for (size_t i = tuple.size(); i-- > 0; index /= vocab) tuple[i] = static_cast<int32_t>(index % vocab);
  return tuple;
}
inline int64_t index_of(std::span<const int32_t> tuple, int vocab) {
  int64_t index = 0;
  for (const int32_t token : tuple) index = index * vocab + token;
  return index;
}

// levels[n]: what has been emitted in n tokens. Continues every shorter emission with the target's conditionals and
// returns the law of the longest.
inline Law continue_by_target(const Toy& toy, std::vector<Law> levels) {
  for (size_t n = 0; n + 1 < levels.size(); ++n) {
    for (size_t i = 0; i < levels[n].size(); ++i) {
      if (levels[n][i] == 0) continue;
      const auto prefix = tuple_of(static_cast<int64_t>(i), static_cast<int>(n), toy.vocab);
      const Law next = toy.target(prefix);
      for (size_t v = 0; v < next.size(); ++v) levels[n + 1][i * next.size() + v] += levels[n][i] * next[v];
    }
  }
  return levels.back();
}

inline std::vector<Law> empty_levels(const Toy& toy) {
  std::vector<Law> levels;
  size_t size = 1;
  for (int n = 0; n <= toy.num_drafts + 1; ++n, size *= static_cast<size_t>(toy.vocab)) levels.emplace_back(size, 0.0);
  return levels;
}

// The law of the first num_drafts + 1 tokens of plain decoding.
inline Law target_law(const Toy& toy) {
  std::vector<Law> levels = empty_levels(toy);
  levels[0][0] = 1;
  return continue_by_target(toy, std::move(levels));
}

// Sup of the u for which holds(u), a condition that is true below some point and false above.
template <class Holds>
double threshold(const Holds& holds) {
  if (!holds(0.0)) return 0;
  if (holds(kJustBelowOne)) return 1;
  double low = 0;
  double high = 1;
  for (int step = 0; step < 48; ++step) {
    const double middle = (low + high) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return (low + high) / 2;
}

// A round for one tuple of drafts; uniforms are left at just below one.
inline Round round_of(const Toy& toy, const std::vector<int32_t>& drafts) {
  Round round;
  const auto l = static_cast<size_t>(toy.cut ? toy.cut(drafts) : toy.num_drafts);
  const std::span<const int32_t> all(drafts);
  round.drafts.assign(drafts.begin(), drafts.begin() + static_cast<int64_t>(l));
  for (size_t k = 0; k <= l; ++k) {
    round.p.push_back(toy.target(all.first(k)));
    if (k < l) round.q.push_back(toy.declared(all.first(k)));
  }
  round.accept_u.assign(l, kJustBelowOne);
  round.bonus_u = 0.5;
  return round;
}

// What the bonus of a round is drawn from, found by moving the number that draws it.
inline Law bonus_law(Round round, const Verify& verify) {
  const auto vocab = static_cast<int32_t>(round.p[0].size());
  Law law;
  double below = 0;
  for (int32_t v = 0; v < vocab; ++v) {
    const double up_to = v + 1 == vocab ? 1.0 : threshold([&](double u) {
      round.bonus_u = u;
      return verify(round).bonus <= v;
    });
    law.push_back(up_to - below);
    below = up_to;
  }
  return law;
}

// Probability of each number of accepted drafts, and a verdict with that number (where it is possible).
struct Acceptance {
  std::vector<double> probability;  // [l + 1]
  std::vector<Law> final_probs;     // [l + 1]; empty where impossible
};

inline Acceptance measure_acceptance(Round round, const Verify& verify, Decision decision) {
  const size_t l = round.drafts.size();
  const std::vector<double> high(l, kJustBelowOne);
  Acceptance out{std::vector<double>(l + 1), std::vector<Law>(l + 1)};
  double reach = 1;
  for (size_t step = 0; step < l; ++step) {
    const size_t k = decision == Decision::kFirstFailureStops ? step : l - 1 - step;  // whose uniform moves
    round.accept_u = high;
    if (decision == Decision::kFirstFailureStops) std::fill_n(round.accept_u.begin(), k, 0.0);
    const double pass = threshold([&](double u) {
      round.accept_u[k] = u;
      return verify(round).accepted >= static_cast<int>(k) + 1;
    });
    out.probability[decision == Decision::kFirstFailureStops ? k : k + 1] =
        reach * (decision == Decision::kFirstFailureStops ? 1 - pass : pass);
    reach *= decision == Decision::kFirstFailureStops ? pass : 1 - pass;
  }
  out.probability[decision == Decision::kFirstFailureStops ? l : 0] = reach;
  for (size_t a = 0; a <= l; ++a) {
    if (out.probability[a] < 1e-13) continue;  // what bisection cannot tell from never
    round.accept_u = high;
    if (decision == Decision::kFirstFailureStops) std::fill_n(round.accept_u.begin(), a, 0.0);
    if (decision == Decision::kLastSuccessWins && a > 0) round.accept_u[a - 1] = 0;
    out.final_probs[a] = verify(round).final_probs;
    if (out.final_probs[a].empty()) out.final_probs[a] = bonus_law(round, verify);
  }
  return out;
}

struct Emission {
  Law law;            // of the first num_drafts + 1 tokens
  double tokens = 0;  // of one round, on average: accepted drafts and the bonus
};

inline Emission emission_law(const Toy& toy, const Verify& verify, Decision decision) {
  std::vector<Law> levels = empty_levels(toy);
  Emission out;
  int64_t tuples = 1;
  for (int k = 0; k < toy.num_drafts; ++k) tuples *= toy.vocab;
  for (int64_t t = 0; t < tuples; ++t) {
    const std::vector<int32_t> drafts = tuple_of(t, toy.num_drafts, toy.vocab);
    double drawn = 1;
    for (size_t k = 0; k < drafts.size() && drawn > 0; ++k) {
      drawn *= toy.draft(std::span(drafts).first(k))[static_cast<size_t>(drafts[k])];
    }
    if (drawn == 0) continue;
    const Acceptance acceptance = measure_acceptance(round_of(toy, drafts), verify, decision);
    for (size_t a = 0; a < acceptance.probability.size(); ++a) {
      const double weight = drawn * acceptance.probability[a];
      out.tokens += weight * static_cast<double>(a + 1);
      const int64_t prefix = index_of(std::span(drafts).first(a), toy.vocab);
      for (size_t v = 0; v < acceptance.final_probs[a].size(); ++v) {
        levels[a + 1][static_cast<size_t>(prefix * toy.vocab) + v] += weight * acceptance.final_probs[a][v];
      }
    }
  }
  out.law = continue_by_target(toy, std::move(levels));
  return out;
}

// --- laws to try ---

// Scaled to one and rounded to f32, as rows are.
inline Law normalised(Law weights) {
  double sum = 0;
  for (const double w : weights) sum += w;
  for (double& w : weights) w = static_cast<float>(w / sum);
  return weights;
}

inline Law softmax_of(const std::vector<double>& logits, double temperature = 1.0) {
  Law law;
  for (const double x : logits) law.push_back(std::exp(x / temperature));
  return normalised(law);
}

inline Law one_hot(size_t at, size_t vocab) {
  Law law(vocab, 0.0);
  law[at] = 1;
  return law;
}

// Random conditionals, another for every prefix. zero_share: how many of the tokens are impossible, on average.
inline Conditional random_conditional(int vocab, uint64_t seed, double zero_share = 0) {
  return [vocab, seed, zero_share](std::span<const int32_t> prefix) {
    Rng rng(seed * 1000003 + static_cast<uint64_t>(index_of(prefix, vocab + 1) * 8) + prefix.size());
    Law weights;
    for (int v = 0; v < vocab; ++v) {
      const double weight = std::pow(rng.uniform(0.05, 1.0), 2.0);
      weights.push_back(rng.uniform() < zero_share ? 0.0 : weight);
    }
    weights[static_cast<size_t>(rng.below(vocab))] += 0.1;  // not all impossible
    return normalised(weights);
  };
}

// A verifier with a mistake, as serving stacks offer it: drafts that the target finds likely enough are accepted, too, and
// the others against p divided by the same limit.
inline Verdict accept_above(double limit, const Round& round) {
  size_t a = 0;
  for (; a < round.drafts.size(); ++a) {
    const double p = round.p[a][static_cast<size_t>(round.drafts[a])];
    if (!(round.accept_u[a] <= p / limit || p >= limit)) break;
  }
  Law rest = round.p[a];
  if (a < round.drafts.size()) rest[static_cast<size_t>(round.drafts[a])] = 0;
  return {.accepted = static_cast<int>(a), .final_probs = normalised(rest)};
}

}  // namespace moat::test
