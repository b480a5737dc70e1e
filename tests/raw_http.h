// SPDX-License-Identifier: Apache-2.0
// A small HTTP client on POSIX sockets for tests: it shows bytes as they came, can hang up at any moment, and sends
// whatever it is told to. One thread a client.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <string_view>

namespace moat {

struct RawResponse {
  int status = 0;  // 0: the connection ended before a whole head came
  std::string head;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;                            // chunks joined
  bool complete = false;                       // the framing says that nothing is missing
};

class RawClient {
 public:
  // `receive_bytes`: size of the kernel's receive buffer, 0: as it is.
  explicit RawClient(int port, int receive_bytes = 0) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    if (receive_bytes > 0) ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof(receive_bytes));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = ::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~RawClient() { hang_up(); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  bool connected() const { return connected_; }
  void hang_up() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (count <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(count));
    }
    return true;
  }

  bool request(std::string_view method, std::string_view target, std::string_view body = "",
               std::string_view headers = "") {
    std::string text = std::string(method) + " " + std::string(target) + " HTTP/1.1\r\nHost: test\r\n";
    text += headers;
    if (!body.empty() || method == "POST") text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
    return send(text + "\r\n" + std::string(body));
  }

  // Reads until `mark` has come; everything up to its end is returned and consumed. Empty: the connection ended first.
  std::string read_until(std::string_view mark) {
    size_t at = 0;
    while ((at = in_.find(mark)) == std::string::npos) {
      if (!fill()) return {};
    }
    std::string text = in_.substr(0, at + mark.size());
    in_.erase(0, at + mark.size());
    return text;
  }

  RawResponse response(bool head_only = false) {
    RawResponse response;
    response.head = read_until("\r\n\r\n");
    if (response.head.size() < 12) return response;
    response.status = std::stoi(response.head.substr(9, 3));
    parse_headers(response);
    if (head_only || response.status == 204) {
      response.complete = true;
    } else if (response.headers.count("content-length") > 0) {
      const size_t length = std::stoul(response.headers["content-length"]);
      while (in_.size() < length && fill()) continue;
      response.complete = in_.size() >= length;
      response.body = in_.substr(0, length);
      in_.erase(0, length);
    } else if (response.headers.count("transfer-encoding") > 0) {
      read_chunks(response);
    } else {
      while (fill()) continue;
      response.body = std::exchange(in_, {});
      response.complete = true;
    }
    return response;
  }

  // The peer closed the connection (and sent nothing more).
  bool at_end() { return in_.empty() && !fill(); }

 private:
  bool fill() {
    pollfd waiting{fd_, POLLIN, 0};
    if (fd_ < 0 || ::poll(&waiting, 1, kPatienceMs) <= 0) return false;
    char bytes[16384];
    const ssize_t count = ::recv(fd_, bytes, sizeof(bytes), 0);
    if (count <= 0) return false;
    in_.append(bytes, static_cast<size_t>(count));
    return true;
  }

  static void parse_headers(RawResponse& response) {
    size_t line = response.head.find("\r\n") + 2;
    while (line < response.head.size()) {
      const size_t end = response.head.find("\r\n", line);
      const size_t colon = response.head.find(": ", line);
      if (end == line || end == std::string::npos) break;
      std::string name = response.head.substr(line, colon - line);
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
      response.headers[name] = response.head.substr(colon + 2, end - colon - 2);
      line = end + 2;
    }
  }

  void read_chunks(RawResponse& response) {
    for (;;) {
      const std::string size_line = read_until("\r\n");
      if (size_line.empty()) return;
      const size_t size = std::stoul(size_line, nullptr, 16);
      while (in_.size() < size + 2 && fill()) continue;
      if (in_.size() < size + 2) {
        response.body += in_;  // for a look at what came of a cut body
        return;
      }
      response.body += in_.substr(0, size);
      in_.erase(0, size + 2);
      if (size == 0) {
        response.complete = true;
        return;
      }
    }
  }

  static constexpr int kPatienceMs = 60'000;
  int fd_ = -1;
  bool connected_ = false;
  std::string in_;
};

inline RawResponse fetch(int port, std::string_view method, std::string_view target, std::string_view body = "",
                         std::string_view headers = "") {
  RawClient client(port);
  client.request(method, target, body, headers);
  return client.response(method == "HEAD");
}

}  // namespace moat
