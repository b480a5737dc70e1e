// SPDX-License-Identifier: Apache-2.0
#include "text/chat.h"

#include <algorithm>
#include <array>

#include "text/chat_history.h"
#include "text/unicode.h"
#include "text/xtml_writer.h"

namespace moat {
namespace {

constexpr std::string_view kToolsHead = "# Tools\nHere are the available tools, described in JSONSchema.";
constexpr std::string_view kMoreToolsHead =
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.";
constexpr std::string_view kEffortHead =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.";
constexpr std::string_view kRawJson =
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.";

// JSON in declarations: no spaces, keys sorted.
std::string fenced(const Json& json) {
  return "```json\n" + json.dump({.spacing = Json::Spacing::kCompact, .sort_keys = true, .python_numbers = true}) +
         "\n```";
}

bool is_non_empty_array(const Json* json) { return json != nullptr && json->is_array() && !json->as_array().empty(); }

class Renderer {
 public:
  explicit Renderer(const ChatOptions& options) : options_(options) {}

  Result<ChatPrompt> render(const Json& messages) {
    MOAT_ASSIGN(const std::vector<ChatTurn> turns, order_turns(messages));
    MOAT_RETURN_IF_ERROR(preface());
    for (const ChatTurn& turn : turns) MOAT_RETURN_IF_ERROR(this->turn(turn));
    tool_choice();
    response_format();
    if (options_.add_generation_prompt) {
      writer_.open("message", {{"role", "assistant"}});
      writer_.open(options_.thinking ? "think" : "response");
    }
    ChatPrompt prompt;
    prompt.segments = writer_.take_segments();
    prompt.message_ends = writer_.take_message_ends();
    prompt.start = options_.thinking ? ReplyChannel::kThink : ReplyChannel::kResponse;
    return prompt;
  }

 private:
  void declare_tools(const Json& tools, std::string_view head) {
    writer_.note("tool-declare", fmt::format("{}\n\n{}", head, fenced(tools)));
  }

  Status preface() {
    if (options_.tools != nullptr && !options_.tools->is_null() && !options_.tools->is_array()) {
      return invalid_argument("tools is a JSON {}, expected an array", options_.tools->type_name());
    }
    if (is_non_empty_array(options_.tools)) declare_tools(*options_.tools, kToolsHead);
    if (!options_.thinking || !options_.thinking_effort) return {};
    const std::string& effort = *options_.thinking_effort;
    static constexpr std::array<std::string_view, 4> kEfforts = {"low", "medium", "high", "max"};
    if (std::find(kEfforts.begin(), kEfforts.end(), effort) == kEfforts.end()) {
      return invalid_argument("thinking_effort is \"{}\", expected low, medium, high or max", effort);
    }
    writer_.note("thinking-effort",
                 fmt::format("{}\nNow the system is invoked with `thinking_effort={}`.", kEffortHead, effort));
    return {};
  }

  Status turn(const ChatTurn& turn) {
    const std::string where = fmt::format("messages[{}]", turn.index);
    if (turn.role == ChatRole::kAssistant) return assistant(*turn.message, where);
    if (turn.role == ChatRole::kSystem) {
      const Json* tools = turn.message->find_set("tools");
      if (tools != nullptr && !tools->is_array()) {
        return invalid_argument("{}.tools is a JSON {}, expected an array", where, tools->type_name());
      }
      if (is_non_empty_array(tools)) {
        declare_tools(*tools, kMoreToolsHead);  // instead of its content
        return {};
      }
    }
    MOAT_ASSIGN(const auto content, read_content(*turn.message, where));
    if (turn.role == ChatRole::kTool) {
      const std::string index = fmt::format("{}", turn.tool_index);
      writer_.open("message", {{"role", "tool"}, {"tool", turn.tool_name}, {"index", index}});
    } else {
      MOAT_RETURN_IF_ERROR(open_named(turn.role == ChatRole::kUser ? "user" : "system", *turn.message, where));
    }
    for (const std::string_view piece : content) writer_.text(piece);
    writer_.end_message();
    return {};
  }

  Status open_named(std::string_view role, const Json& message, std::string_view where) {
    MOAT_ASSIGN(const std::string_view name, read_string(message, "name", where));
    std::vector<XtmlWriter::Attribute> attributes = {{"role", role}};
    if (!name.empty()) attributes.push_back({"name", name});
    writer_.open("message", attributes);
    return {};
  }

  Status assistant(const Json& message, std::string_view where) {
    MOAT_RETURN_IF_ERROR(open_named("assistant", message, where));
    MOAT_ASSIGN(std::string_view reasoning, read_string(message, "reasoning_content", where));
    if (is_blank(reasoning)) {
      MOAT_ASSIGN(reasoning, read_string(message, "reasoning", where));
    }
    if (options_.thinking) {
      writer_.open("think");
      if (!is_blank(reasoning)) writer_.text(reasoning);
      writer_.close("think");
    }
    MOAT_ASSIGN(const auto content, read_content(message, where));
    writer_.open("response");
    for (const std::string_view piece : content) writer_.text(piece);
    writer_.close("response");
    MOAT_ASSIGN(const auto calls, read_calls(message, where));
    if (!calls.empty()) {
      writer_.open("tools");
      for (size_t i = 0; i < calls.size(); ++i) {
        const std::string index = fmt::format("{}", i + 1);
        writer_.open("call", {{"tool", calls[i].name}, {"index", index}});
        MOAT_RETURN_IF_ERROR(arguments(calls[i].arguments, fmt::format("{}.tool_calls[{}]", where, i)));
        writer_.close("call");
      }
      writer_.close("tools");
    }
    writer_.end_message();
    return {};
  }

  Status arguments(const Json* arguments, std::string_view where) {
    if (arguments == nullptr) return {};
    if (arguments->is_object()) {
      argument_elements(*arguments);
      return {};
    }
    const std::string& text = arguments->as_string();
    if (is_blank(text)) return {};
    const auto parsed = parse_json(text);
    if (!parsed.ok()) {
      // What the model once wrote is kept, valid or not.
      writer_.open("json", {{"type", "object"}});
      writer_.text(text);
      writer_.close("json");
      return {};
    }
    if (parsed->is_null()) return {};
    if (!parsed->is_object()) {
      return invalid_argument("{}.function.arguments spells a JSON {}, expected an object", where, parsed->type_name());
    }
    argument_elements(*parsed);
    return {};
  }

  void argument_elements(const Json& object) {
    for (const auto& [key, value] : object.as_object()) {
      // The type names of XTML are JSON's own.
      writer_.open("argument", {{"key", key}, {"type", value.type_name()}});
      if (value.is_string()) {
        writer_.text(value.as_string());
      } else {
        writer_.text(value.dump({.spacing = Json::Spacing::kPython, .python_numbers = true}));
      }
      writer_.close("argument");
    }
  }

  void tool_choice() {
    const Json* choice = options_.tool_choice;
    if (choice == nullptr || !choice->is_string()) return;  // a named choice has no XTML form
    if (choice->as_string() == "required") {
      writer_.note("tool-choice",
                   "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.");
    } else if (choice->as_string() == "none") {
      writer_.note("tool-choice",
                   "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.");
    }
  }

  void response_format() {
    const Json* format = options_.response_format;
    const Json* type = format == nullptr ? nullptr : format->is_object() ? format->find("type") : format;
    if (type == nullptr || !type->is_string()) return;
    const std::string& kind = type->as_string();
    if (kind != "json_object" && kind != "json_schema") return;
    std::string body = fmt::format("The system is invoked with `response_format={}`.\n{}", kind, kRawJson);
    if (kind == "json_schema") {
      const Json empty = Json::object();
      const Json* schema = format->find_set("json_schema");
      if (schema == nullptr) schema = &empty;
      for (const std::string_view key : {"schema", "json_schema"}) {
        if (const Json* inner = schema->find_set(key)) {
          schema = inner;
          break;
        }
      }
      body += "\nThe JSON data must match the following schema:\n" + fenced(*schema);
    }
    writer_.note("response-format", body);
  }

  const ChatOptions& options_;
  XtmlWriter writer_;
};

}  // namespace

Result<ChatPrompt> render_chat(const Json& messages, const ChatOptions& options) {
  return Renderer(options).render(messages);
}

}  // namespace moat
