// SPDX-License-Identifier: Apache-2.0
// Configs and checkpoints of drafters: what is read, what is refused and in which words, published sizes, and the traps of
// dspark.md section 7 that a config decides: a name like T01 carries the number.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "draft_checkpoint.h"
#include "golden_file.h"
#include "model/dspark_config.h"
#include "model/dspark_weights.h"

namespace moat {
namespace {

using test::GoldenFile;
using test::TinyDraft;
using test::TinyDraftOptions;
using test::with;

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
  expect_refused(with(flat, "rope_parameters", 7), {"rope_parameters: got 7", "object"});
  expect_refused(with(flat, "quantization_config", Json::object()), {"quantization_config", "null"});
  // A key in two places.
  Json twice = nested;
  twice.find("dflash_config")->set("block_size", 8);
  expect_refused(twice, {"dflash_config.block_size", "got 8", "expected 4"});
  expect_refused(with(nested, "dflash_config", 1), {"dflash_config", "got 1"});
}

// No key with any value does worse than a refusal that says something.
TEST(Config, AnyValueOfAnyKey) {
  const std::vector<Json> values = {nullptr,
                                    true,
                                    0,
                                    -1,
                                    3,
                                    1e300,
                                    int64_t{1} << 24,
                                    INT64_MAX,
                                    "x",
                                    Json::array(),
                                    Json::array({1, 2}),
                                    Json::array({INT64_MIN}),
                                    Json::object(),
                                    Json::object({{"rope_type", "yarn"}, {"rope_theta", 1e12}, {"factor", 1e6}})};
  const auto try_all = [&](const Json& config) {
    const auto parsed = parse_dspark_config(config);
    if (!parsed.ok()) {
      EXPECT_FALSE(parsed.status().message().empty());
      return;
    }
    DsparkWeights weights;
    shape_draft_weights(*parsed, weights);
    EXPECT_GT(draft_size(*parsed, OwnVocabulary::kNone).parameters, 0);
  };
  for (const Json& base : {test::flat_draft_config(), test::pruned_draft_config(), test::mla_draft_config()}) {
    for (const auto& [key, old] : base.as_object()) {
      for (const Json& value : values) try_all(with(base, key.c_str(), value));
      if (!old.is_object()) continue;
      for (const auto& [inner, unused] : old.as_object()) {
        for (const Json& value : values) {
          Json config = base;
          config.find(key)->set(inner, value);
          try_all(config);
        }
      }
    }
  }
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

// No tensor of any layout is optional by accident, none is left over, and each is used whole, from one shard or three.
TEST(Trap, T81_EveryTensorIsConsumed) {
  ThreadPool pool(1);
  for (const Json& config : {test::flat_draft_config(), test::nested_draft_config(), test::pruned_draft_config(),
                             test::mla_draft_config()}) {
    const TinyDraft good(config);
    for (const int num_shards : {1, 3}) {
      const TempDir dir;
      good.write(dir.path(), num_shards);
      const auto loaded = load_dspark(dir.path(), pool);
      ASSERT_TRUE(loaded.ok()) << loaded.status().message();
      const DraftLoadReport& report = (*loaded)->report;
      EXPECT_EQ(report.num_tensors, good.tensors.size());
      EXPECT_EQ(report.num_used + report.num_ignored, report.num_tensors);
    }
    for (const TinyTensor& tensor : good.tensors) {
      TinyDraft without = good, longer = good;
      without.erase(tensor.name);
      expect_bad_checkpoint(without, {tensor.name.c_str()});
      // One more row, or one more value of a vector: nothing is cut off.
      TinyTensor& t = longer.tensor(tensor.name);
      const int64_t row = t.dims.count() / t.dims[0];
      t.dims[0] += 1;
      t.bytes.resize(t.bytes.size() + static_cast<size_t>(dtype_bytes(t.dtype, row)), '\0');
      expect_bad_checkpoint(longer, {tensor.name.c_str()});
    }
  }
}

// Damaged headers of a good file: refused or read, never a crash.
TEST(Loader, FlippedBytes) {
  const TempDir dir;
  TinyDraft(test::pruned_draft_config()).write(dir.path());
  const std::string path = join_path(dir.path(), "model.safetensors");
  const std::string good = slurp(path);
  uint64_t header = 0;
  std::memcpy(&header, good.data(), 8);
  ThreadPool pool(1);
  Rng rng(5);
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string bad = good;
    const int64_t at = i < 64 ? i / 8 : 8 + rng.below(static_cast<int64_t>(header));
    bad[static_cast<size_t>(at)] =
        static_cast<char>(bad[static_cast<size_t>(at)] ^ 1 << (i < 64 ? i % 8 : rng.below(7)));
    if (i % 50 == 49) bad.resize(static_cast<size_t>(rng.below(static_cast<int64_t>(bad.size()))));
    spill(path, bad);
    refused += !load_dspark(dir.path(), pool).ok();
  }
  EXPECT_GT(refused, 900);
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

}  // namespace
}  // namespace moat
