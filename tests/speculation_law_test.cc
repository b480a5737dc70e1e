// SPDX-License-Identifier: Apache-2.0
// That the sampler's verification of drafts is lossless: the exact law of what Sampler::verify emits, on vocabularies
// small enough to enumerate, against the definition of plain decoding, for every sampling parameter; the tokens of
// requests that are verified by matching against those of Sampler::sample; and planted mistakes, which the same
// statistic has to catch. speculation_law_engine.cc: whole engines. Traps carry the numbers of docs/design/dspark.md section 7.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "accept_law.h"
#include "engine/draft_length.h"
#include "engine/sampler.h"
#include "ops/case_data.h"
#include "plain_law.h"
#include "speculation_scale.h"

namespace moat {
namespace {

using test::Conditional;
using test::Decision;
using test::Law;
using test::Round;
using test::Toy;
using test::Verdict;
using test::Verify;

struct Machine {
  ThreadPool pool{1};
  Arena arena{size_t{64} << 20};
  Exec exec{{.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool, .arena = &arena}};
};
Machine& machine() {
  static Machine m;
  return m;
}

// --- a tiny model: logits by prefix, and a conversation that it continues ---

const std::vector<int32_t> kPrompt = {0, 2, 1};
const std::vector<int32_t> kReply = {2};

struct TinyModel {
  int vocab = 5;
  uint64_t seed = 1;

  int32_t eos() const { return vocab - 1; }

  std::vector<float> logits(std::span<const int32_t> prefix) const {
    Rng rng(seed * 7919 + static_cast<uint64_t>(test::index_of(prefix, vocab + 1) * 8) + prefix.size());
    std::vector<float> out;
    for (int v = 0; v < vocab; ++v) out.push_back(static_cast<float>(1.5 * rng.normal()));
    return out;
  }

  // What plain decoding draws the next token from. A reply that has ended stays so.
  Conditional law(const SamplingParams& params) const {
    return [*this, params](std::span<const int32_t> prefix) {
      if (std::find(prefix.begin(), prefix.end(), eos()) != prefix.end()) {
        return test::one_hot(static_cast<size_t>(eos()), static_cast<size_t>(vocab));
      }
      std::vector<int32_t> reply = kReply;
      reply.insert(reply.end(), prefix.begin(), prefix.end());
      return test::plain_law(logits(prefix), params, kPrompt, reply, eos());
    };
  }
};

struct Setting {
  const char* name;
  SamplingParams params;
};

// Every parameter that changes what may come next, at two temperatures.
std::vector<Setting> settings(int32_t eos) {
  const std::vector<Setting> kinds = {
      {"none", {}},
      {"top_k", {.top_k = 3}},
      {"top_p", {.top_p = 0.9F}},
      {"min_p", {.min_p = 0.05F}},
      {"penalties", {.presence_penalty = 0.6F, .frequency_penalty = 0.4F, .repetition_penalty = 1.3F}},
      {"logit_bias", {.logit_bias = {{0, 1.5F}, {2, -0.7F}}}},
      {"min_tokens", {.min_tokens = 3, .stop_token_ids = {0}}},
      {"bad_words", {.bad_words = {{2, 1}, {3}, {1, 0}}}},
      {"all",
       {.top_k = 4,
        .top_p = 0.95F,
        .min_p = 0.02F,
        .min_tokens = 3,
        .presence_penalty = 0.6F,
        .frequency_penalty = 0.4F,
        .repetition_penalty = 1.3F,
        .logit_bias = {{eos, 1.0F}, {1, 0.5F}},
        .bad_words = {{1, 0}}}},
  };
  std::vector<Setting> out;
  for (const float temperature : {1.0F, 0.7F}) {
    for (Setting setting : kinds) {
      setting.params.temperature = temperature;
      setting.params.seeded = false;
      out.push_back(setting);
    }
  }
  return out;
}

// Drafts end with the first that ends the reply, as the runner cuts them.
int until_end(std::span<const int32_t> drafts, int32_t eos) {
  const auto end = std::find(drafts.begin(), drafts.end(), eos);
  return static_cast<int>(end - drafts.begin()) + (end == drafts.end() ? 0 : 1);
}

Toy toy_of(const TinyModel& model, int num_drafts, const SamplingParams& params) {
  Toy toy{.vocab = model.vocab, .num_drafts = num_drafts};
  toy.target = model.law(params);
  toy.draft = test::random_conditional(model.vocab, 900 + model.seed, 0.1);
  toy.declared = toy.draft;
  toy.cut = [eos = model.eos()](std::span<const int32_t> drafts) { return until_end(drafts, eos); };
  return toy;
}

using Logits = std::function<std::vector<float>(std::span<const int32_t> prefix)>;

// Sampler::verify with its uniforms given, between a greedy sequence and one that has no drafts. The token counts of
// the sequence live as long as the verifier, as they do in the scheduler.
class SamplerUnderTest {
 public:
  SamplerUnderTest(const TinyModel& model, const SamplingParams& params)
      : SamplerUnderTest(model, params, [model](std::span<const int32_t> prefix) { return model.logits(prefix); }) {}
  SamplerUnderTest(const TinyModel& model, const SamplingParams& params, Logits logits)
      : model_(model), params_(params), logits_(std::move(logits)), sampler_(model.vocab, model.eos()) {
    tokens_.insert(tokens_.end(), kReply.begin(), kReply.end());
  }

  VerifiedSequence verify(const Round& round) {
    const auto vocab = static_cast<int64_t>(model_.vocab);
    std::vector<float> rows = logits_({});  // of the greedy mate, twice
    rows.insert(rows.end(), rows.begin(), rows.end());
    std::vector<float> laws(static_cast<size_t>(vocab), NAN);  // nobody's
    for (size_t k = 0; k <= round.drafts.size(); ++k) {
      const std::vector<float> row = logits_(std::span(round.drafts).first(k));
      rows.insert(rows.end(), row.begin(), row.end());
      if (k < round.drafts.size()) laws.insert(laws.end(), round.q[k].begin(), round.q[k].end());
    }
    rows.insert(rows.end(), rows.begin(), rows.begin() + vocab);
    const std::vector<int32_t> mate_drafts = {1};
    const VerifySequence sequences[] = {
        {.params = &greedy_mate_, .tokens = tokens_, .drafts = mate_drafts, .num_generated = 1},
        {.params = &params_,
         .tokens = tokens_,
         .drafts = round.drafts,
         .num_generated = static_cast<int64_t>(kReply.size()),
         .counts = &counts_,
         .law_row = 1,
         .accept_uniforms = round.accept_u,
         .bonus_uniform = round.bonus_u},
        {.params = &sampled_mate_, .tokens = tokens_, .num_generated = 1}};
    Exec& exec = machine().exec;
    const ArenaScope scope(machine().arena);
    const auto count = [&](const std::vector<float>& values) { return static_cast<int64_t>(values.size()) / vocab; };
    auto verified = sampler_.verify(exec, make_tensor(rows.data(), DType::kF32, {count(rows), vocab}), sequences,
                                    make_tensor(laws.data(), DType::kF32, {count(laws), vocab}));
    return std::move(verified[1]);
  }

  Verdict operator()(const Round& round) {
    const VerifiedSequence out = verify(round);
    if (out.tokens.empty()) {
      ADD_FAILURE() << out.error;
      return {};
    }
    Verdict verdict{.accepted = static_cast<int>(out.tokens.size()) - 1, .bonus = out.tokens.back().token_id};
    for (int k = 0; k < verdict.accepted; ++k) {
      EXPECT_EQ(out.tokens[static_cast<size_t>(k)].token_id, round.drafts[static_cast<size_t>(k)]);
    }
    // What follows the end of a reply is dropped, whatever it is.
    if (verdict.accepted > 0 && round.drafts[static_cast<size_t>(verdict.accepted) - 1] == model_.eos()) {
      verdict.final_probs = test::one_hot(static_cast<size_t>(model_.eos()), static_cast<size_t>(model_.vocab));
    }
    return verdict;
  }

 private:
  TinyModel model_;
  SamplingParams params_;
  Logits logits_;
  Sampler sampler_;
  std::vector<int32_t> tokens_ = kPrompt;
  TokenCounts counts_;
  SamplingParams greedy_mate_{.temperature = 0.0F, .presence_penalty = 1.0F, .bad_words = {{0}}};
  SamplingParams sampled_mate_{.temperature = 1.3F, .top_k = 2, .frequency_penalty = -0.5F, .logit_bias = {{1, 3.0F}}};
};

Verify sampler_verifier(const TinyModel& model, const SamplingParams& params) {
  return
      [sampler = std::make_shared<SamplerUnderTest>(model, params)](const Round& round) { return (*sampler)(round); };
}

double tv_of(const Toy& toy, const Verify& verify, Decision decision = Decision::kLastSuccessWins) {
  return test::total_variation(emission_law(toy, verify, decision).law, target_law(toy));
}

// --- the exact law ---

constexpr double kLossless = 1e-6;

TEST(SamplerLaw, EverySettingEmitsTheLawOfPlainDecoding) {
  struct Size {
    int vocab, num_drafts;
  };
  std::vector<Size> sizes = {{6, 1}, {5, 2}};
  if (test::is_full_speculation()) sizes.push_back({4, 3});
  double worst = 0;
  int laws = 0;
  for (const auto& [vocab, num_drafts] : sizes) {
    const TinyModel model{.vocab = vocab, .seed = static_cast<uint64_t>(10 * vocab + num_drafts)};
    for (const auto& [name, params] : settings(model.eos())) {
      const Toy toy = toy_of(model, num_drafts, params);
      const double tv = tv_of(toy, sampler_verifier(model, params));
      EXPECT_LT(tv, kLossless) << name << " at " << params.temperature << ", " << num_drafts << " drafts";
      worst = std::max(worst, tv);
      ++laws;
    }
  }
  fmt::print("{} laws, total variation at most {:.1e}\n", laws, worst);
}

// The statistic has something to see: each setting changes the law, so that one that verify() ignored would be caught.
TEST(SamplerLaw, EverySettingMatters) {
  const TinyModel model{.vocab = 5, .seed = 52};
  for (const auto& [name, params] : settings(model.eos())) {
    if (std::string_view(name) == "none") continue;
    SamplingParams ignoring;
    ignoring.temperature = params.temperature;
    ignoring.seeded = false;
    const double tv = tv_of(toy_of(model, 1, params), sampler_verifier(model, ignoring));
    fmt::print("control {:<10} ignored at {:.1f}: total variation {:.4f}\n", name, params.temperature, tv);
    EXPECT_GT(tv, 1e-3) << name;
  }
}

// Three drafts, so that penalties, masks and words reach over several of them.
TEST(SamplerLaw, ThreeDraftsWithEverything) {
  const TinyModel model{.vocab = 4, .seed = 3};
  const Setting all = settings(model.eos())[8];
  EXPECT_LT(tv_of(toy_of(model, 3, all.params), sampler_verifier(model, all.params)), kLossless) << all.name;
}

// Drafts behind one that ends the reply change nothing, though nobody cuts them: what they emit is dropped.
TEST(SamplerLaw, DraftsBehindTheEndOfTheReply) {
  const TinyModel model{.vocab = 4, .seed = 9};
  for (const int32_t min_tokens : {0, 2, 3}) {
    const SamplingParams params{.temperature = 1.0F, .seeded = false, .min_tokens = min_tokens};
    Toy toy = toy_of(model, 2, params);
    toy.cut = nullptr;
    const Verify verify = sampler_verifier(model, params);
    const Law law = emission_law(toy, verify, Decision::kLastSuccessWins).law;
    Law dropped(law.size(), 0.0);
    for (size_t i = 0; i < law.size(); ++i) {
      std::vector<int32_t> tokens = test::tuple_of(static_cast<int64_t>(i), 3, model.vocab);
      std::fill(std::find(tokens.begin(), tokens.end(), model.eos()), tokens.end(), model.eos());
      dropped[static_cast<size_t>(test::index_of(tokens, model.vocab))] += law[i];
    }
    EXPECT_LT(test::total_variation(dropped, target_law(toy)), kLossless) << min_tokens;
  }
}

// Absent numbers are those of the seed; given ones are used in their place.
TEST(SamplerLaw, UniformsFromOutsideAreThoseOfTheSeedWhereTheyAreEqual) {
  const TinyModel model{.vocab = 5, .seed = 4};
  const Sampler sampler(model.vocab, model.eos());
  std::vector<int32_t> tokens = kPrompt;
  Rng rng(8);
  int differing = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const SamplingParams params{.temperature = 1.0F, .seed = seed, .seeded = false};
    const std::vector<int32_t> drafts = {static_cast<int32_t>(rng.below(5)), static_cast<int32_t>(rng.below(5))};
    std::vector<float> rows, laws;
    for (size_t k = 0; k <= drafts.size(); ++k) {
      const std::vector<float> row = model.logits(std::span(drafts).first(k));
      rows.insert(rows.end(), row.begin(), row.end());
      laws.insert(laws.end(), 5, 0.2F);
    }
    const uint64_t round = tokens.size();
    const std::vector<double> own = {random_uniform(seed, draft_counter(round, 0), RandomPurpose::kAccept),
                                     random_uniform(seed, draft_counter(round, 1), RandomPurpose::kAccept)};
    const std::vector<double> others = {rng.uniform(), rng.uniform()};
    const VerifySequence absent{.params = &params, .tokens = tokens, .drafts = drafts, .law_row = 0};
    VerifySequence equal = absent, other = absent;
    equal.accept_uniforms = own;
    equal.bonus_uniform = random_uniform(seed, round, RandomPurpose::kBonus);
    other.accept_uniforms = others;
    other.bonus_uniform = rng.uniform();
    std::vector<std::vector<int32_t>> emitted;
    for (const VerifySequence& s : {absent, equal, other}) {
      const auto out = sampler.verify(machine().exec, make_tensor(rows.data(), DType::kF32, {3, 5}), {&s, 1},
                                      make_tensor(laws.data(), DType::kF32, {3, 5}));
      emitted.emplace_back();
      for (const SampledToken& t : out[0].tokens) emitted.back().push_back(t.token_id);
    }
    EXPECT_EQ(emitted[0], emitted[1]) << seed;
    differing += emitted[0] != emitted[2];
  }
  EXPECT_GT(differing, 50);
}

// --- planted mistakes: the same statistic has to catch each ---

void expect_caught(const char* name, double tv) {
  fmt::print("control {:<44} total variation {:.4f}\n", name, tv);
  EXPECT_GT(tv, 1e-3) << name;
}

Conditional argmax_of(const Conditional& law) {
  return [law](std::span<const int32_t> prefix) {
    const Law probs = law(prefix);
    return test::one_hot(static_cast<size_t>(std::max_element(probs.begin(), probs.end()) - probs.begin()),
                         probs.size());
  };
}

// softmax((base + bias of the token before) / temperature), as a Markov head makes it.
Conditional markov_law(int vocab, double bias_scale, double temperature) {
  return [=](std::span<const int32_t> prefix) {
    Rng base(500 + prefix.size());
    Rng bias(900 + static_cast<uint64_t>(prefix.empty() ? vocab : prefix.back()));
    std::vector<double> logits;
    for (int v = 0; v < vocab; ++v) logits.push_back(base.normal() + bias_scale * bias.normal());
    return test::softmax_of(logits, temperature);
  };
}

class Control : public ::testing::Test {
 protected:
  TinyModel model_{.vocab = 5, .seed = 21};
  SamplingParams params_{.temperature = 0.7F, .seeded = false};

  Toy markov_toy() const {
    Toy toy = toy_of(model_, 2, params_);
    toy.draft = toy.declared = markov_law(model_.vocab, 1.2, 0.7);
    return toy;
  }
};

TEST_F(Control, WithoutAMistakeNothingIsCaught) {
  EXPECT_LT(tv_of(markov_toy(), sampler_verifier(model_, params_)), kLossless);
}

TEST_F(Control, T29_ArgmaxDraftsDeclaredAsSoftmaxDraws) {
  Toy toy = markov_toy();
  toy.draft = argmax_of(toy.declared);
  expect_caught("argmax drafts declared as softmax draws", tv_of(toy, sampler_verifier(model_, params_)));
}

TEST_F(Control, DraftLawWithoutTheMarkovBias) {
  Toy toy = markov_toy();
  toy.declared = markov_law(model_.vocab, 0.0, 0.7);
  expect_caught("q without the Markov bias", tv_of(toy, sampler_verifier(model_, params_)));
}

TEST_F(Control, ResidualReplacedByTheTarget) {
  const Verify right = sampler_verifier(model_, params_);
  const Verify wrong = [&right](const Round& round) {
    Verdict verdict = right(round);
    verdict.final_probs = round.p[static_cast<size_t>(verdict.accepted)];
    return verdict;
  };
  expect_caught("residual replaced by p", tv_of(markov_toy(), wrong));
}

// As serving stacks offer them: also accept what the target finds likely enough, or divide by a constant.
TEST_F(Control, AcceptanceThresholds) {
  for (const double limit : {0.9, 0.5}) {
    const Verify wrong = [limit](const Round& round) { return test::accept_above(limit, round); };
    Toy toy = markov_toy();
    toy.draft = argmax_of(toy.draft);
    expect_caught(fmt::format("thresholds {0}/{0}", limit).c_str(), tv_of(toy, wrong, Decision::kFirstFailureStops));
  }
}

TEST_F(Control, T37_PenaltiesOfTheFirstRowForAllRows) {
  params_ = {.temperature = 1.0F,
             .seeded = false,
             .presence_penalty = 0.6F,
             .frequency_penalty = 0.4F,
             .repetition_penalty = 1.3F};
  SamplingParams bare;
  bare.seeded = false;
  // Logits that have been penalised for what stood before the drafts.
  const Logits penalised = [this](std::span<const int32_t> prefix) {
    const std::vector<double> row = test::plain_logits(model_.logits(prefix), params_, kPrompt, kReply, model_.eos());
    return std::vector<float>(row.begin(), row.end());
  };
  SamplerUnderTest wrong(model_, bare, penalised);
  expect_caught("penalties of row 0 for all rows", tv_of(toy_of(model_, 2, params_), std::ref(wrong)));
  EXPECT_LT(tv_of(toy_of(model_, 2, params_), sampler_verifier(model_, params_)), kLossless);
}

TEST_F(Control, T46_TemperatureOnOneSideOnly) {
  SamplingParams warm = params_;
  warm.temperature = 1.0F;
  expect_caught("temperature not applied to p", tv_of(markov_toy(), sampler_verifier(model_, warm)));
  Toy toy = markov_toy();
  toy.declared = markov_law(model_.vocab, 1.2, 1.0);
  expect_caught("temperature not applied to the q declared", tv_of(toy, sampler_verifier(model_, params_)));
}

TEST_F(Control, T60_LookAheadCut) {
  Toy toy = markov_toy();
  toy.cut = [this](std::span<const int32_t> x) { return x[0] == 0 ? until_end(x, model_.eos()) : 0; };
  expect_caught("look-ahead cut", tv_of(toy, sampler_verifier(model_, params_)));
}

// --- verified by matching: the tokens are those of sample() ---

// A sequence with drafts for its next tokens, most of them what sample() gives.
struct MatchCase {
  SamplingParams params;
  std::vector<int32_t> tokens, drafts;
  int64_t num_generated = 0;
  int64_t first_row = 0;  // of the logits
  TokenCounts counts;
};

constexpr int64_t kMatchVocab = 60;
constexpr int32_t kMatchEos = 17;

SamplingParams random_params(Rng& rng) {
  SamplingParams p;
  const auto half = [&] { return rng.below(2) == 0; };
  const auto id = [&] { return static_cast<int32_t>(rng.below(kMatchVocab)); };
  p.temperature = rng.below(3) == 0 ? 0.0F : static_cast<float>(rng.uniform(0.5, 1.2));
  p.seed = rng.next();
  p.seeded = half();
  if (half()) p.top_k = static_cast<int32_t>(1 + rng.below(20));
  if (half()) p.top_p = static_cast<float>(rng.uniform(0.5, 1.0));
  if (half()) p.min_p = static_cast<float>(rng.uniform(0.0, 0.1));
  if (half()) p.presence_penalty = static_cast<float>(rng.uniform(-2, 2));
  if (half()) p.frequency_penalty = static_cast<float>(rng.uniform(-2, 2));
  if (half()) p.repetition_penalty = static_cast<float>(rng.uniform(0.5, 2));
  if (half()) p.min_tokens = static_cast<int32_t>(rng.below(20));
  if (half()) p.stop_token_ids = {id(), id()};
  if (half()) p.bad_words = {{id()}, {id(), id()}, {id(), id()}};
  if (half()) p.logit_bias = {{kMatchEos, 4.0F}, {5, -1.0F}};
  p.num_logprobs = static_cast<int32_t>(rng.below(4)) - 1;
  return p;
}

SampledRow sample_row(const Sampler& sampler, const Tensor& logits, const MatchCase& c,
                      std::span<const int32_t> tokens) {
  const auto row = static_cast<int64_t>(tokens.size() - c.tokens.size());
  const SampleRow ask{.params = &c.params,
                      .position = static_cast<int64_t>(tokens.size()),
                      .num_generated = c.num_generated + row,
                      .tokens = tokens};
  const ArenaScope scope(machine().arena);
  return sampler.sample(machine().exec, logits.rows(c.first_row + row, c.first_row + row + 1), {&ask, 1})[0];
}

bool equal_bits(const SampledToken& a, const SampledToken& b) {
  const auto same = [](float x, float y) { return std::memcmp(&x, &y, sizeof x) == 0; };
  return a.token_id == b.token_id && same(a.logprob, b.logprob) &&
         std::equal(a.top.begin(), a.top.end(), b.top.begin(), b.top.end(),
                    [&](const TokenLogprob& x, const TokenLogprob& y) {
                      return x.token_id == y.token_id && same(x.logprob, y.logprob);
                    });
}

// Greedy, seeded, and drawn ones whose drafts have no law: bit for bit what sample() gives row by row,
// log-probabilities included, among sequences that are verified by their law.
TEST(Matching, EveryTokenIsThatOfSampleRowByRow) {
  constexpr int64_t kSeqs = 40;
  const Sampler sampler(kMatchVocab, kMatchEos);
  Rng rng(77);
  int64_t accepted = 0, judged = 0, with_end = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    CaseData data(static_cast<uint64_t>(repeat) + 1);
    std::vector<MatchCase> cases(kSeqs);
    int64_t rows = 0;
    for (MatchCase& c : cases) {
      c.params = random_params(rng);
      const int64_t num_prompt = 1 + rng.below(10);
      c.num_generated = rng.below(10);
      for (int64_t i = 0; i < num_prompt + c.num_generated; ++i) {
        c.tokens.push_back(static_cast<int32_t>(rng.below(30)));
      }
      c.drafts.resize(static_cast<size_t>(rng.below(7)));
      c.first_row = rows;
      rows += static_cast<int64_t>(c.drafts.size()) + 1;
    }
    const Tensor logits = data.normal({rows, kMatchVocab}, 2.5);
    const Tensor laws = data.normal({8, kMatchVocab}, 1.0);
    float* law = laws.f32();
    std::fill(law, law + laws.count(), 1.0F / kMatchVocab);
    std::vector<VerifySequence> sequences;
    for (size_t i = 0; i < cases.size(); ++i) {
      MatchCase& c = cases[i];
      std::vector<int32_t> tokens = c.tokens;
      for (int32_t& draft : c.drafts) {
        draft = sample_row(sampler, logits, c, tokens).token.token_id;
        if (draft < 0 || rng.below(5) == 0) draft = static_cast<int32_t>(rng.below(kMatchVocab));
        with_end += draft == kMatchEos;
        tokens.push_back(draft);
      }
      // Half of the drawn ones have a law, and are company only.
      const bool has_law = i % 2 == 0 || c.params.seeded || c.params.temperature == 0.0F;
      sequences.push_back({.params = &c.params,
                           .tokens = c.tokens,
                           .drafts = c.drafts,
                           .num_generated = c.num_generated,
                           .counts = i % 3 == 0 ? nullptr : &c.counts,
                           .law_row = has_law ? 1 : -1});
    }
    const ArenaScope scope(machine().arena);
    const std::vector<VerifiedSequence> verified = sampler.verify(machine().exec, logits, sequences, laws);
    for (size_t i = 0; i < cases.size(); ++i) {
      const MatchCase& c = cases[i];
      const bool drawn = c.params.temperature > 0.0F && !c.params.seeded && sequences[i].law_row >= 0;
      if (drawn && !c.drafts.empty()) continue;
      std::vector<int32_t> tokens = c.tokens;
      std::vector<SampledToken> want;
      for (size_t k = 0; k <= c.drafts.size(); ++k) {
        want.push_back(sample_row(sampler, logits, c, tokens).token);
        tokens.push_back(want.back().token_id);
        if (k == c.drafts.size() || want.back().token_id != c.drafts[k]) break;
      }
      EXPECT_TRUE(
          std::equal(want.begin(), want.end(), verified[i].tokens.begin(), verified[i].tokens.end(), equal_bits))
          << "repeat " << repeat << " sequence " << i;
      accepted += static_cast<int64_t>(want.size()) - 1;
      judged += static_cast<int64_t>(c.drafts.size());
    }
  }
  fmt::print("{} of {} drafts accepted; {} drafts were the end of the reply\n", accepted, judged, with_end);
  EXPECT_GT(accepted, judged / 3);
  EXPECT_GT(with_end, 30);
}

// Accepted or drawn after them, a token's log-probability is that of its own row as it came from the model.
TEST(SamplerLaw, LogprobsOfDraftsJudgedByTheirLaw) {
  const TinyModel model{.vocab = 6, .seed = 31};
  const SamplingParams params{
      .temperature = 0.8F, .top_k = 4, .seeded = false, .frequency_penalty = 0.5F, .num_logprobs = 2};
  SamplerUnderTest sampler(model, params);
  Rng rng(5);
  int accepted = 0;
  for (int i = 0; i < 300; ++i) {
    Round round{.bonus_u = rng.uniform()};
    for (int k = 0; k < 3; ++k) {
      round.drafts.push_back(static_cast<int32_t>(rng.below(model.vocab)));
      round.q.push_back(Law(6, 1.0 / 6));
      round.accept_u.push_back(rng.uniform());
    }
    const VerifiedSequence out = sampler.verify(round);
    for (size_t k = 0; k < out.tokens.size(); ++k) {
      const std::vector<float> logits = model.logits(std::span(round.drafts).first(k));
      double sum = 0;
      for (const float x : logits) sum += std::exp(double{x});
      const auto id = static_cast<size_t>(out.tokens[k].token_id);
      EXPECT_NEAR(out.tokens[k].logprob, logits[id] - std::log(sum), 1e-5);
      ASSERT_EQ(out.tokens[k].top.size(), 2);
      EXPECT_EQ(out.tokens[k].top[0].token_id, std::max_element(logits.begin(), logits.end()) - logits.begin());
    }
    accepted += static_cast<int>(out.tokens.size()) - 1;
  }
  EXPECT_GT(accepted, 100);
}

// --- traps ---

// 26: a verifier that is greedy at any temperature.
TEST(Trap, T26_SampledVerificationIsNotGreedy) {
  const TinyModel model{.vocab = 5, .seed = 26};
  const SamplingParams params{.temperature = 1.0F, .seeded = false};
  SamplingParams greedy = params;
  greedy.temperature = 0.0F;
  const Toy toy = toy_of(model, 2, params);
  const Law emitted = emission_law(toy, sampler_verifier(model, params), Decision::kLastSuccessWins).law;
  Toy argmax = toy;
  argmax.target = model.law(greedy);
  const double far = test::total_variation(emitted, target_law(argmax));
  EXPECT_GT(far, 0.3);
  EXPECT_LT(test::total_variation(emitted, target_law(toy)), kLossless);
  const double caught = tv_of(toy, sampler_verifier(model, greedy), Decision::kFirstFailureStops);
  fmt::print("control {:<44} total variation {:.4f}\n", "greedy verification at temperature 1", caught);
  EXPECT_GT(caught, 0.3);
}

// 38: min_p and logit_bias under speculation.
TEST(Trap, T38_MinPAndBiasUnderSpeculation) {
  const TinyModel model{.vocab = 5, .seed = 38};
  const SamplingParams params{
      .temperature = 1.0F, .min_p = 0.2F, .seeded = false, .logit_bias = {{0, 2.0F}, {1, -2.0F}}};
  const Toy toy = toy_of(model, 2, params);
  EXPECT_LT(tv_of(toy, sampler_verifier(model, params)), kLossless);
  for (const bool keeps_bias : {true, false}) {
    SamplingParams dropped = params;
    if (keeps_bias) dropped.min_p = 0.0F;
    if (!keeps_bias) dropped.logit_bias.clear();
    const double tv = tv_of(toy, sampler_verifier(model, dropped));
    fmt::print("control {:<44} total variation {:.4f}\n", keeps_bias ? "min_p dropped" : "logit_bias dropped", tv);
    EXPECT_GT(tv, 1e-3);
  }
}

// 60: the cuts that serving makes, by confidences that depend on the drafts before each.
TEST(Trap, T60_TheCutByConfidenceIsLossless) {
  const TinyModel model{.vocab = 4, .seed = 60};
  const SamplingParams params{.temperature = 1.0F, .seeded = false};
  Toy toy = toy_of(model, 3, params);
  const DraftPolicy policy{
      .automatic = true, .num_decodes = 1, .seconds = {1.0, 1.4, 1.8, 2.2}, .factor = {1.0F, 1.0F, 1.0F}};
  std::vector<int> seen(4, 0);
  toy.cut = [&](std::span<const int32_t> x) {
    Drafts drafts{.width = 3, .ids = {x.begin(), x.end()}};
    for (size_t k = 0; k < x.size(); ++k) {
      drafts.confidence.push_back(k == 0 ? 0.9F : 0.95F - 0.25F * static_cast<float>(x[k - 1]));
    }
    const std::vector<int32_t> limits = {until_end(x, model.eos())};
    const int kept = draft_lengths(policy, drafts, limits)[0];
    ++seen[static_cast<size_t>(kept)];
    return kept;
  };
  EXPECT_LT(tv_of(toy, sampler_verifier(model, params)), kLossless);
  EXPECT_EQ(seen[0], 0);
  EXPECT_TRUE(seen[1] > 0 && seen[2] > 0 && seen[3] > 0) << seen[1] << " " << seen[2] << " " << seen[3];
}

// dspark.md 1.7: with a first draft that does not pay by itself, whether it is verified must not depend on what it is.
TEST(Trap, T60_TheFirstCutIsBlindToTheDraft) {
  const DraftPolicy policy{.automatic = true, .num_decodes = 1, .seconds = {1.0, 1.85, 2.7}, .factor = {1.0F, 1.0F}};
  const std::vector<int32_t> limits = {2};
  for (const int32_t first : {0, 1}) {
    const Drafts drafts{.width = 2, .ids = {first, 0}, .confidence = {0.8F, first == 0 ? 0.99F : 0.0F}};
    EXPECT_EQ(draft_lengths(policy, drafts, limits), std::vector<int32_t>{0}) << first;
  }
}

}  // namespace
}  // namespace moat
