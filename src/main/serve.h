// SPDX-License-Identifier: Apache-2.0
// `moat serve`: load, start the engine and the HTTP server, run until SIGTERM or SIGINT, drain, exit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "main/common.h"

namespace moat {

struct ServeOptions {
  ModelOptions model;
  std::string host = "127.0.0.1";
  int port = 8080;
  std::string served_name;  // empty: the last part of the model directory
  std::vector<std::string> aliases;
  std::vector<std::string> api_keys;
  int64_t max_model_len = 0;  // 0: the model's
  int64_t max_num_seqs = 64;
  int64_t max_batched_tokens = 2048;
  int64_t max_queued = 256;
  double memory_fraction = 0.9;
  int drain_seconds = 30;
};

// Returns when the server has stopped. A second signal while draining cuts the drain short.
Status serve_command(const ServeOptions& options);

}  // namespace moat
