// SPDX-License-Identifier: Apache-2.0
// Model: what the engine knows of a model. One implementation serves Kimi K3 and Kimi-Linear (kimi.h).
#pragma once

#include "model/config.h"
#include "model/forward.h"
#include "ops/select.h"

namespace moat {

class Model {
 public:
  virtual ~Model() = default;
  virtual const ModelConfig& config() const = 0;
  // Reads `input`, updates `caches` and returns logits. In dry mode it touches no data: arrays need sizes only.
  virtual ForwardOutput forward(Exec& exec, const ForwardInput& input, const CacheView& caches) const = 0;
  // After a forward with verified rows: the recurrent states take those that stay. May be called several times for
  // successive ranges; the records last until the next forward.
  virtual void commit(Exec& exec, const CommitInput& input, const CacheView& caches) const = 0;
};

}  // namespace moat
