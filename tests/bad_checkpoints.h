// SPDX-License-Identifier: Apache-2.0
// Checkpoints that must be refused, as data: what is changed in a good one, and what the message must say.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tiny_checkpoint.h"

namespace moat {

struct BadCheckpoint {
  const char* kind;
  const char* what;
  std::vector<const char*> message;                     // all of these are in it
  std::function<void(TinyCheckpoint&)> edit = {};       // before writing
  std::function<void(const std::string&)> damage = {};  // of the directory, after writing
};

namespace bad {

inline std::string shard(const std::string& dir, int i) { return join_path(dir, TinyCheckpoint::kShards[i]); }
inline std::string index(const std::string& dir) { return join_path(dir, "model.safetensors.index.json"); }

using Damage = std::function<void(const std::string&)>;

// The first shard's header as JSON; names of its tensors in file order.
inline Damage header(std::function<void(Json&)> change) {
  return [change](const std::string& dir) {
    FileParts parts = split_file(shard(dir, 0));
    Json json = *parse_json(parts.header);
    change(json);
    parts.header = json.dump();
    join_file(shard(dir, 0), parts);
  };
}
// ... as text: for what JSON values cannot hold, such as duplicate keys.
inline Damage header_text(std::string from, std::string to) {
  return [from, to](const std::string& dir) {
    FileParts parts = split_file(shard(dir, 0));
    parts.header = replaced(parts.header, from, to);
    join_file(shard(dir, 0), parts);
  };
}
inline Damage bytes(std::function<void(std::string&)> change) {
  return [change](const std::string& dir) {
    std::string text = slurp(shard(dir, 0));
    change(text);
    spill(shard(dir, 0), text);
  };
}
inline Damage length(uint64_t value) {
  return bytes([value](std::string& text) { std::memcpy(text.data(), &value, 8); });
}
inline Damage index_text(std::function<std::string(std::string)> change) {
  return [change](const std::string& dir) { spill(index(dir), change(slurp(index(dir)))); };
}
inline Json offsets(int64_t begin, int64_t end) { return Json::array({begin, end}); }
inline Json& nth(Json& header, size_t i) { return header.as_object()[i].second; }
inline int64_t begin_of(Json& header, size_t i) {
  return *nth(header, i).find("data_offsets")->as_array()[0].as_int64();
}
inline int64_t end_of(Json& header, size_t i) { return *nth(header, i).find("data_offsets")->as_array()[1].as_int64(); }
inline void move_to(Json& header, size_t i, int64_t begin) {
  const int64_t size = end_of(header, i) - begin_of(header, i);
  nth(header, i).set("data_offsets", offsets(begin, begin + size));
}
inline void poke(TinyCheckpoint& c, std::string_view suffix, size_t at, unsigned char value) {
  c.tensor(suffix).bytes.at(at) = static_cast<char>(value);
}
inline void poke_f32(TinyCheckpoint& c, std::string_view suffix, size_t at, float value) {
  std::memcpy(c.tensor(suffix).bytes.data() + 4 * at, &value, 4);
}

}  // namespace bad

inline std::vector<BadCheckpoint> bad_headers() {
  using namespace bad;
  const char* kFile = "model-00001-of-000002.safetensors";
  const char* kEmbed = "language_model.model.embed_tokens.weight";
  const char* kConv = "layers.0.self_attn.q_conv1d.weight";
  using C = TinyCheckpoint;
  return {
      {"header bounds", "length 0", {kFile, "header length 0"}, {}, length(0)},
      {"header bounds", "length 1", {kFile, "header length 1"}, {}, length(1)},
      {"header bounds", "length 2^63", {kFile, "header length 9223372036854775808"}, {}, length(uint64_t{1} << 63)},
      {"header bounds", "length 2^64 - 1", {kFile, "header length"}, {}, length(~uint64_t{0})},
      {"header bounds", "one byte more than the file", {kFile, "at most"}, {}, bytes([](std::string& t) {
         const uint64_t n = t.size() - 7;
         std::memcpy(t.data(), &n, 8);
       })},
      {"header bounds",
       "length beyond the limit of the format",
       {kFile, "header length 100000001"},
       {},
       length(100'000'001)},
      {"header bounds", "seven bytes", {kFile, "file of 7 bytes"}, {}, bytes([](std::string& t) { t.resize(7); })},
      {"header bounds", "empty file", {kFile, "file of 0 bytes"}, {}, bytes([](std::string& t) { t.clear(); })},
      {"header bounds", "header is a list", {kFile, "header begins"}, {}, bytes([](std::string& t) { t[8] = '['; })},
      {"header bounds",
       "deep nesting",
       {kFile, "nested deeper"},
       {},
       header_text("{", "{\"a\":[[[[[[[[[[[]]]]]]]]]]],")},

      {"overlap", "second tensor onto the first", {kFile, "overlaps"}, {}, header([](Json& h) { move_to(h, 1, 0); })},
      {"overlap", "by two bytes", {kFile, "overlaps"}, {}, header([](Json& h) { move_to(h, 1, begin_of(h, 1) - 2); })},
      {"overlap", "last onto the one before", {kFile, "overlaps"}, {}, header([](Json& h) {
         const size_t n = h.as_object().size();
         move_to(h, n - 1, begin_of(h, n - 1) - 1);
       })},
      {"overlap", "all at the beginning", {kFile, "overlaps"}, {}, header([](Json& h) {
         for (size_t i = 0; i < h.as_object().size(); ++i) move_to(h, i, 0);
       })},

      {"overflow", "2^62 x 4", {kFile, kEmbed, "overflows"}, {}, header([](Json& h) {
         nth(h, 0).set("shape", Json::array({int64_t{1} << 62, 4}));
       })},
      {"overflow", "2^32 x 2^32", {kFile, kEmbed, "overflows"}, {}, header([](Json& h) {
         nth(h, 0).set("shape", Json::array({int64_t{1} << 32, int64_t{1} << 32}));
       })},
      {"overflow", "hidden by a zero", {kFile, kEmbed, "overflows"}, {}, header([](Json& h) {
         nth(h, 0).set("shape", Json::array({0, int64_t{1} << 40, int64_t{1} << 40}));
       })},
      {"overflow", "bytes beyond 2^63", {kFile, kEmbed, "overflows"}, {}, header([](Json& h) {
         nth(h, 0).set("shape", Json::array({int64_t{1} << 62}));
       })},
      {"overflow", "offset beyond 2^64", {kFile, kEmbed, "data_offsets"}, {}, header([](Json& h) {
         nth(h, 0).set("data_offsets", Json::array({0, Json::Number{"18446744073709551872"}}));
       })},
      {"overflow", "negative dimension", {kFile, kEmbed, "dimension 0"}, {}, header([](Json& h) {
         nth(h, 0).set("shape", Json::array({-8, -16}));
       })},
      {"overflow", "six dimensions", {kFile, kEmbed, "6 dimensions"}, {}, header([](Json& h) {
         nth(h, 0).set("shape", Json::array({1, 1, 1, 1, 8, 16}));
       })},

      {"duplicate",
       "same name twice",
       {kFile, "duplicate key", kEmbed},
       {},
       header_text(
           "{",
           "{\"language_model.model.embed_tokens.weight\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},")},
      {"duplicate",
       "same key twice",
       {kFile, "duplicate key", "dtype"},
       {},
       header_text("\"dtype\"", "\"dtype\":\"U8\",\"dtype\"")},
      {"duplicate",
       "two metadata objects",
       {kFile, "duplicate key"},
       {},
       header_text("{", "{\"__metadata__\":{},\"__metadata__\":{},")},
      {"duplicate", "in two shards", {"tensor language_model.lm_head.weight", "also in"}, {}, header([](Json& h) {
         h.as_object()[0].first = "language_model.lm_head.weight";
       })},
      {"duplicate", "in the index", {"index.json", "duplicate key"}, {}, index_text([](std::string t) {
         return replaced(t, "\"weight_map\":{", "\"weight_map\":{\"language_model.lm_head.weight\":\"a.safetensors\",");
       })},

      {"dtype",
       "matrix in f16",
       {kFile, "q_proj.weight", "f16", "expected bf16 or f32"},
       [](C& c) {
         c.reshape("layers.0.self_attn.q_proj.weight", DType::kF16, {8, 16});
       }},
      {"dtype",
       "scales in bf16",
       {"w1.weight_scale", "bf16", "expected u8"},
       [](C& c) {
         c.reshape("experts.0.w1.weight_scale", DType::kBF16, {64, 1});
       }},
      {"dtype",
       "A_log in i32",
       {kFile, "A_log", "i32"},
       [](C& c) { c.reshape("layers.0.self_attn.A_log", DType::kI32, {128}); }},
      {"dtype",
       "norm in f64",
       {"model.norm.weight", "f64"},
       [](C& c) { c.reshape("model.norm.weight", DType::kF64, {16}); }},
      {"dtype", "8-bit float", {kFile, kConv, "F8_E4M3"}, {}, header([=](Json& h) {
         h.find("language_model.model.layers.0.self_attn.q_conv1d.weight")->set("dtype", "F8_E4M3");
       })},
      {"dtype", "boolean", {kFile, kEmbed, "256 bytes, expected 128 for u8"}, {}, header([](Json& h) {
         nth(h, 0).set("dtype", "BOOL");
       })},
      {"dtype", "a number", {kFile, kEmbed, "dtype is a number"}, {}, header([](Json& h) {
         nth(h, 0).set("dtype", 4);
       })},
      {"dtype", "other size than its bytes", {kFile, kEmbed, "256 bytes, expected 512"}, {}, header([](Json& h) {
         nth(h, 0).set("dtype", "F32");
       })},

      {"header entry", "no name", {kFile, "empty name"}, {}, header([](Json& h) { h.as_object()[0].first = ""; })},
      {"header entry", "long name", {kFile, "name of 1025 bytes"}, {}, header([](Json& h) {
         h.as_object()[0].first.assign(1025, 'x');
       })},
      {"header entry", "no offsets", {kFile, kEmbed, "data_offsets is missing"}, {}, header([](Json& h) {
         nth(h, 0).as_object().pop_back();
       })},
      {"header entry", "another key", {kFile, kEmbed, "unknown key strides"}, {}, header([](Json& h) {
         nth(h, 0).set("strides", 1);
       })},
      {"header entry", "end before begin", {kFile, kEmbed, "data_offsets"}, {}, header([](Json& h) {
         nth(h, 0).set("data_offsets", offsets(256, 0));
       })},
      {"header entry", "three offsets", {kFile, kEmbed, "data_offsets"}, {}, header([](Json& h) {
         nth(h, 0).set("data_offsets", Json::array({0, 1, 256}));
       })},
      {"header entry", "not an object", {kFile, kEmbed, "got a null"}, {}, header([](Json& h) { nth(h, 0) = Json(); })},
      {"header entry", "metadata of numbers", {kFile, "__metadata__", "a is a number"}, {}, header([](Json& h) {
         h.set("__metadata__", Json::object({{"a", 1}}));
       })},
  };
}

inline std::vector<BadCheckpoint> bad_files() {
  using namespace bad;
  const char* kFile = "model-00001-of-000002.safetensors";
  using C = TinyCheckpoint;
  return {
      {"truncated", "last byte", {kFile, "truncated", "kv_a_proj_with_mqa"}, {}, bytes([](std::string& t) {
         t.pop_back();
       })},
      {"truncated", "in the middle of the data", {kFile, "truncated"}, {}, bytes([](std::string& t) {
         t.resize(t.size() - 2000);
       })},
      {"truncated",
       "right after the header",
       {kFile, "truncated", "embed_tokens"},
       {},
       [](const std::string& dir) {
         FileParts p = split_file(shard(dir, 0));
         p.data.clear();
         join_file(shard(dir, 0), p);
       }},
      {"truncated", "in the header", {kFile, "header length", "the file has 100 bytes"}, {}, bytes([](std::string& t) {
         t.resize(100);
       })},
      {"truncated", "after the length", {kFile, "header length", "the file has 8 bytes"}, {}, bytes([](std::string& t) {
         t.resize(8);
       })},

      {"missing shard",
       "first",
       {kFile, "1 of 2 shards missing", "embed_tokens"},
       {},
       [](const std::string& d) { std::filesystem::remove(shard(d, 0)); }},
      {"missing shard",
       "second",
       {"model-00002-of-000002.safetensors", "1 of 2", "tensors from"},
       {},
       [](const std::string& d) { std::filesystem::remove(shard(d, 1)); }},
      {"missing shard",
       "both",
       {kFile, "2 of 2 shards missing"},
       {},
       [](const std::string& d) {
         std::filesystem::remove(shard(d, 0));
         std::filesystem::remove(shard(d, 1));
       }},
      {"missing shard",
       "a directory in its place",
       {kFile, "is a directory"},
       {},
       [](const std::string& d) {
         std::filesystem::remove(shard(d, 0));
         std::filesystem::create_directory(shard(d, 0));
       }},
      {"missing shard",
       "no index and no single file",
       {"no checkpoint, expected model.safetensors"},
       {},
       [](const std::string& d) { std::filesystem::remove(index(d)); }},

      {"hole",
       "before the first tensor",
       {kFile, "embed_tokens", "belong to no tensor"},
       {},
       [](const std::string& dir) {
         header([](Json& h) {
           for (size_t i = 0; i < h.as_object().size(); ++i) move_to(h, i, begin_of(h, i) + 8);
         })(dir);
         bytes([](std::string& t) { t += std::string(8, '\0'); })(dir);
       }},
      {"hole",
       "before the last tensor",
       {kFile, "kv_a_proj_with_mqa", "belong to no tensor"},
       {},
       [](const std::string& dir) {
         header([](Json& h) {
           const size_t n = h.as_object().size();
           move_to(h, n - 1, begin_of(h, n - 1) + 2);
         })(dir);
         bytes([](std::string& t) { t += std::string(2, '\0'); })(dir);
       }},
      {"hole", "one trailing byte", {kFile, "1 trailing bytes"}, {}, bytes([](std::string& t) { t += 'x'; })},
      {"hole", "a trailing page", {kFile, "4096 trailing bytes"}, {}, bytes([](std::string& t) {
         t += std::string(4096, '\0');
       })},
      {"hole", "a tensor left out of the header", {kFile, "belong to no tensor"}, {}, header([](Json& h) {
         h.as_object().erase(h.as_object().begin() + 3);
       })},

      {"shape",
       "transposed",
       {kFile, "q_proj.weight", "[16, 8]", "expected [8, 16]"},
       [](C& c) {
         c.tensor("layers.0.self_attn.q_proj.weight").dims = {16, 8};
       }},
      {"shape",
       "one row fewer",
       {kFile, "embed_tokens.weight", "[7, 16]"},
       [](C& c) {
         c.reshape("embed_tokens.weight", DType::kBF16, {7, 16});
       }},
      {"shape",
       "another rank",
       {kFile, "k_conv1d.weight", "[8, 4]", "expected [8, 1, 4]"},
       [](C& c) {
         c.tensor("k_conv1d.weight").dims = {8, 4};
       }},
      {"shape",
       "A_log with one head",
       {kFile, "A_log", "at least 2 values"},
       [](C& c) { c.reshape("A_log", DType::kF32, {1}); }},
      {"shape",
       "codes not packed",
       {"w2.weight_packed", "[32, 64]", "expected [32, 32]"},
       [](C& c) {
         c.reshape("experts.1.w2.weight_packed", DType::kU8, {32, 64});
       }},
      {"shape",
       "scales of groups of 16",
       {"w1.weight_scale", "[64, 2]", "expected [64, 1]"},
       [](C& c) {
         c.reshape("experts.0.w1.weight_scale", DType::kU8, {64, 2});
       }},

      {"missing tensor", "final norm", {"1 of", "model.norm.weight"}, [](C& c) { c.erase("model.norm.weight"); }},
      {"missing tensor",
       "scales of an expert",
       {"experts.1.w3.weight_scale"},
       [](C& c) { c.erase("experts.1.w3.weight_scale"); }},
      {"missing tensor", "head", {"language_model.lm_head.weight"}, [](C& c) { c.erase("lm_head.weight"); }},
      {"missing tensor",
       "output gate",
       {"layers.1.self_attn.g_proj.weight"},
       [](C& c) { c.erase("layers.1.self_attn.g_proj.weight"); }},
      {"missing tensor",
       "two, under another name",
       {"missing", "dt_bias", "1 unknown", "dt_bios"},
       [](C& c) { c.tensor("dt_bias").name = "language_model.model.layers.0.self_attn.dt_bios"; }},

      {"unknown tensor",
       "a bias",
       {"model-00002", "q_b_proj.bias", "does not name"},
       [](C& c) { c.add("language_model.model.layers.1.self_attn.q_b_proj.bias", DType::kBF16, {12}); }},
      {"unknown tensor",
       "a third expert",
       {"model-00002", "experts.2.w1.weight_packed"},
       [](C& c) {
         c.add("language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight_packed", DType::kU8, {64, 16});
       }},
      {"unknown tensor",
       "a third layer",
       {"model-00002", "layers.2.input_layernorm"},
       [](C& c) { c.add("language_model.model.layers.2.input_layernorm.weight", DType::kBF16, {16}); }},
      {"unknown tensor",
       "almost vision",
       {"model-00002", "vision_towers"},
       [](C& c) { c.add("vision_towers.x", DType::kBF16, {1}); }},
      {"unknown tensor",
       "global scale of another format",
       {"weight_global_scale"},
       [](C& c) {
         c.add("language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_global_scale", DType::kF32, {1});
       }},

      {"index", "not JSON", {"index.json", "invalid JSON"}, {}, index_text([](const std::string&) {
         return std::string("{\"weight_map\":");
       })},
      {"index", "a list", {"index.json", "got a array"}, {}, index_text([](const std::string&) {
         return std::string("[]");
       })},
      {"index", "no map", {"index.json", "weight_map: missing"}, {}, index_text([](const std::string&) {
         return std::string("{}");
       })},
      {"index", "empty map", {"index.json", "weight_map: empty"}, {}, index_text([](const std::string&) {
         return std::string(R"({"weight_map":{}})");
       })},
      {"index", "a number as file", {"index.json", "tensor a: got a number"}, {}, index_text([](const std::string&) {
         return std::string(R"({"weight_map":{"a":1}})");
       })},
      {"index",
       "out of the directory",
       {"index.json", "../x.safetensors", "plain name"},
       {},
       index_text([](const std::string&) { return std::string(R"({"weight_map":{"a":"../x.safetensors"}})"); })},
      {"index",
       "absolute path",
       {"index.json", "/etc/x.safetensors", "plain name"},
       {},
       index_text([](const std::string&) { return std::string(R"({"weight_map":{"a":"/etc/x.safetensors"}})"); })},
      {"index", "zero byte in the name", {"index.json", "plain name"}, {}, index_text([](const std::string&) {
         return std::string(R"({"weight_map":{"a":"x\u0000.safetensors"}})");
       })},
      {"index",
       "another kind of file",
       {"index.json", "model.bin", "plain name"},
       {},
       index_text([](const std::string&) { return std::string(R"({"weight_map":{"a":"model.bin"}})"); })},
      {"index", "negative size", {"index.json", "total_size"}, {}, index_text([](std::string t) {
         return replaced(t, "\"metadata\":{}", "\"metadata\":{\"total_size\":-1}");
       })},
      {"index",
       "tensor in the other shard",
       {kFile, "embed_tokens.weight", "found in"},
       {},
       index_text([](std::string t) {
         return replaced(t, "embed_tokens.weight\":\"model-00001", "embed_tokens.weight\":\"model-00002");
       })},
      {"index",
       "tensor that no shard has",
       {kFile, "tensor ghost", "not in this file"},
       {},
       index_text([](std::string t) {
         return replaced(t, "\"weight_map\":{", "\"weight_map\":{\"ghost\":\"model-00001-of-000002.safetensors\",");
       })},
      {"index",
       "tensor that it does not list",
       {kFile, "embed_tokens.weight", "not listed"},
       {},
       index_text([](std::string t) {
         return replaced(t, "\"language_model.model.embed_tokens.weight\":\"model-00001-of-000002.safetensors\",", "");
       })},

      {"NaN scale",
       "first",
       {"experts.0.w1.weight_scale", "[0, 0]", "NaN"},
       [](C& c) { poke(c, "experts.0.w1.weight_scale", 0, 255); }},
      {"NaN scale",
       "last",
       {"experts.1.w2.weight_scale", "[31, 1]"},
       [](C& c) { poke(c, "experts.1.w2.weight_scale", 63, 255); }},
      {"NaN scale",
       "in the middle",
       {"experts.0.w2.weight_scale", "[16, 1]"},
       [](C& c) { poke(c, "experts.0.w2.weight_scale", 33, 255); }},
      {"NaN scale",
       "two tensors: the first in the file is named",
       {"experts.0.w3.weight_scale", "[5, 0]"},
       [](C& c) {
         poke(c, "experts.0.w3.weight_scale", 5, 255);
         poke(c, "experts.1.w1.weight_scale", 2, 255);
       }},

      {"A_log padding", "first", {kFile, "A_log", "value 2 is not zero"}, [](C& c) { poke_f32(c, "A_log", 2, 1.0F); }},
      {"A_log padding", "last", {kFile, "A_log", "value 127"}, [](C& c) { poke_f32(c, "A_log", 127, -1e-30F); }},
      {"A_log padding", "NaN", {kFile, "A_log", "value 64"}, [](C& c) { poke_f32(c, "A_log", 64, std::nanf("")); }},
      {"A_log padding",
       "in another shape",
       {kFile, "A_log", "value 3"},
       [](C& c) {
         c.reshape("A_log", DType::kF32, {1, 1, 4, 1});
         poke_f32(c, "A_log", 3, 2.0F);
       }},

      {"config",
       "not JSON",
       {"config.json", "invalid JSON"},
       {},
       [](const std::string& d) { spill(join_path(d, "config.json"), "{"); }},
      {"config",
       "missing",
       {"config.json", "cannot open"},
       {},
       [](const std::string& d) { std::filesystem::remove(join_path(d, "config.json")); }},
      {"config",
       "groups do not fit the experts",
       {"moe_intermediate_size", "multiple of 32"},
       [](C& c) {
         c.text().set("moe_intermediate_size", 48);
         c.text().set("quantization_config", nullptr);
       }},
      {"config",
       "more heads than the tensors",
       {"q_proj.weight", "[8, 16]", "expected [16, 16]"},
       [](C& c) { c.text().find("linear_attn_config")->set("num_heads", 4); }},
  };
}

}  // namespace moat
