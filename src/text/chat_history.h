// SPDX-License-Identifier: Apache-2.0
// The messages of a chat request in the order in which they are rendered, tool results matched to their calls. Views
// into the request's JSON, which must outlive them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace moat {

enum class ChatRole { kSystem, kUser, kAssistant, kTool };

struct ChatTurn {
  const Json* message = nullptr;
  size_t index = 0;  // in the request, for error messages
  ChatRole role = ChatRole::kUser;
  std::string_view tool_name;  // of a tool result
  int tool_index = 0;          // of a tool result: 1 for the first one after the assistant's message
};

struct ChatCall {
  std::string_view name;
  const Json* arguments = nullptr;  // a string, an object or nothing
};

Result<std::vector<ChatTurn>> order_turns(const Json& messages);
// The calls of one assistant message; `where` names the message in errors.
Result<std::vector<ChatCall>> read_calls(const Json& message, std::string_view where);
// The text pieces of a message's content: a string, null, or text parts.
Result<std::vector<std::string_view>> read_content(const Json& message, std::string_view where);
// A string member that may be absent, null or empty: then an empty view.
Result<std::string_view> read_string(const Json& object, std::string_view key, std::string_view where);

}  // namespace moat
