// SPDX-License-Identifier: Apache-2.0
// Messages, tools and options -> the prompt of Kimi K3's XTML format (docs/design/k3.md 6.5, 6.6), as segments that keep
// user text apart from control tokens. Pure functions of their arguments.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/tokenizer.h"

namespace moat {

struct ChatOptions {
  bool thinking = true;
  std::optional<std::string>
      thinking_effort;                // low, medium, high, max; absent: no effort message (the API layer fills it in)
  const Json* tools = nullptr;        // OpenAI tools array; null or empty: none
  const Json* tool_choice = nullptr;  // "auto" | "none" | "required" | {"type":"function",...}
  const Json* response_format = nullptr;  // {"type":"text"|"json_object"|"json_schema",...}
  bool add_generation_prompt = true;
};

// The channel that the generation prompt leaves open.
enum class ReplyChannel { kThink, kResponse };

struct ChatPrompt {
  std::vector<Segment> segments;
  // Index into segments after the last one of each rendered message (declarations and notes included), ascending.
  std::vector<size_t> message_ends;
  ReplyChannel start = ReplyChannel::kThink;
};

// `messages` is the OpenAI array. Failures (kInvalidArgument) name the message index and field: unknown role, content of the
// wrong type, tool result that matches no call, arguments that are not an object.
Result<ChatPrompt> render_chat(const Json& messages, const ChatOptions& options);

}  // namespace moat
