// SPDX-License-Identifier: Apache-2.0
// moat make-synthetic: a random checkpoint of any config, for measuring and testing without the real weights. Text
// model only. Streamed shard by shard; the same seed gives the same bytes whatever the shard size and the number of
// threads.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace moat {

struct MakeSyntheticOptions {
  std::string config_path;          // a config.json; copied as it is
  std::string out_directory;        // made if it does not exist; must not hold a checkpoint
  std::string tokenizer_directory;  // empty, or where tiktoken.model and its companions are copied from
  uint64_t seed = 0;
  int64_t shard_bytes = int64_t{4} << 30;  // a shard holds at least one tensor
  int threads = 0;                         // 0: all usable CPUs
};

Status make_synthetic_command(const MakeSyntheticOptions& options);

}  // namespace moat
