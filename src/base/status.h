// SPDX-License-Identifier: Apache-2.0
// How failure travels. Status and Result<T> carry whatever data, users, files or machines can cause, with a message
// that says what was got and what was expected. MOAT_CHECK is for what only a programmer can cause: it prints and
// aborts, and is never reachable from user input. moat throws no exceptions; those of libraries are caught where the
// library is called.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace moat {

enum class StatusCode {
  kOk,
  kInvalidArgument,    // the caller's value is wrong (HTTP 400)
  kNotFound,           // no such file, model, tensor (HTTP 404)
  kDataLoss,           // a file is damaged or contradicts itself
  kUnsupported,        // valid, but not something this build or model does
  kResourceExhausted,  // does not fit: memory, queue (HTTP 503)
  kUnavailable,        // shutting down, not ready (HTTP 503)
  kCancelled,          // the requester went away
  kDeadlineExceeded,   // the time that the requester gave is over (HTTP 504)
  kInternal,           // ours (HTTP 500)
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // The same failure, said with where it happened: "prefix: message".
  Status with_prefix(std::string_view prefix) const {
    return ok() ? *this : Status(code_, fmt::format("{}: {}", prefix, message_));
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

template <class... A>
Status invalid_argument(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kInvalidArgument, fmt::format(format, std::forward<A>(args)...)};
}
template <class... A>
Status not_found(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kNotFound, fmt::format(format, std::forward<A>(args)...)};
}
template <class... A>
Status data_loss(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kDataLoss, fmt::format(format, std::forward<A>(args)...)};
}
template <class... A>
Status unsupported(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kUnsupported, fmt::format(format, std::forward<A>(args)...)};
}
template <class... A>
Status resource_exhausted(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kResourceExhausted, fmt::format(format, std::forward<A>(args)...)};
}
template <class... A>
Status unavailable(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kUnavailable, fmt::format(format, std::forward<A>(args)...)};
}
template <class... A>
Status deadline_exceeded(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kDeadlineExceeded, fmt::format(format, std::forward<A>(args)...)};
}
template <class... A>
Status internal_error(fmt::format_string<A...> format, A&&... args) {
  return {StatusCode::kInternal, fmt::format(format, std::forward<A>(args)...)};
}

[[noreturn]] void check_failed(const char* file, int line, const char* condition, std::string_view detail);

// Aborts with file, line, condition and an optional fmt message when `condition` is false.
#define MOAT_CHECK(condition, ...)                                                                      \
  do {                                                                                                  \
    if (!(condition)) [[unlikely]]                                                                      \
      ::moat::check_failed(__FILE__, __LINE__, #condition, ::moat::detail::check_message(__VA_ARGS__)); \
  } while (false)

namespace detail {
inline std::string check_message() { return {}; }
template <class... A>
std::string check_message(fmt::format_string<A...> format, A&&... args) {
  return fmt::format(format, std::forward<A>(args)...);
}
}  // namespace detail

// A value or the reason why there is none. Reading the value of a failure is a programmer's error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<1>, std::move(value)) {}        // NOLINT: implicit on purpose
  Result(Status status) : state_(std::in_place_index<0>, std::move(status)) {  // NOLINT
    MOAT_CHECK(!std::get<0>(state_).ok(), "a Result without a value needs a failure");
  }

  bool ok() const { return state_.index() == 1; }
  Status status() const { return ok() ? Status() : std::get<0>(state_); }
  T& value() & {
    MOAT_CHECK(ok(), "{}", status().message());
    return std::get<1>(state_);
  }
  const T& value() const& {
    MOAT_CHECK(ok(), "{}", status().message());
    return std::get<1>(state_);
  }
  T&& value() && {
    MOAT_CHECK(ok(), "{}", status().message());
    return std::get<1>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::variant<Status, T> state_;
};

#define MOAT_CONCAT_(a, b) a##b
#define MOAT_CONCAT(a, b) MOAT_CONCAT_(a, b)

// Returns the Status of `expression` from the enclosing function unless it is ok.
#define MOAT_RETURN_IF_ERROR(expression)   \
  do {                                     \
    ::moat::Status status_ = (expression); \
    if (!status_.ok()) [[unlikely]]        \
      return status_;                      \
  } while (false)

// MOAT_ASSIGN(auto x, function()) : x gets the value, or the enclosing function returns the failure.
#define MOAT_ASSIGN(declaration, expression) MOAT_ASSIGN_IMPL_(MOAT_CONCAT(result_, __LINE__), declaration, expression)
#define MOAT_ASSIGN_IMPL_(result, declaration, expression) \
  auto result = (expression);                              \
  if (!result.ok()) [[unlikely]]                           \
    return result.status();                                \
  declaration = std::move(result).value()

}  // namespace moat
