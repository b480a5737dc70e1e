// SPDX-License-Identifier: Apache-2.0
// parse_json: nlohmann's SAX parser does the grammar, this handler builds the value.
#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/json.h"

namespace moat {
namespace {

// With long double the parser accepts numbers beyond the range of double (an integer of 400 digits, 1e999), whose
// spelling is all that is kept.
using Parser = nlohmann::basic_json<std::map, std::vector, std::string, bool, int64_t, uint64_t, long double>;

// Tells the handler, which the parser gives no positions, how far it has read.
struct TrackedIterator {
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  const char* at;
  const char** furthest;

  const char& operator*() const { return *at; }
  TrackedIterator& operator++() {
    *furthest = ++at;
    return *this;
  }
  bool operator==(const TrackedIterator& other) const { return at == other.at; }
  bool operator!=(const TrackedIterator& other) const { return at != other.at; }
};

class Builder : public nlohmann::json_sax<Parser> {
 public:
  Builder(const JsonLimits& limits, const char* begin) : limits_(limits), begin_(begin), furthest_(begin) {}

  const char** furthest() { return &furthest_; }
  Status& status() { return status_; }
  Json take() { return std::move(root_); }

  bool null() override { return add(Json()); }
  bool boolean(bool value) override { return add(Json(value)); }
  bool number_integer(number_integer_t value) override { return add(Json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return add(Json(value)); }
  bool number_float(number_float_t, const string_t& text) override { return add(Json(Json::Number{text})); }
  bool string(string_t& value) override { return add(Json(std::move(value))); }
  bool binary(binary_t&) override { return fail("binary value"); }
  bool start_object(std::size_t) override { return start(Json(Json::Object())); }
  bool start_array(std::size_t) override { return start(Json(Json::Array())); }
  bool end_object() override { return end(); }
  bool end_array() override { return end(); }

  bool key(string_t& key) override {
    Frame& frame = frames_.back();
    Json::Object& members = frame.value.as_object();
    size_t index = find(frame, members, key);
    if (index == members.size()) {
      members.emplace_back(std::move(key), Json());
    } else if (limits_.duplicate_keys == DuplicateKeys::kError) {
      return fail(fmt::format("duplicate key \"{}\"", key));
    }
    frame.member = index;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: WHAT; last read: '...'": the input is not
    // repeated, it may be large and is not always valid text.
    std::string_view what = error.what();
    if (const size_t column = what.find("column "); column != std::string_view::npos) {
      if (const size_t colon = what.find(": ", column); colon != std::string_view::npos) what.remove_prefix(colon + 2);
    } else if (const size_t bracket = what.find("] "); bracket != std::string_view::npos) {
      what.remove_prefix(bracket + 2);
    }
    what = what.substr(0, what.find("; last read"));
    if (what.starts_with("number overflow")) what = "number out of range";
    status_ = invalid_argument("invalid JSON at byte {}: {}", position == 0 ? 0 : position - 1, what);
    return false;
  }

 private:
  struct Frame {
    Json value;
    size_t member = 0;                              // of an object: where the next value goes
    std::unordered_map<std::string, size_t> index;  // of an object that has become large
  };

  bool fail(std::string_view what) {
    status_ = invalid_argument("invalid JSON at byte {}: {}", furthest_ > begin_ ? furthest_ - begin_ - 1 : 0, what);
    return false;
  }

  // Position of `key` or members.size().
  static size_t find(Frame& frame, const Json::Object& members, const std::string& key) {
    constexpr size_t kScanLimit = 16;
    if (members.size() < kScanLimit) {
      size_t i = 0;
      while (i < members.size() && members[i].first != key) ++i;
      return i;
    }
    for (size_t i = frame.index.size(); i < members.size(); ++i) frame.index.emplace(members[i].first, i);
    const auto found = frame.index.find(key);
    return found == frame.index.end() ? members.size() : found->second;
  }

  bool add(Json value) {
    if (frames_.empty()) {
      root_ = std::move(value);
    } else if (Frame& frame = frames_.back(); frame.value.is_array()) {
      frame.value.as_array().push_back(std::move(value));
    } else {
      frame.value.as_object()[frame.member].second = std::move(value);
    }
    return true;
  }

  bool start(Json container) {
    if (frames_.size() >= static_cast<size_t>(limits_.max_depth)) {
      return fail(fmt::format("nested deeper than {} levels", limits_.max_depth));
    }
    frames_.push_back({std::move(container), 0, {}});
    return true;
  }

  bool end() {
    Json value = std::move(frames_.back().value);
    frames_.pop_back();
    return add(std::move(value));
  }

  const JsonLimits& limits_;
  const char* begin_;
  const char* furthest_;
  Status status_;
  Json root_;
  std::vector<Frame> frames_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, const JsonLimits& limits) {
  // Two leniencies of the parser: it takes a zero byte as the end and skips a byte order mark.
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {
    return invalid_argument("invalid JSON at byte {}: zero byte", zero);
  }
  if (text.starts_with("\xEF\xBB\xBF")) return invalid_argument("invalid JSON at byte 0: byte order mark");
  const char* begin = text.data();
  Builder builder(limits, begin);
  bool parsed = false;
  try {
    parsed = Parser::sax_parse(TrackedIterator{begin, builder.furthest()},
                               TrackedIterator{begin + text.size(), builder.furthest()}, &builder);
  } catch (const std::exception& error) {
    return internal_error("JSON parser: {}", error.what());
  }
  if (parsed) return builder.take();
  if (!builder.status().ok()) return builder.status();
  return internal_error("JSON parser stopped without a reason");
}

}  // namespace moat
