// SPDX-License-Identifier: Apache-2.0
#include "plan/decode_bytes.h"

#include <cmath>

#include "model/weight_map.h"
#include "plan/capacity.h"

namespace moat {

double expected_distinct_experts(const ModelConfig& config, int64_t batch) {
  if (config.num_experts == 0) return 0;
  const auto e = static_cast<double>(config.num_experts);
  const auto k = static_cast<double>(config.num_experts_per_token);
  return e * (1.0 - std::pow(1.0 - k / e, static_cast<double>(batch)));
}

double decode_step_bytes(const ModelConfig& config, int64_t batch, int64_t context) {
  KimiWeights weights;
  const CheckpointLayout layout{.mxfp4_experts = config.mxfp4_experts_declared};
  double dense = 0;
  double routed = 0;
  for (const WeightSpec& spec : weight_table(config, layout, weights)) {
    if (spec.optional || spec.component == Component::kEmbed || spec.component == Component::kVision) continue;
    const auto bytes = static_cast<double>(storage_bytes(spec.dtypes.front(), spec.shape));
    (spec.component == Component::kRouted ? routed : dense) += bytes;
  }
  const double drawn =
      config.num_experts > 0 ? expected_distinct_experts(config, batch) / static_cast<double>(config.num_experts) : 0.0;
  const auto b = static_cast<double>(batch);
  const double state = 2.0 * b * static_cast<double>(slot_bytes(config));
  const double latents = b * static_cast<double>(context) * static_cast<double>(block_bytes(config, 1));
  const double embedding = b * static_cast<double>(config.hidden_size) * 2.0;
  return dense + routed * drawn + state + latents + embedding;
}

}  // namespace moat
