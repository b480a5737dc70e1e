// SPDX-License-Identifier: Apache-2.0
// Tokenizer, chat format, reply parser and stop strings against the goldens, plus what no golden can say: linearity, injection,
// independence of how a stream is cut.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "text/bpe.h"
#include "text/chat.h"
#include "text/reply_parser.h"
#include "text/stop_strings.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace moat {
namespace {

using Ids = std::vector<int32_t>;

Json golden(const std::string& name) {
  const char* root = std::getenv("MOAT_GOLDEN");
  const std::string folder = root != nullptr ? root : MOAT_SOURCE_DIR "/tests/golden";
  const auto text = read_file(join_path(folder, "text/" + name));
  MOAT_CHECK(text.ok(), "{}", text.status().message());
  auto json = parse_json(*text);
  MOAT_CHECK(json.ok(), "{}: {}", name, json.status().message());
  return std::move(json).value();
}

const Tokenizer& nano() {
  static const Tokenizer tokenizer = Tokenizer::load(MOAT_SOURCE_DIR "/models/moat-nano").value();
  return tokenizer;
}

Ids ids_of(const Json& json) {
  Ids ids;
  for (const Json& id : json.as_array()) ids.push_back(static_cast<int32_t>(id.as_int64().value()));
  return ids;
}

std::string from_base64(const std::string& text) {
  static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text.substr(0, text.find('='))) {
    bits = (bits << 6 | static_cast<uint32_t>(kDigits.find(c))) & 0xFFFF;
    if ((count += 6) >= 8) out.push_back(static_cast<char>(bits >> (count -= 8) & 0xFF));
  }
  return out;
}

// Counts the rows of one golden list and prints the summary line.
class Tally {
 public:
  explicit Tally(std::string name) : name_(std::move(name)) {}
  ~Tally() { std::printf("golden %s: %d of %d rows\n", name_.c_str(), passed_, rows_); }
  void row(bool passed) {
    ++rows_;
    passed_ += passed ? 1 : 0;
  }

 private:
  std::string name_;
  int rows_ = 0, passed_ = 0;
};

TEST(Tokenizer, GoldenIds) {
  const Json file = golden("tokenizer.json");
  EXPECT_EQ(nano().vocab_size(), file.find("vocab")->as_int64());
  const auto check = [&](const char* list, auto input, auto encode) {
    Tally tally(std::string("tokenizer.json ") + list);
    for (const Json& row : file.find(list)->as_array()) {
      const Ids got = encode(input(row)), wanted = ids_of(*row.find("ids"));
      EXPECT_EQ(got, wanted) << list << ": " << row.dump();
      tally.row(got == wanted);
    }
  };
  const auto text = [](const Json& row) { return row.find("text")->as_string(); };
  const auto bytes = [](const Json& row) { return from_base64(row.find("base64")->as_string()); };
  const auto plain = [](const std::string& s) { return nano().encode_text(s); };
  check("ordinary", text, plain);
  check("invalid_utf8", bytes, plain);
  check("with_special", text, [](const std::string& s) { return nano().encode_markup(s); });
  Tally tally("tokenizer.json decode");
  for (const Json& row : file.find("decode")->as_array()) {
    const bool same = nano().decode(ids_of(*row.find("ids"))) == bytes(row);
    EXPECT_TRUE(same) << row.dump();
    tally.row(same);
  }
}

TEST(Tokenizer, GoldenSplits) {
  const Json file = golden("splits.json");
  Tally tally("splits.json");
  for (const Json& row : file.as_array()) {
    Json pieces = Json::array();
    for (const std::string_view piece : Tokenizer::split(row.as_array()[0].as_string())) pieces.push_back(piece);
    EXPECT_EQ(pieces.dump(), row.as_array()[1].dump());
    tally.row(pieces == row.as_array()[1]);
  }
}

}  // namespace
}  // namespace moat
