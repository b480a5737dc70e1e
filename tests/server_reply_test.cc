// SPDX-License-Identifier: Apache-2.0
// Replies over real sockets against the scripted engine: what is streamed is what is returned, in the shape clients expect.
#include <gtest/gtest.h>

#include <set>

#include "base/file.h"
#include "server/call_limit.h"
#include "server/logprobs.h"
#include "server_calls.h"

namespace moat {
namespace {

using std::chrono::milliseconds;

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

// A prompt counts once, so what was restored of it counts once, too: for the first choice, which pays for the others.
TEST(Chat, CachedTokensOfSeveralChoices) {
  Harness harness;
  harness.play_by([](const Request& request) {
    const bool first = request.id.ends_with("-0") || request.id.ends_with("-2");
    return SimEngine::Script{.ids = reply("", "Hi"), .num_cached_tokens = first ? 2 : 40};
  });
  const Json two = Json::object({{"n", 2}, {"stream_options", Json::object({{"include_usage", true}})}});
  const auto check = [&](const std::string& path, Json body, int64_t prompt_tokens, int64_t cached) {
    std::vector<Json> usages = {at(parsed(harness.post(path, body).body), "usage")};
    body.set("stream", true);
    const std::vector<std::string> events = sse_data(harness.post(path, body).body);
    ASSERT_GE(events.size(), 2U);
    usages.push_back(at(parsed(events[events.size() - 2]), "usage"));
    for (const Json& usage : usages) {
      EXPECT_EQ(number(at(usage, "prompt_tokens")), prompt_tokens) << usage.dump();
      EXPECT_EQ(number(at(usage, "prompt_tokens_details", "cached_tokens")), cached) << usage.dump();
    }
  };
  const int64_t tokens = number(at(parsed(harness.post("/tokenize", chat_body()).body), "count"));
  check("/v1/chat/completions", chat_body(two), tokens, 2);
  Json prompts = completion_body(two);
  prompts.set("prompt", parsed("[[1,2,3],[4,5,6,7]]"));
  check("/v1/completions", prompts, 7, 4);
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
  const Json untold = Json::object({{"chat_template_kwargs", Json::object({{"thinking_effort", Json()}})}});
  EXPECT_FALSE(with(prompt_of(untold), "thinking_effort="));
  EXPECT_TRUE(prompt_of(untold).ends_with("<|open|>think<|sep|>"));
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

TEST(Chat, LogitEditsReachTheEngine) {
  Harness harness;
  SamplingParams sampling;
  harness.play_by([&](const Request& request) {
    sampling = request.sampling;
    return SimEngine::Script{.ids = reply("", "ok")};
  });
  const Json extra = parsed(R"({"presence_penalty":-0.5,"frequency_penalty":2,"repetition_penalty":1.25,
      "logit_bias":{"5119":-100,"0":1.5},"bad_words":["  horse","end\n"]})");
  for (const std::string path : {"/v1/chat/completions", "/v1/completions"}) {
    sampling = {};
    EXPECT_EQ(harness.post(path, path == "/v1/completions" ? completion_body(extra) : chat_body(extra)).status, 200);
    EXPECT_EQ(sampling.presence_penalty, -0.5F);
    EXPECT_EQ(sampling.frequency_penalty, 2.0F);
    EXPECT_EQ(sampling.repetition_penalty, 1.25F);
    ASSERT_EQ(sampling.logit_bias.size(), 2U);
    EXPECT_EQ(sampling.logit_bias[0].token_id, 5119);
    EXPECT_EQ(sampling.logit_bias[0].bias, -100.0F);
    EXPECT_EQ(sampling.logit_bias[1].token_id, 0);
    EXPECT_EQ(sampling.logit_bias[1].bias, 1.5F);
    // Space before a word does not matter: it is tried without and with one.
    EXPECT_EQ(sampling.bad_words, (std::vector<Ids>{nano().encode_text("horse"), nano().encode_text(" horse"),
                                                    nano().encode_text("end\n"), nano().encode_text(" end\n")}));
  }
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

}  // namespace
}  // namespace moat
