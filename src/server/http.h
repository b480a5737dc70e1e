// SPDX-License-Identifier: Apache-2.0
// HTTP/1.1 with server-sent events, on Boost.Beast; only http.cc includes Beast and Asio, so everything else compiles
// fast.
//
// Threads: a few I/O threads; all work of one connection runs on its strand. The handler is called there and must not
// block: it answers through the HttpResponder, at once or later, from any thread.
//
// A connection goes through: idle -> reading -> handling -> (streaming) -> idle ... -> lingering -> closed.
//  1. One request at a time; what a client sends ahead waits (bounded) in the buffer.
//  2. While a request is handled the socket is watched, so a peer that goes away is noticed before anything is written.
//  3. What waits to be written to a stream is bounded: a reader slower than that is cut off.
//  4. Every request gets an answer: a responder dropped without one sends 500, or cuts a stream that was not ended.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace moat {

struct HttpRequest {
  std::string method;  // "GET", "POST", ...; HEAD arrives as GET, its body is held back
  std::string path;    // of the target, percent-decoded
  std::string query;   // of the target, without '?'
  std::vector<std::pair<std::string, std::string>> headers;  // in the order sent
  std::string body;
  std::chrono::steady_clock::time_point received;  // when the last byte was read

  const std::string* header(std::string_view name) const;  // case-insensitive; the first, nullptr if absent
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
};

class HttpConnection;  // http.cc

// The answering end of one request. Members may be called from any thread; calls of one thread keep their order. After
// the answer is complete or the peer is gone they do nothing.
class HttpResponder {
 public:
  HttpResponder(std::shared_ptr<HttpConnection> connection, uint64_t serial);
  ~HttpResponder();
  HttpResponder(const HttpResponder&) = delete;
  HttpResponder& operator=(const HttpResponder&) = delete;

  void send(HttpResponse response);  // the whole answer

  void start_stream(HttpResponse head);  // status and headers of an event stream; its body must be empty
  void write(std::string bytes);         // part of the body
  void end();                            // the body is complete
  void abort();                          // cuts the connection: the peer sees that the body is incomplete

  // Runs `task` on the connection's strand: state used only by such tasks needs no lock. Runs even when the peer is
  // gone, not after the server has stopped.
  void post(std::function<void()> task);
  // Called on the strand, once, if the peer goes away (or is cut off) before the answer is complete.
  void on_hangup(std::function<void()> callback);

 private:
  // Shared with the I/O operations in flight: whichever ends last lets go of the socket.
  std::shared_ptr<HttpConnection> connection_;
  const uint64_t serial_;  // which request of the connection; a stale responder is ignored
};

using HttpHandler = std::function<void(HttpRequest, std::shared_ptr<HttpResponder>)>;

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 0;  // 0: any free one, see HttpServer::port()
  int num_threads = 2;
  int max_connections = 4096;
  size_t max_header_bytes = 64 << 10;
  size_t max_body_bytes = 32 << 20;
  size_t max_buffered_bytes = 4 << 20;               // of one event stream, waiting for its reader
  std::chrono::milliseconds idle_timeout{75'000};    // between requests of one connection
  std::chrono::milliseconds header_timeout{20'000};  // for all header lines
  std::chrono::milliseconds body_timeout{120'000};   // for the whole body
  std::chrono::milliseconds write_timeout{60'000};   // without any progress
  std::chrono::milliseconds ping_interval{15'000};   // a comment line in an event stream that has been silent that long
  // The body of answers that the HTTP layer itself gives (400, 408, 413, 431, 500, 503).
  std::function<std::string(int status, std::string_view message)> error_body;
  std::function<void(int status)> on_response;  // for counting: the status of every answer, any I/O thread
};

class HttpServer {
 public:
  HttpServer(HttpOptions options, HttpHandler handler);
  ~HttpServer();  // stop()
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  Status start();    // binds, listens, starts the threads
  int port() const;  // bound port, after start()
  // Accepts no more, closes idle connections, lets answers under way complete for up to `grace`, then cuts what is
  // left.
  void stop(std::chrono::milliseconds grace);

  struct Shared;  // http.cc: what connections share

 private:
  std::shared_ptr<Shared> shared_;  // connections keep it alive
};

std::string_view http_reason(int status);

}  // namespace moat
