// SPDX-License-Identifier: Apache-2.0
// The eight greedy chat prompts of tests/golden/moat-nano/greedy.json as chat requests.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"

namespace moat::test {

struct GreedyChat {
  int index = 0;  // in greedy.json, and in the names of golden.safetensors
  Json request;
};

// Those that an API request can express; the others think without being told an effort, which the API always does.
inline std::vector<GreedyChat> greedy_chats() {
  const auto user = [](const char* text) { return Json::array({Json::object({{"role", "user"}, {"content", text}})}); };
  const Json weather = parse_json(R"({"type": "function", "function": {"name": "get_weather",
      "description": "Get the current weather for a city.", "parameters": {"type": "object", "properties": {
      "city": {"type": "string", "description": "City name"},
      "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["city"]}}})")
                           .value();
  return {
      {0, Json::object({{"messages", user("What is a moat?")}})},
      {1, Json::object({{"messages", user("What is 47 + 38?")}})},
      {2, Json::object({{"messages", user("What is the capital of France?")},
                        {"chat_template_kwargs", Json::object({{"thinking", false}})}})},
      {4, Json::object({{"messages", user("What is the weather in Paris?")},
                        {"tools", Json::array({weather})},
                        {"reasoning_effort", "low"}})},
      {7, Json::object({{"messages", user("Tell me a short story about a fox.")}, {"reasoning_effort", "high"}})},
  };
}

}  // namespace moat::test
