// SPDX-License-Identifier: Apache-2.0
// ModelConfig: the numbers and switches of one Kimi K3 or Kimi-Linear text model, from its config.json, every one checked.
// Sources of the meanings: docs/design/k3.md sections 1.1 to 1.3. Immutable value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace moat {

enum class LayerKind : uint8_t { kKda, kMla };
enum class HiddenAct : uint8_t { kSilu, kSitu };

struct ModelConfig {
  std::string model_type;     // "kimi_k3" or "kimi_linear"
  std::string tensor_prefix;  // "language_model." when the text model is nested, else ""
  bool has_vision = false;    // vision_config is present; its tensors are recognised and skipped

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  std::vector<LayerKind> layer_kinds;  // [num_layers]
  float rms_norm_eps = 1e-6F;
  float mla_norm_eps = 1e-6F;  // of q_a_layernorm and kv_a_layernorm: the module's class default, not rms_norm_eps
  int64_t max_position_embeddings = 0;
  int32_t bos_token_id = -1, eos_token_id = -1, pad_token_id = -1;

  // Activation of every MLP.
  HiddenAct hidden_act = HiddenAct::kSilu;
  float situ_beta = 1.0F;
  std::optional<float> situ_linear_beta;  // absent: up is unbounded

  // Residual stream.
  std::optional<int64_t> attn_res_block_size;  // absent: x += sublayer

  // KDA.
  int64_t kda_num_heads = 0, kda_head_dim = 0, conv_kernel = 0;
  std::optional<float> gate_lower_bound;  // absent: -exp(A) softplus(z)
  bool full_rank_gate = false;            // g_proj, else g_a_proj and g_b_proj

  // MLA.
  int64_t num_heads = 0;
  std::optional<int64_t> q_lora_rank;  // absent: one q_proj
  int64_t kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  bool mla_output_gate = false;

  // Feed-forward.
  int64_t intermediate_size = 0;
  int64_t first_k_dense = 0, moe_layer_freq = 1;
  int64_t num_experts = 0, num_experts_per_token = 0, num_shared_experts = 0, moe_intermediate_size = 0;
  std::optional<int64_t> latent_size;  // routed_expert_hidden_size; absent: experts see the hidden width
  bool latent_norm = false;
  bool moe_renormalize = false;
  float routed_scaling_factor = 1.0F;
  bool mxfp4_experts_declared = false;  // quantization_config names mxfp4-pack-quantized; the tensor suffix decides

  bool is_moe(int64_t layer) const { return num_experts > 0 && layer >= first_k_dense && layer % moe_layer_freq == 0; }
  int64_t expert_hidden() const { return latent_size.value_or(hidden_size); }
  int64_t kda_width() const { return kda_num_heads * kda_head_dim; }
  int64_t qk_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
  int64_t mla_row() const { return kv_lora_rank + qk_rope_head_dim; }  // values cached per token and layer
  int64_t num_kda_layers() const;
  int64_t num_mla_layers() const;
};

// Fails, naming the key with got and expected, on missing or absurd values and on every switch that is not implemented:
// mla_use_nope false, router activation other than sigmoid, topk_method other than noaux_tc, more than one expert group,
// nextn layers, tied embeddings, unknown quantization formats, layer lists that do not partition 1..num_layers.
Result<ModelConfig> parse_model_config(const Json& config);
Result<ModelConfig> load_model_config(const std::string& directory);  // directory/config.json

}  // namespace moat
