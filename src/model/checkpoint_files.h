// SPDX-License-Identifier: Apache-2.0
// The files of one checkpoint directory, opened and cross-checked: either model.safetensors, or the shards that
// model.safetensors.index.json names. Owns the mappings; names and entries point into `files`. Immutable once opened.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/safetensors.h"

namespace moat {

struct StoredTensor {
  const SafetensorsEntry* entry = nullptr;
  size_t file = 0;  // in CheckpointFiles::files
};

struct CheckpointFiles {
  std::vector<SafetensorsFile> files;
  std::unordered_map<std::string_view, StoredTensor> tensors;
  uint64_t total_bytes = 0;  // of all tensors

  CheckpointFiles() = default;
  CheckpointFiles(CheckpointFiles&&) = default;
  CheckpointFiles& operator=(CheckpointFiles&&) = default;
  CheckpointFiles(const CheckpointFiles&) = delete;
  CheckpointFiles& operator=(const CheckpointFiles&) = delete;
};

constexpr const char* kSingleFileName = "model.safetensors";
constexpr const char* kIndexFileName = "model.safetensors.index.json";

// With an index, every name must be in exactly the shard that the index says and no shard may hold more; missing shards
// are reported by name with what they should hold.
Result<CheckpointFiles> open_checkpoint(const std::string& directory, ThreadPool& pool);

}  // namespace moat
