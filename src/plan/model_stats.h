// SPDX-License-Identifier: Apache-2.0
// What a model weighs: parameters, bytes by component, cache bytes a token and state bytes a sequence. Pure functions
// of config and layout; `moat inspect`, the planner and the server all count with them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>

#include "core/tensor.h"
#include "model/config.h"
#include "model/weight_map.h"

namespace moat {

struct ComponentStats {
  int64_t num_tensors = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;
};

struct ModelStats {
  std::array<ComponentStats, kNumComponents> components;  // by Component; vision is left empty here
  int64_t num_tensors = 0;                                // of the text model, those that nothing reads included
  int64_t parameters = 0;                                 // of the text model
  int64_t active_parameters = 0;  // that one token multiplies with: without the embedding table and idle experts
  int64_t bytes = 0;              // of the text model

  // Values, not bytes: the dtype of a cache is the engine's choice.
  int64_t mla_values_per_token = 0;  // over all MLA layers
  int64_t kda_state_values = 0;      // per sequence, over all KDA layers
  int64_t kda_conv_values = 0;       // per sequence

  const ComponentStats& operator[](Component component) const { return components[static_cast<size_t>(component)]; }
  int64_t kv_bytes_per_token(DType dtype) const { return dtype_bytes(dtype, mla_values_per_token); }
  int64_t state_bytes_per_sequence(DType state, DType conv) const {
    return dtype_bytes(state, kda_state_values) + dtype_bytes(conv, kda_conv_values);
  }
};

using SpecBytes = std::function<int64_t(const WeightSpec&)>;

// `bytes` tells what a tensor takes: as the release stores it, unless a real checkpoint says otherwise.
ModelStats count_specs(const ModelConfig& config, const std::vector<WeightSpec>& specs,
                       const SpecBytes& bytes = spec_bytes);
ModelStats model_stats(const ModelConfig& config, const CheckpointLayout& layout);

}  // namespace moat
