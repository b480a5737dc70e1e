// SPDX-License-Identifier: Apache-2.0
#include "text/chat_history.h"

#include <algorithm>
#include <optional>

namespace moat {
namespace {

Result<ChatRole> read_role(const Json& message, std::string_view where) {
  if (!message.is_object()) return invalid_argument("{} is a JSON {}, expected an object", where, message.type_name());
  const Json* role = message.find("role");
  if (role == nullptr || !role->is_string()) return invalid_argument("{}.role is missing or not a string", where);
  const std::string& name = role->as_string();
  // "developer" is OpenAI's newer name for system.
  if (name == "system" || name == "developer") return ChatRole::kSystem;
  if (name == "user") return ChatRole::kUser;
  if (name == "assistant") return ChatRole::kAssistant;
  if (name == "tool") return ChatRole::kTool;
  return invalid_argument("{}.role is \"{}\", expected system, developer, user, assistant or tool", where, name);
}

// An id as the text to compare; clients send strings, some numbers.
std::optional<std::string> id_text(const Json* id) {
  if (id == nullptr) return std::nullopt;
  return id->is_string() ? id->as_string() : id->dump();
}

// The calls that tool results can refer to: those of the latest assistant message.
struct OpenCalls {
  std::vector<ChatCall> calls;
  std::vector<std::optional<std::string>> ids;

  // Position of the first call with that id.
  std::optional<size_t> find(const std::optional<std::string>& id) const {
    if (!id) return std::nullopt;
    const auto found = std::find(ids.begin(), ids.end(), id);
    if (found == ids.end()) return std::nullopt;
    return static_cast<size_t>(found - ids.begin());
  }
};

Result<OpenCalls> read_open_calls(const Json& message, std::string_view where) {
  OpenCalls open;
  MOAT_ASSIGN(open.calls, read_calls(message, where));
  if (!open.calls.empty()) {
    for (const Json& call : message.find("tool_calls")->as_array()) open.ids.push_back(id_text(call.find_set("id")));
  }
  return open;
}

// Sorts the run of tool results [begin, end) into the order of their calls and names them, if every one of them
// matches.
void match_run(std::vector<ChatTurn>& turns, size_t begin, const OpenCalls& open) {
  struct Match {
    size_t position;
    ChatTurn turn;
  };
  std::vector<Match> matches;
  for (size_t i = begin; i < turns.size(); ++i) {
    const Json& message = *turns[i].message;
    const Json* id = message.find_set("tool_call_id");
    const auto position = open.find(id_text(id != nullptr ? id : message.find_set("id")));
    if (!position) return;
    matches.push_back({*position, turns[i]});
    matches.back().turn.tool_name = open.calls[*position].name;
  }
  std::stable_sort(matches.begin(), matches.end(), [](auto& a, auto& b) { return a.position < b.position; });
  for (size_t i = 0; i < matches.size(); ++i) turns[begin + i] = matches[i].turn;
}

// Numbers the run that begins at `begin`, continuing after `count` earlier results, and names what matching did not
// name.
Status number_run(std::vector<ChatTurn>& turns, size_t begin, int& count, const OpenCalls& open) {
  for (size_t i = begin; i < turns.size(); ++i) {
    ChatTurn& turn = turns[i];
    turn.tool_index = ++count;
    const std::string where = fmt::format("messages[{}]", turn.index);
    for (const std::string_view key : {"tool", "name"}) {
      if (!turn.tool_name.empty()) break;
      MOAT_ASSIGN(turn.tool_name, read_string(*turn.message, key, where));
    }
    if (turn.tool_name.empty() && static_cast<size_t>(count) <= open.calls.size()) {
      turn.tool_name = open.calls[static_cast<size_t>(count) - 1].name;
    }
    if (turn.tool_name.empty()) return invalid_argument("{}: the tool result matches no tool call before it", where);
  }
  return {};
}

}  // namespace

Result<std::vector<ChatTurn>> order_turns(const Json& messages) {
  if (!messages.is_array()) return invalid_argument("messages is a JSON {}, expected an array", messages.type_name());
  const auto& list = messages.as_array();
  std::vector<ChatTurn> turns;
  OpenCalls open;
  int results = 0;  // since the latest assistant message; other roles do not start again
  for (size_t i = 0; i < list.size();) {
    const size_t begin = turns.size();
    ChatRole role = ChatRole::kTool;
    for (; i < list.size(); ++i) {
      const std::string where = fmt::format("messages[{}]", i);
      MOAT_ASSIGN(role, read_role(list[i], where));
      if (role != ChatRole::kTool) break;
      turns.push_back({&list[i], i, role, {}, 0});
    }
    match_run(turns, begin, open);
    MOAT_RETURN_IF_ERROR(number_run(turns, begin, results, open));
    if (i == list.size()) break;
    turns.push_back({&list[i], i, role, {}, 0});
    if (role == ChatRole::kAssistant) {
      MOAT_ASSIGN(open, read_open_calls(list[i], fmt::format("messages[{}]", i)));
      results = 0;
    }
    ++i;
  }
  return turns;
}

Result<std::vector<ChatCall>> read_calls(const Json& message, std::string_view where) {
  std::vector<ChatCall> calls;
  const Json* list = message.find_set("tool_calls");
  if (list == nullptr) return calls;
  if (!list->is_array()) {
    return invalid_argument("{}.tool_calls is a JSON {}, expected an array", where, list->type_name());
  }
  for (size_t i = 0; i < list->as_array().size(); ++i) {
    const Json& call = list->as_array()[i];
    std::string field = fmt::format("{}.tool_calls[{}]", where, i);
    const Json* function = call.find("function");
    if (function == nullptr) {
      function = &call;  // some clients send the function alone
    } else {
      field += ".function";
    }
    const Json* name = function->find("name");
    if (name == nullptr || !name->is_string() || name->as_string().empty()) {
      return invalid_argument("{}.name is missing or not a non-empty string", field);
    }
    const Json* arguments = function->find_set("arguments");
    if (arguments != nullptr && !arguments->is_string() && !arguments->is_object()) {
      return invalid_argument("{}.arguments is a JSON {}, expected a string of JSON or an object", field,
                              arguments->type_name());
    }
    calls.push_back({name->as_string(), arguments});
  }
  return calls;
}

Result<std::vector<std::string_view>> read_content(const Json& message, std::string_view where) {
  std::vector<std::string_view> pieces;
  const Json* content = message.find_set("content");
  if (content == nullptr) return pieces;
  if (content->is_string()) {
    pieces.push_back(content->as_string());
    return pieces;
  }
  if (!content->is_array()) {
    return invalid_argument("{}.content is a JSON {}, expected a string, an array of parts or null", where,
                            content->type_name());
  }
  for (size_t i = 0; i < content->as_array().size(); ++i) {
    const Json& part = content->as_array()[i];
    const std::string field = fmt::format("{}.content[{}]", where, i);
    if (!part.is_object()) return invalid_argument("{} is a JSON {}, expected an object", field, part.type_name());
    MOAT_ASSIGN(const std::string_view type, read_string(part, "type", field));
    if (type == "image_url" || type == "image") {
      return unsupported("{}: images are not supported yet by this build", field);
    }
    if (!type.empty() && type != "text") return invalid_argument("{}.type is \"{}\", expected \"text\"", field, type);
    const Json* text = part.find("text");
    if (text == nullptr || !text->is_string()) {
      return invalid_argument("{}.text is missing or not a string", field);
    }
    pieces.push_back(text->as_string());
  }
  return pieces;
}

Result<std::string_view> read_string(const Json& object, std::string_view key, std::string_view where) {
  const Json* value = object.find_set(key);
  if (value == nullptr) return std::string_view();
  if (!value->is_string()) {
    return invalid_argument("{}.{} is a JSON {}, expected a string", where, key, value->type_name());
  }
  return std::string_view(value->as_string());
}

}  // namespace moat
