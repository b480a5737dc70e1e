// SPDX-License-Identifier: Apache-2.0
#include "server/http.h"

#include <array>
#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "base/log.h"

namespace moat {

namespace asio = boost::asio;
namespace beast = boost::beast;
using asio::ip::tcp;
using boost::system::error_code;

namespace {

constexpr size_t kMaxPipelinedBytes = 64 << 10;  // read ahead while a request is handled
constexpr size_t kMaxLingerBytes = 64 << 20;     // discarded after an early error answer
constexpr std::chrono::seconds kLingerTime{2};
constexpr size_t kMaxBuffersPerWrite = 16;

bool iequals(std::string_view a, std::string_view b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) {
           const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
           return lower(x) == lower(y);
         });
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string percent_decode(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const int high = text[i] == '%' && i + 2 < text.size() ? hex_digit(text[i + 1]) : -1;
    const int low = high >= 0 ? hex_digit(text[i + 2]) : -1;
    if (low >= 0) {
      out.push_back(static_cast<char>(high * 16 + low));
      i += 2;
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

// Header values come partly from requests (echoed ids and header lists): nothing may break the line.
std::string header_safe(std::string_view value) {
  std::string out(value);
  std::erase_if(out, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
  return out;
}

}  // namespace

const std::string* HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (iequals(key, name)) return &value;
  }
  return nullptr;
}

std::string_view http_reason(int status) {
  switch (status) {
    case 200: return "OK";
    case 204: return "No Content";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 413: return "Content Too Large";
    case 431: return "Request Header Fields Too Large";
    case 500: return "Internal Server Error";
    case 501: return "Not Implemented";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    default: return "Unknown";
  }
}

struct HttpServer::Shared {
  Shared(HttpOptions options_in, HttpHandler handler_in)
      : options(std::move(options_in)),
        handler(std::move(handler_in)),
        work(io.get_executor()),
        acceptor(asio::make_strand(io)),
        accept_timer(acceptor.get_executor()) {}

  std::string error_body(int status, std::string_view message) const {
    return options.error_body ? options.error_body(status, message) : std::string(message);
  }
  void add(HttpConnection* connection);
  void remove(HttpConnection* connection);
  void run();
  void accept(const std::shared_ptr<Shared>& self);
  // Calls `f` with every connection that still lives.
  void for_each(const std::function<void(const std::shared_ptr<HttpConnection>&)>& f);
  bool wait_until_empty(std::chrono::milliseconds limit);

  const HttpOptions options;
  const HttpHandler handler;
  asio::io_context io;
  // While stopping, there may be moments with nothing pending: the threads must still run what is posted next.
  asio::executor_work_guard<asio::io_context::executor_type> work;
  tcp::acceptor acceptor;
  asio::steady_timer accept_timer;
  int port = 0;
  std::atomic<bool> started{false};
  std::atomic<bool> draining{false};  // no further request on any connection
  std::atomic<bool> stopped{false};   // no further task either
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::condition_variable empty;
  std::set<HttpConnection*> connections;  // guarded by mutex; members unregister in their destructors
};

class HttpConnection : public std::enable_shared_from_this<HttpConnection> {
 public:
  using Shared = HttpServer::Shared;

  HttpConnection(std::shared_ptr<Shared> shared, tcp::socket socket)
      : shared_(std::move(shared)),
        socket_(std::move(socket)),
        deadline_(socket_.get_executor()),
        ping_(socket_.get_executor()) {
    shared_->add(this);
  }
  ~HttpConnection() { shared_->remove(this); }

  void start();
  void start_refused();  // one connection too many: says so and closes
  void begin_stop();     // on any thread
  void cut();            // on any thread

  // The responder's calls, any thread; `serial` names the request.
  void run(std::function<void()> task);
  template <class F>
  void for_request(uint64_t serial, F f) {
    run([self = shared_from_this(), serial, f = std::move(f)]() mutable {
      if (self->serial_ == serial && (self->phase_ == Phase::kHandling || self->phase_ == Phase::kStreaming) &&
          !self->answered_) {
        f(*self);
      }
    });
  }
  void send(HttpResponse response);
  void start_stream(HttpResponse head);
  void write(std::string bytes);
  void end();
  void abandon();
  void hang_up();
  void set_hangup(std::function<void()> callback) { on_hangup_ = std::move(callback); }
  void post_task(std::function<void()> task);

 private:
  enum class Phase { kIdle, kReading, kHandling, kStreaming, kLingering, kClosed };
  using Parser = beast::http::request_parser<beast::http::string_body>;

  void next_request();
  void watch();
  void on_readable();
  void read_header();
  void on_header(error_code error);
  void on_request();
  bool read_is_wanted(error_code error);
  void read_failed(error_code error);
  void answer_error(int status, std::string_view message);
  void answer_preflight(const HttpRequest& request);
  std::string head_of(const HttpResponse& response, std::optional<size_t> length);
  void enqueue(std::string bytes);
  void flush();
  void on_written(error_code error, size_t count);
  void complete();  // the whole answer has been written
  void linger();
  void discard();
  void close();
  void arm(std::chrono::milliseconds limit);
  void disarm();
  void on_deadline();
  void arm_ping();

  const std::shared_ptr<Shared> shared_;  // first: it holds the io_context that the members below use
  tcp::socket socket_;
  asio::steady_timer deadline_;
  asio::steady_timer ping_;
  uint64_t deadline_serial_ = 0;  // an old expiry that was already queued is ignored

  Phase phase_ = Phase::kIdle;
  bool watching_ = false;  // a wait for readability is pending
  bool reading_ = false;   // a read of request bytes is pending
  beast::flat_buffer in_;
  std::optional<Parser> parser_;
  uint64_t serial_ = 0;
  bool keep_alive_ = false;
  bool chunked_ = false;  // else the end of the body is the end of the connection
  bool head_only_ = false;
  bool input_left_ = false;  // the request was answered before it was read to its end
  bool answered_ = false;    // the whole answer has been queued
  std::function<void()> on_hangup_;

  std::deque<std::string> out_;
  size_t out_bytes_ = 0;
  size_t front_offset_ = 0;  // bytes of out_.front() already written
  bool writing_ = false;
  size_t lingered_ = 0;
  std::array<char, 4096> scratch_;
};

// --- HttpServer::Shared ---

void HttpServer::Shared::add(HttpConnection* connection) {
  const std::lock_guard lock(mutex);
  connections.insert(connection);
}

void HttpServer::Shared::remove(HttpConnection* connection) {
  const std::lock_guard lock(mutex);
  connections.erase(connection);
  if (connections.empty()) empty.notify_all();
}

void HttpServer::Shared::for_each(const std::function<void(const std::shared_ptr<HttpConnection>&)>& f) {
  std::vector<std::shared_ptr<HttpConnection>> living;
  {
    const std::lock_guard lock(mutex);
    for (HttpConnection* connection : connections) {
      if (auto strong = connection->weak_from_this().lock()) living.push_back(std::move(strong));
    }
  }
  for (const auto& connection : living) f(connection);
}

bool HttpServer::Shared::wait_until_empty(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex);
  return empty.wait_for(lock, limit, [this] { return connections.empty(); });
}

void HttpServer::Shared::run() {
  for (;;) {
    try {
      io.run();
      return;
    } catch (const std::exception& e) {
      log_error("exception on an I/O thread what=\"{}\"", e.what());
    }
  }
}

void HttpServer::Shared::accept(const std::shared_ptr<Shared>& self) {
  acceptor.async_accept(asio::make_strand(io), [this, self](error_code error, tcp::socket socket) {
    if (draining || error == asio::error::operation_aborted) return;
    if (error) {
      // Out of descriptors, most likely: existing connections go on, new ones wait in the backlog.
      log_warn("accept failed error=\"{}\"", error.message());
      accept_timer.expires_after(std::chrono::milliseconds(100));
      accept_timer.async_wait([this, self](error_code) {
        if (!draining) accept(self);
      });
      return;
    }
    size_t count = 0;
    {
      const std::lock_guard lock(mutex);
      count = connections.size();
    }
    const auto connection = std::make_shared<HttpConnection>(self, std::move(socket));
    if (count < static_cast<size_t>(options.max_connections)) {
      connection->start();
    } else {
      connection->start_refused();
    }
    accept(self);
  });
}

// --- HttpConnection: life ---

void HttpConnection::start() {
  run([self = shared_from_this()] {
    error_code ignored;
    self->socket_.set_option(tcp::no_delay(true), ignored);
    self->socket_.non_blocking(true, ignored);
    self->next_request();
  });
}

void HttpConnection::start_refused() {
  run([self = shared_from_this()] {
    error_code ignored;
    self->socket_.non_blocking(true, ignored);
    self->answer_error(503, "too many connections");
  });
}

void HttpConnection::begin_stop() {
  run([self = shared_from_this()] {
    self->keep_alive_ = false;
    if (self->phase_ == Phase::kIdle || self->phase_ == Phase::kLingering) self->close();
  });
}

void HttpConnection::cut() {
  run([self = shared_from_this()] { self->hang_up(); });
}

void HttpConnection::run(std::function<void()> task) {
  if (shared_->stopped) return;
  // Never inline, not even on the strand: what one thread did before another must also come first here (an answer sent
  // by a worker before the I/O thread drops the last reference to the responder).
  asio::post(socket_.get_executor(), std::move(task));
}

void HttpConnection::post_task(std::function<void()> task) {
  if (shared_->stopped) return;
  // Keeps the connection, and with it the io_context, alive until the task has run.
  asio::post(socket_.get_executor(), [self = shared_from_this(), task = std::move(task)] { task(); });
}

void HttpConnection::next_request() {
  phase_ = Phase::kIdle;
  parser_.reset();
  if (shared_->draining) return close();
  if (in_.size() > 0) return read_header();
  arm(shared_->options.idle_timeout);
  watch();
}

void HttpConnection::watch() {
  if (watching_) return;
  watching_ = true;
  socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this()](error_code error) {
    self->watching_ = false;
    if (error || self->phase_ == Phase::kClosed) return;
    self->on_readable();
  });
}

void HttpConnection::on_readable() {
  if (phase_ == Phase::kIdle) return read_header();
  // While reading or lingering the socket has its own reader.
  if (phase_ != Phase::kHandling && phase_ != Phase::kStreaming) return;
  error_code error;
  const size_t count = socket_.read_some(in_.prepare(4096), error);
  if (error == asio::error::would_block) return watch();
  if (error) return hang_up();
  in_.commit(count);
  if (in_.size() < kMaxPipelinedBytes) watch();
}

void HttpConnection::hang_up() {
  if (phase_ == Phase::kClosed) return;
  // A reset: nothing that is left in the kernel's buffers counts any more, and the peer sees that the body is incomplete.
  error_code ignored;
  socket_.set_option(asio::socket_base::linger(true, 0), ignored);
  close();
  // At once: posted, it would wait behind every event that a fast engine has queued on the strand, and the request would
  // run on. Nothing above this frame belongs to the callback: all that hangs up is an I/O handler or a task of run().
  if (const auto callback = std::exchange(on_hangup_, nullptr)) callback();
}

void HttpConnection::close() {
  if (phase_ == Phase::kClosed) return;
  phase_ = Phase::kClosed;
  error_code ignored;
  socket_.close(ignored);
  disarm();
  ping_.cancel();
  out_.clear();
  out_bytes_ = 0;
}

void HttpConnection::arm(std::chrono::milliseconds limit) {
  const uint64_t serial = ++deadline_serial_;
  deadline_.expires_after(limit);
  deadline_.async_wait([self = shared_from_this(), serial](error_code error) {
    if (!error && serial == self->deadline_serial_) self->on_deadline();
  });
}

void HttpConnection::disarm() {
  ++deadline_serial_;
  deadline_.cancel();
}

void HttpConnection::on_deadline() {
  switch (phase_) {
    case Phase::kIdle: return close();
    case Phase::kReading: return answer_error(408, "the request did not arrive in time");
    case Phase::kHandling:
    case Phase::kStreaming: log_info("a reader made no progress and is cut off"); return hang_up();
    case Phase::kLingering: return close();
    case Phase::kClosed: return;
  }
}

// --- HttpConnection: reading ---

void HttpConnection::read_header() {
  phase_ = Phase::kReading;
  ++serial_;
  answered_ = false;
  head_only_ = false;
  keep_alive_ = false;
  parser_.emplace();
  parser_->header_limit(static_cast<uint32_t>(shared_->options.max_header_bytes));
  parser_->body_limit(shared_->options.max_body_bytes);
  arm(shared_->options.header_timeout);
  reading_ = true;
  beast::http::async_read_header(socket_, in_, *parser_,
                                 [self = shared_from_this()](error_code error, size_t) { self->on_header(error); });
}

void HttpConnection::on_header(error_code error) {
  if (!read_is_wanted(error)) return;
  if (error) return read_failed(error);
  if (parser_->is_done()) return on_request();
  if (iequals(parser_->get()[beast::http::field::expect], "100-continue")) enqueue("HTTP/1.1 100 Continue\r\n\r\n");
  arm(shared_->options.body_timeout);
  reading_ = true;
  beast::http::async_read(socket_, in_, *parser_, [self = shared_from_this()](error_code read_error, size_t) {
    if (!self->read_is_wanted(read_error)) return;
    if (read_error) return self->read_failed(read_error);
    self->on_request();
  });
}

// False if the request was answered meanwhile (it came too slowly): what is read then only matters to linger().
bool HttpConnection::read_is_wanted(error_code error) {
  reading_ = false;
  if (phase_ == Phase::kLingering) error ? close() : discard();
  return phase_ == Phase::kReading;
}

void HttpConnection::read_failed(error_code error) {
  using HttpError = beast::http::error;
  if (error == HttpError::end_of_stream || error == HttpError::partial_message) return close();
  if (error == HttpError::header_limit) {
    return answer_error(431, fmt::format("the header exceeds {} bytes", shared_->options.max_header_bytes));
  }
  if (error == HttpError::body_limit) {
    return answer_error(413, fmt::format("the body exceeds {} bytes", shared_->options.max_body_bytes));
  }
  if (error.category() == beast::http::make_error_code(HttpError::bad_method).category()) {
    return answer_error(400, fmt::format("malformed HTTP: {}", error.message()));
  }
  close();
}

void HttpConnection::on_request() {
  disarm();
  phase_ = Phase::kHandling;
  auto message = parser_->release();
  keep_alive_ = message.keep_alive() && !shared_->draining;
  chunked_ = message.version() >= 11;
  HttpRequest request;
  request.received = std::chrono::steady_clock::now();
  request.method = std::string(message.method_string());
  if (request.method == "HEAD") {
    head_only_ = true;
    request.method = "GET";
  }
  const std::string_view target(message.target().data(), message.target().size());
  const size_t question = target.find('?');
  request.path = percent_decode(target.substr(0, question));
  if (question != std::string_view::npos) request.query = std::string(target.substr(question + 1));
  for (const auto& field : message) {
    request.headers.emplace_back(std::string(field.name_string()), std::string(field.value()));
  }
  request.body = std::move(message.body());
  watch();
  if (request.method == "OPTIONS") return answer_preflight(request);
  shared_->handler(std::move(request), std::make_shared<HttpResponder>(shared_from_this(), serial_));
}

// --- HttpConnection: answering ---

void HttpConnection::answer_error(int status, std::string_view message) {
  phase_ = Phase::kHandling;
  disarm();
  keep_alive_ = false;
  input_left_ = true;
  HttpResponse response{.status = status, .body = shared_->error_body(status, message)};
  if (status == 503) response.headers.emplace_back("Retry-After", "1");
  send(std::move(response));
}

// Browsers ask before they send; the answer must not need a key (the real request will bring it).
void HttpConnection::answer_preflight(const HttpRequest& request) {
  const std::string* asked = request.header("Access-Control-Request-Headers");
  HttpResponse response{.status = 204, .content_type = ""};
  response.headers = {{"Access-Control-Allow-Methods", "GET, HEAD, POST, OPTIONS"},
                      {"Access-Control-Allow-Headers", asked ? *asked : "authorization, content-type, x-request-id"},
                      {"Access-Control-Max-Age", "86400"},
                      {"Vary", "Access-Control-Request-Headers"}};
  if (request.header("Access-Control-Request-Private-Network") != nullptr) {
    response.headers.emplace_back("Access-Control-Allow-Private-Network", "true");
  }
  send(std::move(response));
}

std::string HttpConnection::head_of(const HttpResponse& response, std::optional<size_t> length) {
  std::string head = fmt::format("HTTP/1.1 {} {}\r\n", response.status, http_reason(response.status));
  if (!response.content_type.empty()) head += fmt::format("Content-Type: {}\r\n", response.content_type);
  if (length) {
    if (response.status != 204) head += fmt::format("Content-Length: {}\r\n", *length);
  } else if (chunked_) {
    head += "Transfer-Encoding: chunked\r\n";
  }
  head += keep_alive_ ? "Connection: keep-alive\r\n" : "Connection: close\r\n";
  head += "Access-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: X-Request-Id, Retry-After\r\n";
  for (const auto& [name, value] : response.headers) head += fmt::format("{}: {}\r\n", name, header_safe(value));
  head += "\r\n";
  return head;
}

void HttpConnection::send(HttpResponse response) {
  if (phase_ == Phase::kStreaming)
    return hang_up();  // too late for another status: the peer must see an incomplete body
  if (shared_->options.on_response) shared_->options.on_response(response.status);
  answered_ = true;
  on_hangup_ = nullptr;
  std::string bytes = head_of(response, response.body.size());
  if (!head_only_) bytes += response.body;
  enqueue(std::move(bytes));
}

void HttpConnection::start_stream(HttpResponse head) {
  if (phase_ == Phase::kStreaming) return;
  if (shared_->options.on_response) shared_->options.on_response(head.status);
  if (!chunked_) keep_alive_ = false;
  phase_ = Phase::kStreaming;
  enqueue(head_of(head, std::nullopt));
  arm_ping();
}

void HttpConnection::write(std::string bytes) {
  if (phase_ != Phase::kStreaming || bytes.empty()) return;
  if (out_bytes_ + bytes.size() > shared_->options.max_buffered_bytes) {
    log_info("a slow reader is cut off buffered_bytes={}", out_bytes_);
    return hang_up();
  }
  arm_ping();
  enqueue(chunked_ ? fmt::format("{:x}\r\n{}\r\n", bytes.size(), bytes) : std::move(bytes));
}

void HttpConnection::end() {
  if (phase_ != Phase::kStreaming) return;
  answered_ = true;
  on_hangup_ = nullptr;
  ping_.cancel();
  if (chunked_) return enqueue("0\r\n\r\n");
  flush();
}

void HttpConnection::abandon() {
  if (phase_ == Phase::kStreaming) return hang_up();
  send({.status = 500, .body = shared_->error_body(500, "the request was dropped")});
}

void HttpConnection::arm_ping() {
  ping_.expires_after(shared_->options.ping_interval);
  ping_.async_wait([self = shared_from_this()](error_code error) {
    // A timer that was moved while its expiry was queued has a later expiry now.
    if (error || self->phase_ != Phase::kStreaming || self->answered_) return;
    if (self->ping_.expiry() > std::chrono::steady_clock::now()) return;
    self->write(": ping\n\n");
  });
}

void HttpConnection::enqueue(std::string bytes) {
  out_bytes_ += bytes.size();
  out_.push_back(std::move(bytes));
  flush();
}

void HttpConnection::flush() {
  if (writing_) return;
  if (out_.empty()) {
    if (answered_) complete();
    return;
  }
  writing_ = true;
  if (phase_ != Phase::kReading) arm(shared_->options.write_timeout);
  std::vector<asio::const_buffer> buffers;
  for (const std::string& bytes : out_) {
    const size_t offset = buffers.empty() ? front_offset_ : 0;
    buffers.emplace_back(bytes.data() + offset, bytes.size() - offset);
    if (buffers.size() == kMaxBuffersPerWrite) break;
  }
  socket_.async_write_some(
      buffers, [self = shared_from_this()](error_code error, size_t count) { self->on_written(error, count); });
}

void HttpConnection::on_written(error_code error, size_t count) {
  writing_ = false;
  if (phase_ == Phase::kClosed) return;
  if (error) return hang_up();
  out_bytes_ -= count;
  while (count > 0) {
    const size_t left = out_.front().size() - front_offset_;
    if (count < left) {
      front_offset_ += count;
      break;
    }
    count -= left;
    front_offset_ = 0;
    out_.pop_front();
  }
  if (out_.empty() && phase_ != Phase::kReading) disarm();
  flush();
}

void HttpConnection::complete() {
  if (phase_ != Phase::kHandling && phase_ != Phase::kStreaming) return;
  answered_ = false;
  if (keep_alive_) return next_request();
  if (!input_left_ && in_.size() == 0) return close();
  linger();
}

// Closing with unread input makes the kernel send a reset, which can destroy the answer before the peer has read it.
void HttpConnection::linger() {
  phase_ = Phase::kLingering;
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  arm(kLingerTime);
  // Of two reads at once, Asio serves only the first at the end of the stream; the pending one goes on to discard().
  if (!reading_) discard();
}

void HttpConnection::discard() {
  socket_.async_read_some(asio::buffer(scratch_), [self = shared_from_this()](error_code error, size_t count) {
    if (self->phase_ != Phase::kLingering) return;
    self->lingered_ += count;
    if (error || self->lingered_ > kMaxLingerBytes) return self->close();
    self->discard();
  });
}

// --- HttpResponder ---

HttpResponder::HttpResponder(std::shared_ptr<HttpConnection> connection, uint64_t serial)
    : connection_(std::move(connection)), serial_(serial) {}

HttpResponder::~HttpResponder() {
  connection_->for_request(serial_, [](HttpConnection& connection) { connection.abandon(); });
}

void HttpResponder::send(HttpResponse response) {
  connection_->for_request(serial_, [response = std::move(response)](HttpConnection& connection) mutable {
    connection.send(std::move(response));
  });
}

void HttpResponder::start_stream(HttpResponse head) {
  connection_->for_request(serial_, [head = std::move(head)](HttpConnection& connection) mutable {
    connection.start_stream(std::move(head));
  });
}

void HttpResponder::write(std::string bytes) {
  connection_->for_request(
      serial_, [bytes = std::move(bytes)](HttpConnection& connection) mutable { connection.write(std::move(bytes)); });
}

void HttpResponder::end() {
  connection_->for_request(serial_, [](HttpConnection& connection) { connection.end(); });
}

void HttpResponder::abort() {
  connection_->for_request(serial_, [](HttpConnection& connection) { connection.hang_up(); });
}

void HttpResponder::post(std::function<void()> task) { connection_->post_task(std::move(task)); }

void HttpResponder::on_hangup(std::function<void()> callback) {
  connection_->for_request(serial_, [callback = std::move(callback)](HttpConnection& connection) mutable {
    connection.set_hangup(std::move(callback));
  });
}

// --- HttpServer ---

HttpServer::HttpServer(HttpOptions options, HttpHandler handler)
    : shared_(std::make_shared<Shared>(std::move(options), std::move(handler))) {}

HttpServer::~HttpServer() { stop(std::chrono::milliseconds(0)); }

Status HttpServer::start() {
  MOAT_CHECK(!shared_->started);
  const HttpOptions& options = shared_->options;
  error_code error;
  tcp::resolver resolver(shared_->io);
  const auto found = resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive, error);
  if (error || found.empty()) return invalid_argument("cannot resolve host \"{}\": {}", options.host, error.message());
  const tcp::endpoint endpoint = found.begin()->endpoint();
  tcp::acceptor& acceptor = shared_->acceptor;
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(tcp::acceptor::max_listen_connections, error);
  if (!error) shared_->port = acceptor.local_endpoint(error).port();
  if (error) return unavailable("cannot listen on {}:{}: {}", options.host, options.port, error.message());
  shared_->started = true;
  shared_->accept(shared_);
  for (int i = 0; i < std::max(1, options.num_threads); ++i) {
    shared_->threads.emplace_back([shared = shared_.get()] { shared->run(); });
  }
  return {};
}

int HttpServer::port() const { return shared_->port; }

void HttpServer::stop(std::chrono::milliseconds grace) {
  if (!shared_->started || shared_->stopped) return;
  shared_->draining = true;
  asio::post(shared_->acceptor.get_executor(), [shared = shared_] {
    error_code ignored;
    shared->acceptor.close(ignored);
    shared->accept_timer.cancel();
  });
  shared_->for_each([](const auto& connection) { connection->begin_stop(); });
  if (!shared_->wait_until_empty(grace)) {
    shared_->for_each([](const auto& connection) { connection->cut(); });
    shared_->wait_until_empty(std::chrono::seconds(1));
  }
  shared_->stopped = true;
  shared_->io.stop();
  for (std::thread& thread : shared_->threads) thread.join();
  shared_->threads.clear();
  // Handlers that were queued hold connections, which hold the io_context: run them, or neither is ever freed.
  shared_->io.restart();
  shared_->io.poll();
}

}  // namespace moat
