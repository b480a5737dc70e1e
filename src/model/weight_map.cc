// SPDX-License-Identifier: Apache-2.0
#include "model/weight_map.h"

#include <utility>

namespace moat {
namespace {

constexpr int64_t kALogPadding = 128;  // K3 stores A_log padded with zeros to a multiple of this

// Appends the specs of one model in forward order.
class TableBuilder {
 public:
  TableBuilder(const ModelConfig& config, const CheckpointLayout& layout, KimiWeights& weights)
      : config_(config), layout_(layout), weights_(weights) {}

  std::vector<WeightSpec> build() {
    const std::string root = config_.tensor_prefix + "model.";
    const int64_t vocab = config_.vocab_size, hidden = config_.hidden_size;
    weights_ = KimiWeights();
    weights_.layers.resize(static_cast<size_t>(config_.num_layers));
    trunk(root + "embed_tokens.weight", {vocab, hidden}, ShardRule::kRows, Component::kEmbed, weights_.embed);
    for (int64_t i = 0; i < config_.num_layers; ++i) add_layer(i);
    if (config_.attn_res_block_size) {
      add_attn_res(root + "output_attn_res", Component::kFinal, weights_.output_res);
    }
    layer_ = -1;
    trunk(root + "norm.weight", {hidden}, ShardRule::kReplicate, Component::kFinal, weights_.norm);
    trunk(config_.tensor_prefix + "lm_head.weight", {vocab, hidden}, ShardRule::kRows, Component::kHead,
          weights_.lm_head);
    return std::move(specs_);
  }

 private:
  WeightSpec& add(std::string name, Dims shape, ShardRule shard, Component component, Tensor* dest) {
    WeightSpec& spec = specs_.emplace_back();
    spec.name = std::move(name);
    spec.shape = shape;
    spec.shard = shard;
    spec.component = component;
    spec.layer = layer_;
    spec.dest = dest;
    return spec;
  }

  // Used as stored: BF16 in the release, F32 in checkpoints made for tests.
  WeightSpec& trunk(std::string name, Dims shape, ShardRule shard, Component component, Tensor& dest) {
    WeightSpec& spec = add(std::move(name), shape, shard, component, &dest);
    spec.dtypes = {DType::kBF16, DType::kF32};
    return spec;
  }

  // Small tensors that are computed with in F32 whatever the checkpoint stores.
  WeightSpec& precise(std::string name, Dims shape, ShardRule shard, Component component, Tensor& dest) {
    WeightSpec& spec = add(std::move(name), shape, shard, component, &dest);
    spec.dtypes = {DType::kF32, DType::kBF16, DType::kF16};
    spec.transform = Transform::kToF32;
    return spec;
  }

  void add_attn_res(const std::string& stem, Component component, AttnResWeights& dest) {
    const int64_t hidden = config_.hidden_size;
    trunk(stem + "_norm.weight", {hidden}, ShardRule::kReplicate, component, dest.norm);
    trunk(stem + "_proj.weight", {1, hidden}, ShardRule::kReplicate, component, dest.proj);
  }

  // The first layer has no stored block to mix with: the release has these two tensors, nothing reads them.
  void add_unread_attn_res(const std::string& stem) {
    AttnResWeights none;
    const size_t first = specs_.size();
    add_attn_res(stem, Component::kNorms, none);
    for (size_t i = first; i < specs_.size(); ++i) {
      specs_[i].optional = true;
      specs_[i].dest = nullptr;
    }
  }

  void add_mlp(const std::string& stem, int64_t width, Component component, MlpWeights& dest) {
    const int64_t hidden = config_.hidden_size;
    trunk(stem + "gate_proj.weight", {width, hidden}, ShardRule::kRows, component, dest.gate_proj);
    trunk(stem + "up_proj.weight", {width, hidden}, ShardRule::kRows, component, dest.up_proj);
    trunk(stem + "down_proj.weight", {hidden, width}, ShardRule::kCols, component, dest.down_proj);
  }

  void add_layer(int64_t index) {
    layer_ = index;
    LayerWeights& dest = weights_.layers[static_cast<size_t>(index)];
    dest.kind = config_.layer_kinds[static_cast<size_t>(index)];
    dest.moe = config_.is_moe(index);
    const std::string stem = fmt::format("{}model.layers.{}.", config_.tensor_prefix, index);
    const int64_t hidden = config_.hidden_size;
    if (config_.attn_res_block_size) {
      if (index == 0) {
        add_unread_attn_res(stem + "self_attention_res");
      } else {
        add_attn_res(stem + "self_attention_res", Component::kNorms, dest.attn_res);
      }
    }
    trunk(stem + "input_layernorm.weight", {hidden}, ShardRule::kReplicate, Component::kNorms, dest.input_norm);
    if (dest.kind == LayerKind::kKda) {
      add_kda(stem + "self_attn.", dest.kda);
    } else {
      add_mla(stem + "self_attn.", dest.mla);
    }
    if (config_.attn_res_block_size) add_attn_res(stem + "mlp_res", Component::kNorms, dest.mlp_res);
    trunk(stem + "post_attention_layernorm.weight", {hidden}, ShardRule::kReplicate, Component::kNorms,
          dest.post_attention_norm);
    if (dest.moe) {
      add_moe(stem + "block_sparse_moe.", dest.experts);
    } else {
      add_mlp(stem + (layout_.dense_under_moe ? "block_sparse_moe." : "mlp."), config_.intermediate_size,
              Component::kDenseMlp, dest.mlp);
    }
  }

  void add_kda(const std::string& stem, KdaWeights& dest) {
    constexpr auto kComponent = Component::kKda;
    const int64_t hidden = config_.hidden_size, heads = config_.kda_num_heads, head_dim = config_.kda_head_dim;
    const int64_t width = config_.kda_width(), taps = config_.conv_kernel;
    trunk(stem + "q_proj.weight", {width, hidden}, ShardRule::kRows, kComponent, dest.q_proj);
    trunk(stem + "k_proj.weight", {width, hidden}, ShardRule::kRows, kComponent, dest.k_proj);
    trunk(stem + "v_proj.weight", {width, hidden}, ShardRule::kRows, kComponent, dest.v_proj);
    precise(stem + "q_conv1d.weight", {width, 1, taps}, ShardRule::kRows, kComponent, dest.q_conv);
    precise(stem + "k_conv1d.weight", {width, 1, taps}, ShardRule::kRows, kComponent, dest.k_conv);
    precise(stem + "v_conv1d.weight", {width, 1, taps}, ShardRule::kRows, kComponent, dest.v_conv);
    trunk(stem + "f_a_proj.weight", {head_dim, hidden}, ShardRule::kReplicate, kComponent, dest.f_a_proj);
    trunk(stem + "f_b_proj.weight", {width, head_dim}, ShardRule::kRows, kComponent, dest.f_b_proj);
    precise(stem + "dt_bias", {width}, ShardRule::kRows, kComponent, dest.dt_bias);
    const int64_t padded = (heads + kALogPadding - 1) / kALogPadding * kALogPadding;
    const Dims a_log_shape = config_.model_type == "kimi_k3" ? Dims{padded} : Dims{1, 1, heads, 1};
    WeightSpec& a_log = precise(stem + "A_log", a_log_shape, ShardRule::kLeading, kComponent, dest.a_log);
    a_log.transform = Transform::kLeadF32;
    a_log.live = heads;
    trunk(stem + "b_proj.weight", {heads, hidden}, ShardRule::kRows, kComponent, dest.b_proj);
    if (config_.full_rank_gate) {
      trunk(stem + "g_proj.weight", {width, hidden}, ShardRule::kRows, kComponent, dest.g_proj);
    } else {
      trunk(stem + "g_a_proj.weight", {head_dim, hidden}, ShardRule::kReplicate, kComponent, dest.g_a_proj);
      trunk(stem + "g_b_proj.weight", {width, head_dim}, ShardRule::kRows, kComponent, dest.g_b_proj);
    }
    precise(stem + "o_norm.weight", {head_dim}, ShardRule::kReplicate, kComponent, dest.o_norm);
    trunk(stem + "o_proj.weight", {hidden, width}, ShardRule::kCols, kComponent, dest.o_proj);
  }

  void add_mla(const std::string& stem, MlaWeights& dest) {
    constexpr auto kComponent = Component::kMla;
    const int64_t hidden = config_.hidden_size, heads = config_.num_heads, latent = config_.kv_lora_rank;
    const int64_t query_rows = heads * config_.qk_head_dim(), value_width = heads * config_.v_head_dim;
    if (config_.q_lora_rank) {
      const int64_t rank = *config_.q_lora_rank;
      trunk(stem + "q_a_proj.weight", {rank, hidden}, ShardRule::kReplicate, kComponent, dest.q_a_proj);
      trunk(stem + "q_a_layernorm.weight", {rank}, ShardRule::kReplicate, kComponent, dest.q_a_norm);
      trunk(stem + "q_b_proj.weight", {query_rows, rank}, ShardRule::kRows, kComponent, dest.q_b_proj);
    } else {
      trunk(stem + "q_proj.weight", {query_rows, hidden}, ShardRule::kRows, kComponent, dest.q_proj);
    }
    trunk(stem + "kv_a_proj_with_mqa.weight", {config_.mla_row(), hidden}, ShardRule::kReplicate, kComponent,
          dest.kv_a_proj);
    trunk(stem + "kv_a_layernorm.weight", {latent}, ShardRule::kReplicate, kComponent, dest.kv_a_norm);
    trunk(stem + "kv_b_proj.weight", {heads * (config_.qk_nope_head_dim + config_.v_head_dim), latent},
          ShardRule::kRows, kComponent, dest.kv_b_proj);
    if (config_.mla_output_gate) {
      trunk(stem + "g_proj.weight", {value_width, hidden}, ShardRule::kRows, kComponent, dest.g_proj);
    }
    trunk(stem + "o_proj.weight", {hidden, value_width}, ShardRule::kCols, kComponent, dest.o_proj);
  }

  void add_moe(const std::string& stem, MoeWeights& dest) {
    const int64_t hidden = config_.hidden_size, experts = config_.num_experts;
    trunk(stem + "gate.weight", {experts, hidden}, ShardRule::kReplicate, Component::kRouter, dest.router);
    precise(stem + "gate.e_score_correction_bias", {experts}, ShardRule::kReplicate, Component::kRouter,
            dest.router_bias);
    if (config_.latent_size) {
      const int64_t latent = *config_.latent_size;
      trunk(stem + "routed_expert_down_proj.weight", {latent, hidden}, ShardRule::kReplicate, Component::kLatent,
            dest.latent_down);
      if (config_.latent_norm) {
        trunk(stem + "routed_expert_norm.weight", {latent}, ShardRule::kReplicate, Component::kLatent,
              dest.latent_norm);
      }
      trunk(stem + "routed_expert_up_proj.weight", {hidden, latent}, ShardRule::kReplicate, Component::kLatent,
            dest.latent_up);
    }
    if (config_.num_shared_experts > 0) {
      add_mlp(stem + "shared_experts.", config_.num_shared_experts * config_.moe_intermediate_size, Component::kShared,
              dest.shared);
    }
    const auto count = static_cast<size_t>(experts);
    dest.w1.resize(count);
    dest.w2.resize(count);
    dest.w3.resize(count);
    const int64_t width = config_.moe_intermediate_size, in = config_.expert_hidden();
    for (int64_t e = 0; e < experts; ++e) {
      const auto i = static_cast<size_t>(e);
      const std::string expert = fmt::format("{}experts.{}.", stem, e);
      add_expert_matrix(expert + "w1", e, {width, in}, ShardRule::kRows, dest.w1[i]);
      add_expert_matrix(expert + "w3", e, {width, in}, ShardRule::kRows, dest.w3[i]);
      add_expert_matrix(expert + "w2", e, {in, width}, ShardRule::kCols, dest.w2[i]);
    }
  }

  void add_expert_matrix(const std::string& stem, int64_t expert, Dims shape, ShardRule shard, Tensor& dest) {
    if (!layout_.mxfp4_experts) {
      trunk(stem + ".weight", shape, shard, Component::kRouted, dest).expert = expert;
      return;
    }
    const int64_t rows = shape[0], cols = shape[1];
    add_mxfp4_part(stem + ".weight_packed", expert, {rows, cols / 2}, shard, dest).part = WeightPart::kCodes;
    add_mxfp4_part(stem + ".weight_scale", expert, {rows, cols / kMxfp4Group}, shard, dest).part = WeightPart::kScales;
  }

  WeightSpec& add_mxfp4_part(std::string name, int64_t expert, Dims shape, ShardRule shard, Tensor& dest) {
    WeightSpec& spec = add(std::move(name), shape, shard, Component::kRouted, &dest);
    spec.dtypes = {DType::kU8};
    spec.expert = expert;
    return spec;
  }

  const ModelConfig& config_;
  const CheckpointLayout& layout_;
  KimiWeights& weights_;
  std::vector<WeightSpec> specs_;
  int64_t layer_ = -1;
};

}  // namespace

std::string_view component_name(Component component) {
  switch (component) {
    case Component::kKda: return "KDA attention";
    case Component::kMla: return "MLA attention";
    case Component::kNorms: return "layer norms and AttnRes";
    case Component::kDenseMlp: return "dense MLP";
    case Component::kRouter: return "router";
    case Component::kLatent: return "latent projections";
    case Component::kShared: return "shared experts";
    case Component::kRouted: return "routed experts";
    case Component::kEmbed: return "embedding";
    case Component::kHead: return "output head";
    case Component::kFinal: return "final norm and AttnRes";
    case Component::kVision: return "vision";
  }
  return "?";
}

CheckpointLayout detect_layout(const ModelConfig& config, const std::function<bool(const std::string&)>& has_tensor) {
  CheckpointLayout layout;
  layout.mxfp4_experts = config.mxfp4_experts_declared;
  bool seen_moe = false, seen_dense = false;
  for (int64_t i = 0; i < config.num_layers && !(seen_moe && seen_dense); ++i) {
    const std::string stem = fmt::format("{}model.layers.{}.block_sparse_moe.", config.tensor_prefix, i);
    if (config.is_moe(i) && !seen_moe) {
      seen_moe = true;
      // With neither name the declaration stands, and the missing tensors are reported under it.
      if (has_tensor(stem + "experts.0.w1.weight_packed")) {
        layout.mxfp4_experts = true;
      } else if (has_tensor(stem + "experts.0.w1.weight")) {
        layout.mxfp4_experts = false;
      }
    } else if (!config.is_moe(i) && !seen_dense) {
      seen_dense = true;
      layout.dense_under_moe = has_tensor(stem + "gate_proj.weight");
    }
  }
  return layout;
}

Status check_layout(const ModelConfig& config, const CheckpointLayout& layout) {
  if (!layout.mxfp4_experts || config.num_experts == 0) return {};
  for (const auto& [what, value] : {std::pair{"expert input width", config.expert_hidden()},
                                    std::pair{"moe_intermediate_size", config.moe_intermediate_size}}) {
    if (value % kMxfp4Group != 0) {
      return invalid_argument("{}: got {}, expected a multiple of {} for experts stored as weight_packed", what, value,
                              kMxfp4Group);
    }
  }
  return {};
}

int64_t spec_bytes(const WeightSpec& spec) { return storage_bytes(spec.dtypes.front(), spec.shape); }

int64_t spec_parameters(const WeightSpec& spec) {
  if (spec.part == WeightPart::kScales) return 0;
  if (spec.part == WeightPart::kCodes) return 2 * spec.shape.count();
  return spec.transform == Transform::kLeadF32 ? spec.live : spec.shape.count();
}

std::vector<WeightSpec> weight_table(const ModelConfig& config, const CheckpointLayout& layout, KimiWeights& weights) {
  return TableBuilder(config, layout, weights).build();
}

bool is_vision_tensor(std::string_view name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

}  // namespace moat
