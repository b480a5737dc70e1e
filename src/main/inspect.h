// SPDX-License-Identifier: Apache-2.0
// moat inspect: what is in a checkpoint, from its files or, when there are only names (an index, perhaps compressed) or
// only a config, computed from the weight table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"
#include "model/weight_map.h"
#include "plan/model_stats.h"

namespace moat {

struct InspectOptions {
  std::string directory;
  bool json = false;
};

// What was found.
struct Inspection {
  enum class Source { kFiles, kIndexOnly, kConfigOnly };

  std::string directory;
  Source source = Source::kFiles;
  ModelConfig config;
  CheckpointLayout layout;
  ModelStats stats;  // vision not included
  ComponentStats vision;
  uint64_t num_files = 0;                     // model.safetensors, or shards named by the index
  uint64_t num_tensors = 0;                   // text and vision
  uint64_t index_total_size = 0;              // 0: not given
  std::vector<std::string> ignored;           // text tensors that nothing reads
  std::vector<std::string> missing, unknown;  // differences between names and table, sorted

  int64_t total_bytes() const { return stats.bytes + vision.bytes; }
};

Result<Inspection> inspect_checkpoint(const std::string& directory);

std::string inspection_text(const Inspection& inspection);
std::string inspection_json(const Inspection& inspection);

// Prints to stdout. Differences between names and table are printed and are a failure.
Status inspect_command(const InspectOptions& options);

}  // namespace moat
