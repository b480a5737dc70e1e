// SPDX-License-Identifier: Apache-2.0
// Configs that must be refused, as data: what is changed in a good one, and the key and words that the message must
// have.
#pragma once

#include <functional>
#include <vector>

#include "tiny_checkpoint.h"

namespace moat {

struct BadConfig {
  std::vector<const char*> message;
  std::function<void(Json& config, Json& text, Json& kda)> edit;
};

inline std::vector<BadConfig> bad_configs() {
  // One member of text_config or of linear_attn_config.
  const auto text = [](const char* key, Json value) { return [=](Json&, Json& t, Json&) { t.set(key, value); }; };
  const auto kda = [](const char* key, Json value) { return [=](Json&, Json&, Json& k) { k.set(key, value); }; };
  const auto weights = [](const char* key, Json value) {
    return [=](Json&, Json& t, Json&) {
      t.find("quantization_config")->find("config_groups")->find("group_0")->find("weights")->set(key, value);
    };
  };
  const auto quant = [](const char* key, Json value) {
    return [=](Json&, Json& t, Json&) { t.find("quantization_config")->set(key, value); };
  };
  const auto group = [](const char* key, Json value) {
    return [=](Json&, Json& t, Json&) {
      t.find("quantization_config")->find("config_groups")->find("group_0")->set(key, value);
    };
  };
  const Json null;
  return {
      // Model types and nesting.
      {{"model_type", "got \"llama\"", "expected \"kimi_k3\""},
       [](Json& c, Json&, Json&) { c.set("model_type", "llama"); }},
      {{"model_type", "missing"}, [](Json& c, Json&, Json&) { c.set("model_type", nullptr); }},
      {{"text_config.model_type", "kimi_k4"}, text("model_type", "kimi_k4")},
      {{"text_config", "got 3"}, [](Json& c, Json&, Json&) { c.set("text_config", 3); }},
      {{"model_type", "expected \"kimi_linear\""},
       [](Json& c, Json& t, Json&) {
         Json flat = t;
         flat.set("model_type", "kimi_k3");
         c = flat;
       }},
      // Missing, absurd and mistyped numbers.
      {{"text_config.hidden_size", "missing"}, text("hidden_size", null)},
      {{"text_config.hidden_size", "got 0"}, text("hidden_size", 0)},
      {{"text_config.hidden_size", "got -16"}, text("hidden_size", -16)},
      {{"text_config.hidden_size", "got \"16\""}, text("hidden_size", "16")},
      {{"text_config.hidden_size", "got 16.5"}, text("hidden_size", 16.5)},
      {{"text_config.hidden_size", "got 100000000"}, text("hidden_size", 100000000)},
      {{"text_config.vocab_size", "got 0"}, text("vocab_size", 0)},
      {{"text_config.vocab_size", "got 99999999999999999999"},
       text("vocab_size", Json::Number{"99999999999999999999"})},
      {{"text_config.vocab_size x hidden_size", "16777216 x 16777216", "elements"},
       [](Json&, Json& t, Json&) {
         t.set("vocab_size", 1 << 24);
         t.set("hidden_size", 1 << 24);
       }},
      {{"intermediate_size x hidden_size", "elements"},
       [](Json&, Json& t, Json&) {
         t.set("intermediate_size", 1 << 24);
         t.set("hidden_size", 1 << 20);
       }},
      {{"num_attention_heads x (qk_nope_head_dim", "16777216"},
       [](Json&, Json& t, Json&) {
         t.set("num_attention_heads", 1 << 22);
         t.set("num_key_value_heads", 1 << 22);
         t.set("qk_nope_head_dim", 4096);
       }},
      {{"linear_attn_config.num_heads x head_dim"},
       [](Json&, Json&, Json& k) {
         k.set("num_heads", 1 << 20);
         k.set("head_dim", 1 << 20);
       }},
      {{"text_config.num_hidden_layers", "got 5000"}, text("num_hidden_layers", 5000)},
      {{"text_config.intermediate_size", "missing"}, text("intermediate_size", null)},
      {{"text_config.max_position_embeddings", "got -1"}, text("max_position_embeddings", -1)},
      {{"text_config.rms_norm_eps", "got 0.0"}, text("rms_norm_eps", 0.0)},
      {{"text_config.rms_norm_eps", "got \"x\""}, text("rms_norm_eps", "x")},
      {{"text_config.eos_token_id", "got 8", "from 0 to 7"}, text("eos_token_id", 8)},
      {{"text_config.bos_token_id", "got [1]"}, text("bos_token_id", Json::array({1}))},
      {{"text_config.attn_res_block_size", "got 0"}, text("attn_res_block_size", 0)},
      // MLA.
      {{"text_config.num_key_value_heads", "got 1", "expected 2"}, text("num_key_value_heads", 1)},
      {{"text_config.mla_use_nope", "got false", "rotary"}, text("mla_use_nope", false)},
      {{"text_config.mla_use_output_gate", "got 1"}, text("mla_use_output_gate", 1)},
      {{"text_config.kv_lora_rank", "missing"}, text("kv_lora_rank", null)},
      {{"text_config.q_lora_rank", "got 0"}, text("q_lora_rank", 0)},
      {{"text_config.v_head_dim", "got -1"}, text("v_head_dim", -1)},
      {{"text_config.attention_bias", "got true"}, text("attention_bias", true)},
      // KDA and the layer lists.
      {{"text_config.linear_attn_config", "missing"}, text("linear_attn_config", null)},
      {{"text_config.linear_attn_config", "got []"}, text("linear_attn_config", Json::array())},
      {{"linear_attn_config.num_heads", "got 0"}, kda("num_heads", 0)},
      {{"linear_attn_config.short_conv_kernel_size", "got 1"}, kda("short_conv_kernel_size", 1)},
      {{"linear_attn_config.gate_lower_bound", "got 5"}, kda("gate_lower_bound", 5)},
      {{"linear_attn_config.use_full_rank_gate", "got \"yes\""}, kda("use_full_rank_gate", "yes")},
      {{"linear_attn_config.kda_layers", "missing"}, kda("kda_layers", null)},
      {{"linear_attn_config.kda_layers", "got 0", "1-based"}, kda("kda_layers", Json::array({0}))},
      {{"linear_attn_config.kda_layers", "got 3", "from 1 to 2"}, kda("kda_layers", Json::array({1, 3}))},
      {{"linear_attn_config.kda_layers", "layer 2 is listed twice", "partition 1..2"},
       kda("kda_layers", Json::array({1, 2}))},
      {{"linear_attn_config.kda_layers", "layer 1 is in neither"}, kda("kda_layers", Json::array())},
      {{"linear_attn_config.full_attn_layers", "got \"2\""}, kda("full_attn_layers", Json::array({"2"}))},
      // Feed-forward.
      {{"text_config.hidden_act", "got \"gelu\""}, text("hidden_act", "gelu")},
      {{"text_config.activation_situ_beta", "missing"}, text("activation_situ_beta", null)},
      {{"text_config.activation_situ_beta", "got 0"}, text("activation_situ_beta", 0)},
      {{"text_config.moe_router_activation_func", "got \"softmax\""}, text("moe_router_activation_func", "softmax")},
      {{"text_config.topk_method", "got \"greedy\""}, text("topk_method", "greedy")},
      {{"text_config.num_expert_group", "got 8"}, text("num_expert_group", 8)},
      {{"text_config.topk_group", "got 4"}, text("topk_group", 4)},
      {{"text_config.num_experts_per_token", "got 3", "num_experts = 2"}, text("num_experts_per_token", 3)},
      {{"text_config.num_experts_per_token", "missing"}, text("num_experts_per_token", null)},
      {{"text_config.num_experts", "got 1048576 over 2 layers"}, text("num_experts", 1 << 20)},
      {{"text_config.moe_intermediate_size", "missing"}, text("moe_intermediate_size", null)},
      {{"text_config.moe_intermediate_size", "got 48", "multiple of 32"}, text("moe_intermediate_size", 48)},
      {{"text_config.routed_expert_hidden_size", "got 40", "multiple of 32"}, text("routed_expert_hidden_size", 40)},
      {{"text_config.latent_moe_use_norm", "expected routed_expert_hidden_size"},
       text("routed_expert_hidden_size", null)},
      {{"text_config.routed_scaling_factor", "got 0"}, text("routed_scaling_factor", 0)},
      {{"text_config.moe_layer_freq", "got 0"}, text("moe_layer_freq", 0)},
      {{"text_config.num_nextn_predict_layers", "got 1"}, text("num_nextn_predict_layers", 1)},
      {{"text_config.tie_word_embeddings", "got true"}, text("tie_word_embeddings", true)},
      {{"tie_word_embeddings", "got true"}, [](Json& c, Json&, Json&) { c.set("tie_word_embeddings", true); }},
      // Quantization.
      {{"quantization_config.quant_method", "got \"fp8\""}, quant("quant_method", "fp8")},
      {{"quantization_config.quant_method", "missing"}, quant("quant_method", null)},
      {{"quantization_config.format", "got \"nvfp4-pack-quantized\""}, quant("format", "nvfp4-pack-quantized")},
      {{"quantization_config.quantization_status", "frozen"}, quant("quantization_status", "frozen")},
      {{"quantization_config.kv_cache_scheme", "got {"}, quant("kv_cache_scheme", Json::object({{"num_bits", 8}}))},
      {{"quantization_config.config_groups", "got {}"}, quant("config_groups", Json::object())},
      {{"text_config.quantization_config", "got \"int4\""}, text("quantization_config", "int4")},
      {{"quantization_config.quant_method"},
       [](Json& c, Json&, Json&) {
         c.set("quantization_config", Json::object({{"quant_method", "gptq"}}));
       }},
      {{"group_0.format", "pack-quantized"}, group("format", "pack-quantized")},
      {{"group_0.input_activations", "activations"}, group("input_activations", Json::object({{"num_bits", 8}}))},
      {{"group_0.output_activations", "activations"}, group("output_activations", Json::object({{"num_bits", 8}}))},
      {{"group_0.weights", "missing"}, group("weights", null)},
      {{"weights.num_bits", "got 8"}, weights("num_bits", 8)},
      {{"weights.type", "got \"int\""}, weights("type", "int")},
      {{"weights.group_size", "got 16"}, weights("group_size", 16)},
      {{"weights.group_size", "missing"}, weights("group_size", null)},
      {{"weights.strategy", "got \"channel\""}, weights("strategy", "channel")},
      {{"weights.symmetric", "got false"}, weights("symmetric", false)},
      {{"weights.dynamic", "got true"}, weights("dynamic", true)},
      {{"weights.scale_dtype", "bfloat16"}, weights("scale_dtype", "torch.bfloat16")},
      {{"weights.actorder", "static"}, weights("actorder", "static")},
  };
}

}  // namespace moat
