// SPDX-License-Identifier: Apache-2.0
// `moat serve`: load, start the engine and the HTTP server, run until SIGTERM or SIGINT, drain, exit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/local_engine.h"
#include "main/common.h"

namespace moat {

struct ServeOptions {
  ModelOptions model;
  std::string host = "127.0.0.1";
  int port = 8080;
  std::string served_name;  // empty: the last part of the model directory
  std::vector<std::string> aliases;
  std::vector<std::string> api_keys;
  EngineOptions engine;
  DraftOptions draft;
  double request_timeout_seconds = 0;  // 0: none; a request may ask for less
  int drain_seconds = 30;
};

// Returns when the server has stopped. A second signal while draining cuts the drain short.
Status serve_command(const ServeOptions& options);

}  // namespace moat
