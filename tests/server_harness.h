// SPDX-License-Identifier: Apache-2.0
// A server over the scripted engine, and what tests need to look at its answers.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <mutex>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "base/json.h"
#include "engine/sim_engine.h"
#include "raw_http.h"
#include "server/server.h"
#include "text/tokenizer.h"

namespace moat {

using Ids = std::vector<int32_t>;

// How GoogleTest shows a value.
inline void PrintTo(const Json& json, std::ostream* out) { *out << json.dump(); }

inline const Tokenizer& nano() {
  static const Tokenizer tokenizer = Tokenizer::load(MOAT_SOURCE_DIR "/models/moat-nano").value();
  return tokenizer;
}

constexpr int32_t kEndOfMsg = 4866;

inline Json parsed(const std::string& text) {
  Result<Json> json = parse_json(text);
  EXPECT_TRUE(json.ok()) << text;
  return json.ok() ? std::move(json).value() : Json();
}

// json.at("choices", 0, "message"): null where there is no such thing.
inline Json at(const Json& json) { return json; }
template <class... Rest>
Json at(const Json& json, const char* key, Rest... rest) {
  const Json* member = json.find(key);
  return member == nullptr ? Json() : at(*member, rest...);
}
template <class... Rest>
Json at(const Json& json, int index, Rest... rest) {
  if (!json.is_array() || static_cast<size_t>(index) >= json.as_array().size()) return {};
  return at(json.as_array()[static_cast<size_t>(index)], rest...);
}

// By value: what at() returns does not live long enough to be looped over.
inline Json::Array items(const Json& json) { return json.is_array() ? json.as_array() : Json::Array(); }

inline int64_t number(const Json& json) { return json.is_number() ? json.as_int64().value_or(-1) : -1; }

// The data of each event; comments are left out.
inline std::vector<std::string> sse_data(const std::string& body) {
  std::vector<std::string> events;
  size_t begin = 0;
  for (size_t end; (end = body.find("\n\n", begin)) != std::string::npos; begin = end + 2) {
    if (body.compare(begin, 6, "data: ") == 0) events.push_back(body.substr(begin + 6, end - begin - 6));
  }
  EXPECT_EQ(begin, body.size()) << "an event is not closed: " << body.substr(begin);
  return events;
}

// The chunks of one choice added up to what a client ends with.
struct Summed {
  std::string role, reasoning, content, finish;
  std::vector<std::string> names, arguments, call_ids;
  Ids token_ids;
  Json::Array logprobs;
};

class Harness {
 public:
  using ScriptOf = std::function<SimEngine::Script(const Request&)>;
  struct Setup {
    int32_t max_num_seqs = 64;
    int32_t max_queued = 64;
    int32_t max_model_len = 8192;
    ApiServer::Options options = {};
    bool loaded = true;
  };

  Harness() : Harness(Setup{}) {}
  explicit Harness(Setup setup) {
    SimEngine::Options sim;
    sim.info = {.vocab_size = nano().vocab_size(),
                .max_model_len = setup.max_model_len,
                .max_num_seqs = setup.max_num_seqs,
                .max_queued = setup.max_queued,
                .eos_token_id = kEndOfMsg,
                .backend = "sim"};
    sim.script = [this](const Request& request) {
      const std::lock_guard lock(mutex_);
      return script_(request);
    };
    engine = std::make_unique<SimEngine>(std::move(sim));
    ApiServer::Options options = std::move(setup.options);
    options.model.name = "moat-nano";
    options.model.aliases = {"org/alias"};
    options.version = "0.1.0";
    server = std::make_unique<ApiServer>(std::move(options));
    if (setup.loaded) server->set_model(*engine, nano());
    const Status started = server->start();
    EXPECT_TRUE(started.ok()) << started.message();
  }
  ~Harness() { server->stop(std::chrono::milliseconds(0)); }

  int port() const { return server->port(); }
  void play(SimEngine::Script script) {
    play_by([script](const Request&) { return script; });
  }
  void play_by(ScriptOf script) {
    const std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  RawResponse post(const std::string& path, const Json& body) { return fetch(port(), "POST", path, body.dump()); }
  RawResponse chat(const Json& body) { return post("/v1/chat/completions", body); }
  RawResponse complete(const Json& body) { return post("/v1/completions", body); }

  // Waits until `condition` holds; false after a generous while.
  static bool eventually(const std::function<bool()>& condition) {
    for (int i = 0; i < 12'000; ++i) {
      if (condition()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  std::unique_ptr<SimEngine> engine;
  std::unique_ptr<ApiServer> server;

 private:
  std::mutex mutex_;
  ScriptOf script_ = [](const Request&) { return SimEngine::Script{}; };
};

// Reply text in the notation of the chat format, e.g. "Hm.<|close|>think<|sep|>...".
inline Ids markup(std::string_view text) { return nano().encode_markup(text); }

constexpr std::string_view kThinkToResponse = "<|close|>think<|sep|><|open|>response<|sep|>";
constexpr std::string_view kEnd = "<|close|>response<|sep|><|close|>message<|sep|>";

inline Ids reply(std::string_view reasoning, std::string_view content) {
  return markup(std::string(reasoning) + std::string(kThinkToResponse) + std::string(content) + std::string(kEnd));
}

inline Json user_messages(std::string text = "Hello.") {
  return Json::array({Json::object({{"role", "user"}, {"content", std::move(text)}})});
}

inline Json weather_tools() {
  const Json city = Json::object({{"type", "object"}, {"properties", Json::object()}});
  const Json function = Json::object({{"name", "get_weather"}, {"parameters", city}});
  return Json::array({Json::object({{"type", "function"}, {"function", function}})});
}

// Walks the events of a stream by the rules of the format and sums up each choice.
inline std::vector<Summed> sum_stream(const std::string& body, size_t num_choices) {
  std::vector<Summed> sums(num_choices);
  std::vector<std::string> events = sse_data(body);
  EXPECT_FALSE(events.empty());
  if (events.empty()) return sums;
  EXPECT_EQ(events.back(), "[DONE]");
  events.pop_back();
  std::string id;
  for (const std::string& text : events) {
    EXPECT_TRUE(is_valid_utf8(text));
    const Json chunk = parsed(text);
    if (id.empty()) id = at(chunk, "id").as_string();
    EXPECT_EQ(at(chunk, "id"), Json(id));
    EXPECT_TRUE(at(chunk, "choices").is_array()) << text;
    if (items(at(chunk, "choices")).empty()) continue;
    const Json choice = at(chunk, "choices", 0);
    Summed& sum = sums.at(static_cast<size_t>(number(at(choice, "index"))));
    EXPECT_EQ(sum.finish, "") << "a chunk after the last one of its choice: " << text;
    const Json delta = at(choice, "delta");
    if (const Json* role = delta.find("role")) sum.role += role->as_string();
    EXPECT_EQ(sum.role, delta.is_object() ? "assistant" : "") << "the role comes first, once";
    if (const Json* reasoning = delta.find("reasoning_content")) sum.reasoning += reasoning->as_string();
    if (const Json* content = delta.find("content")) sum.content += content->as_string();
    if (const Json* content = choice.find("text")) sum.content += content->as_string();
    if (const Json* calls = delta.find("tool_calls")) {
      for (const Json& call : calls->as_array()) {
        const auto index = static_cast<size_t>(number(at(call, "index")));
        if (const Json* call_id = call.find("id")) {
          EXPECT_EQ(index, sum.names.size());
          sum.call_ids.push_back(call_id->as_string());
          sum.names.push_back(at(call, "function", "name").as_string());
          sum.arguments.emplace_back();
          EXPECT_EQ(at(call, "type"), Json("function"));
        } else {
          EXPECT_EQ(call.find("type"), nullptr);
          EXPECT_EQ(call.find("function")->find("name"), nullptr);
        }
        sum.arguments.at(index) += at(call, "function", "arguments").as_string();
      }
    }
    if (const Json* ids = choice.find("token_ids")) {
      for (const Json& token : ids->as_array()) sum.token_ids.push_back(static_cast<int32_t>(number(token)));
    }
    const Json logprobs = at(choice, "logprobs", "content");
    if (logprobs.is_array()) {
      sum.logprobs.insert(sum.logprobs.end(), logprobs.as_array().begin(), logprobs.as_array().end());
    }
    if (at(choice, "finish_reason").is_string()) sum.finish = at(choice, "finish_reason").as_string();
  }
  for (const Summed& sum : sums) EXPECT_NE(sum.finish, "") << body;
  return sums;
}

}  // namespace moat
