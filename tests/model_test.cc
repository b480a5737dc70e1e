// SPDX-License-Identifier: Apache-2.0
// The model against goldens of independent PyTorch code, and against itself: whole prompt = chunks = token by token,
// rows independent of batch mates, of how a batch is split and of the number of threads.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>

#include "base/json.h"
#include "engine/sequence_logits.h"
#include "golden_file.h"
#include "model/loader.h"

namespace moat {
namespace {

using test::GoldenFile;

constexpr float kTolerance = 3e-4F;     // goldens of our own reference (its two forms differ by up to 6e-5)
constexpr float kTransformers = 1e-4F;  // hf/kimi_linear

struct Checkpoint {
  std::string name;
  std::string model_dir;
  std::string golden_path;
};

struct Loaded {
  ThreadPool pool;
  std::unique_ptr<LoadedModel> model;
  explicit Loaded(const std::string& dir, int threads = 2) : pool(threads) {
    auto result = load_model(dir, {}, pool);
    EXPECT_TRUE(result.ok()) << result.status().message();
    if (result.ok()) model = std::move(result).value();
  }
  std::unique_ptr<SequenceLogits> logits(bool reference = false, int64_t chunk = 512) {
    auto result = SequenceLogits::create(*model, {.reference = reference, .max_tokens = 512, .chunk = chunk}, pool);
    EXPECT_TRUE(result.ok()) << result.status().message();
    return std::move(result).value();
  }
};

// Logits of every position, [tokens, vocab], flat.
std::vector<float> run(SequenceLogits& runner, std::span<const int32_t> ids, int64_t chunk = 0) {
  std::vector<float> all;
  const Status status = runner.append(ids, chunk, [&](int64_t, const Tensor& logits) {
    all.insert(all.end(), logits.f32(), logits.f32() + logits.count());
  });
  EXPECT_TRUE(status.ok()) << status.message();
  return all;
}

// Largest |got - want| over the last rows of `got` that `want` holds; infinity if anything is not finite.
float largest_error(std::span<const float> got, const Tensor& want) {
  const auto count = static_cast<size_t>(want.count());
  EXPECT_LE(count, got.size());
  const float* tail = got.data() + (got.size() - count);
  float worst = 0;
  for (size_t i = 0; i < count; ++i) {
    const float error = std::fabs(tail[i] - want.f32()[i]);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}

size_t argmax(const float* row, int64_t vocab) { return static_cast<size_t>(std::max_element(row, row + vocab) - row); }

Checkpoint random_small() {
  const std::string dir = test::golden_dir() + "/k3-random-small";
  return {"k3-random-small", dir, dir + "/golden.safetensors"};
}
Checkpoint nano() {
  return {"moat-nano", test::source_dir() + "/models/moat-nano", test::golden_dir() + "/moat-nano/golden.safetensors"};
}
Checkpoint kimi_linear() {
  const std::string dir = test::golden_dir() + "/hf/kimi_linear";
  return {"hf/kimi_linear", dir, dir + "/golden.safetensors"};
}
// The larger golden with all of K3's head counts of one TP8 rank; only where MOAT_GOLDEN points to a full set.
Checkpoint random_full() {
  const std::string dir = test::golden_dir() + "/k3-random";
  return {"k3-random", dir, dir + "/golden.safetensors"};
}

// Worst errors of the intermediate values that the golden names, collected by a probe.
struct ProbeErrors {
  std::map<std::string, float> worst;
  void note(const std::string& name, float error) { worst[name] = std::max(worst[name], error); }
};

void compare_probe(const GoldenFile& golden, const std::string& prompt, const ModelConfig& config, const char* name,
                   int64_t layer, const Tensor& value, ProbeErrors& errors) {
  const std::string kind = name;
  const std::string key = kind == "hidden"           ? "hidden"
                          : kind == "mix"            ? "mixes"
                          : kind == "expert_ids"     ? "experts"
                          : kind == "expert_weights" ? "expert_weights"
                                                     : "";
  if (!golden.has(prompt + "." + key)) return;
  const Tensor all = golden.tensor(prompt + "." + key);  // [entries, rows, width]
  int64_t entry = kind == "hidden" ? layer + 1 : layer;
  if (kind.starts_with("expert")) {
    entry = 0;  // counts MoE layers
    for (int64_t l = 0; l < layer; ++l) entry += config.is_moe(l);
  }
  if (kind == "hidden" && layer == config.num_layers - 1 && !config.attn_res_block_size)
    return;  // that entry is normed
  const Tensor want = all.at(entry);
  if (kind == "expert_ids") {
    for (int64_t i = 0; i < want.count(); ++i) EXPECT_EQ(value.i32()[i], want.ptr<int64_t>()[i]) << "layer " << layer;
    return;
  }
  const Tensor contiguous = value;
  std::vector<float> got(contiguous.f32(), contiguous.f32() + contiguous.count());
  errors.note(key, largest_error(got, want));
}

void check_k3_golden(const Checkpoint& c, bool reference) {
  Loaded loaded(c.model_dir);
  const GoldenFile golden(c.golden_path);
  ASSERT_TRUE(loaded.model);
  auto runner = loaded.logits(reference);
  ProbeErrors errors;
  for (const std::string prompt : {"p1", "p17", "p150"}) {
    runner->model().set_probe([&](const char* name, int64_t layer, const Tensor& value) {
      compare_probe(golden, prompt, loaded.model->config, name, layer, value, errors);
    });
    runner->restart();
    const auto ids = golden.ints(prompt + ".ids");
    errors.note("logits", largest_error(run(*runner, ids), golden.tensor(prompt + ".logits")));
    if (prompt != "p17") continue;

    // Eight and more tokens one at a time after the 17-token prompt, then the state they leave.
    runner->model().set_probe({});
    errors.note("decode", largest_error(run(*runner, golden.ints("decode.ids"), 1), golden.tensor("decode.logits")));
    const Tensor state = runner->caches().kda_state.at(0).at(0);
    const Tensor conv = runner->caches().kda_conv.at(0).at(0);
    errors.note("state",
                largest_error({state.f32(), static_cast<size_t>(state.count())}, golden.tensor("decode.state")));
    errors.note("conv", largest_error({conv.f32(), static_cast<size_t>(conv.count())}, golden.tensor("decode.conv")));
  }
  std::string line;
  for (const auto& [name, error] : errors.worst) {
    line += fmt::format(" {} {:.2g}", name, error);
    EXPECT_LE(error, kTolerance) << c.name << " " << name;
  }
  fmt::print("golden {} ({}): largest errors:{}\n", c.name, reference ? "reference" : "cpu", line);
}

TEST(Golden, K3RandomSmall) { check_k3_golden(random_small(), false); }
TEST(Golden, K3RandomSmallReference) { check_k3_golden(random_small(), true); }
TEST(Golden, MoatNano) { check_k3_golden(nano(), false); }
TEST(Golden, MoatNanoReference) { check_k3_golden(nano(), true); }

TEST(Golden, K3RandomWhereGiven) {
  if (!file_exists(random_full().golden_path)) {
    fmt::print("golden k3-random: not in {}; set MOAT_GOLDEN to a full set to run it\n", test::golden_dir());
    return;
  }
  check_k3_golden(random_full(), false);
  check_k3_golden(random_full(), true);
}

void check_kimi_linear(bool reference) {
  const Checkpoint c = kimi_linear();
  Loaded loaded(c.model_dir);
  const GoldenFile golden(c.golden_path);
  ASSERT_TRUE(loaded.model);
  auto runner = loaded.logits(reference);
  float worst = 0;
  for (const std::string n : {"1", "150", "17"}) {
    runner->restart();
    worst = std::max(worst, largest_error(run(*runner, golden.ints("ids_" + n)), golden.tensor("logits_" + n)));
  }
  const float decode = largest_error(run(*runner, golden.ints("decode_ids"), 1), golden.tensor("decode_logits"));
  EXPECT_LE(worst, kTransformers);
  EXPECT_LE(decode, kTransformers);
  fmt::print("golden {} ({}): largest errors: logits {:.2g} decode {:.2g}\n", c.name, reference ? "reference" : "cpu",
             worst, decode);
}

TEST(Golden, KimiLinear) { check_kimi_linear(false); }
TEST(Golden, KimiLinearReference) { check_kimi_linear(true); }

// Greedy continuations of eight chat prompts: ids, and the ten most likely with their logprobs at every step.
TEST(Golden, MoatNanoGreedy) {
  Loaded loaded(nano().model_dir);
  const GoldenFile golden(nano().golden_path);
  auto text = read_file(test::golden_dir() + "/moat-nano/greedy.json");
  ASSERT_TRUE(text.ok() && loaded.model);
  auto runner = loaded.logits();
  const int64_t vocab = loaded.model->config.vocab_size;
  float worst_logprob = 0;
  int compared = 0;
  for (int p = 0; p < 8; ++p) {
    const std::string name = fmt::format("greedy{}", p);
    const auto prompt = golden.ints(name + ".prompt");
    const auto want = golden.ints(name + ".ids");
    const auto top_ids = golden.ints(name + ".top_ids");
    const Tensor top_logprobs = golden.tensor(name + ".top_logprobs");
    runner->restart();
    std::vector<float> logits = run(*runner, prompt);
    std::vector<float> row(logits.end() - vocab, logits.end());
    for (size_t step = 0; step < want.size(); ++step) {
      const auto token = static_cast<int32_t>(argmax(row.data(), vocab));
      ASSERT_EQ(token, want[step]) << name << " step " << step;
      ++compared;
      double sum = 0;
      const float top = row[static_cast<size_t>(token)];
      for (const float x : row) sum += std::exp(static_cast<double>(x - top));
      for (size_t j = 0; j < 10; ++j) {
        const auto id = static_cast<size_t>(top_ids[step * 10 + j]);
        const auto logprob = static_cast<float>(row[id] - top - std::log(sum));
        worst_logprob = std::max(worst_logprob, std::fabs(logprob - top_logprobs.f32()[step * 10 + j]));
      }
      row = run(*runner, std::vector<int32_t>{token}, 1);
    }
  }
  EXPECT_EQ(compared, 512);
  EXPECT_LE(worst_logprob, kTolerance);
  fmt::print("golden moat-nano greedy: {} ids identical, largest top-10 logprob error {:.2g}\n", compared,
             worst_logprob);
}

// Whole prompt = chunks of 1, 7, 64: the same ids everywhere, and logits that differ by rounding only.
TEST(Model, ChunkedEqualsWhole) {
  for (const Checkpoint& c : {random_small(), nano(), kimi_linear()}) {
    Loaded loaded(c.model_dir);
    ASSERT_TRUE(loaded.model);
    auto runner = loaded.logits();
    const GoldenFile golden(c.golden_path);
    const auto ids = golden.ints(golden.has("p150.ids") ? "p150.ids" : "ids_150");
    const int64_t vocab = loaded.model->config.vocab_size;
    const auto whole = run(*runner, ids);
    for (const int64_t chunk : {1, 7, 64}) {
      runner->restart();
      const auto pieces = run(*runner, ids, chunk);
      ASSERT_EQ(pieces.size(), whole.size());
      float worst = 0;
      for (size_t i = 0; i < whole.size(); ++i) worst = std::max(worst, std::fabs(whole[i] - pieces[i]));
      EXPECT_LE(worst, kTolerance) << c.name << " chunk " << chunk;
      for (size_t t = 0; t < ids.size(); ++t) {
        EXPECT_EQ(argmax(&whole[t * static_cast<size_t>(vocab)], vocab),
                  argmax(&pieces[t * static_cast<size_t>(vocab)], vocab))
            << c.name << " chunk " << chunk << " row " << t;
      }
      fmt::print("{}: chunks of {} against whole: largest logit difference {:.2g}, ids equal\n", c.name, chunk, worst);
    }
  }
}

// Token-by-token logits are the same bits whatever the piece size in decode form, with 1 and with 2 threads.
TEST(Model, DecodeFormRowsAreBitIdentical) {
  for (const Checkpoint& c : {random_small(), nano(), kimi_linear()}) {
    const GoldenFile golden(c.golden_path);
    const auto ids = golden.ints(golden.has("p150.ids") ? "p150.ids" : "ids_150");
    Loaded one(c.model_dir, 1);
    Loaded two(c.model_dir, 2);
    ASSERT_TRUE(one.model && two.model);
    const auto alone = run(*one.logits(), ids, 1);
    EXPECT_EQ(run(*two.logits(), ids, 1), alone) << c.name << ": 1 and 2 threads";
    EXPECT_EQ(run(*one.logits(), ids, 8), alone) << c.name << ": rows of a verification of 8";
    EXPECT_EQ(run(*two.logits(), ids, 31), alone) << c.name << ": pieces of 31";
  }
}

// The prefill form does not depend on the number of threads either.
TEST(Model, PrefillFormIsIndependentOfThreads) {
  Loaded one(nano().model_dir, 1);
  Loaded two(nano().model_dir, 2);
  const auto ids = GoldenFile(nano().golden_path).ints("p150.ids");
  EXPECT_EQ(run(*one.logits(), ids), run(*two.logits(), ids));
}

}  // namespace
}  // namespace moat
