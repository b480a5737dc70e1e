// SPDX-License-Identifier: Apache-2.0
#include "model/config.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "base/file.h"
#include "core/tensor.h"
#include "model/config_fields.h"

namespace moat {
namespace {

constexpr int64_t kMaxProduct = int64_t{1} << 40;  // elements of any one tensor
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxExpertsInAll = int64_t{1} << 20;  // layers x experts: bounds the weight table

// --- the parts of a config ---

void read_layer_list(ConfigFields& fields, std::string_view key, LayerKind kind, int64_t num_layers,
                     std::vector<std::optional<LayerKind>>& kinds) {
  const Json* list = fields.find(key);
  if (list == nullptr) return fields.fail("{}: missing, expected a list of layer numbers", fields.name(key));
  if (!list->is_array()) return fields.refuse(key, *list, "a list of layer numbers");
  for (const Json& item : list->as_array()) {
    const std::optional<int64_t> number = item.is_number() ? item.as_int64() : std::nullopt;
    if (!number || *number < 1 || *number > num_layers) {
      return fields.refuse(key, item, fmt::format("layer numbers from 1 to {} (1-based)", num_layers));
    }
    std::optional<LayerKind>& slot = kinds[static_cast<size_t>(*number - 1)];
    if (slot) {
      return fields.fail("{}: layer {} is listed twice, expected kda_layers and full_attn_layers to partition 1..{}",
                         fields.name(key), *number, num_layers);
    }
    slot = kind;
  }
}

void read_kda(const Json& text, const std::string& path, Status& status, ModelConfig& config) {
  const Json* json = text.find_set("linear_attn_config");
  if (json == nullptr || !json->is_object()) {
    if (status.ok()) {
      status = invalid_argument("{}linear_attn_config: {}, expected an object", path,
                                json == nullptr ? "missing" : "got " + ConfigFields::shown(*json));
    }
    return;
  }
  ConfigFields fields(*json, path + "linear_attn_config.", status);
  config.kda_num_heads = fields.integer("num_heads");
  config.kda_head_dim = fields.integer("head_dim");
  config.conv_kernel = fields.integer("short_conv_kernel_size", {2, 64});
  config.gate_lower_bound = fields.optional_number("gate_lower_bound", -1e4, -1e-4);
  config.full_rank_gate = fields.boolean_or("use_full_rank_gate", false);
  if (!status.ok()) return;
  std::vector<std::optional<LayerKind>> kinds(static_cast<size_t>(config.num_layers));
  read_layer_list(fields, "full_attn_layers", LayerKind::kMla, config.num_layers, kinds);
  read_layer_list(fields, "kda_layers", LayerKind::kKda, config.num_layers, kinds);
  for (size_t i = 0; i < kinds.size() && status.ok(); ++i) {
    if (!kinds[i]) {
      fields.fail(
          "{}: layer {} is in neither list, expected kda_layers and full_attn_layers to partition 1..{} (1-based)",
          fields.name("kda_layers"), i + 1, config.num_layers);
      return;
    }
    config.layer_kinds.push_back(*kinds[i]);
  }
}

void read_mla(ConfigFields& fields, ModelConfig& config) {
  config.num_heads = fields.integer("num_attention_heads");
  const int64_t num_kv_heads = fields.integer_or("num_key_value_heads", config.num_heads);
  if (num_kv_heads != config.num_heads) {
    fields.fail_unsupported("{}: got {}, expected {} as num_attention_heads: latent attention has one key per head",
                            fields.name("num_key_value_heads"), num_kv_heads, config.num_heads);
  }
  config.q_lora_rank = fields.optional_integer("q_lora_rank");
  config.kv_lora_rank = fields.integer("kv_lora_rank");
  config.qk_nope_head_dim = fields.integer("qk_nope_head_dim");
  config.qk_rope_head_dim = fields.integer("qk_rope_head_dim");
  config.v_head_dim = fields.integer("v_head_dim");
  config.mla_output_gate = fields.boolean_or("mla_use_output_gate", false);
  fields.expect("mla_use_nope", true, "rotary positions are not implemented");
}

void read_activation(ConfigFields& fields, ModelConfig& config) {
  const Json* act = fields.find("hidden_act");
  const Json silu("silu"), situ("situ");
  if (act != nullptr && *act == situ) {
    config.hidden_act = HiddenAct::kSitu;
    const auto beta = fields.optional_number("activation_situ_beta", 1e-3, 1e6);
    if (!beta) fields.fail("{}: missing, expected a number with hidden_act situ", fields.name("activation_situ_beta"));
    config.situ_beta = beta.value_or(1.0F);
    config.situ_linear_beta = fields.optional_number("activation_situ_linear_beta", 1e-3, 1e6);
  } else if (act != nullptr && *act != silu) {
    fields.fail_unsupported("{}: got {}, expected \"silu\" or \"situ\"", fields.name("hidden_act"),
                            ConfigFields::shown(*act));
  }
}

void read_feed_forward(ConfigFields& fields, ModelConfig& config) {
  read_activation(fields, config);
  config.intermediate_size = fields.integer("intermediate_size");
  config.num_experts = fields.integer_or("num_experts", 0, {0, int64_t{1} << 20});
  config.first_k_dense = fields.integer_or("first_k_dense_replace", 0, {0, kMaxLayers});
  config.moe_layer_freq = fields.integer_or("moe_layer_freq", 1, {1, kMaxLayers});
  fields.expect("moe_router_activation_func", "sigmoid", "other router activations are not implemented");
  fields.expect("topk_method", "noaux_tc", "other ways to choose experts are not implemented");
  fields.expect("num_expert_group", 1, "grouped routing is not implemented");
  fields.expect("topk_group", 1, "grouped routing is not implemented");
  if (config.num_experts == 0) return;
  config.num_experts_per_token = fields.integer("num_experts_per_token");
  if (config.num_experts_per_token > config.num_experts) {
    fields.fail("{}: got {}, expected at most num_experts = {}", fields.name("num_experts_per_token"),
                config.num_experts_per_token, config.num_experts);
  }
  if (config.num_layers * config.num_experts > kMaxExpertsInAll) {
    fields.fail("{}: got {} over {} layers, expected at most {} experts in all", fields.name("num_experts"),
                config.num_experts, config.num_layers, kMaxExpertsInAll);
  }
  config.num_shared_experts = fields.integer_or("num_shared_experts", 0, {0, 1024});
  config.moe_intermediate_size = fields.integer("moe_intermediate_size");
  config.latent_size = fields.optional_integer("routed_expert_hidden_size");
  config.latent_norm = fields.boolean_or("latent_moe_use_norm", false);
  if (config.latent_norm && !config.latent_size) {
    fields.fail("{}: got true, expected routed_expert_hidden_size with it", fields.name("latent_moe_use_norm"));
  }
  config.moe_renormalize = fields.boolean_or("moe_renormalize", true);
  config.routed_scaling_factor = fields.optional_number("routed_scaling_factor", 1e-6, 1e6).value_or(1.0F);
}

// The only scheme that the expert kernels know: 4-bit floats in groups of 32 with a power-of-two scale, activations
// plain.
void read_quantization_group(const Json& json, const std::string& path, Status& status) {
  ConfigFields group(json, path, status);
  group.expect("format", "mxfp4-pack-quantized", "");
  group.expect_absent("input_activations", "quantized activations are not implemented");
  group.expect_absent("output_activations", "quantized activations are not implemented");
  const Json* weights_json = group.find("weights");
  if (weights_json == nullptr || !weights_json->is_object()) {
    return group.fail("{}: missing, expected an object", group.name("weights"));
  }
  ConfigFields weights(*weights_json, path + "weights.", status);
  weights.require("num_bits", 4);
  weights.require("type", "float");
  weights.require("group_size", kMxfp4Group);
  weights.expect("strategy", "group", "");
  weights.expect("symmetric", true, "");
  weights.expect("dynamic", false, "");
  weights.expect("scale_dtype", "torch.uint8", "");
  weights.expect_absent("actorder", "reordered columns are not implemented");
  weights.expect_absent("block_structure", "block scales are not implemented");
  weights.expect_absent("zp_dtype", "zero points are not implemented");
}

void read_quantization(const Json& owner, const std::string& path, Status& status, ModelConfig& config) {
  const Json* json = owner.find_set("quantization_config");
  if (json == nullptr) return;
  ConfigFields fields(*json, path + "quantization_config.", status);
  if (!json->is_object()) {
    return fields.fail("{}quantization_config: got {}, expected an object", path, ConfigFields::shown(*json));
  }
  fields.require("quant_method", "compressed-tensors");
  fields.require("format", "mxfp4-pack-quantized");
  fields.expect("quantization_status", "compressed", "");
  fields.expect_absent("kv_cache_scheme", "a quantized cache is not implemented");
  const Json* groups = fields.find("config_groups");
  if (groups == nullptr || !groups->is_object() || groups->as_object().empty()) {
    return fields.fail("{}: {}, expected an object with one group or more", fields.name("config_groups"),
                       groups == nullptr ? "missing" : "got " + ConfigFields::shown(*groups));
  }
  for (const auto& [name, group] : groups->as_object()) {
    read_quantization_group(group, fields.name("config_groups.") + name + ".", status);
  }
  config.mxfp4_experts_declared = true;
  if (config.num_experts == 0) return;
  for (const auto& [key, value] : {std::pair{"routed_expert_hidden_size", config.expert_hidden()},
                                   std::pair{"moe_intermediate_size", config.moe_intermediate_size}}) {
    if (value % kMxfp4Group != 0) {
      fields.fail("{}{}: got {}, expected a multiple of {} with mxfp4 experts", path, key, value, kMxfp4Group);
    }
  }
}

// Dimensions are at most 2^24, so products of two fit; every tensor's element count must too.
void check_products(ConfigFields& fields, const ModelConfig& c) {
  struct Product {
    const char* what;
    int64_t a, b;
  };
  const int64_t query_in = c.q_lora_rank.value_or(c.hidden_size);
  const std::array<Product, 4> widths = {{
      {"linear_attn_config.num_heads x head_dim", c.kda_num_heads, c.kda_head_dim},
      {"num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)", c.num_heads, c.qk_head_dim()},
      {"num_attention_heads x (qk_nope_head_dim + v_head_dim)", c.num_heads, c.qk_nope_head_dim + c.v_head_dim},
      {"num_shared_experts x moe_intermediate_size", c.num_shared_experts, c.moe_intermediate_size},
  }};
  for (const Product& p : widths) {
    if (p.a * p.b > ConfigFields::kMaxDim) {
      return fields.fail("{}{}: got {} x {}, expected at most {}", fields.name(""), p.what, p.a, p.b,
                         ConfigFields::kMaxDim);
    }
  }
  const std::array<Product, 9> tensors = {{
      {"vocab_size x hidden_size", c.vocab_size, c.hidden_size},
      {"intermediate_size x hidden_size", c.intermediate_size, c.hidden_size},
      {"linear_attn_config.num_heads x head_dim x hidden_size", c.kda_width(), c.hidden_size},
      {"linear_attn_config.num_heads x head_dim x head_dim", c.kda_width(), c.kda_head_dim},
      {"num_attention_heads x qk_head_dim x query width", c.num_heads * c.qk_head_dim(), query_in},
      {"num_attention_heads x v_head_dim x hidden_size", c.num_heads * c.v_head_dim, c.hidden_size},
      {"num_attention_heads x head dims x kv_lora_rank", c.num_heads * (c.qk_nope_head_dim + c.v_head_dim),
       c.kv_lora_rank},
      {"num_experts x hidden_size", c.num_experts, c.hidden_size},
      {"moe_intermediate_size x max(hidden_size, routed_expert_hidden_size)",
       std::max<int64_t>(c.num_shared_experts, 1) * c.moe_intermediate_size,
       std::max(c.hidden_size, c.expert_hidden())},
  }};
  for (const Product& p : tensors) {
    if (p.a * p.b > kMaxProduct) {
      return fields.fail("{}{}: got {} x {}, expected at most {} elements", fields.name(""), p.what, p.a, p.b,
                         kMaxProduct);
    }
  }
}

// Token ids are repeated at the top level of a nested config; the inner ones win.
int32_t read_token_id(ConfigFields& inner, ConfigFields& outer, std::string_view key, int64_t vocab_size) {
  ConfigFields& fields = inner.has(key) ? inner : outer;
  return static_cast<int32_t>(fields.integer_or(key, -1, {0, std::max<int64_t>(vocab_size, 1) - 1}));
}

void read_text(const Json& text, const std::string& path, const Json& outer, Status& status, ModelConfig& config) {
  ConfigFields fields(text, path, status);
  ConfigFields outer_fields(outer, "", status);
  config.vocab_size = fields.integer("vocab_size");
  config.hidden_size = fields.integer("hidden_size");
  config.num_layers = fields.integer("num_hidden_layers", {1, kMaxLayers});
  config.rms_norm_eps = fields.optional_number("rms_norm_eps", 1e-12, 0.1).value_or(1e-6F);
  const char* length_key = fields.has("max_position_embeddings") ? "max_position_embeddings" : "model_max_length";
  config.max_position_embeddings = fields.integer(length_key, {1, int64_t{1} << 30});
  config.bos_token_id = read_token_id(fields, outer_fields, "bos_token_id", config.vocab_size);
  config.eos_token_id = read_token_id(fields, outer_fields, "eos_token_id", config.vocab_size);
  config.pad_token_id = read_token_id(fields, outer_fields, "pad_token_id", config.vocab_size);
  config.attn_res_block_size = fields.optional_integer("attn_res_block_size", {1, kMaxLayers});
  fields.expect("tie_word_embeddings", false, "tied embeddings are not implemented");
  outer_fields.expect("tie_word_embeddings", false, "tied embeddings are not implemented");
  fields.expect("attention_bias", false, "projection biases are not implemented");
  fields.expect("num_nextn_predict_layers", 0, "next-token prediction layers are not implemented");
  read_mla(fields, config);
  read_kda(text, path, status, config);
  read_feed_forward(fields, config);
  read_quantization(text, path, status, config);
  if (&text != &outer) read_quantization(outer, "", status, config);
  if (status.ok()) check_products(fields, config);
}

}  // namespace

int64_t ModelConfig::num_kda_layers() const {
  return std::count(layer_kinds.begin(), layer_kinds.end(), LayerKind::kKda);
}
int64_t ModelConfig::num_mla_layers() const {
  return std::count(layer_kinds.begin(), layer_kinds.end(), LayerKind::kMla);
}

Result<ModelConfig> parse_model_config(const Json& json) {
  if (!json.is_object()) return invalid_argument("got {}, expected an object", ConfigFields::shown(json));
  Status status;
  ModelConfig config;
  ConfigFields fields(json, "", status);
  const Json* text = json.find_set("text_config");
  if (text != nullptr && !text->is_object())
    return invalid_argument("text_config: got {}, expected an object", ConfigFields::shown(*text));
  config.model_type = text != nullptr ? "kimi_k3" : "kimi_linear";
  fields.require("model_type", config.model_type);
  MOAT_RETURN_IF_ERROR(status);
  if (text == nullptr) {
    read_text(json, "", json, status, config);
  } else {
    config.tensor_prefix = "language_model.";
    config.has_vision = fields.has("vision_config");
    ConfigFields(*text, "text_config.", status).expect("model_type", "kimi_linear", "");
    read_text(*text, "text_config.", json, status, config);
  }
  MOAT_RETURN_IF_ERROR(status);
  return config;
}

Result<ModelConfig> load_model_config(const std::string& directory) {
  const std::string path = join_path(directory, "config.json");
  MOAT_ASSIGN(const std::string text, read_file(path));
  const Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(path);
  const Result<ModelConfig> config = parse_model_config(*json);
  if (!config.ok()) return config.status().with_prefix(path);
  return config;
}

}  // namespace moat
