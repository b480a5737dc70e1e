// SPDX-License-Identifier: Apache-2.0
// Checkpoint directory -> weights in memory. Files are mapped; what a rank needs is used in place where its bytes are
// consecutive in the file, aligned and of the right dtype (whole tensors, ranges of rows), else copied or converted into
// owned memory. Fails without side effects; errors name the file and the tensor, got and expected.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/config.h"
#include "model/parallel.h"
#include "model/weight_map.h"

namespace moat {

struct LoadProgress {
  uint64_t bytes_done = 0, bytes_total = 0;
  double seconds = 0;
};

struct LoadOptions {
  Parallel parallel;  // under expert parallelism the experts of other ranks stay unset; pipeline stages are refused
  // Touch every page now, so that the first requests do not wait for the disk and progress is real.
  bool prefault = true;
  std::function<void(const LoadProgress&)>
      progress;  // called a few times a second, on the loading thread; may be empty
};

struct LoadReport {
  uint64_t num_tensors = 0;  // in the checkpoint
  uint64_t num_used = 0;
  uint64_t num_ignored = 0;  // listed as ignored: vision, unused AttnRes weights of layer 0
  uint64_t num_vision = 0;
  uint64_t bytes_mapped = 0;  // used in place
  uint64_t bytes_owned = 0;   // converted or sliced copies
  double seconds = 0;
};

// Owns everything that `weights` views. Not movable: the table points into it.
struct LoadedModel {
  ModelConfig config;
  CheckpointLayout layout;
  Parallel parallel;
  KimiWeights weights;
  LoadReport report;
  std::vector<MappedFile> files;
  std::vector<Buffer> buffers;

  LoadedModel() = default;
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;
};

// `directory` holds config.json and either model.safetensors or shards with model.safetensors.index.json.
// Every checkpoint tensor is used exactly once or listed as ignored, and every field is filled, or it fails.
Result<std::unique_ptr<LoadedModel>> load_model(const std::string& directory, const LoadOptions& options,
                                                ThreadPool& pool);

}  // namespace moat
