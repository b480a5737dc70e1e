// SPDX-License-Identifier: Apache-2.0
// Request bodies, and calls made both streamed and whole, whose results must be the same.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "server_harness.h"

namespace moat {

inline Json chat_body(Json extra = Json::object()) {
  Json body = Json::object({{"model", "moat-nano"}, {"messages", user_messages()}});
  for (const auto& [key, value] : extra.as_object()) body.set(key, value);
  return body;
}

inline Json completion_body(Json extra = Json::object()) {
  Json body = Json::object({{"prompt", "Once"}});
  for (const auto& [key, value] : extra.as_object()) body.set(key, value);
  return body;
}

// Both forms of one call; the streamed one summed up must be the whole one.
struct Both {
  Json whole;
  std::vector<Summed> streamed;
};

inline Both both_ways(Harness& harness, const std::string& path, Json body, size_t num_choices = 1) {
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

inline Both chat_both_ways(Harness& harness, Json extra = Json::object(), size_t num_choices = 1) {
  return both_ways(harness, "/v1/chat/completions", chat_body(std::move(extra)), num_choices);
}

}  // namespace moat
