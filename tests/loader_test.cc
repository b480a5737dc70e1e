// SPDX-License-Identifier: Apache-2.0
// Checkpoints: good ones load with the values of their files, whole or in parts; bad ones are refused with file and
// tensor.
#include "model/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "bad_checkpoints.h"
#include "bad_configs.h"
#include "main/gzip.h"
#include "main/inspect.h"
#include "main/make_synthetic.h"
#include "model/checkpoint_files.h"
#include "plan/model_stats.h"
#include "tiny_checkpoint.h"

namespace moat {
namespace {

std::string source_path(const std::string& name) { return join_path(MOAT_SOURCE_DIR, name); }
const std::string kRelease = source_path("tests/golden/kimi-k3-release");

std::unique_ptr<LoadedModel> load(const std::string& directory, const Parallel& parallel = {}) {
  ThreadPool pool(2);
  auto model = load_model(directory, {.parallel = parallel}, pool);
  EXPECT_TRUE(model.ok()) << model.status().message();
  return model.ok() ? std::move(model).value() : nullptr;
}

std::string load_error(const std::string& directory, const Parallel& parallel = {}) {
  ThreadPool pool(1);
  const auto model = load_model(directory, {.parallel = parallel}, pool);
  return model.ok() ? "" : model.status().message();
}

// Every destination of `weights` with the spec that fills it: the table of an empty copy names the fields, and the same
// field of `weights` lies at the same place of an identical structure.
struct Field {
  WeightSpec spec;
  Tensor value;
};

void collect(KimiWeights& weights, std::vector<Tensor*>& out) {
  const auto add = [&](auto&... tensors) { (out.push_back(&tensors), ...); };
  const auto add_mlp = [&](MlpWeights& m) { add(m.gate_proj, m.up_proj, m.down_proj); };
  add(weights.embed, weights.norm, weights.output_res.norm, weights.output_res.proj, weights.lm_head);
  for (LayerWeights& l : weights.layers) {
    add(l.input_norm, l.post_attention_norm, l.attn_res.norm, l.attn_res.proj, l.mlp_res.norm, l.mlp_res.proj);
    KdaWeights& k = l.kda;
    add(k.q_proj, k.k_proj, k.v_proj, k.q_conv, k.k_conv, k.v_conv, k.f_a_proj, k.f_b_proj, k.dt_bias, k.a_log,
        k.b_proj, k.g_proj, k.g_a_proj, k.g_b_proj, k.o_norm, k.o_proj);
    MlaWeights& m = l.mla;
    add(m.q_proj, m.q_a_proj, m.q_a_norm, m.q_b_proj, m.kv_a_proj, m.kv_a_norm, m.kv_b_proj, m.g_proj, m.o_proj);
    add_mlp(l.mlp);
    MoeWeights& e = l.experts;
    add(e.router, e.router_bias, e.latent_down, e.latent_norm, e.latent_up);
    add_mlp(e.shared);
    for (auto* list : {&e.w1, &e.w2, &e.w3}) {
      for (Tensor& t : *list) add(t);
    }
  }
}

std::vector<Field> fields_of(LoadedModel& model) {
  KimiWeights empty;
  const std::vector<WeightSpec> specs = weight_table(model.config, model.layout, empty);
  std::vector<Tensor*> places, values;
  collect(empty, places);
  collect(model.weights, values);
  std::map<const Tensor*, const Tensor*> value_at;
  for (size_t i = 0; i < places.size(); ++i) value_at[places[i]] = values[i];
  std::vector<Field> fields;
  for (const WeightSpec& spec : specs) {
    if (spec.dest != nullptr) fields.push_back({spec, *value_at.at(spec.dest)});
  }
  return fields;
}

const Tensor& field(const std::vector<Field>& fields, std::string_view suffix) {
  for (const Field& f : fields) {
    if (f.spec.name.ends_with(suffix)) return f.value;
  }
  ADD_FAILURE() << suffix;
  return fields.front().value;
}

// As a matrix: vectors are one row, convolutions one row a channel.
Tensor as_matrix(const Tensor& t) {
  if (t.rank() == 1) return t.reshape({1, t.dim(0)});
  return t.rank() == 3 ? t.reshape({t.dim(0), t.dim(1) * t.dim(2)}) : t;
}

// --- good checkpoints ---

struct Spot {
  const char* name;
  int64_t row, col;
  float value;
};

void expect_spots(const std::vector<Field>& fields, const std::vector<Spot>& spots) {
  for (const Spot& s : spots) EXPECT_EQ(element_f32(as_matrix(field(fields, s.name)), s.row, s.col), s.value) << s.name;
}

// Values read from the raw files by another program.
TEST(Load, MoatNano) {
  const auto model = load(source_path("models/moat-nano"));
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->report.num_tensors, 1386U);
  EXPECT_EQ(model->report.num_used, 1384U);
  EXPECT_EQ(model->report.num_ignored, 2U);
  EXPECT_EQ(model->report.bytes_owned, 0U);
  EXPECT_TRUE(model->layout.mxfp4_experts);
  const auto fields = fields_of(*model);
  expect_spots(fields, {{"lm_head.weight", 17, 3, -0.38671875F},
                        {"model.embed_tokens.weight", 0, 100, 0.00750732421875F},
                        {"layers.3.self_attn.kv_b_proj.weight", 5, 7, 0.00946044921875F},
                        {"layers.2.self_attn.A_log", 0, 1, -0.04906283691525459F},
                        {"layers.2.self_attn.dt_bias", 0, 200, -0.6221460700035095F},
                        {"layers.0.self_attn.k_conv1d.weight", 9, 3, 0.13625849783420563F},
                        {"layers.1.block_sparse_moe.gate.e_score_correction_bias", 0, 5, 0.10374560207128525F},
                        {"model.norm.weight", 0, 11, 1.90625F}});
  const Tensor& w2 = field(fields, "layers.4.block_sparse_moe.experts.5.w2.weight_packed");
  EXPECT_EQ(w2.describe(), "mxfp4[128, 256]");
  EXPECT_EQ(w2.u8()[1000], 41);
  EXPECT_EQ(w2.scales[33], 123);
  EXPECT_EQ(field(fields, "layers.2.self_attn.A_log").describe(), "f32[4]");
  EXPECT_FALSE(model->weights.layers[0].attn_res.norm.is_set());
  EXPECT_TRUE(model->weights.layers[0].mlp_res.norm.is_set());
  EXPECT_TRUE(model->weights.layers[1].attn_res.norm.is_set());
}

TEST(Load, K3RandomSmall) {
  const auto model = load(source_path("tests/golden/k3-random-small"));
  ASSERT_NE(model, nullptr);
  const auto fields = fields_of(*model);
  expect_spots(fields, {{"lm_head.weight", 17, 3, 0.056884765625F},
                        {"model.embed_tokens.weight", 1, 36, 0.455078125F},
                        {"layers.3.self_attn.kv_b_proj.weight", 5, 7, 0.0400390625F},
                        {"layers.2.self_attn.A_log", 0, 1, 1.5049256086349487F},
                        {"layers.0.self_attn.k_conv1d.weight", 9, 3, -0.580107569694519F},
                        {"layers.1.block_sparse_moe.gate.e_score_correction_bias", 0, 5, 0.1923019140958786F}});
  const Tensor& w2 = field(fields, "layers.4.block_sparse_moe.experts.5.w2.weight_packed");
  EXPECT_EQ(w2.u8()[1000], 121);
  EXPECT_EQ(w2.scales[33], 120);
}

TEST(Load, KimiLinear) {
  const auto model = load(source_path("tests/golden/hf/kimi_linear"));
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->config.model_type, "kimi_linear");
  EXPECT_FALSE(model->layout.mxfp4_experts);
  EXPECT_TRUE(model->layout.dense_under_moe);
  EXPECT_EQ(model->config.max_position_embeddings, 4096);
  EXPECT_FALSE(model->config.q_lora_rank.has_value());
  const auto fields = fields_of(*model);
  expect_spots(fields, {{"lm_head.weight", 17, 3, -0.055419921875F},
                        {"layers.3.self_attn.kv_b_proj.weight", 5, 7, -0.003570556640625F},
                        {"layers.2.self_attn.A_log", 0, 1, 1.7109375F},
                        {"layers.2.self_attn.dt_bias", 0, 200, -4.8125F},
                        {"layers.0.self_attn.k_conv1d.weight", 9, 3, -0.12451171875F},
                        {"layers.1.block_sparse_moe.gate.e_score_correction_bias", 0, 5, -0.08447265625F},
                        {"layers.4.block_sparse_moe.experts.5.w2.weight", 2, 13, 0.1396484375F}});
  for (const char* name : {"A_log", "dt_bias", "k_conv1d.weight", "o_norm.weight", "e_score_correction_bias"}) {
    EXPECT_EQ(field(fields, name).dtype, DType::kF32) << name;
  }
}

// Kept outside the tree for its size.
TEST(Load, K3Random) {
  const char* root = std::getenv("MOAT_GOLDEN");
  const std::string directory = root == nullptr ? "" : join_path(root, "k3-random");
  if (!file_exists(join_path(directory, "config.json")))
    GTEST_SKIP() << "MOAT_GOLDEN names no directory with k3-random";
  const auto model = load(directory);
  ASSERT_NE(model, nullptr);
  expect_spots(fields_of(*model), {{"lm_head.weight", 17, 3, 0.0400390625F},
                                   {"layers.2.self_attn.A_log", 0, 1, 2.0597004890441895F},
                                   {"layers.2.self_attn.dt_bias", 0, 200, 1.050520420074463F}});
}

TEST(Load, OneFileAndShardsAgree) {
  const TempDir one, two;
  const TinyCheckpoint checkpoint;
  checkpoint.write(one.path(), 1);
  checkpoint.write(two.path(), 2);
  const auto a = load(one.path()), b = load(two.path());
  ASSERT_TRUE(a != nullptr && b != nullptr);
  const auto fields = fields_of(*a), others = fields_of(*b);
  for (size_t i = 0; i < fields.size(); ++i) {
    const Tensor &x = fields[i].value, &y = others[i].value;
    ASSERT_EQ(x.describe(), y.describe());
    EXPECT_EQ(std::memcmp(x.data, y.data, static_cast<size_t>(dtype_bytes(x.dtype, x.count()))), 0)
        << fields[i].spec.name;
  }
}

TEST(Load, PlainExpertsOddAlignmentVisionAndAbsentOptionals) {
  TinyCheckpoint checkpoint;
  checkpoint.erase("layers.0.self_attention_res_norm.weight");
  checkpoint.erase("layers.0.self_attention_res_proj.weight");
  // An odd number of bytes in front: everything after it is misaligned.
  checkpoint.add("vision_tower.patch_embed.proj.weight", DType::kU8, {3});
  checkpoint.add("mm_projector.proj.0.weight", DType::kBF16, {2, 2});
  std::rotate(checkpoint.tensors.begin(), checkpoint.tensors.end() - 2, checkpoint.tensors.end());
  for (TinyTensor& t : checkpoint.tensors) t.shard = 0;
  const TempDir dir;
  checkpoint.write(dir.path(), 1);
  const auto model = load(dir.path());
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->report.num_vision, 2U);
  EXPECT_EQ(model->report.num_ignored, 2U);
  EXPECT_GT(model->report.bytes_owned, 0U);
  for (const Field& f : fields_of(*model)) {
    const auto address = reinterpret_cast<uintptr_t>(f.value.data);
    EXPECT_EQ(address % static_cast<uintptr_t>(std::max<int64_t>(1, dtype_bytes(f.value.dtype, 1))), 0U) << f.spec.name;
  }
}

TEST(Load, ReportsProgress) {
  std::vector<LoadProgress> seen;
  ThreadPool pool(2);
  const auto model = load_model(source_path("models/moat-nano"),
                                {.progress = [&](const LoadProgress& p) { seen.push_back(p); }}, pool);
  ASSERT_TRUE(model.ok());
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen.back().bytes_done, seen.back().bytes_total);
  EXPECT_EQ(seen.back().bytes_total, (*model)->report.bytes_mapped);
}

// --- slices ---

// The rank that holds element (row, col) of the whole, and where.
float element_of_ranks(const Field& whole, const std::vector<std::vector<Field>>& ranks, size_t index, int64_t row,
                       int64_t col) {
  const WeightSpec& spec = whole.spec;
  const bool is_vector = whole.value.rank() == 1;
  const bool by_row = spec.shard == ShardRule::kRows || spec.shard == ShardRule::kLeading;
  int64_t& at = by_row && !is_vector ? row : col;
  if (!by_row && spec.shard != ShardRule::kCols) return element_f32(as_matrix(ranks[0][index].value), row, col);
  const Tensor part = as_matrix(ranks[0][index].value);
  const int64_t extent = by_row && !is_vector ? part.dim(0) : part.dim(1);
  const auto rank = static_cast<size_t>(at / extent);
  at %= extent;
  return element_f32(as_matrix(ranks[rank][index].value), row, col);
}

void expect_ranks_make_the_whole(const std::string& directory, int tp) {
  const auto whole_model = load(directory);
  ASSERT_NE(whole_model, nullptr);
  const auto whole = fields_of(*whole_model);
  std::vector<std::unique_ptr<LoadedModel>> models;
  std::vector<std::vector<Field>> ranks;
  for (int rank = 0; rank < tp; ++rank) {
    models.push_back(load(directory, {.tp = tp, .rank = rank}));
    ASSERT_NE(models.back(), nullptr);
    ranks.push_back(fields_of(*models.back()));
  }
  for (size_t i = 0; i < whole.size(); ++i) {
    const WeightSpec& spec = whole[i].spec;
    if (spec.part == WeightPart::kScales) continue;  // compared with its codes
    int64_t count = 0;
    for (const auto& rank : ranks) count += rank[i].value.count();
    ASSERT_EQ(count, whole[i].value.count() * (spec.shard == ShardRule::kReplicate ? tp : 1)) << spec.name;
    const Tensor all = as_matrix(whole[i].value);
    for (int64_t row = 0; row < all.dim(0); ++row) {
      for (int64_t col = 0; col < all.dim(1); ++col) {
        const float expected = element_f32(all, row, col), got = element_of_ranks(whole[i], ranks, i, row, col);
        ASSERT_EQ(std::memcmp(&expected, &got, 4), 0) << spec.name << " " << row << " " << col;
      }
    }
  }
}

TEST(Slices, TwoRanksMakeTheWhole) {
  const TempDir dir;
  TinyCheckpoint().write(dir.path());
  expect_ranks_make_the_whole(dir.path(), 2);
  expect_ranks_make_the_whole(source_path("tests/golden/k3-random-small"), 2);
  expect_ranks_make_the_whole(source_path("tests/golden/hf/kimi_linear"), 1);
}

TEST(Slices, FourRanksOfMoatNano) { expect_ranks_make_the_whole(source_path("models/moat-nano"), 4); }

TEST(Slices, ExpertsStayWholeUnderExpertParallelism) {
  const std::string directory = source_path("models/moat-nano");
  const auto whole = load(directory);
  for (int rank = 0; rank < 4; ++rank) {
    const auto part = load(directory, {.tp = 4, .ep = 2, .rank = rank});
    ASSERT_TRUE(whole != nullptr && part != nullptr);
    const MoeWeights &all = whole->weights.layers[1].experts, &mine = part->weights.layers[1].experts;
    for (size_t e = 0; e < 24; ++e) {
      const bool owned = e / 12 == static_cast<size_t>(rank / 2);
      ASSERT_EQ(mine.w1[e].is_set(), owned) << rank << " " << e;
      if (!owned) continue;
      // Two ranks share each group: half the rows of w1, half the columns of w2.
      EXPECT_EQ(mine.w1[e].describe(), "mxfp4[128, 128]");
      EXPECT_EQ(mine.w2[e].describe(), "mxfp4[128, 128]");
      EXPECT_EQ(element_f32(mine.w1[e], 3, 5), element_f32(all.w1[e], 3 + 128 * (rank % 2), 5));
      EXPECT_EQ(element_f32(mine.w2[e], 3, 5), element_f32(all.w2[e], 3, 5 + 128 * (rank % 2)));
    }
  }
}

TEST(Slices, WhatDoesNotDivideIsRefused) {
  const std::string directory = source_path("models/moat-nano");
  const auto expect_words = [&](const Parallel& parallel, const char* words) {
    const std::string error = load_error(directory, parallel);
    EXPECT_NE(error.find(words), std::string::npos) << error;
  };
  expect_words({.tp = 8}, "num_attention_heads = 4 does not divide over 8");
  expect_words({.tp = 3}, "num_attention_heads = 4");
  expect_words({.tp = 2, .rank = 2}, "rank=2");
  expect_words({.tp = 0}, "tp=0");
  expect_words({.tp = 4, .ep = 3}, "must divide");
  expect_words({.pp = 2}, "pipeline stages: got 2");
  // Four ranks divide the 64 columns of w2, but not its two groups of scales.
  Json config = tiny_config();
  Json& text = *config.find("text_config");
  text.set("num_attention_heads", 4);
  text.set("num_key_value_heads", 4);
  text.find("linear_attn_config")->set("num_heads", 4);
  const TempDir dir;
  TinyCheckpoint(config).write(dir.path());
  EXPECT_EQ(load_error(dir.path(), {.tp = 2}), "");
  const std::string error = load_error(dir.path(), {.tp = 4});
  EXPECT_NE(error.find("w2.weight_scale: columns = 2 does not divide over 4"), std::string::npos) << error;
}

// --- the release ---

TEST(WeightTable, NamesExactlyTheTensorsOfTheRelease) {
  const auto text = read_maybe_gzip(join_path(kRelease, "model.safetensors.index.json.gz"));
  ASSERT_TRUE(text.ok()) << text.status().message();
  const auto index = parse_checkpoint_index(*text);
  ASSERT_TRUE(index.ok()) << index.status().message();
  std::set<std::string> named, vision;
  for (const auto& [tensor, file] : index->weight_map) (is_vision_tensor(tensor) ? vision : named).insert(tensor);
  EXPECT_EQ(vision.size(), 168U);

  const auto config = load_model_config(kRelease);
  ASSERT_TRUE(config.ok()) << config.status().message();
  const CheckpointLayout layout =
      detect_layout(*config, [&](const std::string& name) { return named.count(name) > 0; });
  KimiWeights weights;
  const std::vector<WeightSpec> specs = weight_table(*config, layout, weights);
  EXPECT_EQ(specs.size(), 497'052U);
  std::set<std::string> table;
  int64_t optional = 0;
  for (const WeightSpec& spec : specs) {
    EXPECT_TRUE(table.insert(spec.name).second) << spec.name;
    optional += spec.optional;
    EXPECT_EQ(spec.optional, spec.dest == nullptr) << spec.name;
  }
  EXPECT_EQ(optional, 2);
  EXPECT_TRUE(table == named);
}

TEST(Inspect, TotalsOfTheRelease) {
  const auto inspection = inspect_checkpoint(kRelease);
  ASSERT_TRUE(inspection.ok()) << inspection.status().message();
  EXPECT_EQ(inspection->num_tensors, 497'220U);
  EXPECT_EQ(inspection->num_files, 96U);
  EXPECT_TRUE(inspection->missing.empty() && inspection->unknown.empty());
  EXPECT_EQ(inspection->total_bytes(), 1'560'860'324'864);
  EXPECT_EQ(inspection->index_total_size, 1'560'860'324'864U);
  const ModelStats& stats = inspection->stats;
  EXPECT_EQ(stats.parameters, 2'779'484'476'000);
  EXPECT_EQ(stats.active_parameters, 104'189'612'640);
  const std::map<Component, int64_t> bytes = {
      {Component::kKda, 61'258'257'408},    {Component::kMla, 11'145'412'608},
      {Component::kNorms, 7'999'488},       {Component::kDenseMlp, 1'453'326'336},
      {Component::kRouter, 1'182'074'880},  {Component::kLatent, 9'454'620'672},
      {Component::kShared, 24'310'185'984}, {Component::kRouted, 1'446'456'066'048},
      {Component::kEmbed, 2'348'810'240},   {Component::kHead, 2'348'810'240},
      {Component::kFinal, 43'008}};
  for (const auto& [component, expected] : bytes)
    EXPECT_EQ(stats[component].bytes, expected) << component_name(component);
  EXPECT_EQ(inspection->vision.bytes, 894'717'952);
  EXPECT_EQ(stats.kv_bytes_per_token(DType::kBF16), 27'648);
  EXPECT_EQ(stats.state_bytes_per_sequence(DType::kF32, DType::kBF16), 434'110'464 + 15'261'696);
  const std::string text = inspection_text(*inspection);
  for (const char* words : {"497,220", "2.779 T", "104.19 B", "1,560,860,324,864", "1.4196 TiB", "the same"}) {
    EXPECT_NE(text.find(words), std::string::npos) << words << "\n" << text;
  }
}

TEST(Inspect, FilesNamesAndConfigAlone) {
  const auto files = inspect_checkpoint(source_path("models/moat-nano"));
  ASSERT_TRUE(files.ok()) << files.status().message();
  EXPECT_EQ(files->source, Inspection::Source::kFiles);
  EXPECT_EQ(files->total_bytes(), 22'827'968);
  EXPECT_TRUE(files->missing.empty() && files->unknown.empty());
  EXPECT_EQ(files->ignored.size(), 2U);
  const auto json = parse_json(inspection_json(*files));
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(json->find("num_tensors")->as_int64(), 1386);
  EXPECT_EQ(json->find("components")->find("routed")->find("bytes")->as_int64(), 10'027'008);
  EXPECT_TRUE(json->find("switches")->find("full_rank_gate")->as_bool());

  // Names without files: what differs from the table is reported.
  const TempDir dir;
  TinyCheckpoint checkpoint;
  checkpoint.tensor("dt_bias").name = "language_model.model.layers.0.self_attn.dt_bios";
  checkpoint.write(dir.path());
  for (const char* shard : TinyCheckpoint::kShards) std::filesystem::remove(join_path(dir.path(), shard));
  const auto names = inspect_checkpoint(dir.path());
  ASSERT_TRUE(names.ok()) << names.status().message();
  EXPECT_EQ(names->source, Inspection::Source::kIndexOnly);
  EXPECT_EQ(names->missing, std::vector<std::string>{"language_model.model.layers.0.self_attn.dt_bias"});
  EXPECT_EQ(names->unknown, std::vector<std::string>{"language_model.model.layers.0.self_attn.dt_bios"});

  std::filesystem::remove(join_path(dir.path(), "model.safetensors.index.json"));
  const auto config = inspect_checkpoint(dir.path());
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->source, Inspection::Source::kConfigOnly);
  EXPECT_EQ(config->num_tensors, checkpoint.tensors.size());
}

// --- config ---

TEST(Config, SwitchesOfTheRelease) {
  const auto config = load_model_config(kRelease);
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->num_kda_layers(), 69);
  EXPECT_EQ(config->num_mla_layers(), 24);
  EXPECT_EQ(config->layer_kinds[91], LayerKind::kMla);
  EXPECT_EQ(config->layer_kinds[92], LayerKind::kMla);
  EXPECT_EQ(config->tensor_prefix, "language_model.");
  EXPECT_TRUE(config->has_vision);
  EXPECT_EQ(config->rms_norm_eps, 1e-5F);
  EXPECT_EQ(config->mla_norm_eps, 1e-6F);
  EXPECT_EQ(config->gate_lower_bound, -5.0F);
  EXPECT_EQ(config->eos_token_id, 163586);
  EXPECT_EQ(config->latent_size, 3584);
  EXPECT_EQ(config->attn_res_block_size, 12);
  EXPECT_FALSE(config->is_moe(0));
  EXPECT_TRUE(config->is_moe(1));
}

TEST(Config, AbsentKeysHaveTheirMeaning) {
  TinyCheckpoint checkpoint;
  for (const char* key :
       {"mla_use_nope", "moe_router_activation_func", "moe_layer_freq", "topk_method", "num_expert_group", "topk_group",
        "num_nextn_predict_layers", "num_key_value_heads", "tie_word_embeddings"}) {
    checkpoint.text().set(key, nullptr);
  }
  EXPECT_TRUE(parse_model_config(checkpoint.config).ok());
  for (const char* key :
       {"attn_res_block_size", "routed_expert_hidden_size", "latent_moe_use_norm", "q_lora_rank", "mla_use_output_gate",
        "hidden_act", "num_shared_experts", "rms_norm_eps", "quantization_config"}) {
    checkpoint.text().set(key, nullptr);
  }
  checkpoint.text().find("linear_attn_config")->set("gate_lower_bound", nullptr);
  checkpoint.text().find("linear_attn_config")->set("use_full_rank_gate", nullptr);
  const auto config = parse_model_config(checkpoint.config);
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_FALSE(config->attn_res_block_size || config->latent_size || config->q_lora_rank || config->gate_lower_bound);
  EXPECT_FALSE(config->full_rank_gate || config->mla_output_gate || config->latent_norm ||
               config->mxfp4_experts_declared);
  EXPECT_EQ(config->hidden_act, HiddenAct::kSilu);
  EXPECT_EQ(config->rms_norm_eps, 1e-6F);
  EXPECT_TRUE(config->moe_renormalize);
}

TEST(Config, BadOnesAreRefused) {
  size_t count = 0;
  for (const BadConfig& bad : bad_configs()) {
    Json config = tiny_config();
    Json& text = *config.find("text_config");
    bad.edit(config, text, *text.find("linear_attn_config"));
    const auto parsed = parse_model_config(config);
    ASSERT_FALSE(parsed.ok()) << bad.message[0];
    for (const char* words : bad.message) {
      EXPECT_NE(parsed.status().message().find(words), std::string::npos) << words << ": " << parsed.status().message();
    }
    ++count;
  }
  RecordProperty("cases", static_cast<int>(count));
}

// --- bad checkpoints ---

void expect_refused(const std::vector<BadCheckpoint>& table) {
  for (const BadCheckpoint& bad : table) {
    const TempDir dir;
    TinyCheckpoint checkpoint;
    if (bad.edit) bad.edit(checkpoint);
    checkpoint.write(dir.path());
    if (bad.damage) bad.damage(dir.path());
    const std::string error = load_error(dir.path());
    EXPECT_NE(error, "") << bad.kind << ": " << bad.what;
    for (const char* words : bad.message) {
      EXPECT_NE(error.find(words), std::string::npos)
          << bad.kind << ": " << bad.what << ": no \"" << words << "\" in: " << error;
    }
  }
}

TEST(BadCheckpoints, TheGoodOneLoads) {
  const TempDir dir;
  TinyCheckpoint().write(dir.path());
  EXPECT_EQ(load_error(dir.path()), "");
}

TEST(BadCheckpoints, Headers) { expect_refused(bad_headers()); }

TEST(BadCheckpoints, Files) { expect_refused(bad_files()); }

TEST(BadCheckpoints, NegativeZeroIsPaddingAndMetadataIsAllowed) {
  const TempDir dir;
  TinyCheckpoint checkpoint;
  bad::poke_f32(checkpoint, "A_log", 5, -0.0F);
  checkpoint.write(dir.path());
  bad::header([](Json& h) { h.set("__metadata__", Json::object({{"format", "pt"}})); })(dir.path());
  EXPECT_EQ(load_error(dir.path()), "");
}

// Header, index and config are changed at random; whatever comes out is a model or a message.
class Mutator {
 public:
  explicit Mutator(uint64_t seed) : rng_(seed) {}

  std::string mutate(std::string text, size_t interesting) {
    const auto rounds = 1 + rng_.below(3);
    for (int64_t i = 0; i < rounds && !text.empty(); ++i)
      text = once(std::move(text), std::min(interesting, text.size()));
    return text;
  }
  int64_t below(int64_t count) { return rng_.below(count); }

 private:
  size_t place(size_t size) { return static_cast<size_t>(rng_.below(static_cast<int64_t>(std::max<size_t>(size, 1)))); }

  std::string once(std::string text, size_t interesting) {
    // Mostly where the structure is; sometimes in the bytes after it.
    const size_t range = rng_.below(8) == 0 ? text.size() : interesting;
    const size_t at = place(range);
    switch (rng_.below(6)) {
      case 0: text[at] = static_cast<char>(text[at] ^ (1 << rng_.below(8))); break;
      case 1: text[at] = static_cast<char>(rng_.below(256)); break;
      case 2: text.resize(at); break;
      case 3: text.erase(at, 1 + place(16)); break;
      case 4: text.insert(at, text.substr(place(range), 1 + place(64))); break;
      default: {
        static constexpr const char* kTokens[] = {
            "0", "-1",      "9",    "99999999999999999999", "1e400", "null", "{}", "[]", "\"", ",", ":",
            "}", "\\u0000", "\xff", "18446744073709551615"};
        const std::string token = kTokens[place(std::size(kTokens))];
        text.replace(at, std::min(token.size(), text.size() - at), token);
      }
    }
    return text;
  }

  Rng rng_;
};

TEST(BadCheckpoints, RandomMutations) {
  constexpr int kMutations = 2000;
  const TempDir dir;
  TinyCheckpoint().write(dir.path());
  const std::vector<std::string> paths = {bad::shard(dir.path(), 0), bad::index(dir.path()),
                                          join_path(dir.path(), "config.json")};
  const std::vector<std::string> originals = {slurp(paths[0]), slurp(paths[1]), slurp(paths[2])};
  Mutator mutator(7);
  ThreadPool pool(1);
  int loaded = 0, refused = 0;
  for (int i = 0; i < kMutations; ++i) {
    const auto which = static_cast<size_t>(mutator.below(3));
    const size_t interesting =
        which == 0 ? originals[0].size() - split_file(paths[0]).data.size() : originals[which].size();
    spill(paths[which], mutator.mutate(originals[which], interesting));
    const auto model = load_model(dir.path(), {}, pool);
    if (model.ok()) {
      ++loaded;
    } else {
      ++refused;
      ASSERT_FALSE(model.status().message().empty());
    }
    spill(paths[which], originals[which]);
  }
  EXPECT_GT(loaded, 0);
  EXPECT_GT(refused, kMutations / 2);
  RecordProperty("loaded", loaded);
  RecordProperty("refused", refused);
}

// --- container, compression, synthetic checkpoints ---

TEST(Writer, ChecksWhatIsDeclared) {
  const TempDir dir;
  const std::string path = join_path(dir.path(), "a.safetensors");
  const std::array<std::byte, 8> bytes = {};
  EXPECT_FALSE(SafetensorsWriter::create(path, {{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}).ok());
  EXPECT_FALSE(SafetensorsWriter::create(path, {{"", DType::kU8, {1}}}).ok());
  EXPECT_FALSE(SafetensorsWriter::create(path, {{"a", DType::kMxfp4, {2, 32}}}).ok());
  EXPECT_FALSE(SafetensorsWriter::create(join_path(dir.path(), "no/a.safetensors"), {}).ok());
  {
    auto writer = SafetensorsWriter::create(path, {{"a", DType::kF32, {2}}});
    ASSERT_TRUE(writer.ok());
    EXPECT_TRUE(writer->append(std::span(bytes).first(4)).ok());
    EXPECT_FALSE(writer->append(bytes).ok());
    EXPECT_FALSE(writer->close().ok());
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));  // an unfinished file does not stay
  auto writer = SafetensorsWriter::create(path, {{"a", DType::kF32, {2}}, {"b", DType::kU8, {0}}});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->append(bytes).ok());
  ASSERT_TRUE(writer->close().ok());
  const auto file = open_safetensors(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_EQ(file->entries.size(), 2U);
  EXPECT_EQ(file->entries[0].begin % 8, 0U);
}

TEST(Gzip, RefusesDamageAndBounds) {
  const TempDir dir;
  const std::string path = join_path(dir.path(), "x.gz");
  const std::string good = slurp(join_path(kRelease, "model.safetensors.index.json.gz"));
  const auto error = [&](std::string bytes, uint64_t limit = kMaxGunzipBytes) {
    spill(path, bytes);
    const auto text = read_maybe_gzip(path, limit);
    return text.ok() ? std::string() : text.status().message();
  };
  EXPECT_EQ(error(good), "");
  EXPECT_NE(error(good.substr(0, 1000)).find("too early"), std::string::npos);
  EXPECT_NE(error("plain text").find("damaged gzip"), std::string::npos);
  EXPECT_NE(error(good + "x").find("1 bytes after the end"), std::string::npos);
  EXPECT_NE(error(good, 1000).find("more than 1000 bytes"), std::string::npos);
  EXPECT_NE(error(""), "");
}

TEST(Synthetic, LoadsAndDependsOnTheSeedAlone) {
  const TempDir root;
  const std::string config = source_path("tests/golden/k3-random-small/config.json");
  const auto make = [&](const char* name, MakeSyntheticOptions options) {
    options.config_path = config;
    options.out_directory = join_path(root.path(), name);
    const Status status = make_synthetic_command(options);
    EXPECT_TRUE(status.ok()) << status.message();
    return options.out_directory;
  };
  const std::string a = make("a", {.seed = 5, .shard_bytes = 300'000, .threads = 1});
  const std::string b = make("b", {.tokenizer_directory = source_path("models/moat-nano"), .seed = 5, .threads = 3});
  const std::string c = make("c", {.seed = 6});
  EXPECT_TRUE(file_exists(join_path(b, "tiktoken.model")) && file_exists(join_path(b, "tokenizer_config.json")));
  EXPECT_GT(std::distance(std::filesystem::directory_iterator(a), std::filesystem::directory_iterator()), 10);
  const auto first = load(a), second = load(b), third = load(c);
  ASSERT_TRUE(first != nullptr && second != nullptr && third != nullptr);
  const auto x = fields_of(*first), y = fields_of(*second), z = fields_of(*third);
  for (size_t i = 0; i < x.size(); ++i) {
    const auto bytes = static_cast<size_t>(dtype_bytes(x[i].value.dtype, x[i].value.count()));
    EXPECT_EQ(std::memcmp(x[i].value.data, y[i].value.data, bytes), 0) << x[i].spec.name;
    EXPECT_NE(std::memcmp(x[i].value.data, z[i].value.data, bytes), 0) << x[i].spec.name;
  }
  // Nothing may be written over.
  EXPECT_FALSE(make_synthetic_command({.config_path = config, .out_directory = a}).ok());
}

TEST(Synthetic, ValuesHaveTheirDistributions) {
  const TempDir root;
  const std::string directory = join_path(root.path(), "x");
  ASSERT_TRUE(make_synthetic_command(
                  {.config_path = source_path("tests/golden/k3-random-small/config.json"), .out_directory = directory})
                  .ok());
  const auto model = load(directory);
  ASSERT_NE(model, nullptr);
  const auto fields = fields_of(*model);
  const auto moments = [&](const char* name) {
    const Tensor t = as_matrix(field(fields, name));
    double sum = 0, squares = 0;
    for (int64_t r = 0; r < t.dim(0); ++r) {
      for (int64_t c = 0; c < t.dim(1); ++c) {
        const double v = element_f32(t, r, c);
        sum += v;
        squares += v * v;
      }
    }
    const auto n = static_cast<double>(t.count());
    return std::pair(sum / n, std::sqrt(squares / n - sum / n * (sum / n)));
  };
  EXPECT_NEAR(moments("layers.0.self_attn.q_proj.weight").first, 0, 0.005);
  EXPECT_NEAR(moments("layers.0.self_attn.q_proj.weight").second, 0.125, 0.005);  // 1 / sqrt(64)
  EXPECT_NEAR(moments("layers.3.self_attn.kv_a_layernorm.weight").first, 1, 0.05);
  EXPECT_NEAR(moments("layers.3.self_attn.kv_a_layernorm.weight").second, 0.2, 0.03);
  EXPECT_NEAR(moments("layers.3.self_attn.kv_a_proj_with_mqa.weight").second, 0.00125, 0.0001);
  for (const Field& f : fields) {
    if (f.spec.part != WeightPart::kCodes) continue;
    for (int64_t group = 0; group < f.value.count() / kMxfp4Group; ++group) {
      EXPECT_TRUE(f.value.scales[group] >= 112 && f.value.scales[group] <= 122);
      bool large = false;
      for (int64_t i = 0; i < 16; ++i) {
        const uint8_t byte = f.value.u8()[group * 16 + i];
        large = large || (byte & 6) == 6 || (byte >> 4 & 6) == 6;
      }
      ASSERT_TRUE(large) << f.spec.name << " " << group;
    }
  }
}

// Newer writers name the scale bytes F8_E8M0; the release says U8. They are the same bytes.
TEST(Safetensors, ScaleBytesUnderTheirNewName) {
  const std::string json = R"({"s":{"dtype":"F8_E8M0","shape":[2,3],"data_offsets":[0,6]}})";
  std::string file(8, '\0');
  const uint64_t length = json.size();
  std::memcpy(file.data(), &length, sizeof(length));
  file += json + "abcdef";
  const auto* bytes = reinterpret_cast<const std::byte*>(file.data());
  const auto entries = parse_safetensors_header({bytes, file.size()}, file.size());
  ASSERT_TRUE(entries.ok()) << entries.status().message();
  ASSERT_EQ(entries->size(), 1U);
  EXPECT_EQ(entries->front().dtype, DType::kU8);
  EXPECT_EQ(entries->front().dims, Dims({2, 3}));
}

}  // namespace
}  // namespace moat
