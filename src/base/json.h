// SPDX-License-Identifier: Apache-2.0
// Json: a value that remembers what other JSON libraries forget: the order of an object's keys and the spelling of its
// numbers (an integer of any size stays verbatim). Parsing is done by nlohmann's SAX parser; nesting is bounded, strings are
// valid UTF-8 (an unpaired surrogate escape is an error). Value type, no sharing, no threads of its own.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"
#include "base/utf8.h"  // utf8_sanitize, is_valid_utf8

namespace moat {

class Json {
 public:
  using Array = std::vector<Json>;
  using Member = std::pair<std::string, Json>;
  using Object = std::vector<Member>;  // in the order written; keys are unique after parsing
  struct Number {
    std::string text;  // as spelled in the source; valid JSON
    bool operator==(const Number&) const = default;
  };

  Json() = default;                                       // null
  Json(std::nullptr_t) {}                                 // NOLINT: conversions are the point of this type
  Json(bool value) : value_(value) {}                     // NOLINT
  Json(int value) : Json(static_cast<int64_t>(value)) {}  // NOLINT
  Json(int64_t value);                                    // NOLINT
  Json(uint64_t value);                                   // NOLINT
  Json(double value);  // NOLINT  as Python's repr: the shortest that reads back the same; not finite -> null
  Json(Number value) : value_(std::move(value)) {}              // NOLINT
  Json(std::string value) : value_(std::move(value)) {}         // NOLINT
  Json(std::string_view value) : value_(std::string(value)) {}  // NOLINT
  Json(const char* value) : value_(std::string(value)) {}       // NOLINT
  Json(Array value) : value_(std::move(value)) {}               // NOLINT
  Json(Object value) : value_(std::move(value)) {}              // NOLINT

  // Json::object({{"a", 1}, {"b", "x"}}) and Json::array({1, 2}): what braces alone would leave ambiguous.
  static Json object(std::initializer_list<Member> members = {}) { return Json(Object(members)); }
  static Json array(std::initializer_list<Json> items = {}) { return Json(Array(items)); }

  bool is_null() const { return std::holds_alternative<std::monostate>(value_); }
  bool is_bool() const { return std::holds_alternative<bool>(value_); }
  bool is_number() const { return std::holds_alternative<Number>(value_); }
  bool is_integer() const;  // a number spelled without fraction or exponent
  bool is_string() const { return std::holds_alternative<std::string>(value_); }
  bool is_array() const { return std::holds_alternative<Array>(value_); }
  bool is_object() const { return std::holds_alternative<Object>(value_); }
  std::string_view type_name() const;  // "null", "boolean", "number", "string", "array", "object"

  // Reading the wrong kind is a programmer's error: ask is_*() first.
  bool as_bool() const { return get<bool>(); }
  const std::string& as_string() const { return get<std::string>(); }
  const Array& as_array() const { return get<Array>(); }
  Array& as_array() { return const_cast<Array&>(get<Array>()); }
  const Object& as_object() const { return get<Object>(); }
  Object& as_object() { return const_cast<Object&>(get<Object>()); }
  const std::string& number_text() const { return get<Number>().text; }
  double as_double() const;                 // of a number, rounded; huge values become infinite
  std::optional<int64_t> as_int64() const;  // of an integer that fits (2.0 and 1e3 count as integers), else nothing

  const Json* find(std::string_view key) const;  // nullptr if absent or not an object
  Json* find(std::string_view key);
  // A member that is present and not null: JSON clients send null for "not set".
  const Json* find_set(std::string_view key) const;
  Json& set(std::string key, Json value);  // replaces or appends; *this must be an object (null becomes one)
  Json& push_back(Json value);             // *this must be an array (null becomes one)

  enum class Spacing {
    kCompact,  // "," and ":"
    kPython,   // ", " and ": " as Python's json.dumps writes by default
  };
  struct DumpOptions {
    Spacing spacing = Spacing::kCompact;
    bool sort_keys = false;       // by code point, recursively
    bool python_numbers = false;  // floats as Python's repr writes them (3.0, 1e+22, 1e-07), integers verbatim
  };
  // Non-ASCII is kept; escapes are \" \\ \b \f \n \r \t and lower-case \u00xx below 0x20.
  std::string dump(const DumpOptions& options) const;
  std::string dump() const { return dump(DumpOptions{}); }

  bool operator==(const Json&) const = default;

 private:
  template <class T>
  const T& get() const {
    const T* value = std::get_if<T>(&value_);
    MOAT_CHECK(value != nullptr, "JSON value is a {}", type_name());
    return *value;
  }

  std::variant<std::monostate, bool, Number, std::string, Array, Object> value_;
};

enum class DuplicateKeys {
  kLastWins,  // the last value at the first position, as Python's dict
  kError,
};

struct JsonLimits {
  int max_depth = 256;
  DuplicateKeys duplicate_keys = DuplicateKeys::kLastWins;
};

// The whole of `text` as one value; errors name the byte offset.
Result<Json> parse_json(std::string_view text, const JsonLimits& limits = {});

// `text` as a JSON string literal, quotes included; same escapes as Json::dump.
void append_json_string(std::string& out, std::string_view text);

}  // namespace moat
