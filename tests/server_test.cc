// SPDX-License-Identifier: Apache-2.0
// The API over real sockets against the scripted engine: what is streamed is what is returned, every error has its
// shape, whoever hangs up is cancelled, and nothing a client sends harms the server.
#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "base/file.h"
#include "server/call_limit.h"
#include "server/logprobs.h"
#include "server_harness.h"

namespace moat {
namespace {

using std::chrono::milliseconds;

Json chat_body(Json extra = Json::object()) {
  Json body = Json::object({{"model", "moat-nano"}, {"messages", user_messages()}});
  for (const auto& [key, value] : extra.as_object()) body.set(key, value);
  return body;
}

Json completion_body(Json extra = Json::object()) {
  Json body = Json::object({{"prompt", "Once"}});
  for (const auto& [key, value] : extra.as_object()) body.set(key, value);
  return body;
}

// Both forms of one call; the streamed one summed up must be the whole one.
struct Both {
  Json whole;
  std::vector<Summed> streamed;
};

Both both_ways(Harness& harness, const std::string& path, Json body, size_t num_choices = 1) {
  Both both;
  const RawResponse whole = harness.post(path, body);
  EXPECT_EQ(whole.status, 200) << whole.body;
  both.whole = parsed(whole.body);
  body.set("stream", true);
  const RawResponse streamed = harness.post(path, body);
  EXPECT_EQ(streamed.status, 200) << streamed.body;
  EXPECT_TRUE(streamed.complete);
  both.streamed = sum_stream(streamed.body, num_choices);
  for (size_t i = 0; i < num_choices; ++i) {
    const Summed& sum = both.streamed[i];
    const Json choice = at(both.whole, "choices", static_cast<int>(i));
    EXPECT_EQ(at(choice, "finish_reason"), Json(sum.finish));
    const Json content = path == "/v1/completions" ? at(choice, "text") : at(choice, "message", "content");
    EXPECT_EQ(content.is_null() ? "" : content.as_string(), sum.content);
    const Json reasoning = at(choice, "message", "reasoning_content");
    EXPECT_EQ(reasoning.is_null() ? "" : reasoning.as_string(), sum.reasoning);
    const Json calls = at(choice, "message", "tool_calls");
    EXPECT_EQ(items(calls).size(), sum.names.size());
    for (size_t j = 0; j < sum.names.size(); ++j) {
      EXPECT_EQ(at(calls, static_cast<int>(j), "function", "name"), Json(sum.names[j]));
      EXPECT_EQ(at(calls, static_cast<int>(j), "function", "arguments"), Json(sum.arguments[j]));
    }
  }
  return both;
}

Both chat_both_ways(Harness& harness, Json extra = Json::object(), size_t num_choices = 1) {
  return both_ways(harness, "/v1/chat/completions", chat_body(std::move(extra)), num_choices);
}

// --- replies ---

TEST(Chat, EveryGoldenReplyStreamedAndWhole) {
  Harness harness;
  const Json rows = parsed(read_file(MOAT_SOURCE_DIR "/tests/golden/text/reply.json").value());
  int step = 0;
  for (const Json& row : rows.as_array()) {
    SCOPED_TRACE(at(row, "name").as_string() + " " + at(row, "start").as_string());
    Ids ids;
    for (const Json& id : items(at(row, "ids"))) ids.push_back(static_cast<int32_t>(number(id)));
    if (ids.empty()) continue;
    // As many tokens a step as a drafting engine may deliver: where steps end must not show.
    harness.play({.ids = ids, .tokens_per_step = 1 + step++ % 7});
    Json extra = Json::object({{"max_tokens", static_cast<int64_t>(ids.size())}});
    if (at(row, "start") == Json("response")) extra.set("reasoning_effort", "none");
    if (at(row, "tools") == Json(true)) extra.set("tools", weather_tools());
    const Both both = chat_both_ways(harness, extra);
    const Json message = at(both.whole, "choices", 0, "message");
    const Json expected = at(row, "message");
    // A reply that is closed but for its end token is one token short of stop only for a parser that sees no more.
    EXPECT_EQ(at(both.whole, "choices", 0, "finish_reason"), at(expected, "finish_reason"));
    EXPECT_EQ(at(message, "content"), at(expected, "content"));
    EXPECT_EQ(at(message, "reasoning_content"), at(expected, "reasoning_content"));
    const Json::Array calls = items(at(expected, "tool_calls"));
    ASSERT_EQ(both.streamed[0].names.size(), calls.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(Json(both.streamed[0].names[i]), at(calls[i], "name"));
      EXPECT_EQ(Json(both.streamed[0].arguments[i]), at(calls[i], "arguments"));
    }
    if (HasFailure()) return;
  }
}

TEST(Chat, StreamBytes) {
  Harness harness;
  harness.play({.ids = reply("Hm", "Hi!")});
  const RawResponse response = harness.chat(chat_body(Json::object(
      {{"stream", true}, {"stream_options", Json::object({{"include_usage", true}})}, {"model", "org/alias"}})));
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.headers.at("content-type"), "text/event-stream; charset=utf-8");
  EXPECT_EQ(response.headers.at("cache-control"), "no-cache");
  EXPECT_EQ(response.headers.at("x-accel-buffering"), "no");
  EXPECT_EQ(response.headers.at("transfer-encoding"), "chunked");
  EXPECT_EQ(response.headers.at("access-control-allow-origin"), "*");
  const std::vector<std::string> events = sse_data(response.body);
  const std::string id = at(parsed(events.at(0)), "id").as_string();
  EXPECT_EQ(id.substr(0, 9), "chatcmpl-");
  const std::string created = at(parsed(events.at(0)), "created").number_text();
  const std::string head = R"(data: {"id":")" + id + R"(","object":"chat.completion.chunk","created":)" + created +
                           R"(,"model":"org/alias","choices":[)";
  const auto chunk = [&head](const std::string& delta, const std::string& finish) {
    return head + R"({"index":0,"delta":{)" + delta + R"(},"logprobs":null,"finish_reason":)" + finish +
           "}],\"usage\":null}\n\n";
  };
  std::string expected = chunk(R"("role":"assistant","content":"")", "null");
  for (const int32_t token : nano().encode_text("Hm")) {
    expected += chunk(R"("reasoning_content":")" + std::string(nano().token_bytes(token)) + "\"", "null");
  }
  for (const int32_t token : nano().encode_text("Hi!")) {
    expected += chunk(R"("content":")" + std::string(nano().token_bytes(token)) + "\"", "null");
  }
  expected += chunk("", "\"stop\"");
  const auto generated = static_cast<int64_t>(reply("Hm", "Hi!").size() + 1);
  const int64_t prompt = number(at(parsed(events.at(events.size() - 2)), "usage", "prompt_tokens"));
  EXPECT_GT(prompt, 0);
  const auto reasoning = nano().encode_text("Hm").size();
  expected += head + fmt::format(R"(],"usage":{{"prompt_tokens":{},"completion_tokens":{},"total_tokens":{},)"
                                 R"("prompt_tokens_details":{{"cached_tokens":0}},)"
                                 R"("completion_tokens_details":{{"reasoning_tokens":{}}}}}}})"
                                 "\n\n",
                                 prompt, generated, prompt + generated, reasoning);
  expected += "data: [DONE]\n\n";
  EXPECT_EQ(response.body, expected);
}

TEST(Chat, NoUsageChunkUnlessAsked) {
  Harness harness;
  harness.play({.ids = reply("", "Hi")});
  const RawResponse response = harness.chat(chat_body(Json::object({{"stream", true}})));
  for (const std::string& event : sse_data(response.body)) {
    EXPECT_TRUE(event == "[DONE]" || parsed(event).find("usage") == nullptr);
  }
  const Json options = Json::object({{"include_usage", true}, {"continuous_usage_stats", true}});
  const RawResponse counted = harness.chat(chat_body(Json::object({{"stream", true}, {"stream_options", options}})));
  for (const std::string& event : sse_data(counted.body)) {
    EXPECT_TRUE(event == "[DONE]" || at(parsed(event), "usage").is_object());
  }
}

TEST(Chat, UsageAndWholeShape) {
  Harness harness;
  harness.play({.ids = reply("Let me think.", "4"), .num_cached_tokens = 7});
  const Both both = chat_both_ways(harness);
  const Json& whole = both.whole;
  EXPECT_EQ(at(whole, "object"), Json("chat.completion"));
  EXPECT_EQ(at(whole, "model"), Json("moat-nano"));
  EXPECT_EQ(at(whole, "choices", 0, "message", "role"), Json("assistant"));
  EXPECT_EQ(at(whole, "choices", 0, "message", "content"), Json("4"));
  EXPECT_TRUE(at(whole, "choices", 0, "logprobs").is_null());
  EXPECT_EQ(number(at(whole, "usage", "prompt_tokens_details", "cached_tokens")), 7);
  EXPECT_EQ(number(at(whole, "usage", "completion_tokens")),
            static_cast<int64_t>(reply("Let me think.", "4").size() + 1));
  EXPECT_EQ(number(at(whole, "usage", "completion_tokens_details", "reasoning_tokens")),
            static_cast<int64_t>(nano().encode_text("Let me think.").size()));
  EXPECT_EQ(number(at(whole, "usage", "total_tokens")),
            number(at(whole, "usage", "prompt_tokens")) + number(at(whole, "usage", "completion_tokens")));
  EXPECT_EQ(whole.find("timings"), nullptr);
  const Json timed = parsed(harness.chat(chat_body(Json::object({{"timings", true}}))).body);
  EXPECT_TRUE(at(timed, "timings", "predicted_n").is_integer());
  const Json hidden = parsed(harness.chat(chat_body(Json::object({{"include_reasoning", false}}))).body);
  EXPECT_EQ(hidden.find("choices")->as_array()[0].find("message")->find("reasoning_content"), nullptr);
}

TEST(Chat, CharactersAreNeverSplit) {
  Harness harness;
  const std::string text = "안녕하세요 สวัสดี 👩‍👩‍👧‍👦 𠀀𠀁 naïve";
  harness.play({.ids = reply(text, text)});
  const Both both = chat_both_ways(harness);
  EXPECT_EQ(both.streamed[0].content, text);
  EXPECT_EQ(both.streamed[0].reasoning, text);
  harness.play({.ids = nano().encode_text(text)});
  EXPECT_EQ(both_ways(harness, "/v1/completions", completion_body()).streamed[0].content, text);
}

TEST(Chat, CutInReasoning) {
  Harness harness;
  harness.play({.ids = nano().encode_text("Still thinking about all of this")});
  const Both both = chat_both_ways(harness, Json::object({{"max_tokens", 4}}));
  EXPECT_EQ(both.streamed[0].finish, "length");
  EXPECT_EQ(both.streamed[0].content, "");
  EXPECT_NE(both.streamed[0].reasoning, "");
  EXPECT_EQ(number(at(both.whole, "usage", "completion_tokens")), 4);
  EXPECT_EQ(number(at(both.whole, "usage", "completion_tokens_details", "reasoning_tokens")), 4);
}

std::string two_calls() {
  return "Two.<|close|>think<|sep|><|open|>response<|sep|>Looking.<|close|>response<|sep|><|open|>tools<|sep|>"
         "<|open|>call tool=\"get_weather\" index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>Paris"
         "<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool=\"get_weather\" index=\"2\"<|sep|>"
         "<|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>"
         "<|close|>tools<|sep|><|close|>message<|sep|>";
}

TEST(Chat, ToolCalls) {
  Harness harness;
  harness.play({.ids = markup(two_calls())});
  const Both both = chat_both_ways(harness, Json::object({{"tools", weather_tools()}}));
  const Summed& sum = both.streamed[0];
  EXPECT_EQ(sum.finish, "tool_calls");
  EXPECT_EQ(sum.content, "Looking.");
  EXPECT_EQ(sum.names, (std::vector<std::string>{"get_weather", "get_weather"}));
  EXPECT_EQ(parsed(sum.arguments.at(0)), Json::object({{"city", "Paris"}}));
  EXPECT_EQ(parsed(sum.arguments.at(1)), Json::object({{"days", 3}}));
  EXPECT_NE(sum.call_ids.at(0), sum.call_ids.at(1));
  EXPECT_EQ(sum.call_ids.at(0).substr(0, 5), "call_");
  // Not declared, or switched off: the element is dropped.
  EXPECT_EQ(chat_both_ways(harness).streamed[0].finish, "stop");
  const Json off = Json::object({{"tools", weather_tools()}, {"tool_choice", "none"}});
  EXPECT_TRUE(chat_both_ways(harness, off).streamed[0].names.empty());
}

TEST(Chat, OneToolCallEndsTheGeneration) {
  Harness harness;
  harness.play({.ids = markup(two_calls())});
  const Json one = Json::object({{"tools", weather_tools()}, {"parallel_tool_calls", false}});
  const Both both = chat_both_ways(harness, one);
  EXPECT_EQ(both.streamed[0].finish, "tool_calls");
  EXPECT_EQ(both.streamed[0].names.size(), 1U);
  EXPECT_EQ(parsed(both.streamed[0].arguments.at(0)), Json::object({{"city", "Paris"}}));
  EXPECT_LT(number(at(both.whole, "usage", "completion_tokens")), static_cast<int64_t>(markup(two_calls()).size()));
}

TEST(SingleCallConstraint, TakesBackDrafts) {
  const Ids ids = markup(two_calls());
  const auto plain = make_single_call_constraint(nano());
  size_t stop = 0;
  while (plain->accept(ids[stop]) == ConstraintVerdict::kContinue) ++stop;
  const auto drafted = make_single_call_constraint(nano());
  for (size_t i = 0; i < stop; ++i) {
    for (int draft = 0; draft < 5; ++draft) (void)drafted->accept(nano().control().sep);
    drafted->rollback(5);
    ASSERT_EQ(drafted->accept(ids[i]), ConstraintVerdict::kContinue);
  }
  EXPECT_EQ(drafted->accept(ids[stop]), ConstraintVerdict::kStop);
}

TEST(Chat, StopStringsAndIds) {
  Harness harness;
  harness.play({.ids = reply("stop here: END", "one two END three")});
  const Json stop = Json::object({{"stop", Json::array({"nowhere", "END"})}});
  Both both = chat_both_ways(harness, stop);
  EXPECT_EQ(both.streamed[0].content, "one two ");  // the reasoning is not searched
  EXPECT_EQ(both.streamed[0].finish, "stop");
  const auto all = static_cast<int64_t>(reply("stop here: END", "one two END three").size());
  EXPECT_LT(number(at(both.whole, "usage", "completion_tokens")), all);
  both = chat_both_ways(harness, Json::object({{"stop", "END"}, {"include_stop_str_in_output", true}}));
  EXPECT_EQ(both.streamed[0].content, "one two END");
  both = chat_both_ways(harness, Json::object({{"stop", "three more"}}));
  EXPECT_EQ(both.streamed[0].content, "one two END three");  // a mere beginning is released
  const Ids three = nano().encode_text(" three");
  both = chat_both_ways(harness, Json::object({{"stop_token_ids", Json::array({three[0]})}}));
  EXPECT_EQ(both.streamed[0].content, "one two END");
  EXPECT_EQ(both.streamed[0].finish, "stop");
}

TEST(Chat, TokenIdsAndLogprobsCoverAllTokens) {
  Harness harness;
  harness.play({.ids = reply("Hm", "Hi 안녕!"), .tokens_per_step = 2});
  const Json asked = Json::object({{"return_token_ids", true}, {"logprobs", true}, {"top_logprobs", 3}});
  const Both both = chat_both_ways(harness, asked);
  Ids expected = reply("Hm", "Hi 안녕!");
  expected.push_back(kEndOfMsg);
  EXPECT_EQ(both.streamed[0].token_ids, expected);
  const Json choice = at(both.whole, "choices", 0);
  EXPECT_EQ(items(at(choice, "token_ids")).size(), expected.size());
  const Json::Array entries = items(at(choice, "logprobs", "content"));
  ASSERT_EQ(entries.size(), expected.size());
  EXPECT_EQ(both.streamed[0].logprobs, entries);
  for (size_t i = 0; i < entries.size(); ++i) {
    std::string bytes;
    for (const Json& byte : items(at(entries[i], "bytes"))) bytes.push_back(static_cast<char>(number(byte)));
    EXPECT_EQ(bytes, nano().token_bytes(expected[i]));
    EXPECT_EQ(items(at(entries[i], "top_logprobs")).size(), 3U);
  }
  EXPECT_GT(items(at(both.whole, "prompt_token_ids")).size(), 0U);
}

TEST(Logprobs, ValuesJsonCannotHold) {
  const std::vector<SampledToken> tokens = {
      {.token_id = 65, .logprob = -INFINITY, .top = {{65, -INFINITY}, {200, NAN}}}};
  const Json::Array entries = chat_logprobs(tokens, nano());
  EXPECT_EQ(at(entries[0], "logprob").as_double(), -9999.0);
  EXPECT_EQ(at(entries[0], "top_logprobs", 1, "logprob").as_double(), -9999.0);
  int64_t offset = 0;
  const Json completion = completion_logprobs(tokens, nano(), 2, offset);
  EXPECT_EQ(at(completion, "token_logprobs", 0).as_double(), -9999.0);
}

TEST(Chat, SeveralChoices) {
  Harness harness;
  std::mutex mutex;
  std::multiset<uint64_t> seeds;
  harness.play_by([&](const Request& request) {
    const std::lock_guard lock(mutex);
    seeds.insert(request.sampling.seed);
    return SimEngine::Script{.ids = reply("", "answer " + std::to_string(request.sampling.seed % 1000)),
                             .tpot = std::chrono::microseconds(200 * (seeds.size() % 4))};
  });
  const Both both = chat_both_ways(harness, Json::object({{"n", 4}, {"seed", 7}}), 4);
  const std::set<uint64_t> distinct(seeds.begin(), seeds.end());
  EXPECT_EQ(seeds.size(), 8U);
  EXPECT_EQ(distinct.size(), 4U);  // distinct between choices, the same when repeated
  EXPECT_TRUE(distinct.count(7) == 1);
  const Json one = parsed(harness.chat(chat_body()).body);
  EXPECT_EQ(at(both.whole, "usage", "prompt_tokens"), at(one, "usage", "prompt_tokens"));
}

TEST(Chat, ThinkingSwitches) {
  Harness harness;
  std::string prompt;
  harness.play_by([&prompt](const Request& request) {
    prompt = nano().decode(request.prompt_ids);
    return SimEngine::Script{.ids = reply("", "ok")};
  });
  const auto prompt_of = [&](Json extra) {
    EXPECT_EQ(harness.chat(chat_body(std::move(extra))).status, 200);
    return prompt;
  };
  const auto with = [](const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(with(prompt_of(Json::object()), "thinking_effort=max"));
  for (const auto& [given, used] : std::vector<std::pair<std::string, std::string>>{{"minimal", "low"},
                                                                                    {"low", "low"},
                                                                                    {"medium", "medium"},
                                                                                    {"high", "high"},
                                                                                    {"xhigh", "max"},
                                                                                    {"max", "max"}}) {
    EXPECT_TRUE(with(prompt_of(Json::object({{"reasoning_effort", given}})), "thinking_effort=" + used));
  }
  for (const Json& off :
       std::vector<Json>{Json::object({{"reasoning_effort", "none"}}),
                         Json::object({{"thinking", Json::object({{"type", "disabled"}})}}),
                         Json::object({{"chat_template_kwargs", Json::object({{"thinking", false}})}}),
                         Json::object({{"chat_template_kwargs", Json::object({{"enable_thinking", false}})}})}) {
    const std::string text = prompt_of(off);
    EXPECT_FALSE(with(text, "thinking_effort="));
    EXPECT_TRUE(text.ends_with("<|open|>response<|sep|>"));
  }
}

TEST(Chat, RequestReachesTheEngine) {
  Harness harness;
  SamplingParams sampling;
  std::string salt;
  int32_t priority = 0;
  std::vector<int32_t> ends;
  harness.play_by([&](const Request& request) {
    sampling = request.sampling;
    salt = request.cache_salt;
    priority = request.priority;
    ends = request.message_ends;
    return SimEngine::Script{.ids = reply("", "ok")};
  });
  const Json extra = parsed(R"({"temperature":0.25,"top_p":0.5,"top_k":-1,"min_p":0.125,"seed":-3,"max_tokens":1e18,
      "min_tokens":2,"ignore_eos":false,"cache_salt":"s","priority":-4,"user":"u","metadata":{"a":1},"store":false,
      "service_tier":"auto","prompt_cache_key":"k","presence_penalty":0,"frequency_penalty":0.0,"repetition_penalty":1,
      "logit_bias":{},"logprobs":false,"stop":null,"n":1,"who_knows":[1]})");
  EXPECT_EQ(harness.chat(chat_body(extra)).status, 200);
  EXPECT_EQ(sampling.temperature, 0.25F);
  EXPECT_EQ(sampling.top_p, 0.5F);
  EXPECT_EQ(sampling.top_k, 0);
  EXPECT_EQ(sampling.min_p, 0.125F);
  EXPECT_EQ(sampling.seed, static_cast<uint64_t>(-3));
  EXPECT_EQ(sampling.min_tokens, 2);
  EXPECT_GT(sampling.max_tokens, 7000);  // what the context leaves
  EXPECT_LT(sampling.max_tokens, 8192);
  EXPECT_EQ(salt, "s");
  EXPECT_EQ(priority, -4);
  EXPECT_FALSE(ends.empty());
}

TEST(Chat, AcceptedForms) {
  Harness harness;
  harness.play({.ids = reply("", "ok")});
  const std::string tool = R"({"type":"function","function":{"name":"a"}})";
  for (const std::string& extra : {
           R"({"tools":[)" + tool + R"(],"tool_choice":)" + tool + "}",
           std::string(
               R"({"tools":[{"function":{"name":"a","parameters":{"enum":[null]}}}],"tool_choice":"required"})"),
           std::string(R"({"tools":[],"tool_choice":"auto"})"),
           std::string(R"({"tools":null,"tool_choice":"none"})"),
           std::string(R"({"response_format":{"type":"json_schema","json_schema":{"schema":{"type":"object"}}}})"),
           std::string(R"({"response_format":{"type":"json_object"}})"),
           std::string(R"({"messages":[{"role":"developer","content":"Be brief."},
                           {"role":"user","content":[{"type":"text","text":"Hi"}]}]})"),
           std::string(R"({"messages":[{"role":"user","content":"w?"},
                           {"role":"assistant","content":null,"reasoning":"Look.","tool_calls":[
                             {"id":"call_1","type":"function","function":{"name":"a","arguments":{"x":1}}}]},
                           {"role":"tool","tool_call_id":"call_1","content":"18C"}]})"),
           std::string(R"({"stop":[],"max_completion_tokens":5,"reasoning":{"effort":"low"},"modalities":["text"]})"),
       }) {
    const RawResponse response = harness.chat(chat_body(parsed(extra)));
    EXPECT_EQ(response.status, 200) << extra << response.body;
  }
}

// --- completions ---

TEST(Completions, FormsOfPrompt) {
  Harness harness;
  std::mutex mutex;
  std::vector<Ids> prompts;
  harness.play_by([&](const Request& request) {
    const std::lock_guard lock(mutex);
    prompts.push_back(request.prompt_ids);
    return SimEngine::Script{.ids = nano().encode_text(" upon a time")};
  });
  const auto run = [&](const char* prompt, size_t count) {
    prompts.clear();
    const Both both = both_ways(harness, "/v1/completions", Json::object({{"prompt", parsed(prompt)}}), count);
    for (const Summed& sum : both.streamed) EXPECT_EQ(sum.content, " upon a time");
    EXPECT_EQ(at(both.whole, "object"), Json("text_completion"));
    EXPECT_EQ(at(both.whole, "id").as_string().substr(0, 5), "cmpl-");
  };
  run(R"("Once")", 1);
  EXPECT_EQ(prompts.at(0), nano().encode_text("Once"));
  run(R"(["Once","Twice"])", 2);
  run("[1,2,3]", 1);
  EXPECT_EQ(prompts.at(0), (Ids{1, 2, 3}));
  run("[[1,2,3],[4],[5]]", 3);
}

TEST(Completions, EchoStopAndMarkup) {
  Harness harness;
  Ids ids = nano().encode_text(" upon a");
  ids.push_back(nano().control().sep);  // reserved ids are no text
  for (const int32_t id : nano().encode_text(" time, END")) ids.push_back(id);
  harness.play({.ids = ids});
  EXPECT_EQ(both_ways(harness, "/v1/completions", completion_body()).streamed[0].content, " upon a time, END");
  const Json echo = completion_body(Json::object({{"echo", true}, {"stop", ", E"}}));
  EXPECT_EQ(both_ways(harness, "/v1/completions", echo).streamed[0].content, "Once upon a time");
}

TEST(Completions, Logprobs) {
  Harness harness;
  harness.play({.ids = nano().encode_text(" 안녕 x")});
  const Json whole = parsed(harness.complete(completion_body(Json::object({{"logprobs", 2}}))).body);
  const Json logprobs = at(whole, "choices", 0, "logprobs");
  const size_t count = nano().encode_text(" 안녕 x").size() + 1;
  for (const char* key : {"tokens", "token_logprobs", "top_logprobs", "text_offset"}) {
    EXPECT_EQ(items(at(logprobs, key)).size(), count) << key;
  }
  EXPECT_EQ(number(at(logprobs, "text_offset", 0)), 0);
  EXPECT_EQ(number(at(logprobs, "text_offset", static_cast<int>(count) - 1)), 5);  // characters, not bytes
}

TEST(Completions, IgnoreEosGoesOn) {
  Harness harness;
  harness.play({.ids = nano().encode_text("ab")});
  const Json body = completion_body(Json::object({{"ignore_eos", true}, {"max_tokens", 50}}));
  const Json whole = parsed(harness.complete(body).body);
  EXPECT_EQ(number(at(whole, "usage", "completion_tokens")), 50);
  EXPECT_EQ(at(whole, "choices", 0, "finish_reason"), Json("length"));
}

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
      {"presence_penalty", R"({"presence_penalty":0.5})"},
      {"frequency_penalty", R"({"frequency_penalty":0.5})"},
      {"repetition_penalty", R"({"repetition_penalty":1.1})"},
      {"logit_bias", R"({"logit_bias":{"5":1}})"},
      {"best_of", R"({"best_of":3})"},
      {"guided_json", R"({"guided_json":{"type":"object"}})"},
      {"model", R"({"model":5})"},
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
  for (const char* guarded : {"/v1/models", "/metrics"}) {
    expect_error(fetch(harness.port(), "GET", guarded), 401, Json(), guarded);
    EXPECT_EQ(status(guarded, "Authorization: Bearer second-key\r\n"), 200);
    EXPECT_EQ(status(guarded, "Authorization: bearer first\r\n"), 200);
    for (const char* wrong : {"Bearer firs", "Bearer firstx", "Bearer ", "Basic first", "first", "Bearer second-kez"}) {
      EXPECT_EQ(status(guarded, "Authorization: " + std::string(wrong) + "\r\n"), 401) << wrong;
    }
  }
}

TEST(Routes, Metrics) {
  Harness harness;
  harness.play({.ids = reply("Hm", "Hi"), .num_cached_tokens = 5});
  EXPECT_EQ(harness.chat(chat_body()).status, 200);
  EXPECT_EQ(harness.chat(chat_body(Json::object({{"n", 0}}))).status, 400);
  const std::string text = fetch(harness.port(), "GET", "/metrics").body;
  for (const char* line :
       {"moat_requests_finished_total{reason=\"stop\"} 1\n", "moat_http_responses_total{code=\"200\"} 1\n",
        "moat_http_responses_total{code=\"400\"} 1\n", "moat_cached_tokens_total 5\n", "moat_requests_running 0\n",
        "moat_requests_waiting 0\n", "moat_state_slots_total 64\n", "moat_time_to_first_token_seconds_count 1\n",
        "moat_request_seconds_count 1\n", "moat_queue_seconds_count 1\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
  }
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
  Harness harness({.max_model_len = 1 << 20, .options = options});
  harness.play({.ids = nano().encode_text("a b c d e f"), .tokens_per_step = 4});
  RawClient reader(harness.port(), 4096);
  const Json body = completion_body(Json::object({{"stream", true}, {"ignore_eos", true}, {"max_tokens", 1000000}}));
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
