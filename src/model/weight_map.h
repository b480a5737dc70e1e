// SPDX-License-Identifier: Apache-2.0
// The weight table: every tensor of a checkpoint with its name, shape, dtypes, shard rule, transform and the field it fills.
// One function makes it; loader, validator, memory planner, `moat inspect` and the synthetic-checkpoint writer all read it.
// Sources: docs/design/k3.md section 2.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "model/config.h"
#include "model/parallel.h"

namespace moat {

// --- destination: the weights of one model, as views; shapes are this rank's ---

struct MlpWeights {
  Tensor gate_proj, up_proj;  // [intermediate, hidden]
  Tensor down_proj;           // [hidden, intermediate]
};

struct AttnResWeights {
  Tensor norm;  // [hidden]
  Tensor proj;  // [1, hidden]
};

struct KdaWeights {
  Tensor q_proj, k_proj, v_proj;  // [heads * head_dim, hidden]
  Tensor q_conv, k_conv, v_conv;  // [heads * head_dim, 1, conv_kernel] f32
  Tensor f_a_proj;                // [head_dim, hidden]
  Tensor f_b_proj;                // [heads * head_dim, head_dim]
  Tensor dt_bias;                 // [heads * head_dim] f32
  Tensor a_log;                   // [heads] f32
  Tensor b_proj;                  // [heads, hidden]
  Tensor g_proj;                  // [heads * head_dim, hidden]; absent with a low-rank gate
  Tensor g_a_proj, g_b_proj;      // [head_dim, hidden], [heads * head_dim, head_dim]; absent with a full-rank gate
  Tensor o_norm;                  // [head_dim] f32
  Tensor o_proj;                  // [hidden, heads * head_dim]
};

struct MlaWeights {
  Tensor q_proj;                // [heads * qk_head_dim, hidden]; absent with q_lora
  Tensor q_a_proj, q_a_norm;    // [q_lora, hidden], [q_lora]
  Tensor q_b_proj;              // [heads * qk_head_dim, q_lora]
  Tensor kv_a_proj, kv_a_norm;  // [kv_lora + rope, hidden], [kv_lora]
  Tensor kv_b_proj;             // [heads * (nope + v), kv_lora]: per head nope key rows, then v rows
  Tensor g_proj;                // [heads * v_head_dim, hidden]; absent without output gate
  Tensor o_proj;                // [hidden, heads * v_head_dim]
};

struct MoeWeights {
  Tensor router, router_bias;                  // [experts, hidden], [experts] f32
  Tensor latent_down, latent_norm, latent_up;  // [latent, hidden], [latent], [hidden, latent]; absent without latent
  std::vector<Tensor> w1, w3;                  // per expert [moe_intermediate, expert_hidden]: gate, up
  std::vector<Tensor> w2;                      // per expert [expert_hidden, moe_intermediate]: down
  MlpWeights shared;                           // absent when num_shared_experts == 0
};

struct LayerWeights {
  LayerKind kind = LayerKind::kKda;
  bool moe = false;
  Tensor input_norm, post_attention_norm;  // [hidden]
  AttnResWeights attn_res, mlp_res;        // absent without AttnRes
  KdaWeights kda;                          // if kind == kKda
  MlaWeights mla;                          // if kind == kMla
  MlpWeights mlp;                          // if !moe
  MoeWeights experts;                      // if moe
};

struct KimiWeights {
  Tensor embed;               // [vocab, hidden]
  Tensor norm;                // [hidden]
  AttnResWeights output_res;  // absent without AttnRes
  Tensor lm_head;             // [vocab, hidden]
  std::vector<LayerWeights> layers;
};

// --- the table ---

enum class Transform : uint8_t {
  kAdopt,    // used as stored (a view of the mapping when aligned and unsharded)
  kToF32,    // converted to f32 from any float dtype
  kLeadF32,  // as kToF32, of the first `live` values of a tensor of any shape; the rest must be zero (A_log)
};

// What a checkpoint tensor contributes to its destination.
enum class WeightPart : uint8_t { kWhole, kCodes, kScales };  // codes and scales together make one MXFP4 tensor

enum class Component : uint8_t {
  kKda,
  kMla,
  kNorms,
  kDenseMlp,
  kRouter,
  kLatent,
  kShared,
  kRouted,
  kEmbed,
  kHead,
  kFinal,
  kVision,
};
constexpr size_t kNumComponents = 12;
std::string_view component_name(Component component);

struct WeightSpec {
  std::string name;                         // in the checkpoint
  Dims shape;                               // as stored, before sharding (kCodes: bytes)
  std::vector<DType> dtypes;                // accepted; the first is what the release uses
  ShardRule shard = ShardRule::kReplicate;  // of an expert: within its expert-parallel group
  Transform transform = Transform::kAdopt;
  WeightPart part = WeightPart::kWhole;
  Component component = Component::kNorms;
  int64_t layer = -1;  // -1: not in a layer
  int64_t expert = -1;
  int64_t live = 0;        // kLeadF32: how many values are real
  bool optional = false;   // stored by the release but never read by the computation: may be absent
  Tensor* dest = nullptr;  // in the KimiWeights given; null for optional ones
};

// What varies between checkpoints of the same config.
struct CheckpointLayout {
  bool mxfp4_experts = true;     // experts under .weight_packed and .weight_scale, else .weight
  bool dense_under_moe = false;  // the dense layer's MLP under block_sparse_moe. (transformers' export), else mlp.
};

// Reads the layout off the names of a checkpoint.
CheckpointLayout detect_layout(const ModelConfig& config, const std::function<bool(const std::string&)>& has_tensor);

// What `layout` asks of `config`: MXFP4 groups must fit the rows of every expert matrix.
Status check_layout(const ModelConfig& config, const CheckpointLayout& layout);

// Bytes of one tensor as the release stores it: the first accepted dtype, the whole shape.
int64_t spec_bytes(const WeightSpec& spec);
// Parameters in it: scales are none, codes are two a byte, padding does not count.
int64_t spec_parameters(const WeightSpec& spec);

// Sizes `weights` for `config` and returns one spec a tensor, in forward order. `weights` must outlive the table.
std::vector<WeightSpec> weight_table(const ModelConfig& config, const CheckpointLayout& layout, KimiWeights& weights);

// Names that belong to the vision tower and projector of the release: recognised, counted, skipped.
bool is_vision_tensor(std::string_view name);

}  // namespace moat
