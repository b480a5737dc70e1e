// SPDX-License-Identifier: Apache-2.0
// `moat serve` as a process with the embedded model, over real HTTP: what it answers, that batch mates do not show, and
// how it ends. The protocol's corners are in server_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <thread>

#include "chat_goldens.h"
#include "golden_file.h"
#include "process.h"
#include "server_harness.h"

namespace moat {
namespace {

using test::golden_dir;
using test::GoldenFile;
using test::Process;
using test::run_moat;

std::string nano_dir() { return test::source_dir() + "/models/moat-nano"; }

const GoldenFile& goldens() {
  static const GoldenFile file(golden_dir() + "/moat-nano/golden.safetensors");
  return file;
}

// A served moat-nano on a port of its own.
class Server {
 public:
  explicit Server(const std::vector<std::string>& more = {}) : process_(arguments(more)) {
    static constexpr std::string_view kMark = "is served on http://127.0.0.1:";
    EXPECT_TRUE(Harness::eventually([&] {
      const std::string out = process_.out();
      const size_t at = out.find(kMark);
      if (at != std::string::npos && out.find("\n\n", at) != std::string::npos) {
        port_ = std::stoi(out.substr(at + kMark.size()));
      }
      return port_ != 0 || !process_.running();
    })) << "no greeting";
    EXPECT_NE(port_, 0) << process_.out() << process_.err();
  }

  int port() const { return port_; }
  Process& process() { return process_; }
  RawResponse get(const std::string& path) const { return fetch(port_, "GET", path); }
  RawResponse post(const std::string& path, const Json& body) const { return fetch(port_, "POST", path, body.dump()); }
  void flush() const { EXPECT_EQ(post("/v1/cache/flush", Json::object()).status, 200); }
  Json chat(const Json& body) const { return answer("/v1/chat/completions", body); }
  Json complete(const Json& body) const { return answer("/v1/completions", body); }

  double metric(const std::string& name) const {
    const std::string text = get("/metrics").body;
    const size_t at = text.find("\n" + name + " ");
    EXPECT_NE(at, std::string::npos) << name << " is not in\n" << text;
    return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
  }
  bool idle() const {
    return metric("moat_requests_running") + metric("moat_requests_waiting") + metric("moat_cache_blocks_used") +
               metric("moat_state_slots_used") ==
           0;
  }

 private:
  static std::vector<std::string> arguments(const std::vector<std::string>& more) {
    std::vector<std::string> list = {"serve", "-m", nano_dir(), "--port", "0"};
    list.insert(list.end(), more.begin(), more.end());
    return list;
  }
  Json answer(const std::string& path, const Json& body) const {
    const RawResponse response = post(path, body);
    EXPECT_EQ(response.status, 200) << response.body;
    return parsed(response.body);
  }

  Process process_;
  int port_ = 0;
};

class Serve : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new Server; }
  static void TearDownTestSuite() {
    EXPECT_TRUE(Harness::eventually([] { return server_->idle(); })) << server_->get("/metrics").body;
    server_->process().signal(SIGTERM);
    EXPECT_EQ(server_->process().wait_for(std::chrono::seconds(120)), 0) << server_->process().err();
    delete server_;
  }
  static Server& server() { return *server_; }

 private:
  static Server* server_;
};
Server* Serve::server_ = nullptr;

Json with(Json request, std::initializer_list<Json::Member> members) {
  for (const auto& [key, value] : members) request.set(key, value);
  return request;
}

Json greedy_request(int index) {
  for (test::GreedyChat& chat : test::greedy_chats()) {
    if (chat.index == index) return std::move(chat.request);
  }
  ADD_FAILURE() << "no request " << index;
  return {};
}

Json capital_of_france() { return Json::object({{"messages", user_messages("What is the capital of France?")}}); }

Ids ids_of(const Json& list) {
  Ids ids;
  for (const Json& id : items(list)) ids.push_back(static_cast<int32_t>(number(id)));
  return ids;
}

Json as_json(const Ids& ids) { return Json::Array(ids.begin(), ids.end()); }

// The same prompts answered with drafts and without.
std::vector<Json> drafted_requests() {
  std::vector<Json> requests;
  for (const auto& [index, request] : test::greedy_chats()) {
    requests.push_back(with(request, {{"temperature", 0}, {"max_tokens", 80}, {"return_token_ids", true}}));
    requests.push_back(with(requests.back(), {{"temperature", 0.9}, {"seed", 40 + index}}));
  }
  return requests;
}

// ------------------------------------------------------------------------------------------------- answers

TEST_F(Serve, AnswersAsGenerateDoes) {
  const Json reply = server().chat(with(capital_of_france(), {{"temperature", 0}, {"return_token_ids", true}}));
  const test::Finished generated = run_moat(
      {"generate", "-m", nano_dir(), "--messages", "-", "--max-tokens", "8000", "--temperature", "0", "--json"},
      capital_of_france().dump());
  ASSERT_EQ(generated.status, 0) << generated.err;
  const Json local = parsed(generated.out);
  EXPECT_NE(at(reply, "choices", 0, "message", "content").dump().find("Paris"), std::string::npos) << reply.dump();
  for (const char* key : {"content", "reasoning_content"}) {
    EXPECT_EQ(at(reply, "choices", 0, "message", key), at(local, "message", key));
  }
  EXPECT_EQ(at(reply, "choices", 0, "token_ids"), at(local, "ids"));
  EXPECT_EQ(at(reply, "choices", 0, "finish_reason"), at(local, "finish_reason"));
  for (const char* key : {"prompt_tokens", "completion_tokens", "total_tokens"}) {
    EXPECT_EQ(at(reply, "usage", key), at(local, "usage", key)) << key;
  }
}

TEST_F(Serve, TheModelHasTheNameOfItsDirectory) {
  EXPECT_EQ(at(parsed(server().get("/v1/models").body), "data", 0, "id"), Json("moat-nano"));
  EXPECT_EQ(at(server().chat(with(capital_of_france(), {{"max_tokens", 1}})), "model"), Json("moat-nano"));
  EXPECT_EQ(server().get("/ready").status, 200);
  EXPECT_EQ(server().get("/health").status, 200);
}

TEST_F(Serve, AllGreedyGoldens) {
  for (int i = 0; i < 8; ++i) {
    const std::string name = fmt::format("greedy{}", i);
    const Json reply = server().complete(Json::object({{"prompt", as_json(goldens().ints(name + ".prompt"))},
                                                       {"temperature", 0},
                                                       {"max_tokens", 64},
                                                       {"ignore_eos", true},
                                                       {"return_token_ids", true}}));
    EXPECT_EQ(ids_of(at(reply, "choices", 0, "token_ids")), goldens().ints(name + ".ids")) << name;
  }
}

TEST_F(Serve, GoldenTopLogprobs) {
  float worst = 0;
  for (const auto& [index, request] : test::greedy_chats()) {
    const std::string name = fmt::format("greedy{}", index);
    const Json reply = server().chat(with(request, {{"temperature", 0},
                                                    {"max_tokens", 64},
                                                    {"ignore_eos", true},
                                                    {"logprobs", true},
                                                    {"top_logprobs", 10},
                                                    {"return_token_ids", true}}));
    EXPECT_EQ(ids_of(at(reply, "prompt_token_ids")), goldens().ints(name + ".prompt"));
    EXPECT_EQ(ids_of(at(reply, "choices", 0, "token_ids")), goldens().ints(name + ".ids"));
    const Json::Array content = items(at(reply, "choices", 0, "logprobs", "content"));
    const Tensor want = goldens().tensor(name + ".top_logprobs");
    ASSERT_EQ(content.size(), 64U);
    for (size_t t = 0; t < content.size(); ++t) {
      for (size_t k = 0; k < 10; ++k) {
        const Json got = at(content[t], "top_logprobs", static_cast<int>(k), "logprob");
        ASSERT_TRUE(got.is_number());
        worst = std::max(worst, std::fabs(static_cast<float>(got.as_double()) - want.f32()[t * 10 + k]));
      }
    }
  }
  fmt::print("top-10 log-probabilities through HTTP: largest error {:.2g}\n", worst);
  EXPECT_LT(worst, 3e-4F);
}

TEST_F(Serve, StreamsAddUpToTheWholeAnswer) {
  std::vector<Json> requests;
  for (const int index : {0, 1, 2, 4, 7}) requests.push_back(with(greedy_request(index), {{"temperature", 0}}));
  requests.push_back(with(greedy_request(7), {{"temperature", 1}, {"seed", 11}, {"max_tokens", 80}}));
  requests.push_back(with(greedy_request(0), {{"temperature", 0}, {"max_tokens", 12}}));
  for (Json& request : requests) {
    request.set("return_token_ids", true);
    server().flush();  // usage says what was restored, which would differ
    const Json whole = server().chat(request);
    server().flush();
    const Json options = Json::object({{"include_usage", true}});
    const RawResponse stream =
        server().post("/v1/chat/completions", with(request, {{"stream", true}, {"stream_options", options}}));
    ASSERT_EQ(stream.status, 200) << stream.body;
    EXPECT_TRUE(stream.complete);
    const Summed sum = sum_stream(stream.body, 1).front();
    const Json choice = at(whole, "choices", 0);
    const auto text = [&](const char* key) {
      const Json value = at(choice, "message", key);
      return value.is_string() ? value.as_string() : "";
    };
    EXPECT_EQ(sum.content, text("content"));
    EXPECT_EQ(sum.reasoning, text("reasoning_content"));
    EXPECT_EQ(Json(sum.finish), at(choice, "finish_reason"));
    EXPECT_EQ(sum.token_ids, ids_of(at(choice, "token_ids")));
    const Json::Array calls = items(at(choice, "message", "tool_calls"));
    ASSERT_EQ(sum.names.size(), calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(Json(sum.names[i]), at(calls[i], "function", "name"));
      EXPECT_EQ(Json(sum.arguments[i]), at(calls[i], "function", "arguments"));
    }
    const std::vector<std::string> events = sse_data(stream.body);
    ASSERT_GE(events.size(), 2U);
    EXPECT_EQ(at(parsed(events[events.size() - 2]), "usage"), at(whole, "usage"));
  }
}

TEST_F(Serve, ToolCallRoundTrip) {
  Json request = with(greedy_request(4), {{"temperature", 0}});
  const Json first = at(server().chat(request), "choices", 0);
  EXPECT_EQ(at(first, "finish_reason"), Json("tool_calls"));
  ASSERT_EQ(items(at(first, "message", "tool_calls")).size(), 1U) << first.dump();
  const Json call = at(first, "message", "tool_calls", 0);
  EXPECT_EQ(at(call, "type"), Json("function"));
  EXPECT_EQ(at(call, "function", "name"), Json("get_weather"));
  EXPECT_EQ(parsed(at(call, "function", "arguments").as_string()), Json::object({{"city", "Paris"}}));

  Json messages = at(request, "messages");
  messages.push_back(at(first, "message"));
  messages.push_back(Json::object({{"role", "tool"},
                                   {"tool_call_id", at(call, "id")},
                                   {"content", R"({"city": "Paris", "temperature": 21, "condition": "sunny"})"}}));
  request.set("messages", messages);
  const Json second = at(server().chat(request), "choices", 0);
  EXPECT_EQ(at(second, "finish_reason"), Json("stop"));
  const std::string content = at(second, "message", "content").as_string();
  for (const char* part : {"sunny", "Paris", "21"}) EXPECT_NE(content.find(part), std::string::npos) << content;
}

TEST_F(Serve, UsageCountsTokens) {
  for (const int index : {0, 2, 4}) {
    const Json request = greedy_request(index);
    const Json reply = server().chat(with(request, {{"temperature", 0}, {"return_token_ids", true}}));
    const Json tokenized = parsed(server().post("/tokenize", request).body);
    const auto prompt = static_cast<int64_t>(items(at(reply, "prompt_token_ids")).size());
    const Ids generated = ids_of(at(reply, "choices", 0, "token_ids"));
    const auto completion = static_cast<int64_t>(generated.size());
    EXPECT_EQ(at(tokenized, "tokens"), at(reply, "prompt_token_ids"));
    EXPECT_EQ(at(tokenized, "count"), Json(prompt));
    EXPECT_EQ(at(reply, "usage", "prompt_tokens"), Json(prompt));
    EXPECT_EQ(at(reply, "usage", "completion_tokens"), Json(completion));
    EXPECT_EQ(at(reply, "usage", "total_tokens"), Json(prompt + completion));
    const int64_t reasoning = number(at(reply, "usage", "completion_tokens_details", "reasoning_tokens"));
    EXPECT_GE(reasoning, 0);
    EXPECT_LT(reasoning, completion);
    EXPECT_EQ(reasoning > 0, at(reply, "choices", 0, "message", "reasoning_content").is_string()) << reply.dump();
    EXPECT_EQ(generated.back(), kEndOfMsg);
  }
}

TEST_F(Serve, EightAtOnceEqualEachAlone) {
  std::vector<Json> requests;
  for (int i = 0; i < 16; ++i) {
    const bool sampled = i >= 8;
    Json request = Json::object({{"prompt", as_json(goldens().ints(fmt::format("greedy{}.prompt", i % 8)))},
                                 {"temperature", sampled ? 1 : 0},
                                 {"max_tokens", 24 + 5 * (i % 8)},
                                 {"ignore_eos", true},
                                 {"return_token_ids", true}});
    if (sampled) request.set("seed", 1000 + i);
    requests.push_back(std::move(request));
  }
  std::vector<Json> alone;
  for (const Json& request : requests) alone.push_back(at(server().complete(request), "choices"));
  for (size_t first = 0; first < requests.size(); first += 8) {
    std::vector<Json> together(8);
    std::vector<std::thread> clients;
    for (size_t i = 0; i < 8; ++i) {
      clients.emplace_back([&, i] { together[i] = at(server().complete(requests[first + i]), "choices"); });
    }
    for (std::thread& client : clients) client.join();
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(together[i], alone[first + i]) << "request " << first + i;
  }
  bool differ = false;  // where the model is sure of itself, a sample is the greedy reply
  for (int i = 0; i < 8; ++i) differ |= at(alone[i], 0, "token_ids") != at(alone[i + 8], 0, "token_ids");
  EXPECT_TRUE(differ) << "sampling has no effect";
}

TEST_F(Serve, LogprobsAreAlignedWithTokens) {
  const Json reply = server().chat(with(
      greedy_request(2), {{"temperature", 0}, {"logprobs", true}, {"top_logprobs", 5}, {"return_token_ids", true}}));
  const Ids ids = ids_of(at(reply, "choices", 0, "token_ids"));
  const Json::Array content = items(at(reply, "choices", 0, "logprobs", "content"));
  ASSERT_EQ(content.size(), ids.size());
  for (size_t t = 0; t < content.size(); ++t) {
    std::string bytes;
    for (const Json& byte : items(at(content[t], "bytes"))) bytes += static_cast<char>(number(byte));
    EXPECT_EQ(bytes, nano().token_bytes(ids[t]));
    EXPECT_LE(at(content[t], "logprob").as_double(), 0);
    EXPECT_EQ(items(at(content[t], "top_logprobs")).size(), 5U);
    // Greedy: the chosen token is the most likely one.
    EXPECT_EQ(at(content[t], "top_logprobs", 0, "token"), at(content[t], "token"));
    EXPECT_EQ(at(content[t], "top_logprobs", 0, "logprob"), at(content[t], "logprob"));
    for (int k = 1; k < 5; ++k) {
      EXPECT_LE(at(content[t], "top_logprobs", k, "logprob").as_double(),
                at(content[t], "top_logprobs", k - 1, "logprob").as_double());
    }
  }
  EXPECT_EQ(at(server().chat(greedy_request(2)), "choices", 0, "logprobs"), Json()) << "not asked for";
}

TEST_F(Serve, StopStrings) {
  const Json request = with(greedy_request(2), {{"temperature", 0}, {"stop", Json::array({"zebra", "is Par"})}});
  const Json cut = at(server().chat(request), "choices", 0);
  EXPECT_EQ(at(cut, "message", "content"), Json("The capital of France "));
  EXPECT_EQ(at(cut, "finish_reason"), Json("stop"));
  const Json kept = at(server().chat(with(request, {{"include_stop_str_in_output", true}})), "choices", 0);
  EXPECT_EQ(at(kept, "message", "content"), Json("The capital of France is Par"));
  const RawResponse stream = server().post("/v1/chat/completions", with(request, {{"stream", true}}));
  EXPECT_EQ(sum_stream(stream.body, 1).front().content, "The capital of France ");
}

TEST_F(Serve, FlushedPrefixesAreComputedAgain) {
  const auto cached = [&] {
    const Json reply =
        server().complete(Json::object({{"prompt", as_json(Ids(200, 2718))}, {"max_tokens", 1}, {"temperature", 0}}));
    return number(at(reply, "usage", "prompt_tokens_details", "cached_tokens"));
  };
  EXPECT_EQ(cached(), 0);
  EXPECT_GT(cached(), 0);
  server().flush();
  EXPECT_EQ(cached(), 0);
}

TEST_F(Serve, LimitsOfLength) {
  const Json cut = server().chat(with(greedy_request(0), {{"temperature", 0}, {"max_tokens", 5}}));
  EXPECT_EQ(at(cut, "choices", 0, "finish_reason"), Json("length"));
  EXPECT_EQ(at(cut, "usage", "completion_tokens"), Json(5));
}

// Starts a long stream and reads its first words.
void begin_stream(RawClient& client, int max_tokens) {
  const Json request = Json::object({{"prompt", as_json(goldens().ints("greedy7.prompt"))},
                                     {"temperature", 1},
                                     {"seed", 5},
                                     {"max_tokens", max_tokens},
                                     {"ignore_eos", true},
                                     {"stream", true}});
  client.request("POST", "/v1/completions", request.dump());
  EXPECT_NE(client.read_until("\"text\":"), "");
}

// ------------------------------------------------------------------------------------------- flags

// What a prompt leaves of the context bounds the reply.
TEST(ServeFlags, MaxModelLen) {
  const Server server({"--max-model-len", "300", "--served-model-name", "tiny", "--alias", "small"});
  const Json full = server.complete(Json::object(
      {{"model", "small"}, {"prompt", as_json(Ids(250, 305))}, {"max_tokens", 1000}, {"ignore_eos", true}}));
  EXPECT_EQ(at(full, "usage", "total_tokens"), Json(300));
  EXPECT_EQ(at(full, "choices", 0, "finish_reason"), Json("length"));

  std::string text;
  for (int i = 0; i < 300; ++i) text += " the";
  const RawResponse refused =
      server.post("/v1/chat/completions", Json::object({{"model", "tiny"}, {"messages", user_messages(text)}}));
  EXPECT_EQ(refused.status, 400);
  EXPECT_EQ(at(parsed(refused.body), "error", "code"), Json("context_length_exceeded")) << refused.body;
  EXPECT_NE(refused.body.find("300"), std::string::npos) << refused.body;

  const RawResponse unknown = server.post("/v1/chat/completions", with(capital_of_france(), {{"model", "moat-nano"}}));
  EXPECT_EQ(unknown.status, 404);
}

TEST(ServeFlags, BoundsOfTheQueue) {
  const Server server({"--max-num-seqs", "1", "--max-queued", "1"});
  RawClient running(server.port()), waiting(server.port());
  begin_stream(running, 8000);
  waiting.request("POST", "/v1/chat/completions", capital_of_france().dump());
  EXPECT_TRUE(Harness::eventually([&] { return server.metric("moat_requests_waiting") == 1; }));
  const RawResponse refused = server.post("/v1/chat/completions", capital_of_france());
  EXPECT_EQ(refused.status, 503) << refused.body;
  EXPECT_EQ(refused.headers.count("retry-after"), 1U);
  EXPECT_EQ(at(parsed(refused.body), "error", "code"), Json("overloaded")) << refused.body;
  running.hang_up();
  EXPECT_EQ(waiting.response().status, 200) << "its turn did not come";
  EXPECT_TRUE(Harness::eventually([&] { return server.idle(); }));
}

int64_t resident_kib(pid_t pid) {
  const Result<std::string> status = read_file(fmt::format("/proc/{}/status", pid));
  const size_t at = status.ok() ? status->find("VmRSS:") : std::string::npos;
  EXPECT_NE(at, std::string::npos);
  return at == std::string::npos ? 0 : std::stoll(status->substr(at + 6));
}

// Ten thousand requests more than fit: each is told so at once, and none leaves anything behind.
TEST(ServeFlags, AFloodIsRefusedAtOnceInBoundedMemory) {
  constexpr int kClients = 8, kEach = 1250;
  constexpr int64_t kMaxGrowthKib = 32 << 10;
  Server server({"--max-num-seqs", "1", "--max-queued", "1"});
  RawClient running(server.port()), waiting(server.port());
  begin_stream(running, 8000);
  waiting.request("POST", "/v1/chat/completions", capital_of_france().dump());
  EXPECT_TRUE(Harness::eventually([&] { return server.metric("moat_requests_waiting") == 1; }));
  const std::string body = Json::object({{"messages", user_messages(std::string(16 << 10, 'x'))}}).dump();
  std::vector<std::vector<double>> times(kClients);
  const auto flood = [&](int count) {
    std::vector<std::thread> clients;
    for (int i = 0; i < kClients; ++i) {
      clients.emplace_back([&, i] {
        RawClient client(server.port());
        for (int j = 0; j < count; ++j) {
          const auto begin = std::chrono::steady_clock::now();
          client.request("POST", "/v1/chat/completions", body);
          EXPECT_EQ(client.response().status, 503);
          times[i].push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        }
      });
    }
    for (std::thread& client : clients) client.join();
  };
  flood(20);  // buffers of these connections
  const int64_t before = resident_kib(server.process().pid());
  flood(kEach);
  const int64_t growth = resident_kib(server.process().pid()) - before;
  EXPECT_EQ(server.metric("moat_requests_waiting"), 1);
  std::vector<double> all;
  for (const auto& some : times) all.insert(all.end(), some.begin(), some.end());
  std::sort(all.begin(), all.end());
  fmt::print("{} refusals: median {:.2f} ms, 99.9% {:.1f} ms, worst {:.1f} ms; memory grew by {} KiB\n", all.size(),
             all[all.size() / 2] * 1e3, all[all.size() * 999 / 1000] * 1e3, all.back() * 1e3, growth);
  EXPECT_LT(all[all.size() * 99 / 100], 0.1);
  EXPECT_LT(growth, kMaxGrowthKib);
}

// What is in the log line "config ...".
std::string config_of(Server& server) {
  const std::string log = server.process().err();
  const size_t begin = log.find(" config model=");
  EXPECT_NE(begin, std::string::npos) << log;
  return begin == std::string::npos ? "" : log.substr(begin, log.find('\n', begin) - begin) + " ";
}

TEST(ServeFlags, TheEffectiveConfigIsPrinted) {
  Server plain;
  const std::string config = config_of(plain);
  for (const char* part : {" served_model_name=moat-nano ", " backend=cpu ", " max_model_len=8192 ",
                           " max_num_seqs=64 ", " max_batched_tokens=2048 ", " max_queued=256 ", " max_step_ms=0 ",
                           " deterministic=false ", " memory_fraction=0.9 ", " block_size=64 ", " prefix_cache=true ",
                           " checkpoint_interval=4096 ", " request_timeout_seconds=0 ", " drain_seconds=30 "}) {
    EXPECT_NE(config.find(part), std::string::npos) << part << "is not in" << config;
  }
  EXPECT_EQ(plain.process().err().find("warn"), std::string::npos) << plain.process().err();

  Server other({"--no-prefix-cache", "--max-memory", "2GiB", "--max-step-ms", "50", "--deterministic",
                "--request-timeout", "2.5", "--api-key", "secret"});
  const std::string changed = config_of(other);
  for (const char* part : {" api_keys=1 ", " max_step_ms=50 ", " deterministic=true ", " memory_bytes=2147483648 ",
                           " prefix_cache=false ", " checkpoints=0 ", " request_timeout_seconds=2.5 "}) {
    EXPECT_NE(changed.find(part), std::string::npos) << part << "is not in" << changed;
  }
  EXPECT_EQ(other.process().err().find("secret"), std::string::npos);
}

TEST(ServeFlags, WhatIsChangedIsAWarning) {
  Server server({"--max-num-seqs", "4096", "--max-memory", "200MB", "--checkpoint-memory", "1kB",
                 "--checkpoint-interval", "100"});
  const std::string log = server.process().err();
  for (const char* part : {"max_num_seqs lowered from 4096 to ", "checkpoint_memory lowered from 1.00 kB to 0",
                           "checkpoint_interval changed from 100 to 64"}) {
    EXPECT_NE(log.find(part), std::string::npos) << part << " is not in\n" << log;
  }
  EXPECT_NE(config_of(server).find(" checkpoint_interval=64 "), std::string::npos);
}

// ---------------------------------------------------------------------------------------------- speculation

class ServeDrafts : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new Server({"--draft", nano_dir() + "-dspark", "--num-draft-tokens", "7"}); }
  static void TearDownTestSuite() {
    EXPECT_TRUE(Harness::eventually([] { return server_->idle(); })) << server_->get("/metrics").body;
    delete server_;
  }
  static Server& server() { return *server_; }
  static Json details(const Json& reply) { return at(reply, "usage", "completion_tokens_details"); }

 private:
  static Server* server_;
};
Server* ServeDrafts::server_ = nullptr;

TEST_F(ServeDrafts, TheStartSaysWhatDrafts) {
  const std::string config = config_of(server());
  EXPECT_NE(config.find("-dspark "), std::string::npos) << config;
  EXPECT_NE(config.find(" num_draft_tokens=7 "), std::string::npos) << config;
  const std::string out = server().process().out();
  EXPECT_NE(out.find("speculation: DSpark: up to 7 drafts"), std::string::npos) << out;
  EXPECT_NE(out.find("always 7 a round"), std::string::npos) << out;
  EXPECT_NE(out.find("draft weights"), std::string::npos) << "not in the memory table:\n" << out;
}

// Greedy replies and those with a seed are the same with drafts, whatever the server, and usage counts the drafts.
TEST_F(ServeDrafts, RepliesAreThoseWithoutDrafts) {
  int64_t accepted = 0, rejected = 0;
  for (const Json& request : drafted_requests()) {
    const Json drafted = server().chat(request), plain = server().chat(with(request, {{"speculative", false}}));
    EXPECT_EQ(at(drafted, "choices", 0, "token_ids"), at(plain, "choices", 0, "token_ids")) << request.dump();
    EXPECT_EQ(at(drafted, "choices", 0, "message", "content"), at(plain, "choices", 0, "message", "content"));
    EXPECT_EQ(at(drafted, "choices", 0, "finish_reason"), at(plain, "choices", 0, "finish_reason"));
    EXPECT_EQ(details(plain).find("accepted_prediction_tokens"), nullptr) << plain.dump();
    EXPECT_EQ(details(plain).find("rejected_prediction_tokens"), nullptr) << plain.dump();
    const int64_t kept = number(at(details(drafted), "accepted_prediction_tokens"));
    EXPECT_GE(kept, 0) << drafted.dump();
    EXPECT_LT(kept, number(at(drafted, "usage", "completion_tokens")));
    accepted += kept;
    rejected += number(at(details(drafted), "rejected_prediction_tokens"));
  }
  EXPECT_GT(accepted, 0);
  EXPECT_GT(rejected, 0);
}

TEST_F(ServeDrafts, MetricsAddUp) {
  const auto sum_of = [&](const std::string& text, const std::string& family) {
    double sum = 0;
    int series = 0;
    for (size_t i = 0; (i = text.find("\n" + family + "{", i)) != std::string::npos; ++i) {
      sum += std::stod(text.substr(text.find("} ", i) + 2));
      ++series;
    }
    EXPECT_EQ(series, 7) << family;
    return sum;
  };
  const double accepted_before = server().metric("moat_accepted_tokens_total");
  const double drafted_before = server().metric("moat_drafted_tokens_total");
  const Json reply = server().chat(with(capital_of_france(), {{"temperature", 0}, {"max_tokens", 40}}));
  const double accepted = server().metric("moat_accepted_tokens_total");
  const double drafted = server().metric("moat_drafted_tokens_total");
  EXPECT_EQ(accepted - accepted_before, static_cast<double>(number(at(details(reply), "accepted_prediction_tokens"))));
  EXPECT_EQ(drafted - drafted_before - (accepted - accepted_before),
            static_cast<double>(number(at(details(reply), "rejected_prediction_tokens"))));
  const double rounds = server().metric("moat_draft_rounds_total");
  EXPECT_GT(rounds, 0);
  EXPECT_NEAR(server().metric("moat_acceptance_length"), 1 + accepted / rounds, 1e-6);
  const std::string text = server().get("/metrics").body;
  EXPECT_EQ(sum_of(text, "moat_drafted_at_position_total"), drafted);
  EXPECT_EQ(sum_of(text, "moat_accepted_at_position_total"), accepted);
}

TEST_F(ServeDrafts, StopStringsEndInsideARound) {
  const Json request = with(capital_of_france(), {{"temperature", 0}, {"return_token_ids", true}});
  const std::string content = at(server().chat(request), "choices", 0, "message", "content").as_string();
  ASSERT_GT(content.size(), 12U);
  for (size_t begin = 1; begin + 3 <= content.size() && begin < 16; begin += 2) {
    const Json stop = with(request, {{"stop", content.substr(begin, 3)}});
    const Json drafted = server().chat(stop), plain = server().chat(with(stop, {{"speculative", false}}));
    EXPECT_EQ(at(drafted, "choices"), at(plain, "choices")) << begin;
    EXPECT_EQ(at(drafted, "choices", 0, "finish_reason"), Json("stop"));
    EXPECT_EQ(at(drafted, "usage", "completion_tokens"), at(plain, "usage", "completion_tokens")) << begin;
  }
}

TEST_F(ServeDrafts, StreamsAddUp) {
  const Json request = with(capital_of_france(), {{"temperature", 0}, {"return_token_ids", true}});
  const Json whole = server().chat(request);
  Json streamed = with(request, {{"stream", true}});
  streamed.set("stream_options", Json::object({{"include_usage", true}}));
  const RawResponse response = server().post("/v1/chat/completions", streamed);
  EXPECT_EQ(response.status, 200) << response.body;
  const Summed sum = sum_stream(response.body, 1)[0];
  EXPECT_EQ(Json(sum.content), at(whole, "choices", 0, "message", "content"));
  EXPECT_EQ(sum.finish, at(whole, "choices", 0, "finish_reason").as_string());
  EXPECT_EQ(as_json(sum.token_ids), at(whole, "choices", 0, "token_ids"));
  const std::vector<std::string> events = sse_data(response.body);
  const Json usage = parsed(events.at(events.size() - 2));
  EXPECT_GT(number(at(details(usage), "accepted_prediction_tokens")), 0) << usage.dump();
}

TEST_F(ServeDrafts, SpeculativeIsABoolean) {
  for (const Json& wrong : {Json("no"), Json(0), Json::array()}) {
    const RawResponse response =
        server().post("/v1/chat/completions", with(capital_of_france(), {{"speculative", wrong}}));
    EXPECT_EQ(response.status, 400) << wrong.dump();
    EXPECT_EQ(at(parsed(response.body), "error", "param"), Json("speculative")) << response.body;
  }
  const Json off = Json::object({{"prompt", "Once"}, {"max_tokens", 8}, {"temperature", 0}, {"speculative", false}});
  EXPECT_EQ(details(server().complete(off)).find("accepted_prediction_tokens"), nullptr);
  EXPECT_NE(details(server().complete(with(off, {{"speculative", true}}))).find("accepted_prediction_tokens"), nullptr);
}

// Speculation that is off says why.
TEST(Trap, T79_T80_WhySpeculationIsOff) {
  Server none, zero({"--draft", nano_dir() + "-dspark", "--num-draft-tokens", "0"});
  EXPECT_NE(none.process().out().find("speculation: off: no drafter"), std::string::npos) << none.process().out();
  EXPECT_NE(zero.process().out().find("speculation: off: --num-draft-tokens 0"), std::string::npos);
  EXPECT_NE(config_of(none).find(" draft=none "), std::string::npos) << config_of(none);
  for (Server* server : {&none, &zero}) {
    EXPECT_NE(config_of(*server).find(" num_draft_tokens=0 "), std::string::npos) << config_of(*server);
    const Json reply = server->chat(with(capital_of_france(), {{"max_tokens", 8}, {"speculative", true}}));
    EXPECT_EQ(at(reply, "usage", "completion_tokens_details").find("accepted_prediction_tokens"), nullptr);
    EXPECT_EQ(server->metric("moat_draft_rounds_total"), 0);
    EXPECT_EQ(server->metric("moat_acceptance_length"), 0);
  }
}

// ---------------------------------------------------------------------------------------------------- flags

TEST(ServeFlags, RequestTimeout) {
  const Server server({"--request-timeout", "0.3"});
  Json request = Json::object({{"prompt", "Once"}, {"max_tokens", 8000}, {"ignore_eos", true}});
  const RawResponse whole = server.post("/v1/completions", request);
  EXPECT_EQ(whole.status, 504) << whole.body;
  EXPECT_EQ(at(parsed(whole.body), "error", "code"), Json("timeout"));
  request.set("stream", true);
  const RawResponse stream = server.post("/v1/completions", request);
  EXPECT_EQ(at(parsed(sse_data(stream.body).back()), "error", "code"), Json("timeout")) << stream.body;
  EXPECT_EQ(server.metric("moat_timeouts_total"), 2);
  EXPECT_TRUE(Harness::eventually([&] { return server.idle(); }));
}

TEST(ServeFlags, ApiKey) {
  const Server server({"--api-key", "secret"});
  const std::string body = with(capital_of_france(), {{"max_tokens", 1}}).dump();
  EXPECT_EQ(fetch(server.port(), "POST", "/v1/chat/completions", body).status, 401);
  EXPECT_EQ(fetch(server.port(), "POST", "/v1/chat/completions", body, "Authorization: Bearer secret\r\n").status, 200);
}

// ------------------------------------------------------------------------------------------ clients that go

// A client process that dies without a word: the kernel closes its connection.
TEST_F(Serve, AKilledClientFreesItsSlots) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const int port = server().port();
  const pid_t child = ::fork();
  if (child == 0) {
    RawClient one(port), other(port);
    begin_stream(one, 8000);
    begin_stream(other, 8000);
    ::_exit(::write(ready[1], "x", 1) == 1 && ::pause() != 0 ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(server().metric("moat_requests_running"), 2);
  EXPECT_GE(server().metric("moat_state_slots_used"), 2);
  EXPECT_GT(server().metric("moat_cache_blocks_used"), 0);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_TRUE(Harness::eventually([] { return server().idle(); })) << server().get("/metrics").body;
  EXPECT_LT(server().metric("moat_generated_tokens_total"), 16000) << "the streams ran to their end";
}

TEST_F(Serve, AClientThatLeavesDuringPrefillFreesItsSlots) {
  for (int i = 0; i < 3; ++i) {
    RawClient client(server().port());
    const Json request = Json::object({{"prompt", as_json(Ids(3000, 300 + i))}, {"max_tokens", 1000}});
    client.request("POST", "/v1/completions", request.dump());
    EXPECT_TRUE(Harness::eventually([] { return server().metric("moat_state_slots_used") > 0; }));
  }
  EXPECT_TRUE(Harness::eventually([] { return server().idle(); })) << server().get("/metrics").body;
}

int64_t open_files(pid_t pid) {
  const std::filesystem::directory_iterator files(fmt::format("/proc/{}/fd", pid));
  return std::distance(begin(files), end(files));
}

// At any moment from the first byte of a request to the middle of its reply.
TEST_F(Serve, AThousandHangUpsLeaveNothingBehind) {
  const pid_t pid = server().process().pid();
  const auto served = [] {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(server().post("/v1/chat/completions", with(capital_of_france(), {{"max_tokens", 1}})).status, 200);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const double before = served();
  const int64_t files = open_files(pid);
  uint32_t state = 7;
  for (int i = 0; i < 1000; ++i) {
    RawClient client(server().port());
    const std::string body =
        with(capital_of_france(), {{"stream", i % 2 == 0}, {"max_tokens", 500}, {"ignore_eos", true}}).dump();
    const std::string text = fmt::format(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {}\r\n\r\n{}", body.size(), body);
    state = state * 1664525U + 1013904223U;
    client.send((state >> 20) % 4 != 0 ? text : text.substr(0, (state >> 8) % text.size()));
    if ((state >> 24) % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state % 8000));
  }
  EXPECT_TRUE(Harness::eventually([] { return server().idle(); })) << server().get("/metrics").body;
  EXPECT_TRUE(Harness::eventually([&] { return open_files(pid) <= files; })) << open_files(pid) << " of " << files;
  const double after = served();
  fmt::print("a request takes {:.1f} ms before, {:.1f} ms after\n", before * 1e3, after * 1e3);
  EXPECT_LT(after, 10 * before + 1);
}

// ----------------------------------------------------------------------------------------------- the end

TEST(ServeEnd, TermDrains) {
  Server server({"--drain-seconds", "600"});
  RawClient client(server.port());
  begin_stream(client, 1500);
  server.process().signal(SIGTERM);
  EXPECT_TRUE(Harness::eventually([&] { return server.get("/ready").status == 503; }));
  EXPECT_EQ(server.get("/health").status, 200);
  const RawResponse refused = server.post("/v1/chat/completions", capital_of_france());
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.headers.count("retry-after"), 1U);
  EXPECT_NE(client.read_until("\"finish_reason\":\"length\""), "") << "the stream was cut";
  EXPECT_NE(client.read_until("data: [DONE]\n\n"), "");
  EXPECT_EQ(server.process().wait_for(std::chrono::seconds(120)), 0) << server.process().err();
  EXPECT_NE(server.process().err().find("blocks_used=0 slots_used=0"), std::string::npos) << server.process().err();
}

TEST(ServeEnd, ASecondSignalCutsTheDrainShort) {
  for (const int second : {SIGTERM, SIGINT}) {
    Server server({"--drain-seconds", "600"});
    RawClient client(server.port());
    begin_stream(client, 8000);
    server.process().signal(SIGTERM);
    EXPECT_TRUE(Harness::eventually([&] { return server.get("/ready").status == 503; }));
    EXPECT_TRUE(server.process().running());
    server.process().signal(second);
    const std::string rest = client.read_until("data: {\"error\"");
    EXPECT_NE(rest, "") << "no error event";
    EXPECT_EQ(rest.find("[DONE]"), std::string::npos);
    EXPECT_EQ(server.process().wait_for(std::chrono::seconds(120)), 0) << server.process().err();
    EXPECT_NE(server.process().err().find("blocks_used=0 slots_used=0"), std::string::npos) << server.process().err();
  }
}

TEST(ServeEnd, TheDrainHasALimit) {
  Server server({"--drain-seconds", "0"});
  RawClient client(server.port());
  begin_stream(client, 8000);
  server.process().signal(SIGINT);
  EXPECT_NE(client.read_until("data: {\"error\""), "") << "no error event";
  EXPECT_EQ(server.process().wait_for(std::chrono::seconds(120)), 0) << server.process().err();
}

// Whether it still loads or already serves: it ends, and says that it was asked to.
TEST(ServeEnd, TermAtTheVeryBeginning) {
  for (int delay_ms = 100; delay_ms < 300; delay_ms += 50) {
    Process process({"serve", "-m", nano_dir(), "--port", "0"});
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    process.signal(SIGTERM);
    const int status = process.wait_for(std::chrono::seconds(120));
    EXPECT_TRUE(status == 0 || status == 128 + SIGTERM) << status << process.err();
  }
}

TEST(ServeEnd, APortInUseIsNamed) {
  const Server server;
  Process second({"serve", "-m", nano_dir(), "--port", std::to_string(server.port())});
  EXPECT_EQ(second.wait_for(std::chrono::seconds(120)), 1);
  EXPECT_NE(second.err().find(std::to_string(server.port())), std::string::npos) << second.err();
}

}  // namespace
}  // namespace moat
