// SPDX-License-Identifier: Apache-2.0
// The drafter against goldens of independent PyTorch code, against plain formulas on small random drafters of every
// layout, and the traps of dspark.md section 7 that are its own: a name like T09 carries the number.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "draft_harness.h"
#include "engine/batch.h"
#include "engine/cache_memory.h"
#include "golden_file.h"
#include "model/kimi.h"
#include "model/loader.h"

namespace moat {
namespace {

using test::Drafter;
using test::GoldenFile;
using test::ReferenceRound;
using test::Row;
using test::TinyDraft;
using test::TinyDraftOptions;
using test::Toy;
using test::with;

float largest_error(const Tensor& got, const Tensor& want) {
  EXPECT_EQ(got.count(), want.count());
  float worst = 0;
  for (int64_t i = 0; i < std::min(got.count(), want.count()); ++i) {
    const float error = std::fabs(got.f32()[i] - want.f32()[i]);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}

// --- goldens on moat-nano ---

// moat-nano as target, its drafter, and the taps of a whole sequence from one prompt pass.
struct Nano {
  ThreadPool pool{2};
  std::unique_ptr<LoadedModel> target;
  std::unique_ptr<LoadedDspark> draft;
  std::unique_ptr<KimiModel> model;
  std::unique_ptr<CacheMemory> caches;
  std::unique_ptr<Drafter> drafter;
  Arena arena{size_t{128} << 20};
  SingleRank comm;
  Buffer taps_memory;

  Nano() {
    auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, pool);
    auto loaded_draft = load_dspark(test::source_dir() + "/models/moat-nano-dspark", pool);
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    EXPECT_TRUE(loaded_draft.ok()) << loaded_draft.status().message();
    target = std::move(loaded).value();
    draft = std::move(loaded_draft).value();
    const Status fits = check_against_target(draft->config, target->config);
    EXPECT_TRUE(fits.ok()) << fits.message();
    model = std::make_unique<KimiModel>(target->config, target->weights);
    CacheSizes sizes;
    sizes.num_blocks = 512 / sizes.block_size;
    sizes.num_slots = 1;
    caches = std::make_unique<CacheMemory>(target->config, sizes);
    drafter =
        std::make_unique<Drafter>(draft->config, draft->weights, target->weights.embed, target->weights.lm_head, pool);
  }

  // [tokens, taps * hidden] for a sequence from its beginning.
  Tensor taps(const std::vector<int32_t>& ids) {
    const auto tokens = static_cast<int64_t>(ids.size());
    const int64_t blocks = caches->view().mla.dim(1) / caches->view().block_size;
    StepPlan plan;
    plan.sequences = {1};
    plan.num_tokens = {static_cast<int32_t>(tokens)};
    plan.first_positions = {0};
    plan.state_slots = {0};
    plan.wants_token = {1};
    plan.token_ids = ids;
    plan.block_tables.resize(static_cast<size_t>(blocks));
    std::iota(plan.block_tables.begin(), plan.block_tables.end(), 0);
    plan.max_blocks = blocks;
    Batch batch;
    ForwardInput input = batch.build(plan, caches->view().block_size);
    input.tap_layers = draft->config.target_layer_ids;
    Exec exec({.arch = host_arch(), .pool = &pool, .arena = &arena, .comm = &comm});
    const ArenaScope scope(arena);
    const Tensor taps = model->forward(exec, input, caches->view()).taps;  // in the arena, which the next pass reuses
    taps_memory = Buffer(static_cast<size_t>(4 * taps.count()));
    std::copy(taps.f32(), taps.f32() + taps.count(), static_cast<float*>(taps_memory.data()));
    return make_tensor(taps_memory.data(), DType::kF32, taps.dims);
  }
};

void check_first_round(ExecMode mode) {
  Nano nano;
  nano.drafter->set_mode(mode);
  const GoldenFile golden(test::golden_dir() + "/dspark/round.safetensors");
  const std::vector<int32_t> prompt = golden.ints("prompt");
  const auto tokens = static_cast<int64_t>(prompt.size());
  const DsparkConfig& config = nano.draft->config;

  const Tensor taps = nano.taps(prompt);
  float features = 0;
  nano.drafter->model().set_probe([&](const char* name, int64_t, const Tensor& value) {
    if (std::string_view(name) == "features") features = largest_error(value, golden.tensor("features"));
  });
  nano.drafter->extend(0, 0, taps);
  const Drafter::Round round =
      nano.drafter->propose({{.anchor = golden.ints("anchor")[0], .position = static_cast<int32_t>(tokens)}}, 7);

  // The cached rows of layer 0: keys of all kv heads, then values; the golden is head by head.
  float keys = 0, values = 0;
  const Tensor want_keys = golden.tensor("layer0.keys"), want_values = golden.tensor("layer0.values");
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = nano.drafter->cache().rows.at(0).row(nano.drafter->slot(0, t));
    for (int64_t h = 0; h < config.num_kv_heads; ++h) {
      for (int64_t d = 0; d < config.head_dim; ++d) {
        const int64_t key = h * config.head_dim + d, value = config.num_kv_heads * config.head_dim + key;
        keys = std::max(keys, std::fabs(row[key] - want_keys.at(h).row(t)[d]));
        values = std::max(values, std::fabs(row[value] - want_values.at(h).row(t)[d]));
      }
    }
  }
  const auto view = [](const std::vector<float>& v) {
    return make_tensor(const_cast<float*>(v.data()), DType::kF32, {static_cast<int64_t>(v.size())});
  };
  const std::vector<std::pair<const char*, float>> errors = {
      {"taps", largest_error(taps, golden.tensor("taps"))},
      {"features", features},
      {"keys", keys},
      {"values", values},
      {"hidden", largest_error(view(round.hidden), golden.tensor("hidden"))},
      {"base logits", largest_error(view(round.base_logits), golden.tensor("base_logits"))},
      {"anchor's bias", largest_error(view(round.bias[0]), golden.tensor("first_bias"))}};
  std::string line;
  for (const auto& [name, error] : errors) {
    line += fmt::format(" {} {:.2g}", name, error);
    EXPECT_LE(error, 3e-4F) << name;
  }
  fmt::print("golden dspark, first round ({}): largest errors:{}\n", mode == ExecMode::kReference ? "reference" : "cpu",
             line);
}

TEST(Golden, FirstRound) { check_first_round(ExecMode::kEager); }
TEST(Golden, FirstRoundReference) { check_first_round(ExecMode::kReference); }

// Every round of all generations: drafts exactly, confidences closely. The taps of a generation come from one pass over
// all that it committed; each round's rows are then injected as they were.
TEST(Golden, Rounds) {
  Nano nano;
  auto text = read_file(test::golden_dir() + "/dspark/rounds.json");
  ASSERT_TRUE(text.ok());
  const Json generations = *parse_json(*text);
  const auto ints = [](const Json& list) {
    std::vector<int32_t> values;
    for (const Json& item : list.as_array()) values.push_back(static_cast<int32_t>(*item.as_int64()));
    return values;
  };
  int rounds = 0;
  double worst = 0;
  for (const Json& g : generations.as_array()) {
    const bool sampled = g.find("temperature") != nullptr;
    const std::vector<int32_t> prompt = ints(*g.find("prompt"));
    std::vector<int32_t> tokens = prompt;
    tokens.push_back(ints(*g.find("ids"))[0]);
    for (const Json& r : g.find("rounds")->as_array()) {
      const std::vector<int32_t> drafts = ints(*r.find("drafts"));
      tokens.insert(tokens.end(), drafts.begin(), drafts.begin() + *r.find("accepted")->as_int64());
      tokens.push_back(static_cast<int32_t>(*r.find("bonus")->as_int64()));
    }
    const Tensor taps = nano.taps(tokens);
    auto first = static_cast<int64_t>(prompt.size());
    nano.drafter->extend(0, 0, taps.rows(0, first));
    for (size_t i = 0; i < g.find("rounds")->as_array().size(); ++i) {
      const Json& r = g.find("rounds")->as_array()[i];
      Drafter::Ask ask{.anchor = tokens[static_cast<size_t>(first)], .position = static_cast<int32_t>(first)};
      if (sampled) {
        ask.temperature = static_cast<float>(g.find("temperature")->as_double());
        const Json::Array& draft_uniforms = g.find("uniforms")->find("draft")->as_array();
        for (size_t k = 0; k < 7; ++k) ask.uniforms[k] = draft_uniforms[7 * i + k].as_double();
      }
      const Drafter::Round round = nano.drafter->propose({ask}, 7);
      EXPECT_EQ(round.ids, ints(*r.find("drafts"))) << "round " << i << " of " << g.find("prompt")->dump();
      for (size_t k = 0; k < 7; ++k) {
        worst =
            std::max(worst, std::fabs(double{round.confidence[k]} - r.find("confidence")->as_array()[k].as_double()));
      }
      const int64_t next = first + *r.find("accepted")->as_int64() + 1;
      nano.drafter->extend(0, first, taps.rows(first, next));
      first = next;
      ++rounds;
    }
  }
  EXPECT_LE(worst, 3e-4);
  fmt::print("golden dspark, {} rounds: largest error of a confidence {:.2g}\n", rounds, worst);
}

// --- small random drafters against the formulas ---

// Softmax of z / temperature, at target ids.
std::vector<double> law(const Toy& toy, const Row& z, double temperature) {
  std::vector<double> p(static_cast<size_t>(test::kTinyVocab), 0.0);
  double sum = 0;
  for (const double v : z) sum += std::exp(v / temperature);
  const std::vector<int32_t>& map = toy.loaded->weights.target_ids;
  for (size_t i = 0; i < z.size(); ++i)
    p[map.empty() ? i : static_cast<size_t>(map[i])] = std::exp(z[i] / temperature) / sum;
  return p;
}

// One sampled and one greedy sequence in one round, each with its own context, against the formulas.
void compare_with_formulas(Toy& toy, const char* what) {
  constexpr double kTolerance = 2e-5;
  const int64_t gamma = toy.loaded->config.block_size;
  const Tensor taps[2] = {toy.taps(11, 21), toy.taps(3, 22)};
  for (int64_t s = 0; s < 2; ++s) toy.drafter->extend(s, 0, taps[s]);
  const std::vector<Drafter::Ask> asks = {
      {.seq = 0, .anchor = 7, .position = 11, .temperature = 0.7F, .uniforms = {0.31, 0.02, 0.77, 0.999, 0.5, 0.4}},
      {.seq = 1, .anchor = 30, .position = 3}};
  const Drafter::Round round = toy.drafter->propose(asks, gamma);
  double hidden = 0, probs = 0, confidence = 0;
  for (int64_t s = 0; s < 2; ++s) {
    const std::vector<int32_t> ids(round.ids.begin() + s * gamma, round.ids.begin() + (s + 1) * gamma);
    const ReferenceRound want = toy.reference(taps[s], asks[static_cast<size_t>(s)].anchor, ids);
    for (int64_t k = 0; k < gamma; ++k) {
      const auto slot = static_cast<size_t>(k);
      const std::vector<float> got = round.row(round.hidden, s * gamma + k, 2 * gamma);
      for (size_t i = 0; i < got.size(); ++i) hidden = std::max(hidden, std::fabs(got[i] - want.hidden[slot][i]));
      const std::vector<double> p = law(toy, want.logits[slot], s == 0 ? 0.7 : 1.0);
      if (s == 0) {
        const std::vector<float> q = round.row(round.probs, k, 2 * gamma);
        for (size_t v = 0; v < q.size(); ++v) probs = std::max(probs, std::fabs(q[v] - p[v]));
        EXPECT_GT(q[static_cast<size_t>(ids[slot])], 0.0F) << what;
        // Inverse distribution in the order of draft ids.
        double total = 0, below = 0;
        const std::vector<int32_t>& map = toy.loaded->weights.target_ids;
        for (size_t i = 0; i < want.logits[slot].size(); ++i) {
          const size_t id = map.empty() ? i : static_cast<size_t>(map[i]);
          if (total <= asks[0].uniforms[slot]) below = total;
          total += p[id];
          if (static_cast<int32_t>(id) == ids[slot]) break;
        }
        EXPECT_LE(below, asks[0].uniforms[slot] + kTolerance) << what;
        EXPECT_GE(total, asks[0].uniforms[slot] - kTolerance) << what;
      } else {
        EXPECT_GE(p[static_cast<size_t>(ids[slot])], *std::max_element(p.begin(), p.end()) - 1e-6) << what;
      }
      if (toy.loaded->config.confidence_head) {
        confidence = std::max(confidence,
                              std::fabs(round.confidence[static_cast<size_t>(s * gamma + k)] - want.confidence[slot]));
      }
    }
  }
  EXPECT_LE(hidden, kTolerance * 4) << what;
  EXPECT_LE(probs, kTolerance) << what;
  EXPECT_LE(confidence, kTolerance) << what;
  EXPECT_EQ(round.confidence.empty(), !toy.loaded->config.confidence_head);
}

void check_formulas(const char* what, Json config, TinyDraftOptions options = {}, int num_shards = 1) {
  SCOPED_TRACE(what);
  Toy toy(TinyDraft(std::move(config), options), num_shards);
  compare_with_formulas(toy, what);
}

TEST(Formulas, FourLayouts) {
  check_formulas("RadixArk", test::nested_draft_config());
  check_formulas("RadixArk bf16 in shards", test::nested_draft_config(), {.dtype = DType::kBF16}, 3);
  check_formulas("DeepSpec with copies", test::flat_draft_config(), {.own_embed = true, .own_head = true});
  check_formulas("novita", test::pruned_draft_config(), {.own_embed = true, .own_head = true});
  check_formulas("Inferact", test::mla_draft_config(), {.own_embed = true});
  check_formulas("lightseek", with(with(test::mla_draft_config(), "fc_norm", true), "aux_hidden_stream", "attn_res"));
  check_formulas("without a query latent", with(test::mla_draft_config(), "q_lora_rank", nullptr));
}

TEST(Formulas, MarkovKinds) {
  for (const char* kind : {"vanilla", "gated", "rnn"}) {
    check_formulas(kind, with(test::nested_draft_config(), "markov_head_type", kind));
    check_formulas(kind, with(test::mla_draft_config(), "markov_head_type", kind), {.dtype = DType::kBF16});
  }
}

TEST(Formulas, CausalBlocks) {
  check_formulas("grouped-query", with(test::nested_draft_config(), "causal", true));
  check_formulas("latent", with(test::mla_draft_config(), "causal", true));
}

TEST(Formulas, OlderNames) {
  TinyDraft draft(test::nested_draft_config());
  draft.tensor("markov_head.markov_w1.weight").name = "logit_head.markov_w1.weight";
  draft.tensor("markov_head.markov_w2.weight").name = "logit_head.markov_w2.weight";
  for (TinyTensor& t : draft.tensors) {
    if (t.name.starts_with("layers.") || t.name == "norm.weight") t.name = "model." + t.name;
  }
  Toy toy(std::move(draft));
  compare_with_formulas(toy, "older names");
}

// --- traps ---

TEST(Trap, T02_T83_TheBiasOfADraftIsThatOfTheDraftBefore) {
  Toy toy(TinyDraft(test::nested_draft_config()));
  const int64_t gamma = toy.loaded->config.block_size;
  const Tensor taps = toy.taps(5, 3);
  toy.drafter->extend(0, 0, taps);
  const Drafter::Round round = toy.drafter->propose({{.anchor = 9, .position = 5}}, gamma);
  ASSERT_EQ(static_cast<int64_t>(round.bias.size()), gamma);
  const DsparkWeights& w = toy.loaded->weights;
  for (int64_t k = 0; k < gamma; ++k) {
    // Slot k, counted from 0, gives draft k from its own hidden row and from what stands before draft k.
    const int32_t before = k == 0 ? 9 : round.ids[static_cast<size_t>(k - 1)];
    const std::vector<float> h = round.row(round.hidden, k, gamma), u = round.row(round.base_logits, k, gamma);
    size_t best = 0;
    std::vector<double> z(u.size());
    for (size_t v = 0; v < u.size(); ++v) {
      double bias = 0, base = 0;
      for (int64_t r = 0; r < w.markov_in.dim(1); ++r) {
        bias += double{w.markov_out.row(static_cast<int64_t>(v))[r]} * w.markov_in.row(before)[r];
      }
      for (size_t i = 0; i < h.size(); ++i) base += double{toy.lm_head.tensor.row(static_cast<int64_t>(v))[i]} * h[i];
      EXPECT_NEAR(u[v], base, 1e-5);
      EXPECT_NEAR(round.bias[static_cast<size_t>(k)][v], bias, 1e-5);
      z[v] = base + bias;
      if (z[v] > z[best]) best = v;
    }
    EXPECT_EQ(round.ids[static_cast<size_t>(k)], static_cast<int32_t>(best));
  }
}

TEST(Trap, T03_SlotZeroIsTheFirstDraftAndEpsilonIsRead) {
  const auto first = [](const Json& config, int32_t anchor) {
    Toy toy{TinyDraft(config)};
    toy.drafter->extend(0, 0, toy.taps(5, 3));
    return toy.drafter->propose({{.anchor = anchor, .position = 5}}, 1);
  };
  const Json config = test::nested_draft_config();
  EXPECT_NE(first(config, 9).base_logits, first(config, 10).base_logits);
  EXPECT_NE(first(config, 9).hidden, first(with(config, "rms_norm_eps", 1e-2), 9).hidden);
}

TEST(Trap, T07_TapNorms) {
  const Json config = test::nested_draft_config();
  Toy plain{TinyDraft(config)}, normed{TinyDraft(with(config, "fc_norm", true))};
  const Tensor taps = plain.taps(3, 3);
  for (int64_t i = 0; i < taps.count(); ++i) taps.f32()[i] *= i % 48 < 24 ? 30.0F : 0.1F;
  std::vector<float> features[2];
  for (Toy* toy : {&plain, &normed}) {
    toy->drafter->model().set_probe([&](const char* name, int64_t, const Tensor& value) {
      if (std::string_view(name) == "features") {
        features[toy == &normed].assign(value.f32(), value.f32() + value.count());
      }
    });
    toy->drafter->extend(0, 0, taps);
  }
  EXPECT_NE(features[0], features[1]);
  TinyDraft missing(with(config, "fc_norm", true));
  missing.erase("fc_norm.1.weight");
  const TempDir dir;
  missing.write(dir.path());
  ThreadPool pool(1);
  const auto loaded = load_dspark(dir.path(), pool);
  ASSERT_FALSE(loaded.ok());
  EXPECT_NE(loaded.status().message().find("fc_norm.1.weight"), std::string::npos) << loaded.status().message();
}

// The anchor's position is the number of context rows: the last of them is read, the one at P is not.
TEST(Trap, T08_TheBlockBeginsWhereTheContextEnds) {
  for (const Json& config : {test::nested_draft_config(), test::mla_draft_config()}) {
    Toy toy{TinyDraft(config)};
    const Tensor taps = toy.taps(9, 3);
    toy.drafter->extend(0, 0, taps);
    const Drafter::Ask ask{.anchor = 9, .position = 8};
    const std::vector<float> before = toy.drafter->propose({ask}, 4).hidden;
    const auto poison = [&](int64_t position) {
      for (int64_t l = 0; l < toy.loaded->config.num_layers; ++l) {
        std::fill_n(toy.drafter->cache().rows.at(l).row(toy.drafter->slot(0, position)),
                    toy.drafter->model().row_width(), std::numeric_limits<float>::quiet_NaN());
      }
    };
    poison(8);
    EXPECT_EQ(toy.drafter->propose({ask}, 4).hidden, before);
    poison(7);
    EXPECT_TRUE(std::isnan(toy.drafter->propose({ask}, 4).hidden[0]));
  }
}

TEST(Trap, T09_SequencesDoNotMix) {
  for (const Json& config : {test::nested_draft_config(), with(test::mla_draft_config(), "markov_head_type", "rnn")}) {
    Toy toy{TinyDraft(config)};
    const Tensor a = toy.taps(11, 1), b = toy.taps(14, 2);
    // Prompts in interleaved chunks.
    toy.drafter->extend(0, 0, a.rows(0, 5));
    toy.drafter->extend(1, 0, b.rows(0, 9));
    toy.drafter->extend(0, 5, a.rows(5, 11));
    toy.drafter->extend(1, 9, b.rows(9, 14));
    toy.drafter->extend(2, 0, a);
    toy.drafter->extend(3, 0, b);
    const std::vector<Drafter::Ask> asks = {
        {.seq = 0, .anchor = 7, .position = 11, .temperature = 0.9F, .uniforms = {0.3, 0.6, 0.1, 0.9}},
        {.seq = 1, .anchor = 21, .position = 14}};
    const Drafter::Round both = toy.drafter->propose(asks, 4);
    for (int64_t s = 0; s < 2; ++s) {
      Drafter::Ask alone = asks[static_cast<size_t>(s)];
      alone.seq += 2;  // the context of one piece
      const Drafter::Round one = toy.drafter->propose({alone}, 4);
      EXPECT_EQ(one.ids, std::vector<int32_t>(both.ids.begin() + 4 * s, both.ids.begin() + 4 * (s + 1)));
      EXPECT_EQ(one.hidden, both.row(both.hidden, s, 2));
      EXPECT_EQ(one.confidence, both.row(both.confidence, s, 2));
      if (s == 0) {
        EXPECT_EQ(one.probs, both.row(both.probs, 0, 2));
      }
      // Fewer drafts are the same leading ones.
      const Drafter::Round fewer = toy.drafter->propose({alone}, 2);
      EXPECT_EQ(fewer.ids, std::vector<int32_t>(one.ids.begin(), one.ids.begin() + 2));
    }
  }
}

// What rounds inject piece by piece is what a fresh prefill of the committed tokens has, bit for bit.
TEST(Trap, T10_EveryCommittedRowIsInjected) {
  for (const Json& config : {test::nested_draft_config(), test::mla_draft_config()}) {
    Toy toy{TinyDraft(config)};
    const Tensor taps = toy.taps(23, 5);
    int64_t first = 0;
    for (const int64_t next : {9, 10, 14, 22, 23}) {  // the prompt, then anchor and accepted drafts of each round
      toy.drafter->extend(0, first, taps.rows(first, next));
      first = next;
    }
    toy.drafter->extend(1, 0, taps);
    for (int64_t l = 0; l < toy.loaded->config.num_layers; ++l) {
      const Tensor rows = toy.drafter->cache().rows.at(l);
      for (int64_t p = 0; p < 23; ++p) {
        EXPECT_EQ(std::memcmp(rows.row(toy.drafter->slot(0, p)), rows.row(toy.drafter->slot(1, p)),
                              sizeof(float) * static_cast<size_t>(rows.dim(1))),
                  0)
            << "layer " << l << " position " << p;
      }
    }
  }
}

TEST(Trap, T11_TheLastSlotReachesTheFirstIffBidirectional) {
  for (const bool causal : {false, true}) {
    for (const Json& base : {test::nested_draft_config(), test::mla_draft_config()}) {
      std::vector<float> hidden[2];
      for (const int mask : {37, 38}) {  // a block of two: the mask is the last slot alone
        Toy toy{TinyDraft(with(with(with(base, "causal", causal), "block_size", 2), "mask_token_id", mask))};
        toy.drafter->extend(0, 0, toy.taps(5, 3));
        const Drafter::Round round = toy.drafter->propose({{.anchor = 9, .position = 5}}, 2);
        hidden[mask - 37] = round.row(round.hidden, 0, 2);
      }
      EXPECT_EQ(hidden[0] == hidden[1], causal);
    }
  }
}

TEST(Trap, T12_ConfidenceReadsTheNormedHidden) {
  // Doubling the final norm's weight doubles the hidden row that the head sees.
  TinyDraft draft(with(test::nested_draft_config(), "confidence_head_with_markov", false));
  TinyTensor& weight = draft.tensor("confidence_head.proj.weight");
  Toy toy(draft);
  toy.drafter->extend(0, 0, toy.taps(5, 3));
  const Drafter::Round round = toy.drafter->propose({{.anchor = 9, .position = 5}}, 4);
  for (int64_t k = 0; k < 4; ++k) {
    double logit = toy.loaded->weights.confidence_bias.f32()[0];
    const std::vector<float> h = round.row(round.hidden, k, 4);
    for (size_t i = 0; i < h.size(); ++i) {
      float w;
      std::memcpy(&w, weight.bytes.data() + 4 * i, 4);
      logit += double{w} * h[i];
    }
    EXPECT_NEAR(round.confidence[static_cast<size_t>(k)], 1.0 / (1.0 + std::exp(-logit)), 1e-6);
  }
}

TEST(Trap, T24_EmbeddingAndHeadAreTheTargetsUnlessOwn) {
  const auto hidden_and_logits = [](TinyDraftOptions options, float embed_scale, float head_scale) {
    Toy toy(TinyDraft(test::flat_draft_config(), options));
    for (float& v : toy.embed.values) v *= embed_scale;
    for (float& v : toy.lm_head.values) v *= head_scale;
    toy.drafter->extend(0, 0, toy.taps(5, 3));
    const Drafter::Round round = toy.drafter->propose({{.anchor = 9, .position = 5}}, 4);
    return std::pair(round.hidden, round.base_logits);
  };
  const auto shared = hidden_and_logits({}, 1, 1);
  EXPECT_NE(hidden_and_logits({}, 2, 1).first, shared.first);
  EXPECT_NE(hidden_and_logits({}, 1, 2).second, shared.second);
  const TinyDraftOptions own{.own_embed = true, .own_head = true};
  EXPECT_EQ(hidden_and_logits(own, 2, 2), hidden_and_logits(own, 1, 1));
}

TEST(Trap, T34_PaddedRowsOfAHeadAreNeverDrafted) {
  TinyDraft draft(with(test::flat_draft_config(), "draft_vocab_size", test::kTinyVocab + 8), {.own_head = true});
  TinyTensor& head = draft.tensor("markov_head.markov_w2.weight");
  for (int64_t i = test::kTinyVocab * head.dims[1]; i < head.dims.count(); ++i) {
    const float huge = 1e6F;
    std::memcpy(head.bytes.data() + 4 * i, &huge, 4);
  }
  Toy toy(std::move(draft));
  toy.drafter->extend(0, 0, toy.taps(5, 3));
  for (int32_t anchor = 0; anchor < test::kTinyVocab; ++anchor) {
    const Drafter::Round round = toy.drafter->propose(
        {{.anchor = anchor, .position = 5},
         {.anchor = anchor, .position = 5, .temperature = 5.0F, .uniforms = {0.99, 0.999, 0.9999, 0.99999}}},
        4);
    for (const int32_t id : round.ids) EXPECT_TRUE(id >= 0 && id < test::kTinyVocab) << id;
  }
}

TEST(Trap, T35_PrunedAndPermutedVocabularies) {
  check_formulas("half", test::pruned_draft_config());
  check_formulas("permutation", test::nested_draft_config(), {.own_head = true, .id_map = true});
  Toy half(TinyDraft(test::pruned_draft_config()));
  half.drafter->extend(0, 0, half.taps(5, 3));
  const Drafter::Round round =
      half.drafter->propose({{.anchor = 9, .position = 5, .temperature = 1.0F, .uniforms = {0.1, 0.4, 0.7, 0.95}}}, 4);
  for (const int32_t id : round.ids) EXPECT_EQ(id % 2, 1);  // the map keeps odd ids
  for (size_t i = 0; i < round.probs.size(); i += 2) EXPECT_EQ(round.probs[i], 0.0F);
  for (int64_t k = 0; k < 4; ++k) {
    const std::vector<float> q = round.row(round.probs, k, 4);
    EXPECT_NEAR(std::accumulate(q.begin(), q.end(), 0.0), 1.0, 1e-5);
  }
  // A map that says nothing is none.
  TinyDraft identity(test::nested_draft_config(), {.own_head = true, .id_map = true});
  std::string& bytes = identity.tensor("d2t").bytes;
  std::fill(bytes.begin(), bytes.end(), '\0');
  EXPECT_TRUE(Toy(std::move(identity)).loaded->weights.target_ids.empty());
}

TEST(Trap, T64_ALostSequenceDraftsNothingAndHarmsNobody) {
  Toy toy{TinyDraft(test::nested_draft_config())};
  const Tensor good = toy.taps(5, 3), bad = toy.taps(5, 4);
  bad.row(2)[0] = std::numeric_limits<float>::quiet_NaN();
  toy.drafter->extend(0, 0, good);
  toy.drafter->extend(1, 0, bad);
  for (const float temperature : {0.0F, 1.0F}) {
    const Drafter::Ask healthy{.seq = 0, .anchor = 9, .position = 5, .temperature = temperature};
    const Drafter::Round alone = toy.drafter->propose({healthy}, 4);
    const Drafter::Round round =
        toy.drafter->propose({{.seq = 1, .anchor = 3, .position = 5, .temperature = temperature}, healthy}, 4);
    EXPECT_EQ(std::vector<int32_t>(round.ids.begin(), round.ids.begin() + 4), std::vector<int32_t>(4, -1));
    EXPECT_EQ(std::vector<int32_t>(round.ids.begin() + 4, round.ids.end()), alone.ids);
  }
}

TEST(Trap, T84_EveryPairOfHeads) {
  for (const Json& base : {test::nested_draft_config(), test::mla_draft_config()}) {
    for (const int rank : {0, 6}) {
      for (const bool enabled : {false, true}) {
        for (const bool with_markov : {false, true}) {
          Json config = with(with(base, "markov_rank", rank), "enable_confidence_head", enabled);
          config = with(std::move(config), "confidence_head_with_markov", with_markov);
          const DsparkConfig parsed = *parse_dspark_config(config);
          EXPECT_EQ(parsed.confidence_width(), 24 + (enabled && with_markov ? rank : 0));
          check_formulas("heads", config);
        }
      }
    }
  }
}

// --- dry passes ---

// The plan and arena of a dry pass are enough for what runs under them, and the bits are those of an eager run.
TEST(Plan, ADryPassIsEnough) {
  for (const Json& config : {test::pruned_draft_config(), with(test::mla_draft_config(), "markov_head_type", "rnn")}) {
    Toy toy{TinyDraft(config)};
    const DsparkConfig& parsed = toy.loaded->config;
    DsparkWeights shapes;
    shape_draft_weights(parsed, shapes);
    const Tensor no_embed = make_tensor(nullptr, DType::kF32, toy.embed.tensor.dims);
    const DsparkModel dry_model(parsed, shapes, no_embed, no_embed);
    DraftCacheView dry_cache = toy.drafter->cache();
    dry_cache.rows.data = nullptr;

    KernelPlan plan(default_buckets(8));
    SingleRank comm;
    int64_t arena_bytes = 0;
    for (size_t b = 0; b < plan.buckets().size(); ++b) {
      for (const bool upper : {true, false}) {
        const int64_t rows = upper ? plan.buckets()[b].last : plan.buckets()[b].first;
        const int64_t drafts = upper ? parsed.block_size : 1;
        Arena arena;
        Exec exec({.mode = ExecMode::kDry,
                   .arch = host_arch(),
                   .pool = &toy.pool,
                   .arena = &arena,
                   .comm = &comm,
                   .plan = &plan});
        exec.begin_step(rows, upper);
        const auto n = static_cast<size_t>(rows);
        const std::vector<int32_t> zeros(n), tables(n * 4);
        const std::vector<int64_t> slots(n);
        const std::vector<float> temperature(n);
        const std::vector<double> uniforms(n * static_cast<size_t>(drafts));
        const Tensor taps = make_tensor(nullptr, DType::kF32, {rows, parsed.num_taps() * parsed.hidden_size});
        dry_model.extend_context(exec, {.taps = taps, .positions = zeros, .slot_mapping = slots}, dry_cache);
        dry_model.propose(exec,
                          {.anchors = zeros,
                           .positions = zeros,
                           .block_tables = tables,
                           .max_blocks = 4,
                           .temperature = temperature,
                           .uniforms = uniforms,
                           .num_drafts = drafts},
                          dry_cache);
        arena_bytes = std::max(arena_bytes, static_cast<int64_t>(arena.high_water()));
      }
    }
    const Status frozen = plan.freeze();
    ASSERT_TRUE(frozen.ok()) << frozen.message();

    toy.drafter->extend(0, 0, toy.taps(8, 3));
    toy.drafter->extend(1, 0, toy.taps(8, 4));
    const std::vector<double> uniforms = {0.1, 0.3, 0.5, 0.7, 0.2, 0.4, 0.6, 0.8};
    const Drafter::Round eager = toy.drafter->propose(
        {{.seq = 0, .anchor = 5, .position = 8, .temperature = 1.0F, .uniforms = {0.1, 0.3, 0.5, 0.7}},
         {.seq = 1, .anchor = 6, .position = 8, .temperature = 0.0F, .uniforms = {0.2, 0.4, 0.6, 0.8}}},
        4);
    Arena arena(static_cast<size_t>(arena_bytes));
    Exec exec({.mode = ExecMode::kRun,
               .arch = host_arch(),
               .pool = &toy.pool,
               .arena = &arena,
               .comm = &comm,
               .plan = &plan});
    exec.begin_step(2);
    const std::vector<int32_t> anchors = {5, 6}, positions = {8, 8}, tables = {0, 8, 1, 9};
    const std::vector<float> temperature = {1.0F, 0.0F};
    const DraftRoundOutput out = toy.drafter->model().propose(exec,
                                                              {.anchors = anchors,
                                                               .positions = positions,
                                                               .block_tables = tables,
                                                               .max_blocks = 2,
                                                               .temperature = temperature,
                                                               .uniforms = uniforms,
                                                               .num_drafts = 4},
                                                              toy.drafter->cache());
    EXPECT_EQ(std::vector<int32_t>(out.ids.i32(), out.ids.i32() + 8), eager.ids);
    EXPECT_EQ(std::vector<float>(out.confidence.f32(), out.confidence.f32() + 8), eager.confidence);
    EXPECT_TRUE(std::equal(out.probs.f32(), out.probs.f32() + 4 * test::kTinyVocab, eager.probs.begin()));
  }
}

}  // namespace
}  // namespace moat
