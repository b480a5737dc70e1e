// SPDX-License-Identifier: Apache-2.0
// How many drafts pay, what the n-gram drafter finds, and counts that follow drafts and come back: plain values, no model.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "base/rng.h"
#include "engine/draft_length.h"
#include "engine/ngram_drafter.h"
#include "engine/token_counts.h"

namespace moat {
namespace {

using Ids = std::vector<int32_t>;

// --- which drafts are verified ---

// Rows of `confidence` are sequences, all with as many drafts.
struct Case {
  DraftPolicy policy;
  Drafts drafts;
  std::vector<int32_t> limits;

  Case(const std::vector<std::vector<float>>& confidence, double seconds, double seconds_per_draft) {
    const size_t width = confidence.front().size();
    policy = {.automatic = true,
              .num_decodes = static_cast<int64_t>(confidence.size()),
              .factor = std::vector<float>(width, 1.0F)};
    for (size_t n = 0; n <= width * confidence.size(); ++n) {
      policy.seconds.push_back(seconds + static_cast<double>(n) * seconds_per_draft);
    }
    drafts.width = static_cast<int64_t>(width);
    for (const auto& row : confidence) drafts.confidence.insert(drafts.confidence.end(), row.begin(), row.end());
    drafts.ids.assign(drafts.confidence.size(), 3);
    limits.assign(confidence.size(), static_cast<int32_t>(width));
  }
  std::vector<int32_t> lengths() const { return draft_lengths(policy, drafts, limits); }
};

// The worked example of dspark.md 1.7: survival (.9, .72, .36) and (.6, .3, .15), at costs on a straight line.
TEST(DraftLengths, WorkedExample) {
  const auto lengths = [](double seconds_per_draft) {
    return Case({{.9F, .8F, .5F}, {.6F, .5F, .5F}}, 10, seconds_per_draft).lengths();
  };
  EXPECT_EQ(lengths(1.5), (Ids{2, 1}));
  EXPECT_EQ(lengths(1.0), (Ids{3, 1}));
  EXPECT_EQ(lengths(3.0), (Ids{2, 0}));
  EXPECT_EQ(lengths(0.0), (Ids{3, 3}));
  EXPECT_EQ(lengths(100.0), (Ids{0, 0}));
}

// What was spent on making drafts is spent: it makes verifying them pay sooner.
TEST(DraftLengths, TheTimeOfDraftingIsGone) {
  Case c({{.15F, .9F}}, 10, 1.6);
  EXPECT_EQ(c.lengths(), Ids{0});
  c.policy.draft_seconds = 5;
  EXPECT_GT(c.lengths()[0], 0);
}

// The walk ends at the first draft that does not pay, whatever comes after it: .1 keeps a certain draft from being seen.
TEST(DraftLengths, StopsAtTheFirstDecrease) {
  EXPECT_EQ(Case({{.1F, 1.0F, 1.0F, 1.0F}}, 1, 0.2).lengths(), Ids{0});
  EXPECT_EQ(Case({{.9F, .1F, 1.0F, 1.0F}}, 1, 0.2).lengths(), Ids{1});
}

// Of equal chances the earlier position comes first, so a sequence's drafts are a prefix; then the earlier sequence.
TEST(DraftLengths, TiesGoByPositionThenSequence) {
  // .5, .5 (certain after the first) and .5: all three pay, or none.
  EXPECT_EQ(Case({{.5F, 1.0F}, {.5F, .0F}}, 10, 1.0).lengths(), (Ids{2, 1}));
  EXPECT_EQ(Case({{.5F, 1.0F}, {.5F, .0F}}, 10, 3.0).lengths(), (Ids{0, 0}));
}

TEST(DraftLengths, LimitsAndMissingDrafts) {
  Case c({{.9F, .9F, .9F}, {.9F, .9F, .9F}, {.9F, .9F, .9F}}, 10, 0.1);
  c.limits = {2, 0, 3};
  c.drafts.ids[7] = -1;  // the third sequence has one draft
  EXPECT_EQ(c.lengths(), (Ids{2, 0, 1}));
  c.policy = {};  // not automatic: all that there are
  EXPECT_EQ(c.lengths(), (Ids{2, 0, 1}));
  // Without confidences nothing is known that was not known before drafting.
  Case plain({{1.0F, 1.0F, 1.0F}}, 10, 300.0);
  plain.drafts.confidence.clear();
  EXPECT_EQ(plain.lengths(), Ids{3});
}

// Rows come in tiles: the first draft costs much and pays only with those that usually follow it.
TEST(DraftLengths, AStepOfTheCurveIsCrossedWhereTheUsualDraftsPay) {
  Case c({{.8F, .8F, .8F, .8F}}, 1, 0);
  c.policy.seconds = {1.0, 1.9, 1.95, 2.0, 3.5};
  EXPECT_EQ(c.lengths(), Ids{0});
  c.policy.acceptance = {.8F, .8F, .8F, .8F};
  EXPECT_EQ(c.lengths(), Ids{3});
  c.drafts.confidence[0] = .2F;  // not here
  EXPECT_EQ(c.lengths(), Ids{0});
  c.drafts.confidence = {.8F, .01F, .8F, .8F};  // crossed, and then given up
  EXPECT_EQ(c.lengths(), Ids{1});
}

// A rule that must not be used: all drafts of a sequence whose confidences promise half of them, or none.
std::vector<int32_t> looking_ahead(const Case& c) {
  std::vector<int32_t> lengths;
  const auto width = static_cast<size_t>(c.drafts.width);
  for (size_t s = 0; s < c.limits.size(); ++s) {
    const auto first = c.drafts.confidence.begin() + static_cast<std::ptrdiff_t>(s * width);
    const float promised = std::accumulate(first, first + c.limits[s], 0.0F);
    lengths.push_back(promised > 0.5F * static_cast<float>(c.limits[s]) ? c.limits[s] : 0);
  }
  return lengths;
}

// Whether draft k is verified never depends on what was drafted at k or after it, whose confidences are k+1 and later
// ones (dspark.md 3.5).
TEST(DraftLengths, ADecisionDoesNotLookAhead) {
  Rng rng(1);
  int64_t cut = 0, decisions = 0, caught = 0;
  for (int i = 0; i < 2000; ++i) {
    const auto seqs = static_cast<size_t>(1 + rng.below(5));
    const auto width = static_cast<size_t>(1 + rng.below(7));
    std::vector<std::vector<float>> confidence(seqs);
    for (auto& row : confidence) {
      for (size_t k = 0; k < width; ++k) row.push_back(static_cast<float>(rng.uniform()));
    }
    Case c(confidence, 1 + rng.uniform(), 0.3 * rng.uniform());
    for (float& factor : c.policy.factor) factor = static_cast<float>(rng.uniform(0.5, 1.5));
    for (size_t k = 0; k < width && i % 2 == 1; ++k) c.policy.acceptance.push_back(static_cast<float>(rng.uniform()));
    for (int32_t& limit : c.limits) limit = static_cast<int32_t>(rng.below(static_cast<int64_t>(width) + 1));
    const std::vector<int32_t> before = c.lengths(), control = looking_ahead(c);
    const auto s = static_cast<size_t>(rng.below(static_cast<int64_t>(seqs)));
    for (size_t k = 0; k < width; ++k) {
      Case other = c;
      for (size_t later = k + 1; later < width; ++later) {
        const double value = std::array{0.0, 1.0, rng.uniform()}[static_cast<size_t>(rng.below(3))];
        other.drafts.confidence[s * width + later] = static_cast<float>(value);
      }
      // A later draft may end the reply, so that there are fewer.
      if (rng.below(2) == 0) other.limits[s] = std::max(std::min(c.limits[s], static_cast<int32_t>(k) + 1), 0);
      const bool is_verified = before[s] > static_cast<int32_t>(k);
      EXPECT_EQ(other.lengths()[s] > static_cast<int32_t>(k), is_verified) << "draft " << k << " of " << s;
      ++decisions;
      cut += !is_verified;
      caught += (looking_ahead(other)[s] > static_cast<int32_t>(k)) != (control[s] > static_cast<int32_t>(k));
    }
  }
  EXPECT_GT(cut, decisions / 10);
  EXPECT_LT(cut, decisions * 9 / 10);
  EXPECT_GT(caught, 0) << "a rule that looks ahead would pass, too";
}

// --- whether drafting pays ---

// A step of so many sequences that decode, each with a round of `drafts`, of which the first `accepted` were.
struct StepOf {
  StepPlan plan;
  StepResult result;
  int64_t rows = 0;
  StepOf(int64_t seqs, int32_t drafts, int32_t accepted, float confidence = -1) : rows(seqs * (1 + drafts)) {
    for (int64_t s = 0; s < seqs; ++s) {
      plan.sequences.push_back(static_cast<SequenceId>(s) + 1);
      plan.num_tokens.push_back(1);
      plan.first_positions.push_back(100);
      plan.wants_token.push_back(1);
      plan.num_drafts.push_back(drafts);
      StepResult::Row& row = result.rows.emplace_back();
      row.sequence = plan.sequences.back();
      row.num_drafts = drafts;
      row.tokens.resize(static_cast<size_t>(accepted) + 1);
      if (confidence >= 0) row.confidence.assign(static_cast<size_t>(drafts), confidence);
    }
    plan.num_decode_seqs = seqs;
    result.draft_seconds = drafts > 0 ? 0.001 : 0;
  }
};

// Seconds of a step: `start`, and `row` for each row.
StepCost cost(double start, double row) { return {.rows_seconds = {{0, start}, {1000, start + 1000 * row}}}; }

// The step took `factor` of what so many rows without drafts are expected to take.
void observe(DraftLength& length, const StepOf& step, const StepCost& each, double factor = 1.0) {
  const double expected = each.seconds(step.rows, 0, 0);
  length.observe(step.plan, step.result, step.rows, expected, factor * expected);
}

// One that has measured steps of both kinds; three drafts a round were accepted.
DraftLength measured(int64_t seqs, const StepCost& each, bool has_confidence = false) {
  DraftLength length(7, 0, has_confidence);
  for (int i = 0; i < 3; ++i) observe(length, StepOf(seqs, 0, 0), each);
  for (int i = 0; i < 6; ++i) observe(length, StepOf(seqs, 7, 3, has_confidence ? 0.5F : -1.0F), each);
  return length;
}

// Drafts for each of so many sequences, of which nothing is known yet.
int64_t demanded(DraftLength& length, int64_t seqs, double context, const StepCost& each) {
  return length.demand(std::vector<DraftRecord>(static_cast<size_t>(seqs)), context, each).max_drafts;
}

// What is chosen, also where it is time for a trial of something else.
DraftDemand chosen(DraftLength& length, const std::vector<DraftRecord>& records, const StepCost& each) {
  DraftDemand demand = length.demand(records, 0, each);
  while (demand.measures) demand = length.demand(records, 0, each);
  return demand;
}
int64_t chosen(DraftLength& length, int64_t seqs, const StepCost& each) {
  return chosen(length, std::vector<DraftRecord>(static_cast<size_t>(seqs)), each).max_drafts;
}

TEST(DraftLength, PinnedNumbersAreTaken) {
  DraftLength length(7, 3, true);
  for (int i = 0; i < 600; ++i) {
    EXPECT_EQ(demanded(length, 4, 100, cost(0, 1)), 3);  // whether it pays or not, measured or not
    observe(length, StepOf(4, 3, 0, 0.9F), cost(0, 1));
  }
  EXPECT_FALSE(length.policy(StepOf(4, 3, 0).plan, cost(0, 1)).automatic);
  EXPECT_EQ(demanded(length, 0, 100, cost(1, 0)), 0) << "nobody decodes";
  DraftLength none;
  EXPECT_EQ(demanded(none, 4, 100, cost(1, 0)), 0) << "no drafter";
}

// Neither kind of step is judged by a guess: three without and six with drafts come first, whatever is expected of them.
TEST(DraftLength, BothKindsOfStepAreMeasuredFirst) {
  for (const StepCost& each : {cost(1, 1e-6), cost(0, 1)}) {
    DraftLength length(7, 0, false);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(demanded(length, 1, 0, each), 0);
      observe(length, StepOf(1, 0, 0), each);
    }
    for (int i = 0; i < 6; ++i) {
      const int64_t drafts = demanded(length, 1, 0, each);
      EXPECT_GE(drafts, 1);
      observe(length, StepOf(1, static_cast<int32_t>(drafts), 1), each);
    }
  }
}

TEST(DraftLength, AsManyAsPay) {
  const auto most = [](int64_t seqs, const StepCost& each, bool has_confidence = false) {
    DraftLength length = measured(seqs, each, has_confidence);
    return chosen(length, seqs, each);
  };
  EXPECT_EQ(most(1, cost(1, 1e-6)), 7) << "rows cost nothing";
  EXPECT_EQ(most(1, cost(0, 1)), 0) << "a row costs as much as a step";
  EXPECT_EQ(most(1, cost(1, 0.2)), 3) << "as far as they are accepted";
  // Confidences say where a sequence can use more than the average one.
  EXPECT_EQ(most(1, cost(1, 0.2), true), 5);
  // Rows of drafts may be found to cost less than those of as many sequences.
  EXPECT_EQ(most(64, cost(0, 1)), 0);
  DraftLength shared = measured(64, cost(0, 1));
  for (int i = 0; i < 30; ++i) observe(shared, StepOf(64, 3, 3), cost(0, 1), 0.3);
  EXPECT_GT(chosen(shared, 64, cost(0, 1)), 0);
}

// Of two sequences the one whose drafts fail is left out, until its record has faded.
TEST(DraftLength, GoesToTheSequencesWhoseDraftsAreAccepted) {
  const StepCost each = cost(1, 0.35);
  DraftLength length = measured(2, each);
  DraftRecord good, bad;
  for (int i = 0; i < 40; ++i) {
    good.add(true);
    bad.add(false);
  }
  const DraftDemand demand = chosen(length, {good, bad}, each);
  EXPECT_GT(demand.max_drafts, 0);
  EXPECT_GE(good.acceptance(demand.prior), demand.min_acceptance);
  EXPECT_LT(bad.acceptance(demand.prior), demand.min_acceptance);
  for (int i = 0; i < 400; ++i) bad.fade();
  EXPECT_NEAR(bad.acceptance(demand.prior), demand.prior, 0.01);
  EXPECT_EQ(chosen(length, 2, cost(0, 1)), 0);
}

// Off while rounds do not pay, tried again now and then, and on again when they do.
TEST(Trap, T15_OffBelowBreakEvenAndBackAgain) {
  const StepCost each = cost(1, 0.3);
  DraftLength length = measured(1, each);
  ASSERT_GT(chosen(length, 1, each), 0);
  const auto one_step = [&](bool accepts) {
    const auto drafts = static_cast<int32_t>(demanded(length, 1, 0, each));
    observe(length, StepOf(1, drafts, accepts ? drafts : 0), each);
    return drafts;
  };
  int64_t until_off = 0;
  for (int in_a_row = 0; in_a_row < 8 && until_off < 1000; ++until_off)
    in_a_row = one_step(false) == 0 ? in_a_row + 1 : 0;
  EXPECT_LT(until_off, 60);
  // What is tried costs about a hundredth of the time, and every length gets its turn.
  std::set<int32_t> lengths;
  double plain_seconds = 0, lost = 0;
  for (int i = 0; i < 3000; ++i) {
    const int32_t drafts = one_step(false);
    (drafts == 0 ? plain_seconds : lost) += drafts == 0 ? 1.3 : 0.3 * drafts + 0.001;
    if (drafts > 0) lengths.insert(drafts);
  }
  EXPECT_EQ(lengths, (std::set<int32_t>{1, 3, 7}));
  EXPECT_LT(lost, 0.015 * plain_seconds);
  EXPECT_GT(lost, 0.005 * plain_seconds);
  int64_t until_on = 0;
  for (int in_a_row = 0; in_a_row < 8 && until_on < 50'000; ++until_on)
    in_a_row = one_step(true) > 0 ? in_a_row + 1 : 0;
  EXPECT_LT(until_on, 512 * 20) << "accepted drafts do not bring drafting back";
}

// A round judges the accepted drafts and the first that was not; later ones say nothing.
TEST(DraftLength, LearnsFromWhatWasJudged) {
  const StepCost each = cost(1, 0.25);
  DraftLength length(4, 0, true);
  for (int i = 0; i < 2000; ++i) observe(length, StepOf(1, 4, i % 2 == 0 ? 2 : 1, 0.8F), each, 0.8);
  const std::vector<double> acceptance = length.acceptance();
  EXPECT_NEAR(acceptance[0], 1.0, 0.02);
  EXPECT_NEAR(acceptance[1], 0.5, 0.02);
  EXPECT_NEAR(acceptance[2], 0.0, 0.03);
  EXPECT_EQ(acceptance[3], acceptance[2]) << "never judged: as the one before";
  const DraftPolicy policy = length.policy(StepOf(1, 4, 0).plan, each);
  EXPECT_TRUE(policy.automatic);
  EXPECT_EQ(policy.num_decodes, 1);
  ASSERT_EQ(policy.seconds.size(), 5U);
  EXPECT_NEAR(policy.seconds[0], 1.25, 1e-9);
  EXPECT_NEAR(policy.seconds[2], 0.8 * 1.75, 1e-9) << "of what rounds were measured to take";
  EXPECT_NEAR(policy.seconds[4], 0.8 * 2.25, 1e-9);
  EXPECT_NEAR(policy.draft_seconds, 0.001, 1e-9);
  // Promises of .8 are brought to what was kept.
  EXPECT_NEAR(policy.factor[0], 1 / 0.8, 0.03);
  EXPECT_NEAR(policy.factor[1], 0.5 / 0.8, 0.03);
}

// --- n-grams ---

Ids found(const Ids& tokens, int64_t count, const NgramOptions& options = {}) {
  const auto span = NgramDrafter(options).find(tokens, count);
  return {span.begin(), span.end()};
}

TEST(Ngram, TheLongestMatchWins) {
  EXPECT_EQ(found({1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3}, 2), (Ids{7, 9}));
  // Only max_match tokens are compared: beyond them the latest wins.
  EXPECT_EQ(found({1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3}, 2, {.max_match = 2}), (Ids{8, 9}));
}

TEST(Ngram, OfEqualsTheLatest) { EXPECT_EQ(found({2, 3, 7, 2, 3, 8, 2, 3}, 8), (Ids{8, 2, 3})); }

TEST(Ngram, ShortOrNoMatches) {
  EXPECT_EQ(found({3, 7, 9, 3}, 8), Ids{});
  EXPECT_EQ(found({3, 7, 9, 3}, 2, {.min_match = 1}), (Ids{7, 9}));
  EXPECT_EQ(found({1, 2, 3, 4}, 8), Ids{});
  EXPECT_EQ(found({}, 8), Ids{});
  EXPECT_EQ(found({1}, 8), Ids{});
  EXPECT_EQ(found({1, 2}, 8), Ids{});
}

TEST(Ngram, LooksBackSoFar) {
  Ids tokens = {1, 2, 7};
  tokens.insert(tokens.end(), 20, 9);
  tokens.insert(tokens.end(), {1, 2});
  EXPECT_EQ(found(tokens, 1), Ids{7});
  EXPECT_EQ(found(tokens, 1, {.max_lookback = 25}), Ids{7});
  EXPECT_EQ(found(tokens, 1, {.max_lookback = 24}), Ids{}) << "the match begins before what is searched";
}

// The match may overlap the end that it matches; drafts end where the text does.
TEST(Ngram, OverlappingRepeats) {
  EXPECT_EQ(found({5, 5, 5}, 8), Ids{5});
  EXPECT_EQ(found({4, 6, 4, 6, 4, 6}, 8), (Ids{4, 6}));
}

TEST(Ngram, ProposesForEachSequence) {
  NgramDrafter drafter({});
  ThreadPool pool(1);
  Arena arena;
  SingleRank comm;
  Exec exec({.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool, .arena = &arena, .comm = &comm});
  const Ids repeats = {2, 3, 7, 8, 2, 3}, fresh = {1, 2, 3, 4}, loop = {5, 5, 5};
  const std::vector<DraftSequence> sequences = {{.tokens = repeats}, {.tokens = fresh}, {.tokens = loop}};
  const Drafts drafts = drafter.propose(exec, sequences, 0, 3);
  EXPECT_EQ(drafts.width, 3);
  EXPECT_EQ(drafts.ids, (Ids{7, 8, 2, -1, -1, -1, 5, -1, -1}));
  EXPECT_TRUE(drafts.confidence.empty());
  EXPECT_FALSE(drafts.laws.is_set());
}

// --- counts ---

using CountMap = std::vector<std::pair<int32_t, int32_t>>;
CountMap listed(const TokenCounts& counts) {
  CountMap list;
  for (size_t i = 0; i < counts.ids().size(); ++i) list.emplace_back(counts.ids()[i], counts.counts()[i]);
  return list;
}
CountMap counted(const Ids& tokens, int64_t num_prompt) {
  TokenCounts counts;
  counts.update(tokens, num_prompt);
  return listed(counts);
}
Ids joined(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(TokenCounts, DraftsAreTakenBack) {
  const Ids tokens = {1, 2, 1, 3, 4}, drafts = {3, 5, 1, 5, 6};
  TokenCounts counts;
  counts.update(tokens, 3);
  counts.update(joined(tokens, drafts), 3);
  EXPECT_EQ(listed(counts), (CountMap{{1, 1}, {2, 0}, {3, 2}, {4, 1}, {5, 2}, {6, 1}}));
  counts.truncate(tokens, drafts);
  EXPECT_EQ(listed(counts), (CountMap{{1, 0}, {2, 0}, {3, 1}, {4, 1}}));
  counts.truncate(tokens, drafts);  // nothing is left to take back
  EXPECT_EQ(listed(counts), counted(tokens, 3));
  TokenCounts empty;
  empty.truncate(tokens, drafts);  // never asked
  EXPECT_TRUE(empty.ids().empty());
}

// Rounds of every kind: counts after one are those of counting afresh, and so are those of the next update.
TEST(TokenCounts, AnyRoundsGiveWhatCountingAfreshGives) {
  Rng rng(3);
  for (int run = 0; run < 300; ++run) {
    const auto num_prompt = static_cast<int64_t>(rng.below(6));
    Ids tokens;
    for (int64_t i = 0; i < num_prompt + rng.below(3); ++i) tokens.push_back(static_cast<int32_t>(rng.below(6)));
    TokenCounts counts;
    for (int round = 0; round < 12; ++round) {
      Ids drafts;
      for (int64_t i = rng.below(8); i > 0; --i) drafts.push_back(static_cast<int32_t>(rng.below(9)));
      for (size_t k = 0; k <= drafts.size(); ++k) {  // row by row, as far as the sampler asks
        if (rng.below(5) == 0) break;
        Ids seen = tokens;
        seen.insert(seen.end(), drafts.begin(), drafts.begin() + static_cast<int64_t>(k));
        counts.update(seen, num_prompt);
        EXPECT_EQ(listed(counts), counted(seen, num_prompt));
      }
      counts.truncate(tokens, drafts);
      const auto accepted = static_cast<int64_t>(rng.below(static_cast<int64_t>(drafts.size()) + 1));
      tokens.insert(tokens.end(), drafts.begin(), drafts.begin() + accepted);
      tokens.push_back(static_cast<int32_t>(rng.below(9)));
      if (rng.below(2) == 0) {
        counts.update(tokens, num_prompt);
        EXPECT_EQ(listed(counts), counted(tokens, num_prompt));
      }
    }
  }
}

}  // namespace
}  // namespace moat
