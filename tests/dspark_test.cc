// SPDX-License-Identifier: Apache-2.0
// The drafter against goldens of independent PyTorch code, against plain formulas on small random drafters of every
// layout, and the traps of dspark.md section 7 that are its own: a name like T09 carries the number.
#include "model/dspark.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "draft_checkpoint.h"
#include "engine/batch.h"
#include "engine/cache_memory.h"
#include "golden_file.h"
#include "model/kimi.h"
#include "model/loader.h"

namespace moat {
namespace {

using test::DraftReference;
using test::GoldenFile;
using test::ReferenceRound;
using test::Row;
using test::TinyDraft;
using test::TinyDraftOptions;
using test::with;

constexpr int64_t kPage = 4;  // rows of a cache page: small, so that contexts cross pages

float largest_error(const Tensor& got, const Tensor& want) {
  EXPECT_EQ(got.count(), want.count());
  float worst = 0;
  for (int64_t i = 0; i < std::min(got.count(), want.count()); ++i) {
    const float error = std::fabs(got.f32()[i] - want.f32()[i]);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}

// A drafter with a cache of its own: sequence s has pages s, s + 8, s + 16, ... of it.
class Drafter {
 public:
  Drafter(const DsparkConfig& config, const DsparkWeights& weights, const Tensor& embed, const Tensor& lm_head,
          ThreadPool& pool)
      : model_(config, weights, embed, lm_head), pool_(pool) {
    const Dims dims = {config.num_layers, kPages * kPage, model_.row_width()};
    memory_ = Buffer(static_cast<size_t>(storage_bytes(DType::kF32, dims)));
    cache_ = {make_tensor(memory_.data(), DType::kF32, dims), kPage};
    // What nobody wrote must not be read.
    std::fill_n(cache_.rows.f32(), cache_.rows.count(), std::numeric_limits<float>::quiet_NaN());
  }

  DsparkModel& model() { return model_; }
  const DraftCacheView& cache() const { return cache_; }
  int64_t slot(int64_t seq, int64_t position) const {
    return (seq + position / kPage * kSeqs) * kPage + position % kPage;
  }

  // taps [tokens, taps * hidden] of positions first ..
  void extend(int64_t seq, int64_t first, const Tensor& taps) {
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    for (int64_t p = first; p < first + taps.dim(0); ++p) {
      positions.push_back(static_cast<int32_t>(p));
      slots.push_back(slot(seq, p));
    }
    Exec exec = make_exec();
    model_.extend_context(exec, {.taps = taps, .positions = positions, .slot_mapping = slots}, cache_);
  }

  struct Round {
    std::vector<int32_t> ids;                      // [seqs, drafts]
    std::vector<float> probs, confidence, hidden;  // flat; hidden [seqs * drafts, hidden]
    std::vector<float> base_logits;                // [seqs * drafts, draft vocab]
    std::vector<std::vector<float>> bias;          // [drafts][seqs * draft vocab]
    std::vector<float> row(const std::vector<float>& all, int64_t i, int64_t rows) const {
      const auto width = static_cast<std::ptrdiff_t>(all.size()) / rows;
      return {all.begin() + i * width, all.begin() + (i + 1) * width};
    }
  };
  struct Ask {
    int64_t seq = 0;
    int32_t anchor = 0;
    int32_t position = 0;
    float temperature = 0.0F;
    std::vector<double> uniforms = std::vector<double>(64, 0.5);
  };

  Round propose(const std::vector<Ask>& asks, int64_t drafts) {
    std::vector<int32_t> anchors, positions, tables;
    std::vector<float> temperature;
    std::vector<double> uniforms;
    for (const Ask& a : asks) {
      anchors.push_back(a.anchor);
      positions.push_back(a.position);
      temperature.push_back(a.temperature);
      uniforms.insert(uniforms.end(), a.uniforms.begin(), a.uniforms.begin() + drafts);
      for (int64_t b = 0; b < kPages / kSeqs; ++b) tables.push_back(static_cast<int32_t>(a.seq + b * kSeqs));
    }
    Round round;
    const auto keep = [](const Tensor& t) { return std::vector<float>(t.f32(), t.f32() + t.count()); };
    model_.set_probe([&](const char* name, int64_t, const Tensor& value) {
      if (std::string_view(name) == "hidden") round.hidden = keep(value);
      if (std::string_view(name) == "base_logits") round.base_logits = keep(value);
      if (std::string_view(name) == "bias") round.bias.push_back(keep(value));
    });
    const ArenaScope scope(arena_);
    Exec exec = make_exec();
    const DraftRoundOutput out = model_.propose(exec,
                                                {.anchors = anchors,
                                                 .positions = positions,
                                                 .block_tables = tables,
                                                 .max_blocks = kPages / kSeqs,
                                                 .temperature = temperature,
                                                 .uniforms = uniforms,
                                                 .num_drafts = drafts},
                                                cache_);
    model_.set_probe({});
    EXPECT_EQ(out.ids.dims, (Dims{static_cast<int64_t>(asks.size()), drafts}));
    round.ids.assign(out.ids.i32(), out.ids.i32() + out.ids.count());
    if (out.probs.is_set()) round.probs = keep(out.probs);
    if (out.confidence.is_set()) round.confidence = keep(out.confidence);
    return round;
  }

 private:
  static constexpr int64_t kSeqs = 8, kPages = 512;
  Exec make_exec() { return Exec({.arch = host_arch(), .pool = &pool_, .arena = &arena_, .comm = &comm_}); }

  DsparkModel model_;
  ThreadPool& pool_;
  Buffer memory_;
  DraftCacheView cache_;
  Arena arena_{size_t{64} << 20};
  SingleRank comm_;
};

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
    const Tensor layers = model->forward(exec, input, caches->view()).taps;  // [taps, tokens, hidden]
    const int64_t count = layers.dim(0), hidden = layers.dim(2);
    taps_memory = Buffer(static_cast<size_t>(4 * layers.count()));
    const Tensor side_by_side = make_tensor(taps_memory.data(), DType::kF32, {tokens, count * hidden});
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t t = 0; t < tokens; ++t) {
        std::copy_n(layers.at(i).row(t), hidden, side_by_side.row(t) + i * hidden);
      }
    }
    return side_by_side;
  }
};

TEST(Golden, FirstRound) {
  Nano nano;
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
  fmt::print("golden dspark, first round: largest errors:{}\n", line);
}

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

// --- YaRN ---

DsparkConfig yarn_config(int64_t original) {
  Json config = with(test::nested_draft_config(), "head_dim", 64);
  config.find("rope_parameters")->set("original_max_position_embeddings", original);
  return *parse_dspark_config(config);
}

TEST(Trap, T03_YarnIsReadFromTheConfig) {
  // dspark.md 1.4: index, original length 65,536, original length 4,096.
  const double table[][3] = {{0, 1.0, 1.0},
                             {1, 7.498942093e-1, 7.498942093e-1},
                             {10, 5.623413252e-2, 5.623413252e-2},
                             {19, 4.216965034e-3, 1.479992536e-3},
                             {20, 3.162277660e-3, 8.817889629e-4},
                             {21, 2.200361179e-3, 4.902359103e-4},
                             {25, 4.794996627e-4, 4.686838808e-5},
                             {28, 1.337886702e-4, 1.976423538e-5},
                             {31, 2.756799115e-5, 8.334508951e-6}};
  const DsparkConfig long_form = yarn_config(65536), short_form = yarn_config(4096);
  for (const auto& [i, first, second] : table) {
    EXPECT_NEAR(long_form.rope.inv_freq[static_cast<size_t>(i)], first, 1e-7 * first);
    EXPECT_NEAR(short_form.rope.inv_freq[static_cast<size_t>(i)], second, 1e-7 * second);
  }
  EXPECT_FLOAT_EQ(long_form.rope.magnitude, 1.2772588722F);
  const GoldenFile golden(test::golden_dir() + "/ops/ops.safetensors");
  const Tensor want = golden.tensor("yarn.head64_orig65536");
  for (int64_t i = 0; i < want.count(); ++i) {
    EXPECT_NEAR(long_form.rope.inv_freq[static_cast<size_t>(i)], want.f32()[i], 2e-7F * want.f32()[i]);
  }
  EXPECT_FLOAT_EQ(long_form.rope.magnitude, golden.tensor("yarn.factor").f32()[0]);
}

TEST(Yarn, AllKeysAreHonoured) {
  Json config = with(test::nested_draft_config(), "head_dim", 64);
  Json* rope = config.find("rope_parameters");
  rope->set("original_max_position_embeddings", 65536);
  rope->set("attention_factor", 1.5);
  EXPECT_FLOAT_EQ(parse_dspark_config(config)->rope.magnitude, 1.5F);
  EXPECT_FLOAT_EQ(parse_dspark_config(config)->attention_scale, 0.125F);
  rope->set("beta_fast", 64.0);
  rope->set("beta_slow", 2.0);
  const std::vector<float> narrow = parse_dspark_config(config)->rope.inv_freq;
  EXPECT_NE(narrow, yarn_config(65536).rope.inv_freq);
  // The older spelling says the same.
  Json older = config;
  Json scaling = *rope;
  scaling.set("type", *scaling.find("rope_type"));
  scaling.set("rope_type", nullptr);
  scaling.set("rope_theta", nullptr);
  older.set("rope_parameters", nullptr);
  older.set("rope_scaling", scaling);
  older.set("rope_theta", 10000.0);
  EXPECT_EQ(parse_dspark_config(older)->rope.inv_freq, narrow);
  // DeepSeek's form: the scores get the square of what all components share.
  const DsparkConfig mla = *parse_dspark_config(test::mla_draft_config());
  const double mscale = 0.1 * std::log(4.0) + 1.0;
  EXPECT_FLOAT_EQ(mla.rope.magnitude, 1.0F);
  EXPECT_FLOAT_EQ(mla.attention_scale, static_cast<float>(mscale * mscale / std::sqrt(10.0)));
  EXPECT_EQ(mla.rope.layout, RopeLayout::kPairs);
}

// --- configs ---

Json radixark_config() {
  return *parse_json(R"({"architectures": ["DSparkDraftModel"], "model_type": "qwen3", "hidden_size": 7168,
    "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 16, "head_dim": 64,
    "intermediate_size": 14336, "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": false,
    "vocab_size": 163840, "num_target_layers": 93, "block_size": 7, "use_sliding_window": false,
    "tie_word_embeddings": false, "markov_rank": 256, "markov_head_type": "vanilla",
    "rope_parameters": {"rope_type": "yarn", "factor": 16, "rope_theta": 10000,
      "original_max_position_embeddings": 65536},
    "dflash_config": {"attention_mode": "gqa", "projector_type": "dspark", "target_layer_ids": [7, 23, 51, 67, 83],
      "mask_token_id": 163824, "markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": true,
      "confidence_head_with_markov": true, "confidence_head_alpha": 1.0}})");
}

TEST(Sizes, PublishedCheckpoints) {
  const DsparkConfig radixark = *parse_dspark_config(radixark_config());
  const DraftSize gqa = draft_size(radixark, OwnVocabulary::kNone);
  EXPECT_EQ(gqa.tensors, 62);
  EXPECT_EQ(gqa.parameters, 2249289601);
  EXPECT_EQ(radixark.row_width() * radixark.num_layers * 2, 20480);  // bytes a token in bf16, dspark.md 1.5

  Json config = radixark_config();
  for (const char* key : {"head_dim", "num_key_value_heads", "rope_parameters"}) config.set(key, nullptr);
  config = with(with(std::move(config), "attention_mode", "mla"), "target_layer_ids", Json::array({2, 23, 47, 71, 89}));
  config.set("architectures", Json::array({"K3DSparkModel"}));
  config.set("model_type", "k3_dspark");
  config.set("rope_theta", 50000);
  for (const auto& [key, value] : {std::pair{"q_lora_rank", 1536},
                                   {"kv_lora_rank", 512},
                                   {"qk_nope_head_dim", 128},
                                   {"qk_rope_head_dim", 64},
                                   {"v_head_dim", 128}}) {
    config.set(key, value);
  }
  const DsparkConfig inferact = *parse_dspark_config(config);
  const DraftSize mla = draft_size(inferact, OwnVocabulary::kEmbed);
  EXPECT_EQ(mla.tensors, 68);
  EXPECT_EQ(mla.parameters, 3562312961);
  EXPECT_EQ(inferact.row_width() * inferact.num_layers * 2, 5760);
}

// `config` is refused with a message that has all of `words`.
void expect_refused(const Json& config, const std::vector<const char*>& words) {
  const auto parsed = parse_dspark_config(config);
  ASSERT_FALSE(parsed.ok()) << words[0] << " was accepted";
  for (const char* word : words)
    EXPECT_NE(parsed.status().message().find(word), std::string::npos) << parsed.status().message();
}

TEST(Config, WhatIsUnknownIsRefusedByName) {
  const Json flat = test::flat_draft_config(), nested = test::nested_draft_config(), mla = test::mla_draft_config();
  const auto rope = [&](const char* key, Json value) {
    Json config = nested;
    config.find("rope_parameters")->set(key, std::move(value));
    return config;
  };
  expect_refused(Json(3), {"got 3", "object"});
  expect_refused(with(flat, "architectures", Json::array({"LlamaForCausalLM"})), {"architectures", "LlamaForCausalLM"});
  expect_refused(with(flat, "architectures", nullptr), {"architectures", "missing"});
  expect_refused(with(flat, "model_type", "llama"), {"model_type", "llama", "k3_dspark"});
  expect_refused(with(flat, "attention_mode", "mla"), {"attention_mode", "mla", "Qwen3DSparkModel"});
  expect_refused(with(mla, "attention_mode", "gqa"), {"attention_mode", "gqa", "K3DSparkModel"});
  expect_refused(with(nested, "projector_type", "dflash"), {"projector_type", "dflash"});
  for (const char* key : {"vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps",
                          "block_size", "mask_token_id", "num_attention_heads", "head_dim"}) {
    expect_refused(with(flat, key, nullptr), {key, "missing"});
    expect_refused(with(flat, key, "many"), {key, "got \"many\""});
    expect_refused(with(flat, key, -1), {key, "got -1"});
  }
  for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}) {
    expect_refused(with(mla, key, nullptr), {key, "missing"});
  }
  expect_refused(with(mla, "num_key_value_heads", 2), {"num_key_value_heads", "got 2", "4"});
  expect_refused(with(mla, "qk_rope_head_dim", 5), {"qk_rope_head_dim", "got 5", "even"});
  expect_refused(with(flat, "num_key_value_heads", 3), {"num_key_value_heads", "got 3", "divisor"});
  expect_refused(with(flat, "block_size", 65), {"block_size", "got 65", "64"});
  expect_refused(with(flat, "mask_token_id", 40), {"mask_token_id", "got 40", "39"});
  expect_refused(with(flat, "hidden_act", "gelu"), {"hidden_act", "gelu"});
  expect_refused(with(flat, "attention_bias", true), {"attention_bias", "true"});
  expect_refused(with(flat, "tie_word_embeddings", true), {"tie_word_embeddings", "true"});
  expect_refused(with(flat, "use_sliding_window", true), {"use_sliding_window", "sliding"});
  expect_refused(with(with(flat, "use_sliding_window", nullptr), "sliding_window", 512), {"sliding_window", "512"});
  expect_refused(with(flat, "layer_types", Json::array({"full_attention", "sliding_attention"})),
                 {"layer_types", "sliding_attention"});
  expect_refused(with(flat, "layer_types", Json::array({"full_attention"})), {"layer_types", "2"});
  expect_refused(with(flat, "target_layer_ids", Json::array({6, 2})), {"target_layer_ids", "increasing"});
  expect_refused(with(flat, "target_layer_ids", Json::array({2, 2})), {"target_layer_ids", "increasing"});
  expect_refused(with(flat, "target_layer_ids", Json::array({2, 9})), {"target_layer_ids", "0 to 8"});
  expect_refused(with(flat, "target_layer_ids", Json::array({-1, 2})), {"target_layer_ids", "0 to 8"});
  expect_refused(with(flat, "target_layer_ids", Json::array()), {"target_layer_ids"});
  expect_refused(with(flat, "eagle_aux_hidden_state_layer_ids", Json::array({2, 6})),
                 {"eagle_aux_hidden_state_layer_ids"});
  expect_refused(with(flat, "markov_head_type", "lstm"), {"markov_head_type", "lstm", "vanilla"});
  expect_refused(with(flat, "markov_rank", -3), {"markov_rank", "-3"});
  expect_refused(with(flat, "rope_parameters", nullptr), {"rope_theta", "missing"});
  expect_refused(with(flat, "rope_theta", 5.0), {"rope_theta", "got 10000", "expected 5"});
  expect_refused(with(flat, "partial_rotary_factor", 0.5), {"partial_rotary_factor", "0.5"});
  expect_refused(with(flat, "rope_scaling", Json::object({{"type", "linear"}})), {"rope_scaling", "rope_parameters"});
  expect_refused(rope("rope_type", "llama3"), {"rope_parameters.rope_type", "llama3", "yarn"});
  expect_refused(rope("factor", nullptr), {"rope_parameters.factor", "missing"});
  expect_refused(rope("factor", 0.5), {"rope_parameters.factor", "0.5"});
  expect_refused(rope("original_max_position_embeddings", nullptr), {"original_max_position_embeddings", "missing"});
  expect_refused(rope("beta_fast", 0.5), {"beta_fast", "0.5", "beta_slow"});
  expect_refused(rope("mscale", 1.0), {"mscale"});
  expect_refused(rope("truncate", false), {"truncate"});
  // A key in two places.
  Json twice = nested;
  twice.find("dflash_config")->set("block_size", 8);
  expect_refused(twice, {"dflash_config.block_size", "got 8", "expected 4"});
  expect_refused(with(nested, "dflash_config", 1), {"dflash_config", "got 1"});
}

TEST(Config, AgainstTheTarget) {
  ModelConfig target;
  target.hidden_size = 24;
  target.vocab_size = 40;
  target.num_layers = 9;
  target.attn_res_block_size = 4;
  const DsparkConfig good = *parse_dspark_config(test::nested_draft_config());
  EXPECT_TRUE(check_against_target(good, target).ok());
  const auto refused = [&](const char* word, auto edit) {
    DsparkConfig config = good;
    ModelConfig other = target;
    edit(config, other);
    const Status status = check_against_target(config, other);
    EXPECT_FALSE(status.ok()) << word;
    EXPECT_NE(status.message().find(word), std::string::npos) << status.message();
  };
  refused("hidden_size: got 24, expected 32", [](DsparkConfig&, ModelConfig& t) { t.hidden_size = 32; });
  refused("vocab_size: got 40, expected at least 41", [](DsparkConfig&, ModelConfig& t) { t.vocab_size = 41; });
  refused("mask_token_id: got 38", [](DsparkConfig&, ModelConfig& t) { t.vocab_size = 38; });
  refused("num_target_layers: got 9, expected 8", [](DsparkConfig&, ModelConfig& t) { t.num_layers = 8; });
  refused("target_layer_ids: got 6", [](DsparkConfig& c, ModelConfig& t) {
    c.num_target_layers.reset();
    t.num_layers = 6;
  });
  refused("aux_hidden_stream: got attn_res", [](DsparkConfig&, ModelConfig& t) { t.attn_res_block_size.reset(); });
  refused("vocab_size: got 40, expected 39", [](DsparkConfig& c, ModelConfig& t) {
    c.draft_vocab_size = 20;
    t.vocab_size = 39;
  });
}

TEST(Config, DefaultTaps) {
  // The list that DeepSpec publishes for a target of 36 layers, and for one layer the middle.
  Json config = with(with(test::flat_draft_config(), "target_layer_ids", nullptr), "num_target_layers", 36);
  config = with(with(std::move(config), "num_hidden_layers", 5), "layer_types", nullptr);
  const DsparkConfig five = *parse_dspark_config(config);
  EXPECT_EQ(five.target_layer_ids, (std::vector<int32_t>{1, 9, 17, 25, 33}));
  EXPECT_EQ(five.notes.size(), 2U);  // of the taps and of their stream
  EXPECT_EQ(parse_dspark_config(with(config, "num_hidden_layers", 1))->target_layer_ids, (std::vector<int32_t>{18}));
}

TEST(Trap, T01_AnchorShiftedCheckpointsAreRefused) {
  const Json flat = test::flat_draft_config();  // has num_anchors
  EXPECT_TRUE(parse_dspark_config(with(flat, "sample_from_anchor", true)).ok());
  expect_refused(with(flat, "sample_from_anchor", false), {"sample_from_anchor", "false", "anchor-shifted"});
  // A speculators envelope alone means shifted; DeepSpec's keys, or saying so, make it anchor-first.
  const Json enveloped = with(flat, "speculators_version", "0.3.0");
  EXPECT_TRUE(parse_dspark_config(enveloped).ok());
  const Json bare = with(enveloped, "num_anchors", nullptr);
  expect_refused(bare, {"sample_from_anchor", "speculators"});
  EXPECT_TRUE(parse_dspark_config(with(bare, "sample_from_anchor", true)).ok());
  EXPECT_TRUE(parse_dspark_config(with(bare, "projector_type", "dspark")).ok());
}

TEST(Trap, T04_GammaIsTheNumberOfDrafts) {
  const DsparkConfig config = *parse_dspark_config(radixark_config());
  EXPECT_EQ(config.block_size, 7);     // rows of a block, and drafts
  EXPECT_EQ(config.verify_rows(), 8);  // with the anchor; at most eight tokens are committed
}

TEST(Trap, T05_TheTapStreamIsReadAndNeverGuessedSilently) {
  const Json nested = test::nested_draft_config(), mla = test::mla_draft_config();
  EXPECT_EQ(parse_dspark_config(with(nested, "aux_hidden_stream", "prefix"))->tap_stream, TapStream::kPrefix);
  EXPECT_EQ(parse_dspark_config(with(nested, "aux_hidden_stream", "attn_res"))->tap_stream, TapStream::kAttnRes);
  EXPECT_TRUE(parse_dspark_config(nested)->notes.empty());
  expect_refused(with(nested, "aux_hidden_stream", "post_norm"), {"aux_hidden_stream", "post_norm", "prefix"});
  Json inner = with(nested, "aux_hidden_stream", nullptr);
  inner.find("dflash_config")->set("aux_hidden_stream", "prefix");
  EXPECT_EQ(parse_dspark_config(inner)->tap_stream, TapStream::kPrefix);
  const DsparkConfig silent = *parse_dspark_config(with(nested, "aux_hidden_stream", nullptr));
  EXPECT_EQ(silent.tap_stream, TapStream::kAttnRes);
  ASSERT_EQ(silent.notes.size(), 1U);
  EXPECT_NE(silent.notes[0].find("attn_res"), std::string::npos);
  const DsparkConfig latent = *parse_dspark_config(mla);
  EXPECT_EQ(latent.tap_stream, TapStream::kPrefix);
  ASSERT_EQ(latent.notes.size(), 1U);
  EXPECT_NE(latent.notes[0].find("prefix"), std::string::npos);
}

// --- small random drafters against the formulas ---

struct Floats {
  std::vector<float> values;
  Tensor tensor;
  Floats(Dims dims, double deviation, uint64_t seed) : values(static_cast<size_t>(dims.count())) {
    Rng rng(seed);
    for (float& v : values) v = static_cast<float>(deviation * rng.normal());
    tensor = make_tensor(values.data(), DType::kF32, dims);
  }
};

// A checkpoint that went through files, with a random target around it.
struct Toy {
  explicit Toy(TinyDraft tiny, int num_shards = 1) : draft(std::move(tiny)) {
    draft.write(dir.path(), num_shards);
    auto result = load_dspark(dir.path(), pool);
    MOAT_CHECK(result.ok(), "{}", result.status().message());
    loaded = std::move(result).value();
    drafter = std::make_unique<Drafter>(loaded->config, loaded->weights, embed.tensor, lm_head.tensor, pool);
  }

  Tensor taps(int64_t tokens, uint64_t seed) {
    all_taps.push_back(
        std::make_unique<Floats>(Dims{tokens, loaded->config.num_taps() * test::kTinyHidden}, 1.0, seed));
    return all_taps.back()->tensor;
  }
  ReferenceRound reference(const Tensor& taps, int32_t anchor, const std::vector<int32_t>& drafts) const {
    std::vector<Row> rows;
    for (int64_t t = 0; t < taps.dim(0); ++t) rows.emplace_back(taps.row(t), taps.row(t) + taps.dim(1));
    return DraftReference(draft, embed.tensor, lm_head.tensor).round(rows, anchor, drafts);
  }

  TinyDraft draft;
  TempDir dir;
  ThreadPool pool{2};
  Floats embed{{test::kTinyVocab, test::kTinyHidden}, 1.0, 11};
  Floats lm_head{{test::kTinyVocab, test::kTinyHidden}, 0.4, 12};
  std::unique_ptr<LoadedDspark> loaded;
  std::unique_ptr<Drafter> drafter;
  std::vector<std::unique_ptr<Floats>> all_taps;
};

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

// --- loading ---

// A good checkpoint after `damage` is refused with a message that has all of `words`.
void expect_bad_checkpoint(TinyDraft draft, const std::vector<const char*>& words) {
  const TempDir dir;
  draft.write(dir.path());
  ThreadPool pool(1);
  const auto loaded = load_dspark(dir.path(), pool);
  ASSERT_FALSE(loaded.ok()) << words[0];
  for (const char* word : words) {
    EXPECT_NE(loaded.status().message().find(word), std::string::npos) << loaded.status().message();
  }
}

TEST(Loader, BadCheckpointsAreRefusedByName) {
  const auto damaged = [](auto damage, Json config = test::nested_draft_config(), TinyDraftOptions options = {}) {
    TinyDraft draft(std::move(config), options);
    damage(draft);
    return draft;
  };
  expect_bad_checkpoint(damaged([](TinyDraft& d) { d.erase("layers.1.self_attn.k_proj.weight"); }),
                        {"1 of", "missing", "layers.1.self_attn.k_proj.weight"});
  expect_bad_checkpoint(damaged([](TinyDraft& d) { d.erase("markov_head.markov_w2.weight"); }),
                        {"markov_head.markov_w2.weight"});
  expect_bad_checkpoint(
      damaged([](TinyDraft& d) {
        d.tensors.push_back({"layers.2.mlp.up_proj.weight", DType::kF32, {1}, std::string(4, '\0'), 0});
      }),
      {"model.safetensors", "1 tensors that the config does not name", "layers.2.mlp.up_proj.weight"});
  expect_bad_checkpoint(damaged([](TinyDraft& d) {
                          TinyTensor copy = d.tensor("fc.weight");
                          copy.name = "model.fc.weight";
                          d.tensors.push_back(copy);
                        }),
                        {"model.fc.weight"});
  expect_bad_checkpoint(damaged([](TinyDraft& d) {
                          d.tensor("fc.weight").dims = {48, 24};
                        }),
                        {"model.safetensors", "fc.weight", "[48, 24]", "[24, 48]"});
  expect_bad_checkpoint(damaged([](TinyDraft& d) {
                          TinyTensor& t = d.tensor("norm.weight");
                          t.dtype = DType::kI32;
                        }),
                        {"norm.weight", "i32", "bf16 or f32"});
  expect_bad_checkpoint(damaged(
                            [](TinyDraft& d) {
                              d.tensor("lm_head.weight").dims = {20, 48};
                            },
                            test::flat_draft_config(), {.own_head = true}),
                        {"lm_head.weight", "[20, 48]", "[40, 24]"});
  // d2t: beyond either end, twice the same, missing, without a head in its order.
  const auto offset = [](int64_t index, int64_t value) {
    return [=](TinyDraft& d) { std::memcpy(d.tensor("d2t").bytes.data() + 8 * index, &value, 8); };
  };
  const Json pruned = test::pruned_draft_config();
  expect_bad_checkpoint(damaged(offset(3, 37), pruned), {"d2t", "draft id 3 has offset 37", "0 to 39"});
  expect_bad_checkpoint(damaged(offset(3, -4), pruned), {"d2t", "draft id 3 has offset -4"});
  expect_bad_checkpoint(damaged(offset(3, INT64_MAX), pruned), {"d2t", "draft id 3"});
  expect_bad_checkpoint(damaged(offset(3, INT64_MIN), pruned), {"d2t", "draft id 3"});
  expect_bad_checkpoint(damaged(offset(3, 2), pruned), {"d2t", "draft id 3", "no other has", "5"});
  expect_bad_checkpoint(damaged([](TinyDraft& d) { d.erase("d2t"); }, pruned), {"missing", "d2t"});
  expect_bad_checkpoint(damaged([](TinyDraft& d) { d.erase("lm_head.weight"); }, pruned),
                        {"missing", "lm_head.weight"});
  expect_bad_checkpoint(
      damaged([](TinyDraft& d) { d.erase("lm_head.weight"); }, test::nested_draft_config(), {.id_map = true}),
      {"lm_head.weight", "d2t"});
}

TEST(Loader, NanoIsUsedInPlaceButForTheStack) {
  ThreadPool pool(2);
  const auto loaded = load_dspark(test::source_dir() + "/models/moat-nano-dspark", pool);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const LoadedDspark& draft = **loaded;
  EXPECT_EQ(draft.report.num_tensors, draft.report.num_used);
  EXPECT_EQ(draft.report.num_ignored, 0U);
  const auto stack = static_cast<uint64_t>(2 * draft.weights.context_kv.count());
  EXPECT_EQ(draft.report.bytes_owned, stack + 4);  // and the bias of the confidence head as f32
  EXPECT_TRUE(draft.config.notes.empty());
  const DraftSize size = draft_size(draft.config, OwnVocabulary::kNone);
  EXPECT_EQ(size.parameters, 1726401);
  EXPECT_EQ(static_cast<uint64_t>(size.tensors), draft.report.num_tensors);
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
