// SPDX-License-Identifier: Apache-2.0
// Speculative decoding against goldens of independent PyTorch code, and against decoding without it. Traps carry the
// numbers of docs/design/dspark.md section 7.
//   MOAT_SPECULATION=full   all 200 prompts, and as many rounds as the statistics want
#include <cmath>

#include "base/rng.h"
#include "speculative_engine.h"

namespace moat {
namespace {

using test::Ask;
using test::chosen_prompts;
using test::EngineUnderTest;
using test::golden_prompts;
using test::GoldenPrompt;
using test::ints;
using test::models;
using test::Outcome;
using test::read_golden;
using test::run_all;
using test::RunSampling;
using test::SpeculativeRun;

std::vector<double> numbers(const Json& list) {
  std::vector<double> out;
  for (const Json& item : list.as_array()) out.push_back(item.as_double());
  return out;
}
double number(const Json& object, const char* key, double absent) {
  const Json* value = object.find_set(key);
  return value == nullptr ? absent : value->as_double();
}

constexpr int32_t kStop = 4866;  // of moat-nano

// --- goldens ---

// 22 generations: drafts, confidences, verdicts and tokens, round by round, with the golden's random numbers.
TEST(Golden, Rounds) {
  const Json golden = read_golden("rounds.json");
  int64_t rounds = 0;
  double worst = 0;
  for (const Json& row : golden.as_array()) {
    const bool sampled = row.find("mode")->as_string() == "sampled";
    RunSampling sampling;
    std::vector<double> draft, accept, bonus;
    if (sampled) {
      sampling = {.temperature = static_cast<float>(number(row, "temperature", 1.0)),
                  .top_k = static_cast<int32_t>(number(row, "top_k", 0)),
                  .top_p = static_cast<float>(number(row, "top_p", 1.0))};
      const Json& uniforms = *row.find("uniforms");
      draft = numbers(*uniforms.find("draft"));
      accept = numbers(*uniforms.find("accept"));
      bonus = numbers(*uniforms.find("bonus"));
    }
    SpeculativeRun run(models(), 512, sampling);
    size_t next_draft = 0, next_accept = 0, next_bonus = 0;
    run.prefill(ints(*row.find("prompt")), sampled ? bonus[next_bonus++] : 0.0);
    const size_t first = run.tokens().size() - 1;
    for (const Json& want : row.find("rounds")->as_array()) {
      const int64_t gamma = 7;
      SpeculativeRun::Numbers numbers;
      if (sampled) {
        numbers.draft.assign(draft.begin() + static_cast<int64_t>(next_draft),
                             draft.begin() + static_cast<int64_t>(next_draft) + gamma);
        next_draft += gamma;
        const size_t tests = want.find("accept_uniforms")->as_array().size();
        numbers.accept.assign(accept.begin() + static_cast<int64_t>(next_accept),
                              accept.begin() + static_cast<int64_t>(next_accept + tests));
        next_accept += tests;
        numbers.bonus = bonus[next_bonus++];
      }
      const SpeculativeRun::Round got = run.round(numbers);
      ++rounds;
      EXPECT_EQ(got.drafts, ints(*want.find("drafts"))) << "round " << rounds;
      EXPECT_EQ(got.accepted, *want.find("accepted")->as_int64()) << "round " << rounds;
      EXPECT_EQ(got.bonus, *want.find("bonus")->as_int64()) << "round " << rounds;
      const std::vector<double> confidence = ::moat::numbers(*want.find("confidence"));
      for (size_t k = 0; k < confidence.size(); ++k) {
        worst = std::max(worst, std::fabs(confidence[k] - double{got.confidence[k]}));
      }
    }
    const std::vector<int32_t> ids = ints(*row.find("ids"));
    ASSERT_GE(run.tokens().size(), first + ids.size());
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), run.tokens().begin() + static_cast<int64_t>(first)));
  }
  fmt::print("{} rounds of {} generations; confidences off by at most {:.1e}\n", rounds, golden.as_array().size(),
             worst);
  EXPECT_LT(worst, 1e-3);
}

// Accepted drafts of every round of greedy decoding, on prompts that neither model saw.
TEST(Golden, AcceptedCountsOfEveryRound) {
  int64_t rounds = 0, accepted = 0, differing = 0;
  for (const size_t i : chosen_prompts(40)) {
    const GoldenPrompt& golden = golden_prompts()[i];
    SpeculativeRun run(models(), static_cast<int64_t>(golden.prompt.size()) + 160);
    run.prefill(golden.prompt);
    std::vector<int32_t> got;
    for (size_t r = 0; r < golden.accepted.size(); ++r) got.push_back(run.round().accepted);
    if (got != golden.accepted) {
      ++differing;
      fmt::print("prompt {} differs; its smallest gap is {}\n", i, golden.gap);
      EXPECT_LT(golden.gap, 1e-3) << "prompt " << i;
    }
    rounds += static_cast<int64_t>(got.size());
    accepted += std::accumulate(got.begin(), got.end(), int64_t{0});
  }
  fmt::print("{} rounds, {:.3f} tokens a round; {} prompts differ\n", rounds,
             1 + static_cast<double>(accepted) / static_cast<double>(rounds), differing);
}

// --- the engine: with drafts = without ---

std::vector<Ask> golden_asks(size_t count, const SamplingParams& sampling) {
  std::vector<Ask> asks;
  for (const size_t i : chosen_prompts(count)) {
    Ask& ask = asks.emplace_back();
    ask.prompt = golden_prompts()[i].prompt;
    ask.sampling = sampling;
    ask.sampling.max_tokens = 128;
    ask.sampling.seed = 1000 + i;
  }
  return asks;
}

// A cancelled request may have got further with drafts than without, or less far: what both have must agree.
void expect_same(const Outcome& got, const Outcome& want, const std::vector<Ask>& asks, const char* what) {
  for (size_t i = 0; i < asks.size(); ++i) {
    std::vector<int32_t> a = got.replies[i], b = want.replies[i];
    if (asks[i].cancel_after >= 0) {
      const size_t common = std::min(a.size(), b.size());
      a.resize(common);
      b.resize(common);
    }
    EXPECT_EQ(a, b) << what << ", prompt " << i;
  }
}

SamplingParams greedy() { return {.temperature = 0.0F}; }
SamplingParams seeded() { return {.temperature = 0.8F, .top_p = 0.95F, .seeded = true}; }

class OnEqualsOff : public ::testing::TestWithParam<bool> {
 protected:
  // One by one without drafts; then with drafts one by one, 16 together, in a pool that is too small for them, and with
  // cancels and requests that want no drafts in between.
  void check(const SamplingParams& sampling, size_t count) {
    EngineUnderTest engine({.deterministic = GetParam()});
    const std::vector<Ask> asks = golden_asks(count, sampling);
    std::vector<Ask> one(1);
    Outcome plain;
    SchedulerStats alone;
    for (const Ask& ask : asks) {
      one[0] = ask;
      plain.replies.push_back(run_all(engine.parts, one, 0).replies[0]);
      const Outcome drafted = run_all(engine.parts, one, 7);
      EXPECT_EQ(drafted.replies[0], plain.replies.back()) << "alone";
      alone.draft_rounds += drafted.stats.draft_rounds;
      alone.accepted_tokens += drafted.stats.accepted_tokens;
    }
    expect_same(run_all(engine.parts, asks, 7), plain, asks, "together");
    const Outcome automatic = run_all(engine.parts, asks, -1);
    expect_same(automatic, plain, asks, "together, as many drafts as pay");
    // Long replies, so that sequences outgrow what they were admitted with.
    std::vector<Ask> long_asks = asks;
    for (Ask& ask : long_asks) ask.sampling.ignore_eos = true;
    const Outcome tight = run_all(engine.parts, long_asks, 7, 72);
    expect_same(tight, run_all(engine.parts, long_asks, 0), long_asks, "in a small pool");
    EXPECT_GT(tight.stats.preemptions, 0);
    std::vector<Ask> disturbed = asks;
    for (size_t i = 0; i < disturbed.size(); ++i) {
      if (i % 5 == 2) disturbed[i].cancel_after = static_cast<int64_t>(i % 20);
      disturbed[i].speculative = i % 4 != 1;
    }
    expect_same(run_all(engine.parts, disturbed, 5, 96), plain, disturbed, "with cancels and plain requests");
    fmt::print("{} prompts, {:.2f} tokens a round alone; {} preemptions in the small pool\n", asks.size(),
               1 + static_cast<double>(alone.accepted_tokens) / static_cast<double>(alone.draft_rounds),
               tight.stats.preemptions);
  }
};
INSTANTIATE_TEST_SUITE_P(Forms, OnEqualsOff, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Deterministic" : "Default"; });

TEST_P(OnEqualsOff, Greedy) { check(greedy(), 16); }
TEST_P(OnEqualsOff, SeededAtTemperature) { check(seeded(), 16); }

// The same conversation again, longer by its reply and a new message: the prefix is restored, and so is the drafter's
// context, which lives in the same blocks.
TEST_P(OnEqualsOff, T16_SecondTurnsAfterAPrefixHit) {
  EngineUnderTest engine({.deterministic = GetParam()});
  std::vector<Ask> first = golden_asks(12, greedy());
  first.resize(12);
  for (size_t i = 0; i + 1 < first.size(); ++i) {  // longer prompts: three conversations one after the other
    for (size_t j = 1; j < 3; ++j) {
      const std::vector<int32_t>& more = golden_prompts()[i + j].prompt;
      first[i].prompt.insert(first[i].prompt.end(), more.begin(), more.end());
    }
  }
  const auto second_turn = [&](const Outcome& one) {
    std::vector<Ask> asks = first;
    for (size_t i = 0; i < asks.size(); ++i) {
      asks[i].prompt.insert(asks[i].prompt.end(), one.replies[i].begin(), one.replies[i].end());
      asks[i].prompt.insert(asks[i].prompt.end(), golden_prompts()[0].prompt.begin(), golden_prompts()[0].prompt.end());
    }
    return asks;
  };
  // Both turns through one scheduler, so that the second finds what the first left.
  const auto both = [&](int64_t fixed, bool restore, SchedulerStats& stats) {
    Scheduler scheduler(engine.parts.scheduler_options, engine.parts.capacity.cache, engine.parts.ledger_options);
    engine.parts.draft_length = fixed == 0 ? DraftLength() : DraftLength(7, fixed, true);
    Stepper stepper(engine.parts, scheduler);
    Outcome turns[2];
    for (int turn = 0; turn < 2; ++turn) {
      const std::vector<Ask> asks = turn == 0 ? first : second_turn(turns[0]);
      turns[turn].replies.resize(asks.size());
      const SequenceId base = static_cast<SequenceId>(1 + turn * 1000);
      for (size_t i = 0; i < asks.size(); ++i) {
        Request request;
        request.prompt_ids = asks[i].prompt;
        request.sampling = asks[i].sampling;
        request.restore_prefix = restore;
        scheduler.add(base + i, std::move(request));
      }
      const SchedulerStats before = scheduler.stats();
      StepPlan plan;
      std::vector<SequenceEvent> events;
      while (!scheduler.idle()) {
        stepper.schedule(plan, events, 0);
        stepper.run(plan, events);
        for (const SequenceEvent& e : events) {
          for (const SampledToken& t : e.event.tokens) turns[turn].replies[e.sequence - base].push_back(t.token_id);
        }
        events.clear();
      }
      stats = scheduler.stats();
      stats.draft_rounds -= before.draft_rounds;
      stats.accepted_tokens -= before.accepted_tokens;
    }
    return turns[1].replies;
  };
  SchedulerStats plain, warm, cold;
  const auto want = both(0, true, plain);
  const auto got = both(7, true, warm);
  const auto fresh = both(7, false, cold);
  EXPECT_EQ(got, want);
  EXPECT_EQ(fresh, want);
  EXPECT_GT(warm.cached_prompt_tokens, 0);
  const auto length = [](const SchedulerStats& s) {
    return 1 + static_cast<double>(s.accepted_tokens) / static_cast<double>(s.draft_rounds);
  };
  fmt::print("second turns: {} of {} prompt tokens cached; {:.3f} tokens a round, {:.3f} without restoring\n",
             warm.cached_prompt_tokens, warm.admitted_prompt_tokens, length(warm), length(cold));
  EXPECT_NEAR(length(warm), length(cold), 0.02 * length(cold));
}

}  // namespace
}  // namespace moat
