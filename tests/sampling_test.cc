// SPDX-License-Identifier: Apache-2.0
// Sampling options against plain formulas: penalties, biases, bad words and min_tokens, alone and combined, on random
// logits and on the real engine; what is refused, and by which words.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <set>

#include "base/rng.h"
#include "engine/local_engine.h"
#include "engine/sampler.h"
#include "engine/sampling_check.h"
#include "golden_file.h"
#include "ops/case_data.h"

namespace moat {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int32_t kEos = 17;

// One sequence at the moment its next token is chosen.
struct Moment {
  SamplingParams params;
  std::vector<int32_t> tokens;  // prompt, then generated
  int64_t num_prompt = 0;

  int64_t num_generated() const { return static_cast<int64_t>(tokens.size()) - num_prompt; }
  SampleRow row() const {
    return {.params = &params,
            .position = static_cast<int64_t>(tokens.size()),
            .num_generated = num_generated(),
            .tokens = tokens};
  }
};

// --- the definition, one id after the other, in f64 ---

bool ends_with(const std::vector<int32_t>& tokens, int64_t from, const std::vector<int32_t>& tail) {
  const auto size = static_cast<int64_t>(tail.size());
  return static_cast<int64_t>(tokens.size()) - from >= size &&
         std::equal(tail.begin(), tail.end(), tokens.end() - size);
}

std::vector<double> plain_logits(const float* logits, int64_t vocab, const Moment& m) {
  const SamplingParams& p = m.params;
  std::vector<double> out;
  for (int32_t id = 0; id < vocab; ++id) {
    double x = logits[id];
    const auto generated = std::count(m.tokens.begin() + m.num_prompt, m.tokens.end(), id);
    if (std::count(m.tokens.begin(), m.tokens.end(), id) > 0) {
      x = x > 0 ? x / p.repetition_penalty : x * p.repetition_penalty;
    }
    x -= static_cast<double>(p.frequency_penalty) * static_cast<double>(generated);
    if (generated > 0) x -= p.presence_penalty;
    for (const TokenBias& bias : p.logit_bias) {
      if (bias.token_id == id) x += bias.bias;
    }
    for (std::vector<int32_t> word : p.bad_words) {
      if (word.back() != id) continue;
      word.pop_back();
      if (ends_with(m.tokens, m.num_prompt, word)) x = -kInf;
    }
    const auto& stops = p.stop_token_ids;
    const bool ends = (id == kEos && !p.ignore_eos) || std::find(stops.begin(), stops.end(), id) != stops.end();
    if (ends && m.num_generated() < p.min_tokens) x = -kInf;
    out.push_back(x);
  }
  return out;
}

// Greedy, or temperature, top_k and the draw that belongs to seed and position.
int32_t plain_choice(const std::vector<double>& logits, const Moment& m) {
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (m.params.temperature == 0.0F) return static_cast<int32_t>(largest - logits.begin());
  std::vector<double> probs;
  for (const double x : logits) probs.push_back(std::exp((x - *largest) / m.params.temperature));
  if (m.params.top_k > 0) {
    std::vector<double> sorted = probs;
    std::sort(sorted.rbegin(), sorted.rend());
    for (double& p : probs) p = p >= sorted[static_cast<size_t>(m.params.top_k) - 1] ? p : 0;
  }
  double total = 0;
  for (const double p : probs) total += p;
  const double limit = total * random_uniform(m.params.seed, m.tokens.size(), RandomPurpose::kSample);
  double sum = 0;
  for (size_t i = 0; i < probs.size(); ++i) {
    sum += probs[i];
    if (sum > limit) return static_cast<int32_t>(i);
  }
  return -1;
}

// --- the sampler on random logits ---

struct SamplerBench {
  ThreadPool pool{2};
  Arena arena{size_t{64} << 20};
  SingleRank comm;
  Profile profile;
  Exec exec{{.mode = ExecMode::kEager,
             .arch = host_arch(),
             .pool = &pool,
             .arena = &arena,
             .comm = &comm,
             .profile = &profile}};
  CaseData data{7};

  std::vector<SampledRow> sample(const Tensor& logits, const std::vector<Moment>& moments) {
    std::vector<SampleRow> rows;
    for (const Moment& m : moments) rows.push_back(m.row());
    return Sampler(logits.dim(1), kEos).sample(exec, logits, rows);
  }
};

// A history from few ids, so that tokens repeat and words recur.
Moment random_moment(Rng& rng, int64_t vocab) {
  Moment m;
  m.num_prompt = 1 + rng.below(30);
  const int64_t length = m.num_prompt + rng.below(30);
  for (int64_t i = 0; i < length; ++i)
    m.tokens.push_back(static_cast<int32_t>(rng.below(std::min<int64_t>(vocab, 40))));
  m.params.temperature = rng.below(2) == 0 ? 0.0F : static_cast<float>(rng.uniform(0.5, 2.0));
  m.params.seed = rng.next();
  m.params.max_tokens = 100;
  return m;
}

using Option = void (*)(Moment&, Rng&, int64_t vocab);

void repetition(Moment& m, Rng& rng, int64_t) {
  m.params.repetition_penalty = static_cast<float>(rng.uniform(0.25, 2.0));
}
void frequency(Moment& m, Rng& rng, int64_t) {
  m.params.frequency_penalty = static_cast<float>(rng.uniform(-2.0, 2.0));
}
void presence(Moment& m, Rng& rng, int64_t) { m.params.presence_penalty = static_cast<float>(rng.uniform(-2.0, 2.0)); }
void bias(Moment& m, Rng& rng, int64_t vocab) {
  for (int32_t id = 0; id < vocab; id += static_cast<int32_t>(1 + rng.below(20))) {
    m.params.logit_bias.push_back({id, static_cast<float>(rng.uniform(-6, 6))});
  }
}
void words(Moment& m, Rng& rng, int64_t vocab) {
  for (int i = 0; i < 30; ++i) m.params.bad_words.push_back({static_cast<int32_t>(rng.below(vocab))});
  // Words that the reply has begun, by one token and by all of it.
  for (int64_t length : {int64_t{1}, m.num_generated(), m.num_generated() + 1}) {
    if (length > static_cast<int64_t>(m.tokens.size())) continue;
    std::vector<int32_t> word(m.tokens.end() - length, m.tokens.end());
    word.push_back(static_cast<int32_t>(rng.below(vocab)));
    m.params.bad_words.push_back(word);
  }
}
void min_tokens(Moment& m, Rng& rng, int64_t vocab) {
  m.params.min_tokens = static_cast<int32_t>(rng.below(40));
  for (int i = 0; i < 20; ++i) m.params.stop_token_ids.push_back(static_cast<int32_t>(rng.below(vocab)));
}
void top_k(Moment& m, Rng& rng, int64_t) { m.params.top_k = static_cast<int32_t>(1 + rng.below(10)); }

TEST(SamplingOptions, EachIsItsFormula) {
  constexpr int64_t kVocab = 200;
  constexpr int kRows = 200;
  const std::vector<std::pair<const char*, std::vector<Option>>> settings = {
      {"none", {}},
      {"repetition_penalty", {repetition}},
      {"frequency_penalty", {frequency}},
      {"presence_penalty", {presence}},
      {"logit_bias", {bias}},
      {"bad_words", {words}},
      {"min_tokens", {min_tokens}},
      {"min_tokens and bad_words", {min_tokens, words}},
      {"penalties and top_k", {repetition, frequency, presence, top_k}},
      {"all", {repetition, frequency, presence, bias, words, min_tokens, top_k}},
  };
  Rng rng(5);
  for (const auto& [name, options] : settings) {
    SamplerBench b;
    const Tensor logits = b.data.normal({kRows, kVocab}, 2.0);
    std::vector<Moment> moments;
    int changed = 0;
    for (int r = 0; r < kRows; ++r) {
      moments.push_back(random_moment(rng, kVocab));
      for (const Option option : options) option(moments.back(), rng, kVocab);
    }
    const auto results = b.sample(logits, moments);
    for (int64_t r = 0; r < kRows; ++r) {
      const Moment& m = moments[static_cast<size_t>(r)];
      const int32_t want = plain_choice(plain_logits(logits.row(r), kVocab, m), m);
      EXPECT_EQ(results[static_cast<size_t>(r)].token.token_id, want) << name << ", row " << r;
      Moment free = m;
      free.params = {.temperature = m.params.temperature, .seed = m.params.seed};
      changed += want != plain_choice(plain_logits(logits.row(r), kVocab, free), free);
    }
    EXPECT_GT(changed, options.empty() ? -1 : kRows / 20) << name << " has hardly any effect: the test proves little";
  }
}

TEST(SamplingOptions, ARowDoesNotDependOnItsBatchMates) {
  constexpr int64_t kVocab = 5120;
  constexpr int kRows = 48;
  SamplerBench b;
  Rng rng(3);
  const Tensor logits = b.data.normal({kRows, kVocab}, 3.0);
  const Option options[] = {repetition, frequency, presence, bias, words, min_tokens, top_k};
  std::vector<Moment> moments;
  for (int r = 0; r < kRows; ++r) {
    Moment m = random_moment(rng, kVocab);
    for (const Option option : options) {
      if (rng.below(3) == 0) option(m, rng, kVocab);
    }
    m.params.num_logprobs = r % 2 ? 5 : -1;
    moments.push_back(m);
  }
  const auto together = b.sample(logits, moments);
  for (int r = 0; r < kRows; ++r) {
    const auto index = static_cast<size_t>(r);
    // Alone, and with counts that were begun in an earlier step.
    TokenCounts counts;
    counts.update(std::span(moments[index].tokens).first(moments[index].tokens.size() / 2), moments[index].num_prompt);
    SampleRow row = moments[index].row();
    row.counts = &counts;
    const auto alone = Sampler(kVocab, kEos).sample(b.exec, logits.rows(r, r + 1), {&row, 1});
    EXPECT_EQ(alone.front().token.token_id, together[index].token.token_id) << "row " << r;
    EXPECT_EQ(alone.front().token.logprob, together[index].token.logprob) << "row " << r;
  }
}

TEST(SamplingOptions, CostNothingWhereNobodyAsks) {
  SamplerBench b;
  const Tensor logits = b.data.normal({2, 64});
  Moment plain{.tokens = {1, 2, 3}, .num_prompt = 1};
  plain.params.max_tokens = 10;
  b.sample(logits, {plain, plain});
  EXPECT_TRUE(b.profile.sites.contains("sample.draw"));
  for (const char* site : {"sample.penalties", "sample.bias", "sample.mask"}) {
    EXPECT_FALSE(b.profile.sites.contains(site)) << site;
  }
}

// What a row with a small top-k needs of its logits is one pass over them.
TEST(SamplingPath, ASmallTopKDoesNotWriteTheVocabulary) {
  constexpr int64_t kVocab = 1000;
  for (const auto& [top_k, is_few] : std::vector<std::pair<int32_t, bool>>{{1, true}, {128, true}, {129, false}}) {
    SamplerBench b;
    Moment m{.tokens = {1, 2, 3}, .num_prompt = 1};
    m.params = {.temperature = 0.7F, .top_k = top_k, .seed = 4, .max_tokens = 10};
    const Tensor logits = b.data.normal({3, kVocab}, 2.0);
    const auto results = b.sample(logits, {m, m, m});
    for (int64_t r = 0; r < 3; ++r) {
      EXPECT_EQ(results[static_cast<size_t>(r)].token.token_id,
                plain_choice(plain_logits(logits.row(r), kVocab, m), m));
    }
    for (const char* site : {"sample.gather", "sample.softmax", "sample.top_k", "sample.draw"}) {
      EXPECT_EQ(b.profile.sites.contains(site), !is_few) << site << ", top_k " << top_k;
    }
    EXPECT_EQ(b.profile.sites.contains("sample.draw_compact"), is_few) << top_k;
  }
}

// Ties with the k-th logit are kept: the more there are, the more may be drawn, also where they do not fit.
TEST(SamplingPath, MoreTiesThanThereIsRoomForAreNotLost) {
  constexpr int64_t kVocab = 600;
  SamplerBench b;
  const Tensor logits = b.data.normal({4, kVocab}, 0.1);
  std::fill(logits.row(1), logits.row(1) + kVocab, 1.0F);
  std::fill(logits.row(2) + 100, logits.row(2) + 400, 8.0F);
  std::vector<Moment> moments;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    Moment m{.tokens = {1, 2, 3}, .num_prompt = 1};
    m.params = {.temperature = 1.0F, .top_k = 5, .seed = seed, .max_tokens = 10};
    moments.push_back(m);
  }
  const auto results = b.sample(logits, moments);
  for (size_t r = 0; r < moments.size(); ++r) {
    const Moment& m = moments[r];
    EXPECT_EQ(results[r].token.token_id, plain_choice(plain_logits(logits.row(static_cast<int64_t>(r)), kVocab, m), m));
    EXPECT_EQ(results[r].error, "");
  }
  EXPECT_EQ(b.profile.sites.at("sample.softmax").calls, 1);
}

// The same of drafts: their law is the target's, so all are accepted, and the token after them is drawn from all 600.
TEST(SamplingPath, DraftsAreJudgedWhereTiesDoNotFit) {
  constexpr int64_t kVocab = 600;
  SamplerBench b;
  const Tensor logits = b.data.normal({6, kVocab}, 1.0);
  std::fill(logits.row(2), logits.row(2) + kVocab, 1.0F);  // the last row of the first sequence
  const Tensor laws = b.data.normal({4, kVocab}, 0.0);
  const SamplingParams params{.temperature = 1.0F, .top_k = 5, .seed = 3, .seeded = false, .max_tokens = 10};
  std::vector<int32_t> drafts;  // the likeliest of each row
  for (int64_t r = 0; r < 6; ++r) {
    if (r % 3 == 2) continue;
    const float* row = logits.row(r);
    drafts.push_back(static_cast<int32_t>(std::max_element(row, row + kVocab) - row));
    float* law = laws.row(static_cast<int64_t>(drafts.size()) - 1);
    std::fill(law, law + kVocab, 0.0F);
    law[drafts.back()] = 0.01F;  // less than the target gives it: accepted, whatever is drawn
  }
  const std::vector<int32_t> tokens = {1, 2, 3};
  std::vector<VerifySequence> sequences;
  for (const int64_t first : {0, 2}) {
    sequences.push_back({.params = &params,
                         .tokens = tokens,
                         .drafts = std::span(drafts).subspan(static_cast<size_t>(first), 2),
                         .num_generated = 1,
                         .law_row = first,
                         .bonus_uniform = 0.9});
  }
  const auto verified = Sampler(kVocab, kEos).verify(b.exec, logits, sequences, laws);
  for (size_t s = 0; s < 2; ++s) {
    ASSERT_EQ(verified[s].tokens.size(), 3U) << verified[s].error;
    EXPECT_EQ(verified[s].tokens[0].token_id, drafts[2 * s]);
    EXPECT_EQ(verified[s].tokens[1].token_id, drafts[2 * s + 1]);
  }
  EXPECT_EQ(verified[0].tokens[2].token_id, 540);
  EXPECT_TRUE(b.profile.sites.contains("sample.softmax")) << "the first sequence";
  EXPECT_TRUE(b.profile.sites.contains("sample.top_k_probs"));
}

// -inf comes in from masks of the model's own; penalties and biases at the ends of their ranges make neither NaN nor
// an infinity of a finite logit.
TEST(SamplingOptions, InfinitiesAreNeitherMadeNorLost) {
  constexpr int64_t kVocab = 40;
  SamplerBench b;
  const Tensor logits = b.data.normal({4, kVocab}, 10.0);
  std::fill(logits.row(0), logits.row(0) + kVocab, -INFINITY);
  std::fill(logits.row(1), logits.row(1) + kVocab - 1, -INFINITY);
  logits.row(2)[5] = std::numeric_limits<float>::max();
  logits.row(3)[6] = std::numeric_limits<float>::lowest();
  for (const float temperature : {0.0F, 1.0F}) {
    for (const float repetition_penalty : {1e-38F, 2.0F}) {
      for (const float sign : {-1.0F, 1.0F}) {
        Moment m{.num_prompt = 2};
        for (int32_t id = 0; id < kVocab; ++id) {
          m.tokens.insert(m.tokens.end(), 50, id);
          m.params.logit_bias.push_back({id, 100 * sign});
        }
        m.params.temperature = temperature;
        m.params.repetition_penalty = repetition_penalty;
        m.params.presence_penalty = m.params.frequency_penalty = 2 * sign;
        const auto results = b.sample(logits, std::vector<Moment>(4, m));
        EXPECT_EQ(results[0].token.token_id, -1) << "nothing may come next";
        EXPECT_EQ(results[1].token.token_id, kVocab - 1);
        EXPECT_GE(results[2].token.token_id, 0) << results[2].error;
        EXPECT_GE(results[3].token.token_id, 0) << results[3].error;
      }
    }
  }
}

TEST(SamplingOptions, LogprobsAreOfTheModelsDistribution) {
  constexpr int64_t kVocab = 100;
  SamplerBench b;
  Rng rng(9);
  const Tensor logits = b.data.normal({1, kVocab}, 2.0);
  Moment m = random_moment(rng, kVocab);
  for (const Option option : {repetition, frequency, presence, bias, words, top_k}) option(m, rng, kVocab);
  m.params.num_logprobs = 3;
  const SampledToken token = b.sample(logits, {m}).front().token;
  double sum = 0;
  for (int64_t i = 0; i < kVocab; ++i) sum += std::exp(static_cast<double>(logits.f32()[i]));
  EXPECT_NEAR(token.logprob, logits.f32()[token.token_id] - std::log(sum), 1e-5);
  ASSERT_EQ(token.top.size(), 3U);
  const auto largest = std::max_element(logits.f32(), logits.f32() + kVocab);
  EXPECT_EQ(token.top.front().token_id, largest - logits.f32());
}

// --- counts ---

void expect_counts(const TokenCounts& counts, std::span<const int32_t> tokens, int64_t num_prompt) {
  const std::set<int32_t> distinct(tokens.begin(), tokens.end());
  ASSERT_EQ(counts.ids().size(), distinct.size());
  ASSERT_EQ(counts.counts().size(), distinct.size());
  for (size_t i = 0; i < counts.ids().size(); ++i) {
    EXPECT_TRUE(distinct.contains(counts.ids()[i]));
    EXPECT_EQ(counts.counts()[i], std::count(tokens.begin() + num_prompt, tokens.end(), counts.ids()[i]));
  }
}

TEST(TokenCounts, AreThoseOfTheListWhateverCameBefore) {
  Rng rng(1);
  std::vector<int32_t> tokens;
  for (int i = 0; i < 3000; ++i) tokens.push_back(static_cast<int32_t>(rng.below(30)));
  const std::span<const int32_t> all(tokens);
  TokenCounts counts;
  // Longer, the same, shorter, another prompt, shorter by one (a draft taken back), empty.
  for (const auto& [length, num_prompt] : std::vector<std::pair<size_t, int64_t>>{
           {100, 100}, {101, 100}, {101, 100}, {3000, 100}, {50, 20}, {50, 30}, {49, 30}, {0, 0}, {7, 0}}) {
    counts.update(all.first(length), num_prompt);
    expect_counts(counts, all.first(length), num_prompt);
  }
  // A draft that was taken back and replaced by another token.
  std::vector<int32_t> other = {tokens.begin(), tokens.begin() + 9};
  other[6] = 29 - other[6];
  counts.update(other, 0);
  expect_counts(counts, other, 0);
}

// --- what is refused ---

TEST(SamplingCheck, NamesTheParameterGotAndExpected) {
  constexpr int64_t kVocab = 100;
  SamplingParams good;
  good.max_tokens = 5;
  good.logit_bias = {{0, -100.0F}, {99, 100.0F}};
  good.bad_words = {{0}, {99, 0}};
  good.repetition_penalty = 2.0F;
  good.presence_penalty = good.frequency_penalty = -2.0F;
  EXPECT_TRUE(check_sampling(good, kVocab).ok()) << check_sampling(good, kVocab).message();
  const std::vector<std::pair<const char*, void (*)(SamplingParams&)>> wrong = {
      {"temperature is nan, expected a finite", [](SamplingParams& p) { p.temperature = NAN; }},
      {"temperature is inf, expected a finite", [](SamplingParams& p) { p.temperature = INFINITY; }},
      {"temperature is -1, expected a finite", [](SamplingParams& p) { p.temperature = -1.0F; }},
      {"top_k is -5, expected at least 0", [](SamplingParams& p) { p.top_k = -5; }},
      {"top_p is 0, expected a number above 0, at most 1", [](SamplingParams& p) { p.top_p = 0.0F; }},
      {"top_p is 2, expected", [](SamplingParams& p) { p.top_p = 2.0F; }},
      {"top_p is nan, expected", [](SamplingParams& p) { p.top_p = NAN; }},
      {"min_p is 2, expected a number from 0 to 1", [](SamplingParams& p) { p.min_p = 2.0F; }},
      {"num_logprobs is 21, expected", [](SamplingParams& p) { p.num_logprobs = 21; }},
      {"min_tokens is 6, expected a number from 0 to 5", [](SamplingParams& p) { p.min_tokens = 6; }},
      {"presence_penalty is 3, expected a number from -2 to 2", [](SamplingParams& p) { p.presence_penalty = 3.0F; }},
      {"frequency_penalty is nan, expected", [](SamplingParams& p) { p.frequency_penalty = NAN; }},
      {"repetition_penalty is 0, expected a number above 0", [](SamplingParams& p) { p.repetition_penalty = 0.0F; }},
      {"repetition_penalty is 2.5, expected", [](SamplingParams& p) { p.repetition_penalty = 2.5F; }},
      {"logit_bias has token 100, expected ids from 0 to 99",
       [](SamplingParams& p) {
         p.logit_bias = {{100, 1.0F}};
       }},
      {"logit_bias has token -1, expected",
       [](SamplingParams& p) {
         p.logit_bias = {{-1, 1.0F}};
       }},
      {"logit_bias has token 7 twice",
       [](SamplingParams& p) {
         p.logit_bias = {{7, 1.0F}, {8, 1.0F}, {7, 2.0F}};
       }},
      {"logit_bias of token 7 is 101, expected a number from -100 to 100",
       [](SamplingParams& p) {
         p.logit_bias = {{7, 101.0F}};
       }},
      {"logit_bias of token 7 is nan, expected",
       [](SamplingParams& p) {
         p.logit_bias = {{7, NAN}};
       }},
      {"logit_bias has 1025 entries, expected at most 1024", [](SamplingParams& p) { p.logit_bias.resize(1025); }},
      {"bad_words[1] has 0 tokens, expected 1 to 128",
       [](SamplingParams& p) {
         p.bad_words = {{1}, {}};
       }},
      {"bad_words[0] has 129 tokens", [](SamplingParams& p) { p.bad_words = {std::vector<int32_t>(129, 1)}; }},
      {"bad_words has token 100, expected",
       [](SamplingParams& p) {
         p.bad_words = {{1, 100}};
       }},
      {"bad_words has 1025 sequences", [](SamplingParams& p) { p.bad_words.resize(1025, {1}); }},
  };
  for (const auto& [message, spoil] : wrong) {
    SamplingParams params = good;
    spoil(params);
    const Status status = check_sampling(params, kVocab);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << message;
    EXPECT_TRUE(std::string(status.message()).starts_with(message)) << message << ": " << status.message();
  }
}

// --- the real engine on moat-nano ---

class NanoSampling : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    pool_ = new ThreadPool(2);
    auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, *pool_);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    loaded_ = std::move(loaded).value().release();
  }
  static void TearDownTestSuite() {
    delete loaded_;
    delete pool_;
  }

  static EngineParts make_parts() {
    auto parts = make_engine_parts(*loaded_, {.max_model_len = 256, .max_num_seqs = 4}, *pool_);
    EXPECT_TRUE(parts.ok()) << parts.status().message();
    return std::move(parts).value();
  }

  // A prompt of three tokens, which prefill computes as decode does.
  static std::vector<int32_t> short_prompt() {
    const test::GoldenFile golden(test::golden_dir() + "/moat-nano/golden.safetensors");
    std::vector<int32_t> prompt = golden.ints("greedy0.prompt");
    return {prompt.end() - 3, prompt.end()};
  }

  static SamplingParams greedy(int32_t max_tokens) {
    SamplingParams p;
    p.temperature = 0.0F;
    p.max_tokens = max_tokens;
    p.ignore_eos = true;
    return p;
  }

  // All requests at once through one engine; the ids of each.
  static std::vector<std::vector<int32_t>> generate(const std::vector<SamplingParams>& params) {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::vector<int32_t>> ids(params.size());
    size_t ended = 0;
    LocalEngine engine(make_parts(), 64);
    for (size_t i = 0; i < params.size(); ++i) {
      Request request;
      request.prompt_ids = short_prompt();
      request.sampling = params[i];
      const auto handle = engine.submit(std::move(request), [&, i](TokenEvent e) {
        const std::lock_guard lock(mutex);
        for (const SampledToken& token : e.tokens) ids[i].push_back(token.token_id);
        EXPECT_TRUE(e.error.ok()) << e.error.message();
        ended += e.finish != FinishReason::kNone;
        changed.notify_all();
      });
      EXPECT_TRUE(handle.ok()) << handle.status().message();
      if (!handle.ok()) return ids;
    }
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ended == params.size(); });
    return ids;
  }
  static std::vector<int32_t> generate(const SamplingParams& params) { return generate(std::vector{params}).front(); }

  static ThreadPool* pool_;
  static LoadedModel* loaded_;
};
ThreadPool* NanoSampling::pool_ = nullptr;
LoadedModel* NanoSampling::loaded_ = nullptr;

// The same choices as a loop that asks the model for logits, applies the formula and takes the largest.
TEST_F(NanoSampling, PenaltiesAreThoseOfAHandWrittenLoop) {
  constexpr int32_t kTokens = 40;
  SamplingParams all = greedy(kTokens);
  all.repetition_penalty = 1.3F;
  all.frequency_penalty = 0.5F;
  all.presence_penalty = 0.7F;
  SamplingParams repetition_only = greedy(kTokens);
  repetition_only.repetition_penalty = 1.5F;
  SamplingParams frequency_only = greedy(kTokens);
  frequency_only.frequency_penalty = 2.0F;
  const std::vector<SamplingParams> settings = {greedy(kTokens), all, repetition_only, frequency_only};
  const auto replies = generate(settings);
  for (size_t i = 0; i < settings.size(); ++i) {
    EngineParts parts = make_parts();
    Moment m{.params = settings[i], .tokens = short_prompt(), .num_prompt = 3};
    StepPlan plan;
    for (int step = 0; step < kTokens; ++step) {
      const auto length = static_cast<int32_t>(m.tokens.size());
      const int32_t rows = step == 0 ? length : 1;
      plan.clear();
      plan.sequences = {1};
      plan.num_tokens = {rows};
      plan.first_positions = {length - rows};
      plan.state_slots = {0};
      plan.wants_token = {1};
      plan.token_ids = {m.tokens.end() - rows, m.tokens.end()};
      plan.block_tables = {0, 1, 2, 3};  // 4 blocks of 16 tokens
      plan.max_blocks = 4;
      plan.num_decode_seqs = 1;
      const Tensor logits = parts.runner->forward(plan);
      m.tokens.push_back(plain_choice(plain_logits(logits.row(0), logits.dim(1), m), m));
    }
    EXPECT_EQ(replies[i], std::vector<int32_t>(m.tokens.begin() + 3, m.tokens.end())) << "setting " << i;
    EXPECT_EQ(replies[i] == replies[0], i == 0) << "setting " << i << " has no effect";
  }
}

TEST_F(NanoSampling, BiasForbidsAndForces) {
  constexpr int32_t kTokens = 12;
  const std::vector<int32_t> free = generate(greedy(kTokens));
  SamplingParams forbid = greedy(kTokens);
  for (const int32_t id : std::set<int32_t>(free.begin(), free.end())) forbid.logit_bias.push_back({id, -100.0F});
  for (const int32_t id : generate(forbid)) {
    EXPECT_EQ(std::count(free.begin(), free.end(), id), 0) << "token " << id << " has a bias of -100";
  }
  SamplingParams force = greedy(kTokens);
  force.logit_bias = {{1234, 100.0F}};
  EXPECT_EQ(generate(force), std::vector<int32_t>(kTokens, 1234));
}

TEST_F(NanoSampling, BadWordsAreNotCompletedAndMinTokensHolds) {
  constexpr int32_t kTokens = 30;
  const std::vector<int32_t> free = generate(greedy(kTokens));
  SamplingParams p = greedy(kTokens);
  p.bad_words = {{free[0]}, {free[3], free[4]}};
  const std::vector<int32_t> kept = generate(p);
  EXPECT_EQ(std::count(kept.begin(), kept.end(), free[0]), 0);
  EXPECT_EQ(std::search(kept.begin(), kept.end(), p.bad_words[1].begin(), p.bad_words[1].end()), kept.end());

  // Stops at the first token, but not before the fifth; the bad word still may not come.
  SamplingParams stop = p;
  stop.stop_token_ids = {kept[0], kept[5]};
  stop.min_tokens = 5;
  const std::vector<int32_t> stopped = generate(stop);
  EXPECT_GE(stopped.size(), 5U);
  for (size_t i = 0; i < std::min<size_t>(5, stopped.size()); ++i) {
    EXPECT_NE(stopped[i], kept[0]);
    EXPECT_NE(stopped[i], free[0]);
  }
}

// A seed repeats, other seeds differ, whatever else runs.
TEST_F(NanoSampling, SeedsRepeatAndDiffer) {
  std::vector<SamplingParams> params;
  for (uint64_t i = 0; i < 8; ++i) {
    SamplingParams p = greedy(24);
    p.temperature = 1.0F;
    p.presence_penalty = 0.5F;
    p.seed = 100 + i % 4;  // each seed twice
    params.push_back(p);
  }
  const auto replies = generate(params);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(replies[i], replies[i + 4]);
    EXPECT_EQ(replies[i], generate(params[i]));
  }
  EXPECT_EQ(std::set(replies.begin(), replies.end()).size(), 4U);
}

// Prefixes are shared whatever the sampling options of those who computed them: options choose tokens and never alter the
// hidden states of given tokens. Whoever adds one that does must keep such requests out of the prefix cache.
TEST_F(NanoSampling, NoOptionAltersWhatThePrefixCacheKeeps) {
  std::vector<SamplingParams> variants(9, greedy(70));
  variants[0].temperature = 1.5F;
  variants[0].seed = 5;
  variants[1].presence_penalty = 1.5F;
  variants[2].frequency_penalty = 1.0F;
  variants[3].repetition_penalty = 1.3F;
  variants[4].logit_bias = {{100, 20.0F}};
  variants[5].bad_words = {{100}, {7, 8}};
  variants[6].min_tokens = 60;
  variants[7].num_logprobs = 5;
  variants[8].temperature = 2.0F;
  variants[8].top_k = 50;
  variants[8].top_p = 0.9F;
  variants[8].min_p = 0.01F;

  const EngineOptions options{.max_model_len = 512, .max_num_seqs = 2, .deterministic = true};
  const auto start = [&] {
    auto parts = make_engine_parts(*loaded_, options, *pool_);
    EXPECT_TRUE(parts.ok()) << parts.status().message();
    return std::make_unique<LocalEngine>(std::move(parts).value(), 8);
  };
  struct Answer {
    std::vector<int32_t> ids;
    std::vector<float> logprobs;
    int32_t cached = 0;
  };
  const auto ask = [](LocalEngine& engine, const std::vector<int32_t>& prompt, const SamplingParams& params) {
    Answer answer;
    std::mutex mutex;
    std::condition_variable changed;
    bool ended = false;
    Request request;
    request.prompt_ids = prompt;
    request.sampling = params;
    const auto handle = engine.submit(std::move(request), [&](TokenEvent e) {
      const std::lock_guard lock(mutex);
      for (const SampledToken& token : e.tokens) {
        answer.ids.push_back(token.token_id);
        answer.logprobs.push_back(token.logprob);
      }
      answer.cached = e.num_cached_tokens;
      ended = e.finish != FinishReason::kNone;
      changed.notify_all();
    });
    EXPECT_TRUE(handle.ok()) << handle.status().message();
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ended; });
    return answer;
  };

  std::vector<int32_t> prompt;
  while (prompt.size() < 100) {
    for (const int32_t id : short_prompt()) prompt.push_back(id);
  }
  SamplingParams plain = greedy(4);
  plain.num_logprobs = 0;
  for (size_t v = 0; v < variants.size(); ++v) {
    const auto engine = start();
    std::vector<int32_t> next = prompt;
    const Answer first = ask(*engine, prompt, variants[v]);
    next.insert(next.end(), first.ids.begin(), first.ids.end());
    next.push_back(42);
    const Answer restored = ask(*engine, next, plain);
    EXPECT_GE(restored.cached, 128) << "variant " << v << ": the reply's rows are part of what is restored";
    const auto fresh = start();
    const Answer cold = ask(*fresh, next, plain);
    EXPECT_EQ(cold.cached, 0);
    EXPECT_EQ(restored.ids, cold.ids) << "variant " << v;
    EXPECT_EQ(restored.logprobs, cold.logprobs) << "variant " << v;
  }
}

}  // namespace
}  // namespace moat
