// SPDX-License-Identifier: Apache-2.0
// Speculative decoding against goldens of independent PyTorch code, and against decoding without it. Traps carry the
// numbers of docs/design/dspark.md section 7.
//   MOAT_SPECULATION=full   all 200 prompts, and as many rounds as the statistics want
#include <cmath>
#include <cstdlib>
#include <map>

#include "base/json.h"
#include "base/rng.h"
#include "engine/local_engine.h"
#include "golden_file.h"
#include "speculative_run.h"

namespace moat {
namespace {

using test::RunSampling;
using test::SpeculativeModels;
using test::SpeculativeRun;

bool is_full() {
  const char* value = std::getenv("MOAT_SPECULATION");
  return value != nullptr && std::string_view(value) == "full";
}

std::string nano() { return test::source_dir() + "/models/moat-nano"; }
std::string nano_dspark() { return test::source_dir() + "/models/moat-nano-dspark"; }

Json read_golden(const std::string& name) {
  auto text = read_file(test::golden_dir() + "/dspark/" + name);
  EXPECT_TRUE(text.ok()) << text.status().message();
  auto json = parse_json(*text);
  EXPECT_TRUE(json.ok()) << json.status().message();
  return std::move(json).value();
}

std::vector<int32_t> ints(const Json& list) {
  std::vector<int32_t> out;
  for (const Json& item : list.as_array()) out.push_back(static_cast<int32_t>(*item.as_int64()));
  return out;
}
std::vector<double> numbers(const Json& list) {
  std::vector<double> out;
  for (const Json& item : list.as_array()) out.push_back(item.as_double());
  return out;
}
double number(const Json& object, const char* key, double absent) {
  const Json* value = object.find_set(key);
  return value == nullptr ? absent : value->as_double();
}

SpeculativeModels& models() {
  static SpeculativeModels both(nano(), nano_dspark());
  return both;
}

struct GoldenPrompt {
  std::vector<int32_t> prompt;
  int64_t new_tokens = 0;
  std::vector<int32_t> accepted;
  double gap = 0;
};
const std::vector<GoldenPrompt>& golden_prompts() {
  static const std::vector<GoldenPrompt> all = [] {
    std::vector<GoldenPrompt> out;
    const Json json = read_golden("prompts.json");
    for (const Json& row : json.as_array()) {
      out.push_back({ints(*row.find("prompt")), *row.find("new_tokens")->as_int64(), ints(*row.find("accepted")),
                     row.find("gap")->as_double()});
    }
    return out;
  }();
  return all;
}
// A part of them unless everything is asked for.
std::vector<size_t> chosen_prompts(size_t count) {
  std::vector<size_t> out;
  const size_t step = is_full() ? 1 : golden_prompts().size() / count;
  for (size_t i = 0; i < golden_prompts().size(); i += step) out.push_back(i);
  return out;
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

}  // namespace
}  // namespace moat
