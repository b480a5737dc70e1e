// SPDX-License-Identifier: Apache-2.0
// The API over real sockets against the scripted engine: every error has its shape, whoever hangs up is cancelled, and nothing
// a client sends harms the server.
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "base/file.h"
#include "server_calls.h"

namespace moat {
namespace {

using std::chrono::milliseconds;

// --- errors ---

void expect_error(const RawResponse& response, int status, const Json& param, const std::string& label) {
  EXPECT_EQ(response.status, status) << label << ": " << response.body;
  EXPECT_EQ(response.headers.count("access-control-allow-origin"), 1U) << label;
  const Json error = at(parsed(response.body), "error");
  EXPECT_TRUE(at(error, "message").is_string()) << label;
  EXPECT_TRUE(at(error, "type").is_string()) << label;
  EXPECT_NE(error.find("code"), nullptr) << label;
  EXPECT_EQ(at(error, "param"), param) << label << ": " << response.body;
}

TEST(Errors, ChatFields) {
  Harness harness;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"messages", R"({"messages":[]})"},
      {"messages", R"({"messages":"hi"})"},
      {"messages", R"({"messages":[{"role":"wizard","content":"x"}]})"},
      {"messages", R"({"messages":[{"role":"user","content":5}]})"},
      {"temperature", R"({"temperature":-1})"},
      {"temperature", R"({"temperature":1e9})"},
      {"temperature", R"({"temperature":"hot"})"},
      {"top_p", R"({"top_p":0})"},
      {"top_p", R"({"top_p":2})"},
      {"top_k", R"({"top_k":-5})"},
      {"top_k", R"({"top_k":1.5})"},
      {"min_p", R"({"min_p":2})"},
      {"max_tokens", R"({"max_tokens":0})"},
      {"max_tokens", R"({"max_tokens":-1})"},
      {"max_completion_tokens", R"({"max_completion_tokens":0})"},
      {"min_tokens", R"({"min_tokens":9,"max_tokens":3})"},
      {"stop", R"({"stop":5})"},
      {"stop", R"({"stop":["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"]})"},
      {"stop_token_ids", R"({"stop_token_ids":[5120]})"},
      {"seed", R"({"seed":"x"})"},
      {"n", R"({"n":0})"},
      {"n", R"({"n":1000})"},
      {"top_logprobs", R"({"logprobs":true,"top_logprobs":21})"},
      {"top_logprobs", R"({"top_logprobs":2})"},
      {"logprobs", R"({"logprobs":2})"},
      {"stream", R"({"stream":"yes"})"},
      {"stream_options", R"({"stream_options":1})"},
      {"stream_options.include_usage", R"({"stream_options":{"include_usage":1}})"},
      {"reasoning_effort", R"({"reasoning_effort":"huge"})"},
      {"chat_template_kwargs.thinking", R"({"chat_template_kwargs":{"thinking":"no"}})"},
      {"tools", R"({"tools":{}})"},
      {"tools", R"({"tools":[{"type":"function"}]})"},
      {"tool_choice", R"({"tool_choice":"required"})"},
      {"tool_choice", R"({"tool_choice":"maybe"})"},
      {"tool_choice",
       R"({"tools":[{"type":"function","function":{"name":"a"}}],"tool_choice":{"type":"function","function":{"name":"b"}}})"},
      {"response_format", R"({"response_format":{"type":"xml"}})"},
      {"response_format", R"({"response_format":{"type":"json_schema"}})"},
      {"presence_penalty", R"({"presence_penalty":2.5})"},
      {"presence_penalty", R"({"presence_penalty":"much"})"},
      {"frequency_penalty", R"({"frequency_penalty":-2.5})"},
      {"frequency_penalty", R"({"frequency_penalty":1e999})"},
      {"repetition_penalty", R"({"repetition_penalty":0})"},
      {"repetition_penalty", R"({"repetition_penalty":2.5})"},
      {"logit_bias", R"({"logit_bias":[5]})"},
      {"logit_bias", R"({"logit_bias":{"5":101}})"},
      {"logit_bias", R"({"logit_bias":{"5":"1"}})"},
      {"logit_bias", R"({"logit_bias":{"5":null}})"},
      {"logit_bias", R"({"logit_bias":{"5120":1}})"},
      {"logit_bias", R"({"logit_bias":{"-1":1}})"},
      {"logit_bias", R"({"logit_bias":{"05":1}})"},
      {"logit_bias", R"({"logit_bias":{"five":1}})"},
      {"logit_bias", R"({"logit_bias":{"":1}})"},
      {"bad_words", R"({"bad_words":"no"})"},
      {"bad_words", R"({"bad_words":[5]})"},
      {"bad_words", R"({"bad_words":["fine"," "]})"},
      {"bad_words", R"({"bad_words":[")" + std::string(2000, 'x') + R"("]})"},
      {"best_of", R"({"best_of":3})"},
      {"guided_json", R"({"guided_json":{"type":"object"}})"},
      {"model", R"({"model":5})"},
      {"timeout", R"({"timeout":0})"},
      {"timeout", R"({"timeout":-1})"},
      {"timeout", R"({"timeout":"10"})"},
      {"timeout", R"({"timeout":1e10})"},
  };
  for (const auto& [param, extra] : cases) {
    expect_error(harness.chat(chat_body(parsed(extra))), 400, param, extra);
    EXPECT_EQ(harness.engine->stats().prompt_tokens_total, 0) << extra;
  }
  expect_error(harness.chat(Json::object({{"model", "moat-nano"}})), 400, "messages", "no messages");
  const RawResponse unknown = harness.chat(chat_body(Json::object({{"model", "gpt-9"}})));
  expect_error(unknown, 404, "model", "unknown model");
  EXPECT_EQ(at(parsed(unknown.body), "error", "code"), Json("model_not_found"));
}

TEST(Errors, SamplingFieldsSayGotAndExpected) {
  Harness harness;
  Json many = Json::object();
  for (int id = 0; id < 1025; ++id) many.set(std::to_string(id), 1);
  for (const auto& [extra, message] : std::vector<std::pair<Json, std::string>>{
           {parsed(R"({"temperature":-1})"), "temperature is -1, expected a number from 0 to 2"},
           {parsed(R"({"top_p":0})"), "top_p is 0, expected a number above 0, at most 1"},
           {parsed(R"({"top_p":2})"), "top_p is 2, expected a number from 0 to 1"},
           {parsed(R"({"top_k":-5})"), "top_k is -5, expected an integer of at least -1"},
           {parsed(R"({"min_p":2})"), "min_p is 2, expected a number from 0 to 1"},
           {parsed(R"({"presence_penalty":3})"), "presence_penalty is 3, expected a number from -2 to 2"},
           {parsed(R"({"repetition_penalty":0})"), "repetition_penalty is 0, expected a number above 0, at most 2"},
           {parsed(R"({"logit_bias":{"7":-101}})"),
            "logit_bias of token 7 is -101, expected a number from -100 to 100"},
           {parsed(R"({"logit_bias":{"x":1}})"),
            "logit_bias has the key \"x\", expected token ids from \"0\" to \"5119\""},
           {Json::object({{"logit_bias", many}}), "logit_bias has 1025 members, expected at most 1024"},
           {parsed(R"({"bad_words":[""]})"), "bad_words contains \"\", expected strings that are not blank"},
           {parsed(R"({"timeout":0})"), "timeout is 0, expected a number of seconds above 0, at most 1000000000"},
       }) {
    for (const RawResponse& response : {harness.chat(chat_body(extra)), harness.complete(completion_body(extra))}) {
      EXPECT_EQ(response.status, 400) << extra.dump();
      EXPECT_EQ(at(parsed(response.body), "error", "message"), Json(message));
    }
  }
}

TEST(Errors, CompletionFields) {
  Harness harness;
  for (const auto& [param, extra] : std::vector<std::pair<std::string, std::string>>{
           {"prompt", R"({"prompt":null})"},
           {"prompt", R"({"prompt":""})"},
           {"prompt", R"({"prompt":[]})"},
           {"prompt", R"({"prompt":[1,99999]})"},
           {"prompt", R"({"prompt":[1,"a"]})"},
           {"prompt", R"({"prompt":["a",1]})"},
           {"prompt", R"({"prompt":{"a":1}})"},
           {"prompt", R"({"prompt":["a","b"],"n":128})"},
           {"suffix", R"({"suffix":"x"})"},
           {"echo", R"({"echo":true,"logprobs":1})"},
           {"logprobs", R"({"logprobs":21})"},
       }) {
    expect_error(harness.complete(completion_body(parsed(extra))), 400, param, extra);
  }
}

TEST(Errors, Bodies) {
  Harness harness;
  const std::string deep(10'000, '[');
  for (const std::string& body :
       {std::string(), std::string("{"), std::string("[]"), std::string("nope"), deep, std::string("{\"a\":\"\xff\"}"),
        std::string(R"({"a":1,"a":2})"), std::string(R"({"a":"\ud800"})"), std::string("{\"temperature\":NaN}")}) {
    expect_error(fetch(harness.port(), "POST", "/v1/chat/completions", body), 400, Json(), body.substr(0, 40));
    expect_error(fetch(harness.port(), "POST", "/tokenize", body), 400, Json(), body.substr(0, 40));
  }
}

TEST(Errors, ContextLength) {
  Harness harness({.max_model_len = 100});
  harness.play({.ids = nano().encode_text("a b c")});
  std::string ids = "[1";
  for (int i = 1; i < 100; ++i) ids += ",1";
  const RawResponse refused = harness.complete(Json::object({{"prompt", parsed(ids + "]")}}));
  expect_error(refused, 400, "prompt", "too long");
  EXPECT_EQ(at(parsed(refused.body), "error", "code"), Json("context_length_exceeded"));
  EXPECT_NE(refused.body.find("101"), std::string::npos) << refused.body;
  ids.resize(ids.size() - 2);  // 99 tokens leave room for one
  const Json whole = parsed(harness.complete(Json::object({{"prompt", parsed(ids + "]")}, {"max_tokens", 50}})).body);
  EXPECT_EQ(number(at(whole, "usage", "completion_tokens")), 1);
  EXPECT_EQ(at(whole, "choices", 0, "finish_reason"), Json("length"));
}

TEST(Errors, EngineFailsAndRejects) {
  Harness harness;
  harness.play({.ids = reply("Hm", "Hi"), .fail_after = 3});
  expect_error(harness.chat(chat_body()), 500, Json(), "whole");
  const RawResponse streamed = harness.chat(chat_body(Json::object({{"stream", true}})));
  EXPECT_EQ(streamed.status, 200);
  EXPECT_TRUE(streamed.complete);
  const std::vector<std::string> events = sse_data(streamed.body);
  EXPECT_TRUE(at(parsed(events.back()), "error", "message").is_string());
  EXPECT_EQ(streamed.body.find("[DONE]"), std::string::npos);
  harness.play({.reject = true});
  const RawResponse rejected = harness.chat(chat_body());
  expect_error(rejected, 503, Json(), "rejected");
  EXPECT_EQ(rejected.headers.count("retry-after"), 1U);
  harness.play({.ids = reply("Hm", "Hi")});
  EXPECT_EQ(harness.chat(chat_body()).status, 200);
}

// --- routes ---

TEST(Routes, ModelsHealthVersion) {
  Harness harness;
  const Json models = parsed(fetch(harness.port(), "GET", "/v1/models").body);
  EXPECT_EQ(at(models, "data", 0, "id"), Json("moat-nano"));
  EXPECT_EQ(number(at(models, "data", 0, "max_model_len")), 8192);
  EXPECT_EQ(number(at(models, "data", 1, "context_length")), 8192);
  EXPECT_EQ(fetch(harness.port(), "GET", "/v1/models/moat-nano").status, 200);
  EXPECT_EQ(fetch(harness.port(), "GET", "/v1/models/org%2Falias").status, 200);
  expect_error(fetch(harness.port(), "GET", "/v1/models/other"), 404, "model", "other model");
  EXPECT_EQ(fetch(harness.port(), "GET", "/health").status, 200);
  EXPECT_EQ(fetch(harness.port(), "GET", "/ready").status, 200);
  EXPECT_EQ(fetch(harness.port(), "GET", "/version").body, R"({"version":"0.1.0"})");
  expect_error(fetch(harness.port(), "GET", "/nothing"), 404, Json(), "unknown path");
  const RawResponse wrong = fetch(harness.port(), "GET", "/v1/chat/completions");
  expect_error(wrong, 405, Json(), "wrong method");
  EXPECT_EQ(wrong.headers.at("allow"), "POST, OPTIONS");
  EXPECT_EQ(fetch(harness.port(), "POST", "/health", "{}").headers.at("allow"), "GET, HEAD, OPTIONS");
  RawClient client(harness.port());
  client.request("HEAD", "/health");
  const RawResponse head = client.response(true);
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.headers.at("content-length"), "15");
  client.request("GET", "/health");  // nothing of a body may have come before
  EXPECT_EQ(client.response().body, R"({"status":"ok"})");
}

TEST(Routes, Tokenize) {
  Harness harness;
  const Json tokens = parsed(harness.post("/tokenize", Json::object({{"prompt", "Hi <|sep|> 안녕"}})).body);
  EXPECT_EQ(number(at(tokens, "count")), static_cast<int64_t>(nano().encode_text("Hi <|sep|> 안녕").size()));
  EXPECT_EQ(number(at(tokens, "max_model_len")), 8192);
  const Json text = parsed(harness.post("/detokenize", Json::object({{"tokens", at(tokens, "tokens")}})).body);
  EXPECT_EQ(at(text, "prompt"), Json("Hi <|sep|> 안녕"));
  const Json chat = parsed(harness.post("/tokenize", Json::object({{"messages", user_messages()}})).body);
  harness.play({.ids = reply("", "ok")});
  const Json whole = parsed(harness.chat(chat_body()).body);
  EXPECT_EQ(at(chat, "count"), at(whole, "usage", "prompt_tokens"));
  expect_error(harness.post("/tokenize", Json::object()), 400, "prompt", "nothing");
  expect_error(harness.post("/detokenize", Json::object()), 400, "tokens", "nothing");
  expect_error(harness.post("/detokenize", Json::object({{"tokens", Json::array({-1})}})), 400, "tokens", "bad id");
}

TEST(Routes, CorsAndRequestIds) {
  ApiServer::Options options;
  options.api_keys = {"secret"};
  Harness harness({.options = options});
  const RawResponse preflight =
      fetch(harness.port(), "OPTIONS", "/v1/chat/completions", "",
            "Origin: http://x\r\nAccess-Control-Request-Headers: authorization, x-stainless-os\r\n");
  EXPECT_EQ(preflight.status, 204);
  EXPECT_EQ(preflight.headers.at("access-control-allow-origin"), "*");
  EXPECT_EQ(preflight.headers.at("access-control-allow-headers"), "authorization, x-stainless-os");
  const RawResponse named = fetch(harness.port(), "GET", "/health", "", "X-Request-ID: abc-1\r\n");
  EXPECT_EQ(named.headers.at("x-request-id"), "abc-1");
  EXPECT_EQ(fetch(harness.port(), "GET", "/health").headers.at("x-request-id").substr(0, 4), "req-");
}

TEST(Routes, ApiKeys) {
  ApiServer::Options options;
  options.api_keys = {"first", "second-key"};
  Harness harness({.options = options});
  const auto status = [&](const std::string& path, const std::string& header) {
    return fetch(harness.port(), "GET", path, "", header).status;
  };
  for (const char* open : {"/health", "/ready", "/version"}) EXPECT_EQ(status(open, ""), 200);
  for (const char* guarded : {"/v1/models", "/metrics", "/flush_cache"}) {
    expect_error(fetch(harness.port(), "GET", guarded), 401, Json(), guarded);
    EXPECT_EQ(status(guarded, "Authorization: Bearer second-key\r\n"), 200);
    EXPECT_EQ(status(guarded, "Authorization: bearer first\r\n"), 200);
    for (const char* wrong : {"Bearer firs", "Bearer firstx", "Bearer ", "Basic first", "first", "Bearer second-kez"}) {
      EXPECT_EQ(status(guarded, "Authorization: " + std::string(wrong) + "\r\n"), 401) << wrong;
    }
  }
}

TEST(Routes, FlushCache) {
  Harness harness({.loaded = false});
  const std::vector<std::pair<std::string, std::string>> calls = {
      {"POST", "/v1/cache/flush"}, {"POST", "/reset_prefix_cache"}, {"POST", "/flush_cache"}, {"GET", "/flush_cache"}};
  for (const auto& [method, path] : calls) {
    expect_error(fetch(harness.port(), method, path), 503, Json(), path);
  }
  harness.server->set_model(*harness.engine, nano());
  for (const auto& [method, path] : calls) {
    const int64_t before = harness.engine->num_flushes();
    const RawResponse flushed = fetch(harness.port(), method, path);
    EXPECT_EQ(flushed.status, 200) << path;
    EXPECT_EQ(flushed.body, R"({"status":"flushed"})");
    EXPECT_EQ(harness.engine->num_flushes(), before + 1);
  }
  for (const char* path : {"/v1/cache/flush", "/reset_prefix_cache"}) {
    const RawResponse wrong = fetch(harness.port(), "GET", path);
    expect_error(wrong, 405, Json(), path);
    EXPECT_EQ(wrong.headers.at("allow"), "POST, OPTIONS");
  }
  const RawResponse wrong = fetch(harness.port(), "DELETE", "/flush_cache");
  expect_error(wrong, 405, Json(), "delete");
  EXPECT_EQ(wrong.headers.at("allow"), "POST, GET, HEAD, OPTIONS");
  EXPECT_NE(wrong.body.find("expected POST or GET"), std::string::npos) << wrong.body;
}

// The value in a line "name value" or "name{labels} value"; -1 if there is none.
double metric(const std::string& text, const std::string& name) {
  const size_t at = text.find("\n" + name + " ");
  return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size() + 2));
}

TEST(Routes, Metrics) {
  Harness harness;
  harness.play({.ids = reply("Hm", "Hi"), .num_cached_tokens = 5});
  EXPECT_EQ(metric(fetch(harness.port(), "GET", "/metrics").body, "moat_prefix_hit_rate"), 0) << "of nothing";
  EXPECT_EQ(harness.chat(chat_body()).status, 200);
  EXPECT_EQ(harness.chat(chat_body(Json::object({{"n", 0}}))).status, 400);
  const std::string text = fetch(harness.port(), "GET", "/metrics").body;
  for (const char* line :
       {"moat_requests_finished_total{reason=\"stop\"} 1\n", "moat_http_responses_total{code=\"200\"} 2\n",
        "moat_http_responses_total{code=\"400\"} 1\n", "moat_cached_tokens_total 5\n", "moat_requests_running 0\n",
        "moat_requests_waiting 0\n", "moat_state_slots_total 64\n", "moat_time_to_first_token_seconds_count 1\n",
        "moat_request_seconds_count 1\n", "moat_queue_seconds_count 1\n", "moat_timeouts_total 0\n",
        "moat_preemptions_total 0\n", "moat_checkpoints_saved_total 0\n", "moat_checkpoints_restored_total 0\n",
        "moat_checkpoints_evicted_total 0\n", "moat_cache_blocks_cached 0\n", "moat_state_checkpoints 0\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
  EXPECT_NEAR(metric(text, "moat_prefix_hit_rate"), 5 / metric(text, "moat_prompt_tokens_total"), 1e-9);
}

// --- HTTP ---

TEST(Http, KeepAliveAndPipelining) {
  Harness harness;
  harness.play({.ids = reply("", "Hi")});
  RawClient client(harness.port());
  for (int i = 0; i < 3; ++i) {
    client.request("POST", "/v1/chat/completions", chat_body(Json::object({{"stream", i == 1}})).dump());
    const RawResponse response = client.response();
    EXPECT_EQ(response.status, 200);
    EXPECT_TRUE(response.complete);
    EXPECT_EQ(response.headers.at("connection"), "keep-alive");
  }
  // The second request is already there while the first is handled.
  const std::string body = chat_body().dump();
  const std::string one =
      "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  client.send(one + one + "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(client.response().status, 200);
  EXPECT_EQ(client.response().status, 200);
  EXPECT_EQ(client.response().status, 200);
  EXPECT_TRUE(client.at_end());
}

TEST(Http, OddButValidRequests) {
  Harness harness;
  harness.play({.ids = reply("", "Hi")});
  const std::string body = chat_body(Json::object({{"stream", true}})).dump();
  RawClient bytewise(harness.port());
  const std::string text =
      "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  for (const char c : text) bytewise.send(std::string(1, c));
  EXPECT_EQ(sum_stream(bytewise.response().body, 1)[0].content, "Hi");

  RawClient chunked(harness.port());
  chunked.send("POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
  chunked.send(
      fmt::format("{:x}\r\n{}\r\n{:x}\r\n{}\r\n0\r\n\r\n", 10, body.substr(0, 10), body.size() - 10, body.substr(10)));
  EXPECT_EQ(sum_stream(chunked.response().body, 1)[0].content, "Hi");

  RawClient expecting(harness.port());
  expecting.send("POST /v1/chat/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: " +
                 std::to_string(body.size()) + "\r\n\r\n");
  EXPECT_EQ(expecting.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  expecting.send(body);
  EXPECT_EQ(sum_stream(expecting.response().body, 1)[0].content, "Hi");

  RawClient old(harness.port());
  old.send("POST /v1/chat/completions HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
  const RawResponse delimited = old.response();
  EXPECT_EQ(delimited.headers.count("transfer-encoding"), 0U);
  EXPECT_EQ(delimited.headers.at("connection"), "close");
  EXPECT_EQ(sum_stream(delimited.body, 1)[0].content, "Hi");
}

TEST(Http, MalformedInputNeverHarms) {
  ApiServer::Options options;
  options.http.max_body_bytes = 1000;
  options.http.max_header_bytes = 2000;
  Harness harness({.options = options});
  const auto answer_to = [&](const std::string& bytes) {
    RawClient client(harness.port());
    client.send(bytes);
    return client.response();
  };
  expect_error(answer_to("GARBAGE\r\n\r\n"), 400, Json(), "garbage");
  expect_error(answer_to("GET / HTTP/9.9\r\n\r\n"), 400, Json(), "version");
  expect_error(answer_to("GET / HTTP/1.1\r\nno colon\r\n\r\n"), 400, Json(), "field");
  expect_error(answer_to("POST /tokenize HTTP/1.1\r\nContent-Length: x\r\n\r\n"), 400, Json(), "length");
  expect_error(answer_to("POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"), 400,
               Json(), "two lengths");
  expect_error(answer_to("GET / HTTP/1.1\r\nX: " + std::string(5000, 'x') + "\r\n\r\n"), 431, Json(), "header");
  expect_error(answer_to("POST /tokenize HTTP/1.1\r\nContent-Length: 5000\r\n\r\n" + std::string(5000, 'x')), 413,
               Json(), "body");
  std::string tls = "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
  tls.resize(600, '\x7f');
  (void)answer_to(tls + "\r\n\r\n");
  uint32_t state = 1;
  for (int round = 0; round < 200; ++round) {
    std::string noise = round % 3 == 0 ? "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 9\r\n\r\n" : "";
    for (int i = 0; i < round; ++i) noise.push_back(static_cast<char>((state = state * 1664525U + 1013904223U) >> 24));
    RawClient client(harness.port());
    client.send(noise);
  }
  EXPECT_EQ(fetch(harness.port(), "GET", "/health").status, 200);
}

TEST(Http, SlowSendersTimeOut) {
  ApiServer::Options options;
  options.http.header_timeout = milliseconds(100);
  options.http.body_timeout = milliseconds(100);
  options.http.idle_timeout = milliseconds(100);
  Harness harness({.options = options});
  RawClient silent(harness.port());
  EXPECT_TRUE(silent.at_end());
  RawClient header(harness.port());
  header.send("GET /health HT");
  expect_error(header.response(), 408, Json(), "header");
  RawClient body(harness.port());
  body.send("POST /tokenize HTTP/1.1\r\nContent-Length: 10\r\n\r\n{");
  expect_error(body.response(), 408, Json(), "body");
}

TEST(Http, PingsWhileSilent) {
  ApiServer::Options options;
  options.http.ping_interval = milliseconds(20);
  Harness harness({.options = options});
  harness.play({.ids = reply("", "Hi"), .ttft = milliseconds(200)});
  const RawResponse response = harness.chat(chat_body(Json::object({{"stream", true}})));
  EXPECT_EQ(response.body.substr(0, 16), ": ping\n\n: ping\n\n");
  EXPECT_EQ(sum_stream(response.body, 1)[0].content, "Hi");
}

TEST(Http, SlowReaderIsCutOff) {
  ApiServer::Options options;
  options.http.max_buffered_bytes = 64 << 10;
  Harness harness({.max_model_len = 1 << 30, .options = options});
  harness.play({.ids = nano().encode_text("a b c d e f"), .tokens_per_step = 4});
  RawClient reader(harness.port(), 4096);
  const Json body = completion_body(Json::object({{"stream", true}, {"ignore_eos", true}, {"max_tokens", 1000000000}}));
  reader.request("POST", "/v1/completions", body.dump());
  EXPECT_TRUE(Harness::eventually([&] { return harness.engine->stats().cancelled_total == 1; }));
  EXPECT_EQ(harness.engine->stats().num_running, 0);
  const RawResponse rest = reader.response();
  EXPECT_FALSE(rest.complete);
  EXPECT_EQ(fetch(harness.port(), "GET", "/health").status, 200);
}

// --- life ---

constexpr std::chrono::hours kNever{1};

TEST(Life, HangUpIsCancelledWhereverTheRequestIs) {
  Harness harness({.max_num_seqs = 1});
  for (const bool stream : {false, true}) {
    const std::string body = chat_body(Json::object({{"stream", stream}})).dump();
    const int64_t cancelled = harness.engine->stats().cancelled_total;
    harness.play({.ids = reply("", "Hi"), .ttft = kNever});
    auto prefilling = std::make_unique<RawClient>(harness.port());
    prefilling->request("POST", "/v1/chat/completions", body);
    ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 1; }));
    auto queued = std::make_unique<RawClient>(harness.port());
    queued->request("POST", "/v1/chat/completions", body);
    ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_waiting == 1; }));
    queued.reset();
    EXPECT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_waiting == 0; }));
    EXPECT_EQ(harness.engine->stats().cancelled_total, cancelled + 1);
    prefilling.reset();
    EXPECT_TRUE(Harness::eventually([&] { return harness.engine->stats().cancelled_total == cancelled + 2; }));
    harness.play({.ids = reply("Hm", "Hi"), .tpot = milliseconds(2)});
    auto decoding = std::make_unique<RawClient>(harness.port());
    const Json endless = chat_body(Json::object({{"stream", stream}, {"ignore_eos", true}}));
    decoding->request("POST", "/v1/chat/completions", endless.dump());
    EXPECT_TRUE(!stream || decoding->read_until("reasoning_content") != "");
    ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 1; }));
    decoding.reset();
    EXPECT_TRUE(Harness::eventually([&] { return harness.engine->stats().cancelled_total == cancelled + 3; }));
    EXPECT_EQ(harness.engine->stats().num_running, 0);
  }
  harness.play({.ids = reply("", "Hi")});
  EXPECT_EQ(harness.chat(chat_body()).status, 200);
}

TEST(Life, RandomHangUpsLeaveNothingBehind) {
  Harness harness({.max_num_seqs = 4, .max_queued = 100});
  harness.play({.ids = reply("Hm", "Hi there, this is a reply."), .ttft = milliseconds(1), .tpot = milliseconds(1)});
  uint32_t state = 7;
  for (int i = 0; i < 300; ++i) {
    RawClient client(harness.port());
    const std::string body = chat_body(Json::object({{"stream", i % 2 == 0}})).dump();
    const std::string text =
        "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    state = state * 1664525U + 1013904223U;
    const bool whole = (state >> 20) % 4 != 0;
    client.send(whole ? text : text.substr(0, (state >> 8) % text.size()));
    if ((state >> 24) % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(state % 4000));
  }
  EXPECT_TRUE(Harness::eventually([&] {
    const EngineStats stats = harness.engine->stats();
    return stats.num_running == 0 && stats.num_waiting == 0;
  }));
  EXPECT_EQ(harness.chat(chat_body()).status, 200);
}

// Nothing is written before the reply is whole, so only reading can tell.
TEST(Life, WholeCallIsCancelledWithinASecondOfItsHangUp) {
  Harness harness;
  harness.play({.ids = reply("", "Hi"), .ttft = kNever});
  RawClient client(harness.port());
  client.request("POST", "/v1/chat/completions", chat_body().dump());
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 1; }));
  const auto begin = std::chrono::steady_clock::now();
  client.hang_up();
  EXPECT_TRUE(Harness::eventually([&] { return harness.engine->stats().cancelled_total == 1; }));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_EQ(harness.engine->stats().num_running, 0);
}

TEST(Life, CancelledInTheQueueIsNeverScheduled) {
  Harness harness({.max_num_seqs = 1});
  harness.play({.ids = reply("", "Hi"), .ttft = kNever});
  RawClient running(harness.port()), queued(harness.port());
  running.request("POST", "/v1/completions", completion_body().dump());
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 1; }));
  queued.request("POST", "/v1/completions", completion_body().dump());
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_waiting == 1; }));
  const int64_t scheduled = harness.engine->stats().prompt_tokens_total;  // counted when a request starts to run
  queued.hang_up();
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().cancelled_total == 1; }));
  running.hang_up();
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().cancelled_total == 2; }));
  EXPECT_EQ(harness.engine->stats().prompt_tokens_total, scheduled);
  EXPECT_EQ(harness.engine->stats().generated_tokens_total, 0);
}

TEST(Life, TimeoutsWaitingAndRunning) {
  Harness harness({.max_num_seqs = 1});
  harness.play({.ids = reply("", "Hi"), .ttft = kNever});
  RawClient running(harness.port());
  running.request("POST", "/v1/chat/completions", chat_body().dump());
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 1; }));
  const Json soon = Json::object({{"timeout", 0.2}});
  const RawResponse waited = harness.chat(chat_body(soon));
  expect_error(waited, 504, Json(), "waiting");
  EXPECT_EQ(at(parsed(waited.body), "error", "code"), Json("timeout"));
  EXPECT_NE(waited.body.find("waits"), std::string::npos) << waited.body;
  running.hang_up();
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 0; }));

  const RawResponse ran = harness.complete(completion_body(soon));
  expect_error(ran, 504, Json(), "running");
  EXPECT_NE(ran.body.find("runs"), std::string::npos) << ran.body;

  harness.play({.ids = reply("Hm", "Hi"), .tpot = milliseconds(1)});
  const Json endless = Json::object({{"timeout", 0.2}, {"ignore_eos", true}, {"stream", true}, {"n", 2}});
  Harness pair;
  pair.play({.ids = reply("Hm", "Hi"), .tpot = milliseconds(1)});
  const RawResponse streamed = pair.chat(chat_body(endless));
  EXPECT_EQ(streamed.status, 200);
  EXPECT_TRUE(streamed.complete);
  const std::vector<std::string> events = sse_data(streamed.body);
  ASSERT_GT(events.size(), 1U) << "the first tokens were in time";
  EXPECT_EQ(at(parsed(events.back()), "error", "code"), Json("timeout"));
  EXPECT_EQ(streamed.body.find("[DONE]"), std::string::npos);

  const std::string metrics = fetch(harness.port(), "GET", "/metrics").body;
  EXPECT_EQ(metric(metrics, "moat_timeouts_total"), 2);
  EXPECT_EQ(metric(metrics, "moat_requests_finished_total{reason=\"timeout\"}"), 2);
  EXPECT_EQ(harness.chat(chat_body(Json::object({{"timeout", 3600}}))).status, 200) << "in time";
}

// Whichever of the two is sooner.
TEST(Life, TimeoutOfTheServerBoundsThatOfTheRequest) {
  ApiServer::Options options;
  options.model.defaults.timeout_seconds = 0.2;
  Harness bounded({.options = options});
  bounded.play({.ids = reply("", "Hi"), .ttft = kNever});
  expect_error(bounded.chat(chat_body()), 504, Json(), "by default");
  expect_error(bounded.chat(chat_body(Json::object({{"timeout", 3600}}))), 504, Json(), "asked for more");
  options.model.defaults.timeout_seconds = 3600;
  Harness patient({.options = options});
  patient.play({.ids = reply("", "Hi"), .ttft = kNever});
  expect_error(patient.chat(chat_body(Json::object({{"timeout", 0.2}}))), 504, Json(), "asked for less");
}

TEST(Life, FullQueueIsRefusedAtOnce) {
  Harness harness({.max_num_seqs = 1, .max_queued = 2});
  harness.play({.ids = reply("", "Hi"), .ttft = kNever});
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<RawClient>(harness.port()));
    clients.back()->request("POST", "/v1/chat/completions", chat_body().dump());
    ASSERT_TRUE(Harness::eventually([&] {
      const EngineStats stats = harness.engine->stats();
      return stats.num_running + stats.num_waiting == i + 1;
    }));
  }
  const RawResponse refused = harness.chat(chat_body(Json::object({{"stream", true}})));
  expect_error(refused, 503, Json(), "full");
  EXPECT_EQ(refused.headers.at("retry-after"), "1");
  EXPECT_EQ(at(parsed(refused.body), "error", "code"), Json("overloaded"));
  // One place is left for two choices: the call is refused as a whole and gives the place back.
  clients.pop_back();
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_waiting == 1; }));
  expect_error(harness.chat(chat_body(Json::object({{"n", 2}}))), 503, Json(), "half");
  EXPECT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_waiting == 1; }));
}

TEST(Life, LoadingThenServing) {
  Harness harness({.loaded = false});
  EXPECT_EQ(fetch(harness.port(), "GET", "/health").status, 200);
  EXPECT_EQ(fetch(harness.port(), "GET", "/ready").status, 503);
  EXPECT_EQ(fetch(harness.port(), "GET", "/metrics").status, 200);
  const RawResponse early = harness.chat(chat_body());
  expect_error(early, 503, Json(), "loading");
  EXPECT_EQ(early.headers.count("retry-after"), 1U);
  harness.play({.ids = reply("", "Hi")});
  harness.server->set_model(*harness.engine, nano());
  EXPECT_EQ(fetch(harness.port(), "GET", "/ready").status, 200);
  EXPECT_EQ(harness.chat(chat_body()).status, 200);
}

TEST(Life, DrainLetsRequestsComplete) {
  Harness harness;
  harness.play({.ids = reply("", "Hi"), .ttft = milliseconds(300)});
  RawClient whole(harness.port());
  whole.request("POST", "/v1/chat/completions", chat_body().dump());
  RawClient streamed(harness.port());
  streamed.request("POST", "/v1/chat/completions", chat_body(Json::object({{"stream", true}})).dump());
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 2; }));
  harness.server->begin_drain();
  EXPECT_EQ(fetch(harness.port(), "GET", "/ready").status, 503);
  EXPECT_EQ(fetch(harness.port(), "GET", "/health").status, 200);
  const RawResponse late = harness.chat(chat_body());
  expect_error(late, 503, Json(), "draining");
  EXPECT_EQ(late.headers.count("retry-after"), 1U);
  std::thread stopper([&] { harness.server->stop(std::chrono::seconds(60)); });
  EXPECT_EQ(whole.response().status, 200);
  EXPECT_EQ(sum_stream(streamed.response().body, 1)[0].content, "Hi");
  stopper.join();
  EXPECT_EQ(harness.engine->stats().finished_stop_total, 2);
  EXPECT_FALSE(RawClient(harness.port()).connected());
}

TEST(Life, DrainDeadlineCancels) {
  Harness harness;
  harness.play({.ids = reply("", "Hi"), .ttft = kNever});
  RawClient whole(harness.port());
  whole.request("POST", "/v1/chat/completions", chat_body().dump());
  RawClient streamed(harness.port());
  streamed.request("POST", "/v1/chat/completions", chat_body(Json::object({{"stream", true}})).dump());
  ASSERT_TRUE(Harness::eventually([&] { return harness.engine->stats().num_running == 2; }));
  std::thread stopper([&] { harness.server->stop(milliseconds(50)); });
  expect_error(whole.response(), 503, Json(), "cancelled");
  const RawResponse cut = streamed.response();
  EXPECT_NE(cut.body.find("data: {\"error\":"), std::string::npos);
  EXPECT_EQ(cut.body.find("[DONE]"), std::string::npos);
  stopper.join();
}

TEST(Life, FiftyStreamsAtOnce) {
  Harness harness({.max_num_seqs = 20, .max_queued = 100});
  harness.play_by([](const Request& request) {
    return SimEngine::Script{.ids = reply("seed", std::to_string(request.sampling.seed) + " is the answer"),
                             .tpot = std::chrono::microseconds(200)};
  });
  std::atomic<int> right{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 50; ++i) {
    clients.emplace_back([&, i] {
      const RawResponse response = harness.chat(chat_body(Json::object({{"stream", true}, {"seed", i}})));
      const std::string expected = std::to_string(i) + " is the answer";
      if (response.complete && sum_stream(response.body, 1)[0].content == expected) ++right;
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(right, 50);
  EXPECT_EQ(harness.engine->stats().finished_stop_total, 50);
}

}  // namespace
}  // namespace moat
