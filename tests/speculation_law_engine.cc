// SPDX-License-Identifier: Apache-2.0
// Part of speculation_law_test: the law of replies of whole engines, moat-nano with its drafter. What the first tokens
// of many unseeded requests are against the exact law and against replies without drafts; the same with a drafter that
// lies about its law; how many tokens a round gives; and greedy replies under every parameter, alone and mixed.
//   MOAT_SPECULATION=full   as many draws and rounds as the statistics want
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "base/rng.h"
#include "chi_square.h"
#include "engine/sequence_logits.h"
#include "plain_law.h"
#include "speculative_engine.h"

namespace moat {
namespace {

using test::Ask;
using test::ChiSquare;
using test::EngineUnderTest;
using test::golden_prompts;
using test::models;
using test::Outcome;
using test::run_all;

using Tokens = std::vector<int32_t>;

constexpr int64_t kMaxDrafts = 7;
constexpr size_t kLength = 3;  // tokens of a reply whose joint law is looked at

int32_t eos() { return static_cast<int32_t>(models().target->config.eos_token_id); }

// --- the exact law of the first tokens ---

// The target's logits after a prompt and the beginning of a reply.
class ReplyLogits {
 public:
  explicit ReplyLogits(Tokens prompt) : prompt_(std::move(prompt)) {
    auto made = SequenceLogits::create(*models().target, {.max_tokens = 512}, models().pool);
    EXPECT_TRUE(made.ok()) << made.status().message();
    forward_ = std::move(made).value();
  }

  const Tokens& prompt() const { return prompt_; }

  const std::vector<float>& after(const Tokens& reply) {
    std::vector<float>& row = rows_[reply];
    if (!row.empty()) return row;
    Tokens all = prompt_;
    all.insert(all.end(), reply.begin(), reply.end());
    forward_->restart();
    const Status status = forward_->append(all, 0, [&](int64_t, const Tensor& logits) {
      const float* last = logits.row(logits.dim(0) - 1);
      row.assign(last, last + logits.dim(1));
    });
    EXPECT_TRUE(status.ok()) << status.message();
    return row;
  }

  std::vector<double> law(const SamplingParams& params, const Tokens& reply) {
    return test::plain_law(after(reply), params, prompt_, reply, eos());
  }

 private:
  Tokens prompt_;
  std::unique_ptr<SequenceLogits> forward_;
  std::map<Tokens, std::vector<float>> rows_;
};

// Cells of replies: a reply is in the cell of its longest beginning that has one. Likely beginnings are followed to
// kLength tokens; what is rare after one stays in the cell of that beginning.
struct Cells {
  std::map<Tokens, size_t> index;
  std::vector<double> law;

  void add(const Tokens& beginning, double chance) {
    index.emplace(beginning, law.size());
    law.push_back(chance);
  }
  size_t of(Tokens reply) const {
    while (!index.contains(reply)) reply.pop_back();
    return index.at(reply);
  }
  std::vector<double> count(const std::vector<Tokens>& replies) const {
    std::vector<double> counts(law.size(), 0.0);
    for (const Tokens& reply : replies)
      ++counts[of(Tokens(reply.begin(), reply.begin() + std::min(reply.size(), kLength)))];
    return counts;
  }
};

Cells exact_cells(ReplyLogits& logits, const SamplingParams& params) {
  constexpr double kLikely = 0.02, kRare = 1e-4;
  Cells cells;
  const std::function<void(const Tokens&, double)> follow = [&](const Tokens& beginning, double chance) {
    const std::vector<double> law = logits.law(params, beginning);
    double rest = 0;
    for (size_t v = 0; v < law.size(); ++v) {
      const double p = chance * law[v];
      if (p < kRare) {
        rest += p;
        continue;
      }
      Tokens longer = beginning;
      longer.push_back(static_cast<int32_t>(v));
      const bool ended = longer.back() == eos() || longer.size() == kLength;
      if (ended || p < kLikely) {
        cells.add(longer, p);
      } else {
        follow(longer, p);
      }
    }
    cells.add(beginning, rest);
  };
  follow({}, 1.0);
  return cells;
}

double entropy(const std::vector<double>& law) {
  double sum = 0;
  for (const double p : law) sum -= p > 0 ? p * std::log(p) : 0.0;
  return sum;
}

constexpr int64_t kBlockSize = 8;  // small: most of the prompt is restored, not computed, for each of many requests

// From the middle of a reply: the token that the prompt pass gives is certain, the next two, which are drafted, are
// open, and a fifth of their first drafts is rejected, so that both verdicts come often.
const Tokens& uncertain_prompt() {
  static const Tokens prompt = [] {
    Tokens out = golden_prompts()[5].prompt;
    for (const int32_t id : {73, 1409, 259, 852, 947, 351, 464, 3725, 311, 259, 3024, 46, 4868, 308, 4869, 4867, 300}) {
      out.push_back(id);
    }
    return out;
  }();
  return prompt;
}

std::vector<Tokens> draw_replies(EngineParts& parts, const SamplingParams& params, int64_t count, int64_t num_drafts,
                                 uint64_t first_seed, int64_t* accepted = nullptr) {
  Ask ask{.prompt = uncertain_prompt(), .sampling = params, .cancel_after = static_cast<int64_t>(kLength)};
  ask.sampling.seeded = false;
  ask.sampling.max_tokens = static_cast<int32_t>(kLength) + kMaxDrafts;  // room for a whole round after two tokens
  std::vector<Ask> asks(static_cast<size_t>(count), ask);
  for (size_t i = 0; i < asks.size(); ++i) asks[i].sampling.seed = first_seed + i;
  Outcome outcome = run_all(parts, asks, num_drafts);
  EXPECT_GT(outcome.stats.cached_prompt_tokens, outcome.stats.admitted_prompt_tokens / 2);
  if (accepted != nullptr) *accepted = outcome.stats.accepted_tokens;
  return std::move(outcome.replies);
}

struct Setting {
  const char* name;
  SamplingParams params;
};
std::vector<Setting> settings() {
  std::vector<Setting> out;
  for (const Setting& kind : std::vector<Setting>{{"none", {}},
                                                  {"top_k 20", {.top_k = 20}},
                                                  {"top_p 0.9", {.top_p = 0.9F}},
                                                  {"min_p 0.05", {.min_p = 0.05F}},
                                                  {"repetition 1.2", {.repetition_penalty = 1.2F}}}) {
    for (const float temperature : {1.0F, 0.7F}) {
      out.push_back(kind);
      out.back().params.temperature = temperature;
    }
  }
  return out;
}

// Of one setting, an index. Without "full" the first one gets many, and each parameter comes once, by turns at either
// temperature.
int64_t num_draws(size_t setting) {
  if (test::is_full_speculation()) return 20'000;
  if (setting == 0) return 2'000;
  return setting / 2 % 2 == setting % 2 ? 200 : 0;
}

constexpr double kSame = 1e-4, kOther = 1e-6;  // p-values

TEST(EngineLaw, FirstTokensWithDraftsAreThoseWithout) {
  EngineUnderTest engine({}, kBlockSize);
  ReplyLogits logits(uncertain_prompt());
  EXPECT_GT(entropy(exact_cells(logits, {.temperature = 1.0F}).law), 1.5) << "there is hardly anything to see";
  uint64_t seed = 1'000'000;
  const std::vector<Setting> all = settings();
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& [name, params] = all[i];
    const int64_t count = num_draws(i);
    if (count == 0) continue;
    const Cells cells = exact_cells(logits, params);
    int64_t accepted = 0;
    const std::vector<Tokens> drafted = draw_replies(engine.parts, params, count, kMaxDrafts, seed, &accepted);
    const int64_t num_plain = test::is_full_speculation() ? count : count / 2;
    const std::vector<Tokens> plain = draw_replies(engine.parts, params, num_plain, 0, seed + 500'000);
    seed += 1'000'000;
    const std::vector<double> with = cells.count(drafted);
    const std::vector<double> without = cells.count(plain);
    const ChiSquare law = test::chi_square_against_law(with, cells.law);
    const ChiSquare two = test::chi_square_of_two(with, without);

    for (size_t c = 0; c < cells.law.size(); ++c) {
      EXPECT_TRUE(cells.law[c] > 0 || with[c] == 0) << "a reply that cannot be, " << name;
    }

    // The second token after the most common first one, by itself: a draft or what replaced it.
    const std::vector<double> first_law = logits.law(params, {});
    const Tokens common = {
        static_cast<int32_t>(std::max_element(first_law.begin(), first_law.end()) - first_law.begin())};
    const std::vector<double> second_law = logits.law(params, common);
    std::vector<double> second(second_law.size(), 0.0);
    for (const Tokens& reply : drafted) {
      if (reply[0] == common[0] && reply.size() > 1) ++second[static_cast<size_t>(reply[1])];
    }
    const ChiSquare conditional = test::chi_square_against_law(second, second_law);
    fmt::print(
        "{:<14} at {:.1f}: against the exact law chi2 {:.1f} / {}, p {:.4f}; second token given the first {:.1f} / {}, "
        "p {:.4f}; with and without {:.1f} / {}, p {:.4f}; {} draws, {:.2f} drafts accepted each\n",
        name, params.temperature, law.statistic, law.degrees, law.p, conditional.statistic, conditional.degrees,
        conditional.p, two.statistic, two.degrees, two.p, count,
        static_cast<double>(accepted) / static_cast<double>(count));
    EXPECT_GT(law.p, kSame) << name;
    EXPECT_GT(conditional.p, kSame) << name;
    EXPECT_GT(two.p, kSame) << name;
    EXPECT_GT(accepted, count / 8);
  }
}

// --- a drafter that lies about its law ---

// Draws every draft from one law, or claims to: what it proposes then is the most likely id.
class FixedLawDrafter final : public Drafter {
 public:
  explicit FixedLawDrafter(std::vector<double> law) : law_(std::move(law)) {}

  bool lies = false;

  int64_t max_drafts() const override { return kMaxDrafts; }
  std::string describe() const override { return "one law for every draft"; }
  Drafts propose(Exec& exec, std::span<const DraftSequence> sequences, int64_t, int64_t num_drafts) override {
    const auto vocab = static_cast<int64_t>(law_.size());
    const auto rows = static_cast<int64_t>(sequences.size()) * num_drafts;
    Drafts out{.width = num_drafts, .laws = exec.arena().alloc(DType::kF32, {rows, vocab})};
    if (exec.dry()) return out;
    for (int64_t r = 0; r < rows; ++r) std::copy(law_.begin(), law_.end(), out.laws.row(r));
    const auto best = static_cast<int32_t>(std::max_element(law_.begin(), law_.end()) - law_.begin());
    for (const DraftSequence& s : sequences) {
      for (uint64_t k = 0; k < static_cast<uint64_t>(num_drafts); ++k) {
        const uint64_t counter = draft_counter(s.tokens.size(), k);
        out.ids.push_back(lies ? best : draw(random_uniform(s.params->seed, counter, RandomPurpose::kDraft)));
      }
    }
    return out;
  }
  void dry_propose(Exec& exec, int64_t seqs, int64_t, bool upper_end) override {
    const ArenaScope scope(exec.arena());
    propose(exec, std::vector<DraftSequence>(static_cast<size_t>(seqs)), 0, upper_end ? kMaxDrafts : 1);
  }

 private:
  int32_t draw(double u) const {
    size_t v = 0;
    for (double sum = law_[0]; sum <= u && v + 1 < law_.size(); sum += law_[v]) ++v;
    return static_cast<int32_t>(v);
  }
  std::vector<double> law_;
};

TEST(EngineLaw, T29_ADrafterThatLiesAboutItsLawIsCaught) {
  ReplyLogits logits(uncertain_prompt());
  const SamplingParams params{.temperature = 1.0F};
  const Cells cells = exact_cells(logits, params);
  // What comes second, whatever came first: as good a guess as one law can be.
  const std::vector<double> first = logits.law(params, {});
  std::vector<double> guess(first.size(), 1e-6);
  for (size_t v = 0; v < first.size(); ++v) {
    if (first[v] < 0.02) continue;
    const std::vector<double> second = logits.law(params, {static_cast<int32_t>(v)});
    for (size_t w = 0; w < guess.size(); ++w) guess[w] += first[v] * second[w];
  }
  test::keep_at_least(guess, 0.0);
  FixedLawDrafter drafter(guess);
  EngineUnderTest engine({.custom_drafter = &drafter}, kBlockSize);
  const int64_t count = test::is_full_speculation() ? 20'000 : 300;
  ChiSquare results[2];
  for (const bool lies : {false, true}) {
    drafter.lies = lies;
    int64_t accepted = 0;
    const std::vector<Tokens> replies =
        draw_replies(engine.parts, params, count, kMaxDrafts, lies ? 51'000'000 : 52'000'000, &accepted);
    results[lies] = test::chi_square_against_law(cells.count(replies), cells.law);
    fmt::print("control: argmax drafts, soft law {:<6}: chi2 {:.1f} / {}, p {:.1e}; {:.2f} drafts accepted each\n",
               lies ? "lies" : "honest", results[lies].statistic, results[lies].degrees, results[lies].p,
               static_cast<double>(accepted) / static_cast<double>(count));
    EXPECT_GT(accepted, count / 20);
  }
  EXPECT_GT(results[false].p, kSame);
  EXPECT_LT(results[true].p, kOther);
}

// --- tokens a round ---

struct Mean {
  double sum = 0, squares = 0, count = 0;
  void add(double x) {
    sum += x;
    squares += x * x;
    ++count;
  }
  double mean() const { return sum / count; }
  double deviation() const { return std::sqrt((squares - sum * sum / count) / (count - 1)); }
  double error() const { return deviation() / std::sqrt(count); }
};

constexpr int64_t kReplyTokens = 96;                               // as the reference
constexpr double kReferenceTokens = 5.42, kReferenceRounds = 192;  // models/moat-nano-dspark/README.md

int64_t num_rounds() { return test::is_full_speculation() ? 3'000 : 300; }

// Prompts far from each other first, then those between.
size_t prompt_at(size_t i) { return i * 37 % golden_prompts().size(); }

// Whole rounds, and those in which the reply goes on: an engine does not draft past the end of a reply.
struct Rounds {
  Mean all, inner;
};
Rounds component_rounds(AcceptRule rule) {
  Rounds out;
  for (size_t i = 0; out.all.count < static_cast<double>(num_rounds()); ++i) {
    const Tokens& prompt = golden_prompts()[prompt_at(i)].prompt;
    test::SpeculativeRun run(models(), static_cast<int64_t>(prompt.size()) + kReplyTokens + 16,
                             {.temperature = 1.0F, .top_p = 0.95F, .rule = rule});
    Rng rng(3'000 + i);
    run.prefill(prompt, rng.uniform());
    const auto reply_begin = static_cast<int64_t>(prompt.size());
    const auto ended = [&] {
      const Tokens& tokens = run.tokens();
      return std::find(tokens.begin() + reply_begin, tokens.end(), eos()) != tokens.end();
    };
    while (!ended() && static_cast<int64_t>(run.tokens().size()) - reply_begin < kReplyTokens) {
      test::SpeculativeRun::Numbers numbers;
      for (int64_t k = 0; k < kMaxDrafts; ++k) {
        numbers.draft.push_back(rng.uniform());
        numbers.accept.push_back(rng.uniform());
      }
      numbers.bonus = rng.uniform();
      const double tokens = run.round(numbers).accepted + 1;
      out.all.add(tokens);
      if (!ended()) out.inner.add(tokens);
    }
  }
  return out;
}

Mean engine_rounds() {
  EngineUnderTest engine({});
  Mean inner;
  for (size_t i = 0; inner.count < static_cast<double>(num_rounds());) {
    std::vector<Ask> asks;
    for (; asks.size() < 16; ++i) {
      Ask& ask = asks.emplace_back();
      ask.prompt = golden_prompts()[prompt_at(i)].prompt;
      ask.cancel_after = kReplyTokens;
      ask.sampling = {.temperature = 1.0F,
                      .top_p = 0.95F,
                      .seed = 7'000 + i,
                      .seeded = false,
                      .max_tokens = kReplyTokens + kMaxDrafts + 1};
    }
    for (const auto& steps : run_all(engine.parts, asks, kMaxDrafts).drafted_steps) {
      for (const test::DraftedStep& step : steps) {
        if (!step.ends) inner.add(step.accepted + 1);
      }
    }
  }
  return inner;
}

TEST(Acceptance, TokensARoundAtTemperatureOne) {
  const Rounds token = component_rounds(AcceptRule::kToken);
  const Rounds block = component_rounds(AcceptRule::kBlock);
  const Mean engine = engine_rounds();
  const double reference_error = token.all.deviation() / std::sqrt(kReferenceRounds);
  const auto line = [](const char* what, const Mean& m) {
    fmt::print("  {:<44} {:.3f} +- {:.3f}  ({} rounds, deviation {:.2f})\n", what, m.mean(), m.error(), m.count,
               m.deviation());
  };
  fmt::print("tokens a round at temperature 1.0, top_p 0.95\n");
  fmt::print("  {:<44} {:.3f} +- {:.3f}  ({} rounds)\n", "reference, token rule", kReferenceTokens, reference_error,
             kReferenceRounds);
  line("token rule, all rounds", token.all);
  line("block rule, all rounds", block.all);
  line("token rule, but those that end a reply", token.inner);
  line("block rule, but those that end a reply", block.inner);
  line("engine (block rule), but those", engine);
  const auto within = [&](double error) { return 2 * std::hypot(error, reference_error); };
  EXPECT_NEAR(token.all.mean(), kReferenceTokens, within(token.all.error()));
  EXPECT_GT(block.all.mean(), kReferenceTokens - within(block.all.error()));
  EXPECT_GT(block.all.mean(), token.all.mean() - 2 * std::hypot(block.all.error(), token.all.error()));
  EXPECT_GT(engine.mean(), kReferenceTokens - within(engine.error()));
}

// --- greedy and seeded replies under every parameter ---

std::vector<Ask> asks_with(const std::vector<SamplingParams>& kinds, size_t count) {
  std::vector<Ask> asks;
  for (size_t i = 0; i < count; ++i) {
    Ask& ask = asks.emplace_back();
    ask.prompt = golden_prompts()[prompt_at(i)].prompt;
    ask.sampling = kinds[i % kinds.size()];
    ask.sampling.max_tokens = 64;
    ask.sampling.seed = 400 + i;
  }
  return asks;
}

// Every ask with drafts, all together, against each alone without. Those that are drawn have no one reply to compare.
Outcome expect_solo_replies(EngineParts& parts, const std::vector<Ask>& asks) {
  Outcome together = run_all(parts, asks, kMaxDrafts);
  for (size_t i = 0; i < asks.size(); ++i) {
    if (is_drawn(asks[i].sampling)) continue;
    EXPECT_EQ(together.replies[i], run_all(parts, {asks[i]}, 0).replies[0]) << "request " << i;
  }
  return together;
}

// 36: penalties and min_tokens under speculation. 38: min_p and bias as well. With 37, a row sees the drafts before it.
TEST(Trap, T36_PenaltiesAndMinTokensWithDraftsAreThoseWithout) {
  EngineUnderTest engine({});
  const std::vector<SamplingParams> kinds = {
      {.temperature = 0.0F, .presence_penalty = 2.0F, .repetition_penalty = 1.4F},
      {.temperature = 0.0F, .frequency_penalty = 2.0F},
      {.temperature = 0.0F, .repetition_penalty = 1.6F},
      {.temperature = 0.0F, .min_tokens = 60},
      {.temperature = 0.0F, .min_p = 0.1F, .logit_bias = {{eos(), -30.0F}, {300, 4.0F}}},
      {.temperature = 0.8F, .min_p = 0.05F, .frequency_penalty = 2.0F, .repetition_penalty = 1.4F},
  };
  const std::vector<Ask> asks = asks_with(kinds, 18);
  const Outcome with = expect_solo_replies(engine.parts, asks);
  // Each parameter changes something, or equality says little.
  std::set<size_t> changed;
  for (size_t i = 0; i < asks.size(); ++i) {
    Ask bare = asks[i];
    bare.sampling = {.temperature = bare.sampling.temperature, .seed = bare.sampling.seed, .max_tokens = 64};
    if (run_all(engine.parts, {bare}, 0).replies[0] != with.replies[i]) changed.insert(i % kinds.size());
  }
  EXPECT_EQ(changed, (std::set<size_t>{0, 1, 2, 3, 4, 5}));
  for (size_t i = 3; i < asks.size(); i += kinds.size()) EXPECT_GE(with.replies[i].size(), 60);
  EXPECT_GT(with.stats.accepted_tokens, with.stats.draft_rounds);
}

// 72: heterogeneous batches, with drawn requests of many kinds and lengths as company.
TEST(Trap, T72_AMixedBatchIsItsSoloRuns) {
  EngineUnderTest engine({});
  const std::vector<SamplingParams> kinds = {
      {.temperature = 0.0F},
      {.temperature = 1.0F, .seeded = false},
      {.temperature = 0.6F, .top_k = 5, .top_p = 0.9F},
      {.temperature = 0.0F, .presence_penalty = 1.0F, .num_logprobs = 2},
      {.temperature = 1.4F, .min_p = 0.1F, .seeded = false, .min_tokens = 20},
      {.temperature = 0.0F, .bad_words = {{300}, {349, 364}}, .ignore_eos = true},
      {.temperature = 0.9F, .top_p = 0.7F, .seeded = false, .frequency_penalty = 0.5F, .logit_bias = {{eos(), -3.0F}}},
  };
  std::vector<Ask> asks = asks_with(kinds, 21);
  for (size_t i = 0; i < asks.size(); ++i) {
    asks[i].sampling.max_tokens = static_cast<int32_t>(8 + 11 * (i % 6));
    asks[i].speculative = i % 5 != 4;
    if (i % 3 == 0) {  // long ones
      const Tokens& more = golden_prompts()[prompt_at(i + 50)].prompt;
      asks[i].prompt.insert(asks[i].prompt.begin(), more.begin(), more.end());
    }
  }
  expect_solo_replies(engine.parts, asks);
}

}  // namespace
}  // namespace moat
