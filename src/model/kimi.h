// SPDX-License-Identifier: Apache-2.0
// Kimi K3 and Kimi-Linear: one forward pass for prefill, decode and verification (k3.md section 3). The weights are
// views that must outlive the model; forward is const and may be called by one thread per Exec.
#pragma once

#include "model/model.h"
#include "model/weight_map.h"

namespace moat {

class KimiModel final : public Model {
 public:
  KimiModel(const ModelConfig& config, const KimiWeights& weights) : config_(config), weights_(weights) {}

  const ModelConfig& config() const override { return config_; }
  ForwardOutput forward(Exec& exec, const ForwardInput& input, const CacheView& caches) const override;
  void commit(Exec& exec, const CommitInput& input, const CacheView& caches) const override;

  // Shows intermediate values to a test: "hidden" (the stream: embeddings, then after each layer), "mix"
  // (attention-side mixture of each layer, the output mixture last), "expert_ids", "expert_weights".
  void set_probe(ForwardProbe probe) { probe_ = std::move(probe); }

 private:
  const ModelConfig& config_;
  const KimiWeights& weights_;
  ForwardProbe probe_;
};

// Shapes without data for every weight of `config` on one rank: enough for dry passes on a machine that holds no
// checkpoint.
Status shape_weights(const ModelConfig& config, const CheckpointLayout& layout, const Parallel& parallel,
                     KimiWeights& weights);

}  // namespace moat
