// SPDX-License-Identifier: Apache-2.0
#include "plan/model_stats.h"

namespace moat {

ModelStats count_specs(const ModelConfig& config, const std::vector<WeightSpec>& specs, const SpecBytes& bytes) {
  ModelStats stats;
  for (const WeightSpec& spec : specs) {
    ComponentStats& component = stats.components[static_cast<size_t>(spec.component)];
    ++component.num_tensors;
    component.parameters += spec_parameters(spec);
    component.bytes += bytes(spec);
  }
  for (const ComponentStats& component : stats.components) {
    stats.num_tensors += component.num_tensors;
    stats.parameters += component.parameters;
    stats.bytes += component.bytes;
  }
  const int64_t routed = stats[Component::kRouted].parameters;
  const int64_t routed_active = config.num_experts > 0 ? routed / config.num_experts * config.num_experts_per_token : 0;
  stats.active_parameters = stats.parameters - stats[Component::kEmbed].parameters - routed + routed_active;

  constexpr int64_t kConvStreams = 3;  // q, k, v
  const int64_t kda_layers = config.num_kda_layers();
  stats.mla_values_per_token = config.num_mla_layers() * config.mla_row();
  stats.kda_state_values = kda_layers * config.kda_width() * config.kda_head_dim;
  stats.kda_conv_values = kda_layers * kConvStreams * config.kda_width() * (config.conv_kernel - 1);
  return stats;
}

ModelStats model_stats(const ModelConfig& config, const CheckpointLayout& layout) {
  KimiWeights weights;
  return count_specs(config, weight_table(config, layout, weights));
}

}  // namespace moat
