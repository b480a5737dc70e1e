// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/thread_pool.h"

namespace moat {
namespace {

std::string round_trip(std::string_view text) {
  const auto json = parse_json(text);
  return json.ok() ? json->dump() : json.status().message();
}

std::string error_of(std::string_view text, JsonLimits limits = {}) {
  const auto json = parse_json(text, limits);
  return json.ok() ? "no error" : json.status().message();
}

TEST(Json, RoundTripsKeepOrderAndSpelling) {
  for (const std::string_view text : {"null",
                                      "true",
                                      "false",
                                      "0",
                                      "-1",
                                      "18446744073709551615",
                                      "-9223372036854775808",
                                      "1.50",
                                      "1E5",
                                      "1e-07",
                                      "-0.0",
                                      "\"\"",
                                      "[]",
                                      "{}",
                                      "[1,[2,[3]],{}]",
                                      R"({"z":1,"a":{"y":[null,true],"b":"x"}})",
                                      R"("é€😀")",
                                      R"("\"\\\b\f\n\r\t\u0001\u001f/")",
                                      "123456789012345678901234567890",
                                      "-123456789012345678901234567890",
                                      "1e999",
                                      "\"\x7f\""}) {
    EXPECT_EQ(round_trip(text), text);
  }
  EXPECT_EQ(round_trip(std::string(400, '7')), std::string(400, '7'));
  EXPECT_EQ(round_trip(" [ 1 , 2 ]\r\n\t"), "[1,2]");
  EXPECT_EQ(round_trip(R"("\u00e9\ud83d\ude00\/")"), "\"é😀/\"");
  EXPECT_EQ(round_trip("-0"), "0");
}

TEST(Json, ErrorsNameTheByte) {
  EXPECT_EQ(error_of(""),
            "invalid JSON at byte 0: syntax error while parsing value - unexpected end of input; expected '[', "
            "'{', or a literal");
  const std::pair<std::string_view, int> cases[] = {
      {"[1,]", 3},     {"{\"a\":1,}", 7}, {"[1 2]", 3},       {"\"\xFF\"", 1},     {"\"ab\xED\xA0\x80\"", 4},
      {"nul", 3},      {"01", 1},         {"\"\\ud800\"", 7}, {"\"\\udc00x\"", 6}, {"[1]x", 3},
      {"\"a\nb\"", 2}, {"NaN", 0},        {"[\"abc", 5},      {"{\"a\" 1}", 5},    {"\"\\ud800\\u0041\"", 12}};
  for (const auto& [text, offset] : cases) {
    EXPECT_TRUE(error_of(text).starts_with(fmt::format("invalid JSON at byte {}: ", offset)))
        << text << ": " << error_of(text);
    EXPECT_TRUE(is_valid_utf8(error_of(text)));
  }
  EXPECT_EQ(error_of(std::string_view("1\0 2", 4)), "invalid JSON at byte 1: zero byte");
  EXPECT_EQ(error_of("\xEF\xBB\xBF{}"), "invalid JSON at byte 0: byte order mark");
}

TEST(Json, DuplicateKeys) {
  EXPECT_EQ(round_trip(R"({"a":1,"b":2,"a":{"c":3}})"), R"({"a":{"c":3},"b":2})");
  EXPECT_EQ(error_of(R"({"a":1,"b":2,"a":3})", {.duplicate_keys = DuplicateKeys::kError}),
            "invalid JSON at byte 15: duplicate key \"a\"");
  EXPECT_EQ(error_of(R"({"a":{"a":1},"b":{"a":1}})", {.duplicate_keys = DuplicateKeys::kError}), "no error");
  std::string large = "{";
  for (int i = 0; i < 5000; ++i) large += fmt::format("\"k{}\":{},", i, i);
  const auto json = parse_json(large + "\"k77\":-1,\"k4999\":-2}");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(json->as_object().size(), 5000U);
  EXPECT_EQ(json->find("k77")->as_int64(), -1);
  EXPECT_EQ(json->as_object()[4999].second.as_int64(), -2);
}

TEST(Json, NestingIsBounded) {
  const auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(round_trip(nested(256)), nested(256));
  EXPECT_EQ(error_of(nested(257)), "invalid JSON at byte 256: nested deeper than 256 levels");
  EXPECT_EQ(error_of(std::string(1000000, '[')), "invalid JSON at byte 256: nested deeper than 256 levels");
  EXPECT_EQ(error_of(R"({"a":{"b":[]}})", {.max_depth = 2}), "invalid JSON at byte 10: nested deeper than 2 levels");
}

TEST(Json, PythonDumps) {
  const auto json =
      parse_json(R"({"b":[3.0,1e22,1E-7,-0.0,123456789012345678901234567890,0.1,1e15,1e16,0.0001,1.5e300,-2.50,-0],)"
                 R"("a":"é\u0001","é":{"y":1,"x":null}})");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(json->dump({Json::Spacing::kPython, false, true}),
            "{\"b\": [3.0, 1e+22, 1e-07, -0.0, 123456789012345678901234567890, 0.1, 1000000000000000.0, 1e+16, 0.0001, "
            "1.5e+300, "
            "-2.5, 0], \"a\": \"é\\u0001\", \"é\": {\"y\": 1, \"x\": null}}");
  EXPECT_EQ(json->find("é")->dump({.sort_keys = true}), R"({"x":null,"y":1})");
  EXPECT_EQ(parse_json(R"({"é":1,"z":2,"Z":3,"":4,"😀":5,"ｚ":6})")->dump({.sort_keys = true}),
            R"({"":4,"Z":3,"z":2,"é":1,"ｚ":6,"😀":5})");
}

TEST(Json, NumbersAndAccess) {
  EXPECT_EQ(Json(3.0).dump(), "3.0");
  EXPECT_EQ(Json(0.1).dump(), "0.1");
  EXPECT_EQ(Json(-1234.5678).dump(), "-1234.5678");
  EXPECT_EQ(Json(5e-324).dump(), "5e-324");
  EXPECT_EQ(Json(std::numeric_limits<double>::infinity()).dump(), "null");
  EXPECT_EQ(Json(std::numeric_limits<double>::quiet_NaN()).dump(), "null");
  EXPECT_EQ(Json(uint64_t{18446744073709551615U}).dump(), "18446744073709551615");
  const auto number = [](const char* text) { return Json(Json::Number{text}); };
  EXPECT_EQ(number("2.0").as_int64(), 2);
  EXPECT_EQ(number("1e3").as_int64(), 1000);
  EXPECT_EQ(number("9223372036854775807").as_int64(), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(number("9223372036854775808").as_int64(), std::nullopt);
  EXPECT_EQ(number("1e19").as_int64(), std::nullopt);
  EXPECT_EQ(number("2.5").as_int64(), std::nullopt);
  EXPECT_TRUE(std::isinf(number("1e999").as_double()));
  EXPECT_EQ(number("-1e-999").as_double(), 0.0);
  EXPECT_TRUE(number("12").is_integer());
  EXPECT_FALSE(number("1e2").is_integer());

  Json json = Json::object({{"a", 1}, {"n", nullptr}, {"l", Json::array({1, "x"})}});
  json.set("a", "replaced");
  json.set("z", true);
  json.find("l")->push_back(2.5);
  EXPECT_EQ(json.dump(), R"({"a":"replaced","n":null,"l":[1,"x",2.5],"z":true})");
  EXPECT_NE(json.find("n"), nullptr);
  EXPECT_EQ(json.find_set("n"), nullptr);
  EXPECT_EQ(json.find("q"), nullptr);
  EXPECT_EQ(Json(1).find("q"), nullptr);
  EXPECT_EQ(json.type_name(), "object");
  EXPECT_EQ(parse_json(json.dump()).value(), json);
}

TEST(Utf8, SanitizeReplacesMaximalParts) {
  const std::string r(kReplacementCharacter);
  EXPECT_EQ(utf8_sanitize("\xED\xA0\x80"), r + r + r);
  EXPECT_EQ(utf8_sanitize("\xFF"), r);
  EXPECT_EQ(utf8_sanitize("a\xE2\x82z"), "a" + r + "z");
  EXPECT_EQ(utf8_sanitize("\xF0\x9F\x98"), r);
  EXPECT_EQ(utf8_sanitize("\xC0\x80"), r + r);
  EXPECT_EQ(utf8_sanitize("\xF4\x90\x80\x80"), r + r + r + r);
  EXPECT_EQ(utf8_sanitize("\xE0\x80\x80"), r + r + r);
  EXPECT_EQ(utf8_sanitize("\xF1\x80\x80\x41\x80"), r + "A" + r);
  EXPECT_EQ(utf8_sanitize("long enough ascii, then \xE2\x82\xAC and \x80."),
            "long enough ascii, then € and " + r + ".");
  EXPECT_EQ(utf8_sanitize(""), "");
  EXPECT_TRUE(is_valid_utf8("aé€😀\xF4\x8F\xBF\xBF"));
  EXPECT_FALSE(is_valid_utf8("aé€😀\xF0\x9F\x98"));
}

TEST(File, WriteReadMap) {
  const std::string directory = testing::TempDir();
  const std::string path = join_path(directory, fmt::format("moat_base_test_{}", ::getpid()));
  EXPECT_EQ(join_path("a", "b"), "a/b");
  EXPECT_EQ(join_path("a/", "b"), "a/b");
  EXPECT_EQ(join_path("", "b"), "b");
  std::string bytes(100000, 'x');
  bytes[5] = '\0';
  ASSERT_TRUE(write_file(path, "old").ok());
  ASSERT_TRUE(write_file(path, bytes).ok());
  EXPECT_TRUE(file_exists(path));
  EXPECT_EQ(read_file(path).value(), bytes);
  auto mapped = MappedFile::open(path);
  ASSERT_TRUE(mapped.ok());
  MappedFile moved = std::move(mapped).value();
  EXPECT_EQ(moved.path(), path);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(moved.bytes().data()), moved.bytes().size()), bytes);
  moved.will_need(5000, 1 << 30);
  ASSERT_TRUE(write_file(path, "").ok());
  EXPECT_EQ(read_file(path).value(), "");
  EXPECT_TRUE(MappedFile::open(path).value().bytes().empty());
  ::unlink(path.c_str());
  EXPECT_FALSE(file_exists(path));
  EXPECT_EQ(read_file(path).status().code(), StatusCode::kNotFound);
  EXPECT_NE(MappedFile::open(path).status().message().find(path), std::string::npos);
  EXPECT_FALSE(read_file(directory).ok());
  EXPECT_FALSE(MappedFile::open(directory).ok());
  EXPECT_FALSE(write_file(join_path(path, "x"), "").ok());
}

TEST(ThreadPool, CoversRangesExactlyOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int64_t count : {0, 1, 2, 3, 7, 8, 63, 64, 65, 1000, 4097}) {
      for (const int64_t grain : {0, 1, 2, 5, 64, 5000}) {
        std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
        std::atomic<bool> aligned{true};
        pool.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
          const int64_t step = std::max<int64_t>(grain, 1);
          if (begin % step != 0 || (end != count && end % step != 0) || begin >= end || end > count) aligned = false;
          for (int64_t i = begin; i < end; ++i) hits[static_cast<size_t>(i)].fetch_add(1);
        });
        EXPECT_TRUE(aligned);
        for (const auto& hit : hits) ASSERT_EQ(hit.load(), 1) << threads << " " << count << " " << grain;
      }
    }
  }
}

TEST(ThreadPool, ManyShortJobs) {
  ThreadPool pool(4);
  int64_t total = 0;
  std::vector<int64_t> values(16);
  for (int round = 0; round < 20000; ++round) {
    // Plain writes: the end of parallel_for must order them before the reads below.
    pool.parallel_for(16, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(i)] = round + i;
    });
    for (const int64_t value : values) total += value;
  }
  EXPECT_EQ(total, 16LL * (19999LL * 20000 / 2) + 20000LL * 120);
  EXPECT_GE(num_usable_cpus(), 1);
}

TEST(Rng, PhiloxKnownAnswers) {
  // The test vectors of the paper's own library.
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t f = 0xffffffff;
  EXPECT_EQ(philox4x32({f, f, f, f}, {f, f}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, NormalHasItsMoments) {
  Rng rng(7);
  double sum = 0, squares = 0, fourth = 0;
  constexpr int kDraws = 200000;
  for (int i = 0; i < kDraws; ++i) {
    const double x = rng.normal();
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
  }
  EXPECT_NEAR(sum / kDraws, 0.0, 0.01);
  EXPECT_NEAR(squares / kDraws, 1.0, 0.02);
  EXPECT_NEAR(fourth / kDraws, 3.0, 0.12);
  Rng again(7), other(8);
  EXPECT_EQ(Rng(7).normal(), again.normal());
  EXPECT_NE(Rng(7).normal(), other.normal());
}

}  // namespace
}  // namespace moat
