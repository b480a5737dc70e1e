// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

namespace moat {
namespace {

// A finite double as Python's repr writes it: shortest digits, positional for exponents -4..15, always with ".0" or
// "e".
std::string python_repr(double value) {
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific).ptr;
  std::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t mark = text.find('e');
  int exponent = 0;
  const char* digits_at = text.data() + mark + 1;
  if (*digits_at == '+') ++digits_at;
  std::from_chars(digits_at, end, exponent);
  std::string out;
  text = text.substr(0, mark);
  if (text[0] == '-') {
    out.push_back('-');
    text.remove_prefix(1);
  }
  std::string digits(1, text[0]);
  if (text.size() > 2) digits.append(text.substr(2));
  if (exponent < -4 || exponent >= 16) {
    out.push_back(digits[0]);
    if (digits.size() > 1) out.append(".").append(digits, 1);
    return out + fmt::format("e{}{:02}", exponent < 0 ? '-' : '+', std::abs(exponent));
  }
  if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return out + digits + std::string(whole - digits.size(), '0') + ".0";
  return out + digits.substr(0, whole) + "." + digits.substr(whole);
}

bool is_integer_text(std::string_view text) { return text.find_first_of(".eE") == std::string_view::npos; }

double to_double(const std::string& text) {
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec == std::errc()) return value;
  return std::strtod(text.c_str(), nullptr);  // too large or too small: infinity or zero
}

class Dumper {
 public:
  Dumper(std::string& out, const Json::DumpOptions& options) : out_(out), options_(options) {
    const bool python = options.spacing == Json::Spacing::kPython;
    item_ = python ? ", " : ",";
    colon_ = python ? ": " : ":";
  }

  // Recursion is bounded by JsonLimits::max_depth for values that came from outside.
  void value(const Json& json) {
    if (json.is_null()) {
      out_.append("null");
    } else if (json.is_bool()) {
      out_.append(json.as_bool() ? "true" : "false");
    } else if (json.is_number()) {
      number(json.number_text());
    } else if (json.is_string()) {
      append_json_string(out_, json.as_string());
    } else if (json.is_array()) {
      array(json.as_array());
    } else {
      object(json.as_object());
    }
  }

 private:
  void number(const std::string& text) {
    if (!options_.python_numbers || is_integer_text(text)) {
      out_.append(text);
      return;
    }
    const double value = to_double(text);
    out_.append(std::isfinite(value) ? python_repr(value) : text);
  }

  void array(const Json::Array& items) {
    out_.push_back('[');
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) out_.append(item_);
      value(items[i]);
    }
    out_.push_back(']');
  }

  void object(const Json::Object& members) {
    std::vector<const Json::Member*> order;
    order.reserve(members.size());
    for (const auto& member : members) order.push_back(&member);
    // Bytes of UTF-8 sort as code points do.
    if (options_.sort_keys) {
      std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->first < b->first; });
    }
    out_.push_back('{');
    for (size_t i = 0; i < order.size(); ++i) {
      if (i > 0) out_.append(item_);
      append_json_string(out_, order[i]->first);
      out_.append(colon_);
      value(order[i]->second);
    }
    out_.push_back('}');
  }

  std::string& out_;
  const Json::DumpOptions& options_;
  std::string_view item_, colon_;
};

}  // namespace

Json::Json(int64_t value) : value_(Number{fmt::format("{}", value)}) {}
Json::Json(uint64_t value) : value_(Number{fmt::format("{}", value)}) {}
Json::Json(double value) {
  if (std::isfinite(value)) value_ = Number{python_repr(value)};
}

bool Json::is_integer() const { return is_number() && is_integer_text(number_text()); }

std::string_view Json::type_name() const {
  switch (value_.index()) {
    case 0: return "null";
    case 1: return "boolean";
    case 2: return "number";
    case 3: return "string";
    case 4: return "array";
    default: return "object";
  }
}

double Json::as_double() const { return to_double(number_text()); }

std::optional<int64_t> Json::as_int64() const {
  const std::string& text = number_text();
  if (is_integer_text(text)) {
    int64_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc()) return std::nullopt;
    return value;
  }
  const double value = to_double(text);
  if (!(value >= -0x1p63 && value < 0x1p63) || value != std::floor(value)) return std::nullopt;
  return static_cast<int64_t>(value);
}

const Json* Json::find(std::string_view key) const {
  const Object* object = std::get_if<Object>(&value_);
  if (object == nullptr) return nullptr;
  for (const auto& member : *object) {
    if (member.first == key) return &member.second;
  }
  return nullptr;
}

Json* Json::find(std::string_view key) { return const_cast<Json*>(std::as_const(*this).find(key)); }

const Json* Json::find_set(std::string_view key) const {
  const Json* value = find(key);
  return value != nullptr && !value->is_null() ? value : nullptr;
}

Json& Json::set(std::string key, Json value) {
  if (is_null()) value_ = Object();
  if (Json* existing = find(key)) {
    *existing = std::move(value);
    return *existing;
  }
  return as_object().emplace_back(std::move(key), std::move(value)).second;
}

Json& Json::push_back(Json value) {
  if (is_null()) value_ = Array();
  return as_array().emplace_back(std::move(value));
}

std::string Json::dump(const DumpOptions& options) const {
  std::string out;
  Dumper(out, options).value(*this);
  return out;
}

void append_json_string(std::string& out, std::string_view text) {
  out.push_back('"');
  size_t done = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
    out.append(text.substr(done, i - done));
    done = i + 1;
    switch (byte) {
      case '"': out.append("\\\""); break;
      case '\\': out.append("\\\\"); break;
      case '\b': out.append("\\b"); break;
      case '\f': out.append("\\f"); break;
      case '\n': out.append("\\n"); break;
      case '\r': out.append("\\r"); break;
      case '\t': out.append("\\t"); break;
      default: out.append(fmt::format("\\u{:04x}", byte));
    }
  }
  out.append(text.substr(done));
  out.push_back('"');
}

}  // namespace moat
