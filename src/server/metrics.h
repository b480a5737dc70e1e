// SPDX-License-Identifier: Apache-2.0
// What /metrics shows, in the Prometheus text format; all names begin with moat_. Any thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "engine/engine.h"

namespace moat {

class Metrics {
 public:
  Metrics();
  ~Metrics();

  void count_response(int status);
  // A choice: stop, length, tool_calls, cancelled, timeout, rejected, error.
  void count_finished(std::string_view reason);
  void observe_queue(double seconds);
  void observe_first_token(double seconds);
  void observe_inter_token(double seconds, size_t count);  // `count` tokens that came `seconds` apart on average
  void observe_request(double seconds);

  // `stats`: of the engine, nullptr while there is none.
  std::string render(const EngineStats* stats);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moat
