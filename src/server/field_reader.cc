// SPDX-License-Identifier: Apache-2.0
#include "server/field_reader.h"

#include <charconv>
#include <cmath>
#include <utility>

namespace moat {

std::string shown(const Json& value) {
  constexpr size_t kMaxShown = 60;
  if (value.is_array() || value.is_object()) return fmt::format("an {}", value.type_name());
  std::string text = value.dump();
  if (text.size() > kMaxShown) text = utf8_sanitize(text.substr(0, kMaxShown)) + "...";
  return text;
}

void FieldReader::fail(ApiError error) {
  if (!error_) error_ = std::move(error);
}

void FieldReader::fail(std::string_view name, std::string message) {
  fail(bad_field(fmt::format("{}{}", prefix_, name), std::move(message)));
}

void FieldReader::wrong(std::string_view name, const Json& got, std::string_view expected) {
  fail(name, fmt::format("{}{} is {}, expected {}", prefix_, name, shown(got), expected));
}

std::optional<bool> FieldReader::boolean(std::string_view name) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_bool()) return value->as_bool();
  wrong(name, *value, "true or false");
  return std::nullopt;
}

std::optional<double> FieldReader::number(std::string_view name, double min, double max) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    const double number = value->as_double();
    if (number >= min && number <= max) return number;
  }
  wrong(name, *value, fmt::format("a number from {} to {}", min, max));
  return std::nullopt;
}

std::optional<int64_t> FieldReader::integer(std::string_view name, int64_t min, int64_t max) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    const std::optional<int64_t> number = value->as_int64();
    if (number && *number >= min && *number <= max) return number;
  }
  wrong(name, *value, fmt::format("an integer from {} to {}", min, max));
  return std::nullopt;
}

std::optional<int64_t> FieldReader::clamped_integer(std::string_view name, int64_t min, int64_t max) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    const std::optional<int64_t> number = value->as_int64();
    if (number && *number >= min) return std::min(*number, max);
    // Beyond 2^63 every double is an integer.
    if (!number && value->as_double() >= 0x1p63) return max;
  }
  wrong(name, *value, fmt::format("an integer of at least {}", min));
  return std::nullopt;
}

std::optional<uint64_t> FieldReader::seed(std::string_view name) {
  const Json* value = any(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    if (const std::optional<int64_t> number = value->as_int64()) return static_cast<uint64_t>(*number);
    const std::string& text = value->number_text();
    uint64_t number = 0;
    const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (failure == std::errc() && end == text.data() + text.size()) return number;
  }
  wrong(name, *value, "a 64-bit integer");
  return std::nullopt;
}

const std::string* FieldReader::string(std::string_view name) {
  const Json* value = any(name);
  if (value == nullptr || value->is_string()) return value == nullptr ? nullptr : &value->as_string();
  wrong(name, *value, "a string");
  return nullptr;
}

const Json* FieldReader::object(std::string_view name) {
  const Json* value = any(name);
  if (value == nullptr || value->is_object()) return value;
  wrong(name, *value, "an object");
  return nullptr;
}

const Json* FieldReader::array(std::string_view name) {
  const Json* value = any(name);
  if (value == nullptr || value->is_array()) return value;
  wrong(name, *value, "an array");
  return nullptr;
}

}  // namespace moat
