// SPDX-License-Identifier: Apache-2.0
// Exchange: one HTTP request on its way to an answer: its id, where it came in, and the responder.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/log.h"
#include "server/http.h"

namespace moat {

struct Exchange {
  std::string request_id;  // the client's X-Request-Id, or one of ours; in the answer and in the log
  std::string method;
  std::string path;
  std::chrono::steady_clock::time_point received;
  // Shared with the jobs and engine events that lead to the answer.
  std::shared_ptr<HttpResponder> responder;

  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - received).count(); }
  void send(HttpResponse response) const {
    response.headers.emplace_back("X-Request-Id", request_id);
    responder->send(std::move(response));
  }
  // Sends and writes the access line of a request that generates nothing.
  void finish(HttpResponse response, LogLevel level = LogLevel::kInfo) const {
    log(level, "request id={} method={} path={} status={} ms={:.1f}", request_id, method, path, response.status,
        seconds() * 1e3);
    send(std::move(response));
  }
};

}  // namespace moat
