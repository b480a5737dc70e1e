// SPDX-License-Identifier: Apache-2.0
// The commands as people and scripts call them: the moat binary as a process, its output against the goldens.
#include <gtest/gtest.h>

#include <cmath>

#include "chat_goldens.h"
#include "golden_file.h"
#include "main/common.h"
#include "ops/op.h"
#include "process.h"
#include "server_harness.h"

namespace moat {
namespace {

using test::Finished;
using test::golden_dir;
using test::GoldenFile;
using test::run_moat;
using test::ScratchDir;

std::string nano_dir() { return test::source_dir() + "/models/moat-nano"; }
std::string dspark_dir() { return nano_dir() + "-dspark"; }
std::string small_dir() { return golden_dir() + "/k3-random-small"; }

Json golden_json(const std::string& name) {
  const Result<std::string> text = read_file(golden_dir() + "/" + name);
  EXPECT_TRUE(text.ok()) << text.status().message();
  return text.ok() ? parsed(*text) : Json();
}

Ids ids_of(const Json& list) {
  Ids ids;
  for (const Json& id : items(list)) ids.push_back(static_cast<int32_t>(number(id)));
  return ids;
}

std::string base64_decoded(std::string_view text) {
  static constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text.substr(0, text.find('='))) {
    bits = bits << 6 | static_cast<uint32_t>(kDigits.find(c));
    count += 6;
    if (count < 8) continue;
    count -= 8;
    bytes += static_cast<char>(bits >> count & 0xff);
  }
  return bytes;
}

// The JSON that a command prints when it succeeds.
Json json_of(const Finished& finished) {
  EXPECT_EQ(finished.status, 0) << finished.err;
  return parsed(finished.out);
}

// Fails with the usual form: status 1, one last line "moat: ..." that holds all of `parts`, nothing on stdout.
void expect_failure(const std::vector<std::string>& arguments, const std::vector<std::string>& parts,
                    const std::string& input = "") {
  const Finished f = run_moat(arguments, input);
  SCOPED_TRACE(fmt::format("moat {}", fmt::join(arguments, " ")));
  EXPECT_EQ(f.status, 1) << f.err;
  EXPECT_EQ(f.out, "");
  const size_t at = f.err.rfind("moat: ");
  ASSERT_NE(at, std::string::npos) << f.err;
  const std::string message = f.err.substr(at);
  EXPECT_EQ(message.find('\n'), message.size() - 1) << message;
  for (const std::string& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message << "lacks " << part;
}

// ---------------------------------------------------------------------------------------------------- text

// A process a row, so not every row; text_test takes them all.
TEST(Tokenize, Goldens) {
  const Json golden = golden_json("text/tokenizer.json");
  const Json::Array ordinary = items(at(golden, "ordinary"));
  ASSERT_GE(ordinary.size(), 280U);
  for (size_t i = 0; i < ordinary.size(); i += 8) {
    const std::string text = at(ordinary[i], "text").as_string();
    EXPECT_EQ(json_of(run_moat({"tokenize", "-m", nano_dir()}, text)), at(ordinary[i], "ids")) << text;
  }
  for (const Json& row : items(at(golden, "invalid_utf8"))) {
    const std::string bytes = base64_decoded(at(row, "base64").as_string());
    EXPECT_EQ(json_of(run_moat({"tokenize", "-m", nano_dir()}, bytes)), at(row, "ids")) << row.dump();
  }
}

TEST(Tokenize, MarkupIsOnlyReadWhenAskedFor) {
  const Json golden = golden_json("text/tokenizer.json");
  for (const Json& row : items(at(golden, "with_special"))) {
    const std::string text = at(row, "text").as_string();
    EXPECT_EQ(json_of(run_moat({"tokenize", "-m", nano_dir(), "--markup"}, text)), at(row, "ids")) << text;
    for (const int32_t id : ids_of(json_of(run_moat({"tokenize", "-m", nano_dir()}, text)))) {
      EXPECT_FALSE(nano().is_reserved(id)) << text;
    }
  }
}

TEST(Tokenize, Decode) {
  for (const Json& row : items(at(golden_json("text/tokenizer.json"), "decode"))) {
    const Finished f = run_moat({"tokenize", "-m", nano_dir(), "--decode"}, at(row, "ids").dump());
    EXPECT_EQ(f.status, 0) << f.err;
    EXPECT_EQ(f.out, base64_decoded(at(row, "base64").as_string())) << row.dump();
  }
  expect_failure({"tokenize", "-m", nano_dir(), "--decode"}, {"5120", "[0, 5120)"}, "[1, 5120]");
  expect_failure({"tokenize", "-m", nano_dir(), "--decode"}, {"1.5"}, "[1.5]");
  expect_failure({"tokenize", "-m", nano_dir(), "--decode"}, {"object", "expected a list"}, "{}");
  expect_failure({"tokenize", "-m", nano_dir(), "--decode"}, {"standard input"}, "[1, ");
}

// A golden row as the request that an API client would send; nothing if the API cannot say it.
std::optional<Json> as_request(const Json& row) {
  const Json options = at(row, "options");
  const Json* thinking = options.find("thinking");
  const Json* effort = options.find("thinking_effort");
  const bool thinks = thinking == nullptr || thinking->as_bool();
  if (options.find("add_generation_prompt") != nullptr) return std::nullopt;
  Json request = Json::object({{"messages", at(row, "messages")}});
  Json kwargs = Json::object();
  if (!thinks) kwargs.set("thinking", false);
  // The API tells an effort to a model that thinks unless null says not to.
  if (thinks && effort == nullptr) kwargs.set("thinking_effort", Json());
  if (!kwargs.as_object().empty()) request.set("chat_template_kwargs", std::move(kwargs));
  if (effort != nullptr) request.set("reasoning_effort", *effort);
  for (const char* key : {"tools", "tool_choice", "response_format"}) {
    if (const Json* value = options.find(key)) request.set(key, *value);
  }
  return request;
}

TEST(Render, Goldens) {
  int compared = 0, skipped = 0;
  for (const Json& row : items(golden_json("text/chat.json"))) {
    const std::optional<Json> request = as_request(row);
    if (!request) {
      ++skipped;
      continue;
    }
    const Json rendered = json_of(run_moat({"render", "-m", nano_dir()}, request->dump()));
    std::string text;
    for (const Json& segment : items(at(row, "segments"))) text += at(segment, 0).as_string();
    EXPECT_EQ(at(rendered, "ids"), at(row, "ids")) << request->dump();
    EXPECT_EQ(at(rendered, "text"), Json(text));
    ++compared;
  }
  EXPECT_GE(compared, 24);
  fmt::print("render: {} rows compared, {} that no API request expresses left out\n", compared, skipped);
}

// A row without an effort is what the API renders with effort max, less the message that says so.
TEST(Render, EffortIsMaxUnlessGiven) {
  int compared = 0;
  const std::string effort_end = "`thinking_effort=max`.<|close|>message<|sep|><|end_of_msg|>";
  for (const Json& row : items(golden_json("text/chat.json"))) {
    const Json options = at(row, "options");
    if (options.find("thinking") || options.find("thinking_effort") || options.find("add_generation_prompt")) continue;
    Json request = Json::object({{"messages", at(row, "messages")}});
    for (const auto& [key, value] : options.as_object()) request.set(key, value);
    std::string text = at(json_of(run_moat({"render", "-m", nano_dir()}, request.dump())), "text").as_string();
    const size_t begin = text.find("<|open|>message role=\"system\" type=\"thinking-effort\"");
    const size_t end = text.find(effort_end, begin);
    ASSERT_NE(begin, std::string::npos) << text;
    ASSERT_NE(end, std::string::npos) << text;
    text.erase(begin, end + effort_end.size() - begin);
    std::string expected;
    for (const Json& segment : items(at(row, "segments"))) expected += at(segment, 0).as_string();
    EXPECT_EQ(text, expected);
    ++compared;
  }
  EXPECT_GE(compared, 10);
}

TEST(Render, Errors) {
  const std::vector<std::string> render = {"render", "-m", nano_dir()};
  expect_failure(render, {"standard input"}, "{\"messages\": ");
  expect_failure(render, {"messages"}, "{}");
  expect_failure(render, {"messages", "role"}, R"({"messages": [{"role": "judge", "content": "x"}]})");
  expect_failure(render, {"reasoning_effort", "enormous"},
                 R"({"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "enormous"})");
}

// -------------------------------------------------------------------------------------------------- logits

// Runs `moat logits` on the prompts of the goldens and returns the largest difference; the last rows where a golden
// holds no more.
float logits_error(const std::string& model, const std::vector<std::string>& more,
                   const std::vector<std::pair<std::string, std::string>>& names) {
  const ScratchDir scratch;
  const GoldenFile golden((model == nano_dir() ? golden_dir() + "/moat-nano" : model) + "/golden.safetensors");
  Json lists = Json::array();
  for (const auto& [ids_name, logits_name] : names) {
    const Ids ids = golden.ints(ids_name);
    lists.push_back(Json::Array(ids.begin(), ids.end()));
  }
  std::vector<std::string> arguments = {
      "logits", "-m", model, "--ids", scratch.write("ids.json", lists.dump()), "-o", scratch / "out.safetensors"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Finished f = run_moat(arguments);
  EXPECT_EQ(f.status, 0) << f.err;
  EXPECT_EQ(f.out, "");
  if (f.status != 0) return INFINITY;
  const GoldenFile written(scratch / "out.safetensors");
  EXPECT_FALSE(written.has(fmt::format("logits.{}", names.size())));
  float worst = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const Tensor got = written.tensor(fmt::format("logits.{}", i));
    const Tensor want = golden.tensor(names[i].second);
    EXPECT_EQ(got.dtype, DType::kF32);
    EXPECT_EQ(got.dims[0], static_cast<int64_t>(golden.ints(names[i].first).size()));
    EXPECT_EQ(got.dims[1], want.dims[1]);
    const float* tail = got.f32() + (got.count() - want.count());
    for (int64_t k = 0; k < want.count(); ++k) {
      const float error = std::fabs(tail[k] - want.f32()[k]);
      if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
    }
  }
  fmt::print("logits {} {}: largest error {:.2g}\n", model.substr(model.rfind('/') + 1), fmt::join(more, " "), worst);
  return worst;
}

const std::vector<std::pair<std::string, std::string>> kAllPrompts = {
    {"p17.ids", "p17.logits"}, {"p1.ids", "p1.logits"}, {"p150.ids", "p150.logits"}};

TEST(Logits, Goldens) {
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {}, {"--chunk", "1"}, {"--chunk", "7"}, {"--chunk", "64"}, {"--threads", "1"}}) {
    EXPECT_LT(logits_error(small_dir(), more, kAllPrompts), 3e-4F);
    EXPECT_LT(logits_error(nano_dir(), more, kAllPrompts), 3e-4F);
  }
  EXPECT_LT(logits_error(golden_dir() + "/hf/kimi_linear", {},
                         {{"ids_1", "logits_1"}, {"ids_17", "logits_17"}, {"ids_150", "logits_150"}}),
            1e-4F);
}

TEST(Logits, Reference) {
  const std::vector<std::string> reference = {"--backend", "reference"};
  EXPECT_LT(logits_error(small_dir(), reference, {{"p17.ids", "p17.logits"}, {"p1.ids", "p1.logits"}}), 3e-4F);
  EXPECT_LT(logits_error(nano_dir(), reference, {{"p17.ids", "p17.logits"}}), 3e-4F);
}

TEST(Logits, Errors) {
  const ScratchDir scratch;
  const std::string out = scratch / "out.safetensors";
  const auto with_ids = [&](const std::string& ids) {
    return std::vector<std::string>{"logits", "-m", nano_dir(), "--ids", scratch.write("ids.json", ids), "-o", out};
  };
  EXPECT_EQ(run_moat(with_ids("[[1], []]")).status, 0) << "an empty list has logits of no position";
  expect_failure(with_ids("[[1, 2, 5120]]"), {"5120", "[0, 5120)"});
  expect_failure(with_ids("[[-1]]"), {"-1", "[0, 5120)"});
  expect_failure(with_ids("[1, 2]"), {"number", "expected a list"});
  expect_failure(with_ids("[[1, \"2\"]]"), {"\"2\"", "integer"});
  expect_failure(with_ids("{\"ids\": []}"), {"ids.json", "object", "list of lists"});
  expect_failure(with_ids("[["), {"ids.json"});
  expect_failure({"logits", "-m", nano_dir(), "--ids", scratch / "absent.json", "-o", out}, {"absent.json"});
  std::vector<std::string> unwritable = with_ids("[[1]]");
  unwritable.back() = scratch / "no/such/directory/out.safetensors";
  expect_failure(unwritable, {"no/such/directory/out.safetensors"});
}

// ------------------------------------------------------------------------------------------------ generate

Json generate(std::vector<std::string> more, const std::string& input = "") {
  more.insert(more.begin(), {"generate", "-m", nano_dir(), "--json"});
  return json_of(run_moat(more, input));
}

TEST(Generate, GreedyGoldens) {
  const GoldenFile golden(golden_dir() + "/moat-nano/golden.safetensors");
  const ScratchDir scratch;
  for (const auto& [index, request] : test::greedy_chats()) {
    const std::string name = fmt::format("greedy{}", index);
    const std::string path = scratch.write(name + ".json", request.dump());
    const Json reply = generate({"--messages", path, "--max-tokens", "64", "--temperature", "0", "--ignore-eos"});
    EXPECT_EQ(ids_of(at(reply, "ids")), golden.ints(name + ".ids")) << name;
    const auto prompt = static_cast<int64_t>(golden.ints(name + ".prompt").size());
    EXPECT_EQ(at(reply, "usage"),
              Json::object({{"prompt_tokens", prompt}, {"completion_tokens", 64}, {"total_tokens", prompt + 64}}));
    EXPECT_EQ(at(reply, "text"), Json(nano().decode(golden.ints(name + ".ids"))));
    for (const char* key : {"queue_seconds", "prefill_seconds", "decode_seconds", "tokens_per_second"}) {
      EXPECT_TRUE(at(reply, "timings", key).is_number()) << key;
    }
  }
}

TEST(Generate, MessagesFromAFileOrStandardInput) {
  const Json messages = user_messages("What is a moat?");
  const ScratchDir scratch;
  const std::vector<std::string> rest = {"--max-tokens", "256", "--temperature", "0"};
  std::vector<std::string> from_file = {"--messages", scratch.write("messages.json", messages.dump())};
  std::vector<std::string> from_stdin = {"--messages", "-"};
  from_file.insert(from_file.end(), rest.begin(), rest.end());
  from_stdin.insert(from_stdin.end(), rest.begin(), rest.end());
  const Json reply = generate(from_file);
  EXPECT_EQ(at(reply, "finish_reason"), Json("stop"));
  EXPECT_EQ(ids_of(at(reply, "ids")).back(), kEndOfMsg);
  const std::string answer =
      "A moat is a deep, wide ditch around a castle, usually filled with water, that helps to keep attackers out.";
  EXPECT_EQ(at(reply, "message", "content"), Json(answer));
  EXPECT_NE(at(reply, "message", "reasoning_content").dump().find("moat"), std::string::npos);
  EXPECT_EQ(at(generate(from_stdin, messages.dump()), "ids"), at(reply, "ids"));
  EXPECT_EQ(at(generate(from_stdin, Json::object({{"messages", messages}}).dump()), "ids"), at(reply, "ids"));

  // For a terminal: reasoning, an empty line, the answer; no markup.
  from_stdin.insert(from_stdin.begin(), {"generate", "-m", nano_dir()});
  const Finished shown = run_moat(from_stdin, messages.dump());
  EXPECT_EQ(shown.status, 0) << shown.err;
  EXPECT_EQ(shown.out, at(reply, "message", "reasoning_content").as_string() + "\n\n" + answer + "\n");
}

TEST(Generate, ToolCall) {
  const auto chats = test::greedy_chats();
  const auto chat = std::find_if(chats.begin(), chats.end(), [](const auto& c) { return c.index == 4; });
  const Json reply = generate({"--messages", "-", "--temperature", "0"}, chat->request.dump());
  EXPECT_EQ(at(reply, "finish_reason"), Json("tool_calls"));
  const Json function = at(reply, "message", "tool_calls", 0, "function");
  EXPECT_EQ(at(function, "name"), Json("get_weather"));
  EXPECT_EQ(parsed(at(function, "arguments").as_string()), Json::object({{"city", "Paris"}}));
}

TEST(Generate, Prompt) {
  const std::string prompt = "The capital of France is";
  const Json reply = generate({"--prompt", prompt, "--max-tokens", "6", "--temperature", "0", "--ignore-eos"});
  const auto count = static_cast<int64_t>(nano().encode_text(prompt).size());
  EXPECT_EQ(at(reply, "usage", "prompt_tokens"), Json(count));
  EXPECT_EQ(at(reply, "usage", "completion_tokens"), Json(6));
  EXPECT_EQ(at(reply, "finish_reason"), Json("length"));
  EXPECT_EQ(ids_of(at(reply, "ids")).size(), 6U);
  EXPECT_EQ(at(reply, "message"), Json());
  const Json reference = generate(
      {"--prompt", prompt, "--max-tokens", "6", "--temperature", "0", "--ignore-eos", "--backend", "reference"});
  EXPECT_EQ(at(reference, "ids"), at(reply, "ids"));
}

TEST(Generate, SeedsReproduce) {
  const std::vector<std::string> common = {"--prompt", "Once upon a time", "--max-tokens", "40", "--ignore-eos"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), common.begin(), common.end());
    return ids_of(at(generate(more), "ids"));
  };
  const Ids seven = with({"--temperature", "1", "--seed", "7"});
  EXPECT_EQ(seven.size(), 40U);
  EXPECT_EQ(with({"--temperature", "1", "--seed", "7"}), seven);
  EXPECT_EQ(with({"--temperature", "1", "--seed", "7", "--threads", "1"}), seven) << "the thread count shows";
  EXPECT_NE(with({"--temperature", "1", "--seed", "8"}), seven);
  EXPECT_EQ(with({"--temperature", "0", "--seed", "7"}), with({"--temperature", "0", "--seed", "8"}));
  EXPECT_EQ(with({"--temperature", "0", "--seed", "7"}), with({"--temperature", "1", "--top-p", "1e-6"}));
}

// Drafts change when tokens come, not which: greedy and with a seed, for both drafters and any number of drafts.
TEST(Generate, DraftsDoNotShow) {
  const std::vector<std::vector<std::string>> drafters = {{"--draft", dspark_dir()},
                                                          {"--draft", dspark_dir(), "--num-draft-tokens", "7"},
                                                          {"--draft-ngram"},
                                                          {"--draft", dspark_dir(), "--num-draft-tokens", "0"}};
  const std::vector<std::vector<std::string>> samplings = {{"--temperature", "0"},
                                                           {"--temperature", "0.8", "--top-p", "0.95", "--seed", "7"}};
  for (const std::vector<std::string>& sampling : samplings) {
    std::vector<std::string> common = {"--prompt", "Once upon a time", "--max-tokens", "60", "--ignore-eos"};
    common.insert(common.end(), sampling.begin(), sampling.end());
    const Json plain = generate(common);
    EXPECT_EQ(ids_of(at(plain, "ids")).size(), 60U);
    for (const std::vector<std::string>& drafter : drafters) {
      std::vector<std::string> more = common;
      more.insert(more.end(), drafter.begin(), drafter.end());
      const Json drafted = generate(more);
      for (const char* key : {"ids", "text", "finish_reason"}) EXPECT_EQ(at(drafted, key), at(plain, key));
      for (const char* key : {"prompt_tokens", "completion_tokens", "total_tokens"}) {
        EXPECT_EQ(at(drafted, "usage", key), at(plain, "usage", key));
      }
    }
  }
}

TEST(Generate, DrafterErrors) {
  const auto with_drafter = [](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"generate", "-m", nano_dir(), "--prompt", "a", "--max-tokens", "1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  };
  expect_failure(with_drafter({"--draft", "/no/such/drafter"}), {"/no/such/drafter/config.json", "No such file"});
  expect_failure(with_drafter({"--draft", nano_dir()}), {"architectures", "KimiK3", "DSpark"});
  expect_failure(with_drafter({"--draft", dspark_dir(), "--num-draft-tokens", "8"}), {"8 draft tokens", "at most 7"});
  // A drafter of another target, and one with a tensor too few or of another width.
  const auto config = parsed(*read_file(dspark_dir() + "/config.json"));
  const auto damaged = [&](const char* key, const Json& value) {
    Json changed = config;
    for (Json* part : {changed.find("dflash_config"), &changed}) {
      if (part == nullptr || part->find(key) == nullptr) continue;
      part->set(key, value);
      break;
    }
    auto scratch = std::make_unique<ScratchDir>();
    scratch->write("config.json", changed.dump());
    scratch->write("model.safetensors", *read_file(dspark_dir() + "/model.safetensors"));
    return scratch;
  };
  const auto narrow = damaged("hidden_size", 160), deep = damaged("num_target_layers", 93);
  expect_failure(with_drafter({"--draft", *narrow / ""}), {"160", "192"});
  expect_failure(with_drafter({"--draft", *deep / ""}), {"num_target_layers", "93", "9"});
}

TEST(Generate, Errors) {
  expect_failure({"generate", "-m", nano_dir()}, {"--prompt", "--messages"});
  expect_failure({"generate", "-m", nano_dir(), "--messages", "/no/such/file.json"}, {"/no/such/file.json"});
  expect_failure({"generate", "-m", nano_dir(), "--messages", "-"}, {"standard input", "role"},
                 R"([{"role": "judge", "content": "x"}])");
  std::string long_prompt;
  for (int i = 0; i < 9000; ++i) long_prompt += " the";
  expect_failure({"generate", "-m", nano_dir(), "--prompt", long_prompt}, {"9000", "8192"});
}

// ----------------------------------------------------------------------------------------- inspect, synthetic

TEST(Inspect, MoatNano) {
  const Json report = json_of(run_moat({"inspect", "-m", nano_dir(), "--json"}));
  EXPECT_EQ(at(report, "source"), Json("files"));
  EXPECT_EQ(at(report, "num_files"), Json(2));
  EXPECT_EQ(items(at(report, "layers")).size(), 9U);
  EXPECT_EQ(at(report, "missing"), Json::array());
  EXPECT_EQ(at(report, "unknown"), Json::array());
  const Finished text = run_moat({"inspect", nano_dir()});
  EXPECT_EQ(text.status, 0);
  EXPECT_NE(text.out.find("moat-nano"), std::string::npos);
  EXPECT_NE(text.out.find("kimi_k3"), std::string::npos);
}

TEST(Inspect, TheRelease) {
  const std::string release = golden_dir() + "/kimi-k3-release";
  const Json report = json_of(run_moat({"inspect", "-m", release, "--json"}));
  EXPECT_EQ(at(report, "source"), Json("index"));
  EXPECT_EQ(at(report, "num_tensors"), Json(497'220));
  EXPECT_EQ(at(report, "total_bytes"), Json(int64_t{1'560'860'324'864}));
  EXPECT_EQ(at(report, "index_total_size"), Json(int64_t{1'560'860'324'864}));
  EXPECT_NEAR(at(report, "text_parameters").as_double(), 2.779e12, 0.0005e12);
  EXPECT_NEAR(at(report, "active_parameters").as_double(), 104.19e9, 0.005e9);
  EXPECT_EQ(at(report, "missing"), Json::array());
  EXPECT_EQ(at(report, "unknown"), Json::array());
  const Finished text = run_moat({"inspect", "-m", release});
  EXPECT_EQ(text.status, 0);
  // A state is 69 layers of 96 x 128 x 128 and of 3 x 3 x 96 x 128 f32; a token 24 layers of 576.
  constexpr int64_t kState = 69LL * (96 * 128 * 128 + 3 * 3 * 96 * 128) * 4;
  EXPECT_EQ(at(report, "checkpoint_bytes"), Json(kState));
  EXPECT_EQ(at(report, "checkpoint_kv_tokens"), Json(8403));
  EXPECT_EQ(at(report, "checkpoint_kv_tokens_bf16"), Json(16'805));
  for (const char* part : {"497,220", "1,560,860,324,864", "2.779 T", "104.19 B", "checkpoint of a prefix"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << " is not in\n" << text.out;
  }
}

TEST(Inspect, Errors) {
  const ScratchDir scratch;
  expect_failure({"inspect", "-m", "/no/such/model"}, {"/no/such/model/config.json"});
  scratch.write("config.json", "{\"model_type\": \"llama\"}");
  expect_failure({"inspect", "-m", scratch / ""}, {"config.json", "llama"});
}

TEST(MakeSynthetic, ReadsBackAndRuns) {
  const ScratchDir scratch;
  const std::string model = scratch / "model";
  const std::vector<std::string> make = {
      "make-synthetic", "--config", small_dir() + "/config.json", "-o", model, "--seed", "3",
      "--shard-bytes",  "500000"};
  ASSERT_EQ(run_moat(make).status, 0);
  const Json report = json_of(run_moat({"inspect", "-m", model, "--json"}));
  const Json original = json_of(run_moat({"inspect", "-m", small_dir(), "--json"}));
  EXPECT_EQ(at(report, "source"), Json("files"));
  EXPECT_GT(number(at(report, "num_files")), 1);
  EXPECT_EQ(at(report, "missing"), Json::array());
  EXPECT_EQ(at(report, "unknown"), Json::array());
  for (const char* key : {"num_tensors", "total_bytes", "text_parameters", "components"}) {
    EXPECT_EQ(at(report, key), at(original, key)) << key;
  }

  const auto logits = [&](const std::string& directory, const std::string& out) {
    const Finished f = run_moat(
        {"logits", "-m", directory, "--ids", scratch.write("ids.json", "[[1, 2, 3], [700]]"), "-o", scratch / out});
    EXPECT_EQ(f.status, 0) << f.err;
    return GoldenFile(scratch / out);
  };
  const GoldenFile first = logits(model, "first.safetensors");
  const Tensor tensor = first.tensor("logits.0");
  ASSERT_EQ(tensor.count(), 3 * 768);
  EXPECT_TRUE(std::all_of(tensor.f32(), tensor.f32() + tensor.count(), [](float x) { return std::isfinite(x); }));
  EXPECT_NE(*std::min_element(tensor.f32(), tensor.f32() + tensor.count()),
            *std::max_element(tensor.f32(), tensor.f32() + tensor.count()));

  // The same seed gives the same model however it is cut; another seed another one.
  const auto remake = [&](const std::string& name, const std::string& seed) {
    const Finished f = run_moat({"make-synthetic", "--config", small_dir() + "/config.json", "-o", scratch / name,
                                 "--seed", seed, "--threads", "1"});
    EXPECT_EQ(f.status, 0) << f.err;
    return logits(scratch / name, name + ".safetensors");
  };
  const auto bytes = [](const Tensor& t) {
    return std::string_view(static_cast<const char*>(t.data), static_cast<size_t>(t.count()) * sizeof(float));
  };
  const GoldenFile same = remake("same", "3"), other = remake("other", "4");
  EXPECT_EQ(bytes(same.tensor("logits.0")), bytes(tensor));
  EXPECT_NE(bytes(other.tensor("logits.0")), bytes(tensor));

  expect_failure(make, {model, "already holds a checkpoint"});
}

// ----------------------------------------------------------------------------------------------------- ops

TEST(Ops, ListShowsEveryOpWithItsRows) {
  const Json list = json_of(run_moat({"ops", "list", "--json"}));
  const std::string text = run_moat({"ops", "list"}).out;
  ASSERT_EQ(items(list).size(), all_ops().size());
  for (size_t i = 0; i < all_ops().size(); ++i) {
    const AnyOp& op = *all_ops()[i];
    EXPECT_EQ(at(list.as_array()[i], "op"), Json(op.name()));
    EXPECT_NE(text.find(fmt::format("{}\n", op.name())), std::string::npos) << text;
    ASSERT_EQ(items(at(list.as_array()[i], "rows")).size(), op.rows().size());
    for (size_t r = 0; r < op.rows().size(); ++r) {
      EXPECT_EQ(at(list.as_array()[i], "rows", static_cast<int>(r), "name"), Json(op.rows()[r].name));
      EXPECT_NE(text.find(op.rows()[r].name), std::string::npos) << text;
    }
  }
  for (const char* name : {"top_k_renorm", "top_p_renorm"}) EXPECT_NE(text.find(name), std::string::npos) << text;
}

TEST(Ops, ExplainChoosesAKernelForEverySite) {
  for (const std::string& model : {nano_dir(), small_dir(), golden_dir() + "/kimi-k3-release"}) {
    for (const char* tokens : {"1", "17", "2048"}) {
      const Finished f = run_moat({"ops", "explain", "-m", model, "--tokens", tokens});
      ASSERT_EQ(f.status, 0) << f.err;
      const size_t summary = f.out.rfind("kernels: ");
      ASSERT_NE(summary, std::string::npos) << f.out;
      EXPECT_NE(f.out.find(" 0 missing", summary), std::string::npos) << f.out.substr(summary);
      EXPECT_NE(f.out.find("  CHOSEN    "), std::string::npos);
      // Blocks: a line of the site, then its candidates, exactly one of them chosen.
      int sites = 0, chosen = 0;
      std::istringstream lines(f.out.substr(f.out.find('\n') + 1));
      for (std::string line; std::getline(lines, line) && !line.starts_with("step temporaries");) {
        if (!line.starts_with("  ")) {
          EXPECT_EQ(chosen, sites) << "before " << line;
          ++sites;
        } else {
          chosen += line.starts_with("  CHOSEN ");
        }
      }
      EXPECT_EQ(chosen, sites);
      EXPECT_GT(sites, 10);
    }
  }
  const std::string one = run_moat({"ops", "explain", "-m", nano_dir(), "--site", "head"}).out;
  const std::string all = run_moat({"ops", "explain", "-m", nano_dir()}).out;
  EXPECT_LT(one.size(), all.size());
  expect_failure({"ops", "explain", "-m", nano_dir(), "--tokens", "4000"}, {"4000", "1 to 2048"});
  expect_failure({"ops", "explain", "-m", "/no/such/model"}, {"/no/such/model/config.json"});
}

// --------------------------------------------------------------------------------------------------- bench

// That they run and say what they measured; what they measure is not for a test.
TEST(Bench, EngineAndCeilings) {
  const Json engine = json_of(run_moat({"bench", "engine", "-m", nano_dir(), "--prefill", "16", "--decode", "4",
                                        "--repeats", "1", "--batch", "1,3", "--json"}));
  ASSERT_EQ(items(at(engine, "results")).size(), 2U);
  for (const Json& row : items(at(engine, "results"))) {
    for (const char* key : {"prefill_tokens_per_second", "decode_tokens_per_second", "decode_gb_per_second"}) {
      EXPECT_GT(at(row, key).as_double(), 0) << key;
    }
  }
  const Finished profile = run_moat({"bench", "engine", "-m", nano_dir(), "--prefill", "16", "--decode", "4",
                                     "--repeats", "1", "--batch", "1", "--profile"});
  EXPECT_EQ(profile.status, 0) << profile.err;
  EXPECT_NE(profile.out.find("read bandwidth"), std::string::npos) << profile.out;
  EXPECT_TRUE(json_of(run_moat({"bench", "ceilings", "--json"})).is_object());
  expect_failure({"bench", "engine", "-m", nano_dir(), "--batch", "1,,2"}, {"1,,2", "expected numbers"});
  expect_failure({"bench", "engine", "-m", nano_dir(), "--decode", "0"}, {"--decode 0", "expected at least 1"});
}

// -------------------------------------------------------------------------------------------------- errors

TEST(Main, BadFlagsAreNamed) {
  const auto refused = [](const std::vector<std::string>& arguments, const std::string& part) {
    const Finished f = run_moat(arguments);
    EXPECT_NE(f.status, 0) << fmt::format("moat {}", fmt::join(arguments, " "));
    EXPECT_LT(f.status, 128) << "a crash";
    EXPECT_NE((f.out + f.err).find(part), std::string::npos) << f.out << f.err;
  };
  refused({}, "subcommand");
  refused({"dance"}, "dance");
  refused({"tokenize"}, "--model");
  refused({"tokenize", "-m", nano_dir(), "--frobnicate"}, "--frobnicate");
  refused({"logits", "-m", nano_dir(), "--ids", "x", "-o", "y", "--chunk", "0"}, "--chunk");
  refused({"generate", "-m", nano_dir(), "--prompt", "a", "--messages", "b"}, "--messages");
  refused({"generate", "-m", nano_dir(), "--prompt", "a", "--temperature", "-1"}, "--temperature");
  refused({"generate", "-m", nano_dir(), "--prompt", "a", "--max-tokens", "0"}, "--max-tokens");
  refused({"generate", "-m", nano_dir(), "--prompt", "a", "--threads", "0"}, "--threads");
  refused({"generate", "-m", nano_dir(), "--prompt", "a", "--threads", "5000"}, "--threads");
  for (const char* command : {"generate", "serve"}) {
    refused({command, "-m", nano_dir(), "--draft", dspark_dir(), "--draft-ngram"}, "--draft excludes --draft-ngram");
    refused({command, "-m", nano_dir(), "--draft-ngram", "--num-draft-tokens", "64"}, "--num-draft-tokens");
    refused({command, "-m", nano_dir(), "--draft-ngram", "--num-draft-tokens", "some"}, "--num-draft-tokens");
  }
  refused({"serve", "-m", nano_dir(), "--port", "65536"}, "--port");
  refused({"serve", "-m", nano_dir(), "--memory-fraction", "0"}, "--memory-fraction");
  refused({"serve", "-m", nano_dir(), "--max-batched-tokens", "1000000000"}, "--max-batched-tokens");
  refused({"serve", "-m", nano_dir(), "--max-memory", "8XB"}, "\"8XB\" is not a size");
  refused({"serve", "-m", nano_dir(), "--checkpoint-memory", "some"}, "--checkpoint-memory");
  refused({"serve", "-m", nano_dir(), "--checkpoint-interval", "-1"}, "--checkpoint-interval");
  refused({"serve", "-m", nano_dir(), "--max-step-ms", "-1"}, "--max-step-ms");
  refused({"serve", "-m", nano_dir(), "--request-timeout", "-1"}, "--request-timeout");
  refused({"serve", "-m", nano_dir(), "--no-prefix-cache", "--checkpoint-memory", "1GB"}, "--no-prefix-cache");
}

TEST(Main, ByteSizes) {
  for (const auto& [text, bytes] : std::vector<std::pair<std::string, int64_t>>{
           {"0", 0},
           {"4096", 4096},
           {"100 B", 100},
           {"8GB", 8'000'000'000},
           {"8g", 8'000'000'000},
           {"512MB", 512'000'000},
           {"512 MiB", 512LL << 20},
           {"1.5GiB", 3LL << 29},
           {"2Ti", 2LL << 40},
           {"64kb", 64'000},
       }) {
    const Result<int64_t> size = parse_byte_size(text);
    ASSERT_TRUE(size.ok()) << text;
    EXPECT_EQ(*size, bytes) << text;
  }
  for (const char* text : {"", "GB", "-1GB", "8XB", "8GBs", "8ib", "1e300", "inf", "nan", " 8GB", "5000000TB"}) {
    EXPECT_FALSE(parse_byte_size(text).ok()) << text;
  }
}

TEST(Main, HelpAndVersion) {
  const Finished help = run_moat({"--help"});
  EXPECT_EQ(help.status, 0);
  for (const char* command :
       {"serve", "generate", "inspect", "logits", "tokenize", "render", "ops", "make-synthetic", "bench"}) {
    EXPECT_NE(help.out.find(command), std::string::npos) << help.out;
    const Finished own = run_moat({command, "--help"});
    EXPECT_EQ(own.status, 0);
    EXPECT_NE(own.out.find("OPTIONS"), std::string::npos) << own.out;
  }
  // Flags of the program may stand before or after the command.
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"--log-level", "warn", "generate", "-m", nano_dir(), "--prompt", "a", "--max-tokens", "1"},
           {"generate", "-m", nano_dir(), "--prompt", "a", "--max-tokens", "1", "--log-level", "warn"}}) {
    const Finished quiet = run_moat(arguments);
    EXPECT_EQ(quiet.status, 0) << quiet.err;
    EXPECT_EQ(quiet.err, "");
  }
  const Finished version = run_moat({"--version"});
  EXPECT_EQ(version.status, 0);
  EXPECT_EQ(std::count(version.out.begin(), version.out.end(), '.'), 2) << version.out;
}

TEST(Main, EveryCommandNamesWhatIsWrongWithTheModel) {
  const ScratchDir scratch;
  const std::string ids = scratch.write("ids.json", "[[1]]"), out = scratch / "out.safetensors";
  const auto commands = [&](const std::string& model) {
    return std::vector<std::vector<std::string>>{
        {"serve", "-m", model, "--port", "0"},
        {"generate", "-m", model, "--prompt", "a"},
        {"logits", "-m", model, "--ids", ids, "-o", out},
    };
  };
  for (auto& command : commands("/no/such/model")) expect_failure(command, {"/no/such/model"});
  for (auto& command : commands(nano_dir())) {
    command.insert(command.end(), {"--backend", "gpu"});
    expect_failure(command, {"gpu", "built: cpu, reference"});
  }
  for (auto& command : commands(nano_dir())) {
    command.insert(command.end(), {"--isa", "MMX"});
    expect_failure(command, {"MMX"});
  }
  expect_failure({"tokenize", "-m", "/no/such/model"}, {"/no/such/model"});
  expect_failure({"render", "-m", "/no/such/model"}, {"/no/such/model"});
  // A checkpoint without a tokenizer has logits, but nothing to say.
  expect_failure({"serve", "-m", small_dir(), "--port", "0"}, {small_dir(), "tiktoken.model"});
  expect_failure({"generate", "-m", small_dir(), "--prompt", "a"}, {small_dir(), "tiktoken.model"});
}

}  // namespace
}  // namespace moat
