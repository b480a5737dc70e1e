// SPDX-License-Identifier: Apache-2.0
// The tensors of the vision tower and projector, by name and shape: counted, never loaded. All are BF16 in the release.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "core/tensor.h"

namespace moat {

struct VisionTensor {
  std::string name;
  Dims shape;
  int64_t bytes() const { return storage_bytes(DType::kBF16, shape); }
};

// From the vision_config object of a config.json.
Result<std::vector<VisionTensor>> vision_table(const Json& vision_config);

}  // namespace moat
