// SPDX-License-Identifier: Apache-2.0
// Reading config.json: typed, bounded members with messages that say key, got and expected.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "base/status.h"

namespace moat {

// Reads the members of one object. The first failure stays in the status that all readers of a config share; after it,
// values are defaults. null counts as absent, as in the release's own config class.
class ConfigFields {
 public:
  static constexpr int64_t kMaxDim = int64_t{1} << 24;  // of any one dimension: products of two fit

  struct Range {
    Range(int64_t low, int64_t high) : min(low), max(high) {}
    int64_t min, max;
  };

  // A value for a message, cut when long.
  static std::string shown(const Json& value) {
    constexpr size_t kMaxShown = 80;
    std::string text = value.dump();
    if (text.size() > kMaxShown) text = utf8_sanitize(text.substr(0, kMaxShown)) + "...";
    return text;
  }

  // `path` is put before keys in messages: "text_config." or "".
  ConfigFields(const Json& object, std::string path, Status& status)
      : object_(object), path_(std::move(path)), status_(status) {}

  bool has(std::string_view key) const { return object_.find_set(key) != nullptr; }
  const Json* find(std::string_view key) const { return object_.find_set(key); }
  std::string name(std::string_view key) const { return path_ + std::string(key); }

  std::optional<int64_t> optional_integer(std::string_view key, Range range = Range(1, kMaxDim)) {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const std::optional<int64_t> number = value->is_number() ? value->as_int64() : std::nullopt;
    if (number && *number >= range.min && *number <= range.max) return number;
    refuse(key, *value, fmt::format("an integer from {} to {}", range.min, range.max));
    return range.min;
  }
  int64_t integer_or(std::string_view key, int64_t absent, Range range = Range(1, kMaxDim)) {
    return optional_integer(key, range).value_or(absent);
  }
  int64_t integer(std::string_view key, Range range = Range(1, kMaxDim)) {
    const auto value = optional_integer(key, range);
    if (!value) fail("{}: missing, expected an integer from {} to {}", name(key), range.min, range.max);
    return value.value_or(range.min);
  }

  // A finite number in [low, high].
  std::optional<float> optional_number(std::string_view key, double low, double high) {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const double number = value->is_number() ? value->as_double() : std::nan("");
    if (number >= low && number <= high) return static_cast<float>(number);
    refuse(key, *value, fmt::format("a number from {} to {}", low, high));
    return static_cast<float>(low);
  }

  bool boolean_or(std::string_view key, bool absent) {
    const Json* value = find(key);
    if (value == nullptr) return absent;
    if (value->is_bool()) return value->as_bool();
    refuse(key, *value, "true or false");
    return absent;
  }

  // `key` must be absent or equal to `expected`.
  void expect(std::string_view key, const Json& expected, std::string_view reason) {
    const Json* value = find(key);
    if (value == nullptr || *value == expected) return;
    if (value->is_number() && expected.is_number() && value->as_double() == expected.as_double()) return;
    fail_unsupported("{}: got {}, expected {}{}{}", name(key), shown(*value), expected.dump(),
                     reason.empty() ? "" : ": ", reason);
  }
  // As expect, but the key must be there.
  void require(std::string_view key, const Json& expected) {
    if (!has(key)) fail("{}: missing, expected {}", name(key), expected.dump());
    expect(key, expected, "");
  }
  void expect_absent(std::string_view key, std::string_view reason) {
    if (const Json* value = find(key)) {
      fail_unsupported("{}: got {}, expected null: {}", name(key), shown(*value), reason);
    }
  }

  template <class... A>
  void fail(fmt::format_string<A...> format, A&&... args) {
    if (status_.ok()) status_ = invalid_argument(format, std::forward<A>(args)...);
  }
  template <class... A>
  void fail_unsupported(fmt::format_string<A...> format, A&&... args) {
    if (status_.ok()) status_ = unsupported(format, std::forward<A>(args)...);
  }
  void refuse(std::string_view key, const Json& got, std::string_view expected) {
    fail("{}: got {}, expected {}", name(key), shown(got), expected);
  }

 private:
  const Json& object_;
  std::string path_;
  Status& status_;
};

}  // namespace moat
