// SPDX-License-Identifier: Apache-2.0
#include "server/openai_request.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "server/call_limit.h"
#include "server/field_reader.h"
#include "server/openai_fields.h"
#include "text/chat.h"
#include "text/stop_strings.h"

namespace moat {
namespace {

constexpr size_t kMaxTools = 1024;

// Thinking switches in their many spellings; the last word of an explicit "off" wins over any effort.
struct Thinking {
  bool on = true;
  std::string effort;
};

void apply_effort(FieldReader& fields, std::string_view field, const std::string& effort, Thinking& thinking) {
  if (effort == "none") {
    thinking.on = false;
  } else if (effort == "minimal") {
    thinking.effort = "low";
  } else if (effort == "xhigh") {
    thinking.effort = "max";
  } else if (effort == "low" || effort == "medium" || effort == "high" || effort == "max") {
    thinking.effort = effort;
  } else {
    fields.fail(std::string(field),
                fmt::format("{} is \"{}\", expected none, minimal, low, medium, high, xhigh or max", field, effort));
  }
}

Thinking read_thinking(FieldReader& fields, const ServingDefaults& defaults) {
  Thinking thinking{.on = true, .effort = defaults.reasoning_effort};
  if (const Json* reasoning = fields.object("reasoning")) {
    FieldReader inner(*reasoning, "reasoning.");
    if (const std::string* effort = inner.string("effort")) apply_effort(fields, "reasoning.effort", *effort, thinking);
    if (!inner.ok()) fields.fail(*inner.error());
  }
  if (const std::string* effort = fields.string("reasoning_effort")) {
    apply_effort(fields, "reasoning_effort", *effort, thinking);
  }
  if (const Json* mode = fields.object("thinking")) {
    const Json* type = mode->find_set("type");
    const bool enabled = type != nullptr && *type == Json("enabled");
    const bool disabled = type != nullptr && *type == Json("disabled");
    if (disabled) thinking.on = false;
    if (mode->find_set("budget_tokens") != nullptr) {
      fields.fail(not_supported("thinking.budget_tokens", "a thinking budget is not supported yet"));
    }
    if (!enabled && !disabled) fields.fail("thinking", "thinking.type must be \"enabled\" or \"disabled\"");
  }
  if (const Json* kwargs = fields.object("chat_template_kwargs")) {
    FieldReader inner(*kwargs, "chat_template_kwargs.");
    for (const std::string_view name : {"thinking", "enable_thinking"}) {
      if (!inner.boolean(name).value_or(true)) thinking.on = false;
    }
    // The renderer's own option, so that every prompt it can make can be asked for: null leaves the effort message out.
    if (const Json* effort = kwargs->find("thinking_effort"); effort != nullptr && effort->is_null()) {
      thinking.effort.clear();
    } else if (const std::string* text = inner.string("thinking_effort")) {
      apply_effort(fields, "chat_template_kwargs.thinking_effort", *text, thinking);
    }
    if (!inner.ok()) fields.fail(*inner.error());
  }
  return thinking;
}

const std::string* tool_name(const Json& tool) {
  const Json* type = tool.find_set("type");
  if (type != nullptr && *type != Json("function")) return nullptr;
  const Json* function = tool.find_set("function");
  const Json* name = function == nullptr ? nullptr : function->find_set("name");
  return name != nullptr && name->is_string() && !name->as_string().empty() ? &name->as_string() : nullptr;
}

const Json* read_tools(FieldReader& fields) {
  const Json* tools = fields.array("tools");
  if (tools == nullptr || tools->as_array().empty()) return nullptr;
  const Json::Array& items = tools->as_array();
  if (items.size() > kMaxTools) {
    fields.fail("tools", fmt::format("tools has {} entries, expected at most {}", items.size(), kMaxTools));
  }
  for (size_t i = 0; i < items.size(); ++i) {
    if (tool_name(items[i]) != nullptr) continue;
    fields.fail("tools", fmt::format("tools[{}] is not of the form {{\"type\": \"function\", \"function\": {{\"name\": "
                                     "...}}}} with a non-empty name",
                                     i));
  }
  return fields.ok() ? tools : nullptr;
}

const Json* read_tool_choice(FieldReader& fields, const Json* tools) {
  const Json* choice = fields.any("tool_choice");
  if (choice == nullptr) return nullptr;
  const bool mode = *choice == Json("none") || *choice == Json("auto") || *choice == Json("required");
  const std::string* name = choice->is_object() ? tool_name(*choice) : nullptr;
  if (!mode && name == nullptr) {
    fields.fail("tool_choice",
                fmt::format("tool_choice is {}, expected \"none\", \"auto\", \"required\" or {{\"type\": "
                            "\"function\", \"function\": {{\"name\": ...}}}}",
                            shown(*choice)));
    return nullptr;
  }
  if (tools == nullptr) {
    if (name != nullptr || *choice == Json("required")) {
      fields.fail("tool_choice", "tool_choice asks for a call, but there are no tools");
    }
    return nullptr;  // none and auto say nothing without tools
  }
  const auto& items = tools->as_array();
  const auto matches = [name](const Json& tool) { return *tool_name(tool) == *name; };
  if (name != nullptr && std::none_of(items.begin(), items.end(), matches)) {
    fields.fail("tool_choice", fmt::format("tool_choice names \"{}\", which is not in tools", *name));
  }
  return choice;
}

const Json* read_response_format(FieldReader& fields) {
  const Json* format = fields.object("response_format");
  if (format == nullptr) return nullptr;
  const Json* type = format->find_set("type");
  const auto is = [type](const char* name) { return type != nullptr && *type == Json(name); };
  if (!is("text") && !is("json_object") && !is("json_schema")) {
    fields.fail("response_format", "response_format.type must be \"text\", \"json_object\" or \"json_schema\"");
  }
  if (is("json_schema")) {
    const Json* schema = format->find_set("json_schema");
    if (schema == nullptr || !schema->is_object() || schema->as_object().empty()) {
      fields.fail("response_format", "response_format.json_schema must be an object that holds the schema");
    }
  }
  return format;
}

void read_modalities(FieldReader& fields) {
  const Json* modalities = fields.array("modalities");
  if (modalities == nullptr) return;
  for (const Json& modality : modalities->as_array()) {
    if (modality == Json("text")) continue;
    fields.fail(not_supported("modalities",
                              fmt::format("modalities contains {}, only \"text\" is supported yet", shown(modality))));
  }
}

// Renders and tokenizes; also says what the reply parser must know.
void read_chat_prompt(FieldReader& fields, const ServedModel& model, const Tokenizer& tokenizer, ApiCall& call) {
  const Json* messages = fields.array("messages");
  if (messages == nullptr) return fields.fail("messages", "messages is missing, expected an array");
  if (messages->as_array().empty()) return fields.fail("messages", "messages is empty, expected at least one");
  const Thinking thinking = read_thinking(fields, model.defaults);
  ChatOptions options;
  options.thinking = thinking.on;
  if (thinking.on && !thinking.effort.empty()) options.thinking_effort = thinking.effort;
  options.tools = read_tools(fields);
  options.tool_choice = read_tool_choice(fields, options.tools);
  options.response_format = read_response_format(fields);
  if (!fields.ok()) return;
  if (!tokenizer.has_xtml()) {
    return fields.fail(not_supported("messages", "this model's tokenizer has no chat markup; use /v1/completions"));
  }
  Result<ChatPrompt> rendered = render_chat(*messages, options);
  if (!rendered.ok()) return fields.fail(api_error(rendered.status(), "messages"));
  PreparedPrompt prompt;
  size_t done = 0;
  const auto encode_until = [&](size_t end) {
    const auto ids = tokenizer.encode(std::span(rendered->segments).subspan(done, end - done));
    prompt.ids.insert(prompt.ids.end(), ids.begin(), ids.end());
    done = end;
  };
  for (const size_t end : rendered->message_ends) {
    encode_until(end);
    prompt.message_ends.push_back(static_cast<int32_t>(prompt.ids.size()));
  }
  encode_until(rendered->segments.size());
  call.prompts.push_back(std::move(prompt));
  const bool none = options.tool_choice != nullptr && *options.tool_choice == Json("none");
  call.parser = {.start = rendered->start, .tools = options.tools != nullptr && !none};
}

bool read_token_ids(FieldReader& fields, const Json::Array& items, const EngineInfo& info, PreparedPrompt& prompt) {
  prompt.ids.reserve(items.size());
  for (const Json& item : items) {
    const auto id = item.is_number() ? item.as_int64() : std::nullopt;
    if (!id || *id < 0 || *id >= info.vocab_size) {
      fields.fail("prompt", fmt::format("prompt contains {} among token ids, expected integers from 0 to {}",
                                        shown(item), info.vocab_size - 1));
      return false;
    }
    prompt.ids.push_back(static_cast<int32_t>(*id));
  }
  return true;
}

void read_text_prompts(FieldReader& fields, const EngineInfo& info, const Tokenizer& tokenizer, ApiCall& call) {
  const Json* prompt = fields.any("prompt");
  if (prompt == nullptr) return fields.fail("prompt", "prompt is missing, expected a string, strings or token ids");
  const auto add = [&](const Json& item) {
    PreparedPrompt prepared;
    if (item.is_string()) {
      prepared.ids = tokenizer.encode_text(item.as_string());
    } else if (!item.is_array()) {
      return fields.fail("prompt",
                         fmt::format("prompt is or contains {}, expected a string, an array of strings, an array "
                                     "of token ids or an array of such arrays",
                                     shown(item)));
    } else if (!read_token_ids(fields, item.as_array(), info, prepared)) {
      return;
    }
    if (prepared.ids.empty()) return fields.fail("prompt", "prompt has 0 tokens, expected at least 1");
    call.prompts.push_back(std::move(prepared));
  };
  const bool list = prompt->is_array() && !prompt->as_array().empty() && !prompt->as_array().front().is_number();
  if (!list) return add(*prompt);
  const auto count = static_cast<int64_t>(prompt->as_array().size());
  if (count * call.num_choices > kMaxChoices) {
    return fields.fail("prompt", fmt::format("{} prompts with n = {} make {} choices, expected at most {}", count,
                                             call.num_choices, count * call.num_choices, kMaxChoices));
  }
  for (const Json& item : prompt->as_array()) {
    if (!fields.ok()) return;
    add(item);
  }
}

void read_echo(FieldReader& fields, const Tokenizer& tokenizer, ApiCall& call) {
  const std::string* suffix = fields.string("suffix");
  if (suffix != nullptr && !suffix->empty()) fields.fail(not_supported("suffix", "suffix is not supported yet"));
  if (!fields.boolean("echo").value_or(false)) return;
  if (call.sampling.num_logprobs >= 0) {
    return fields.fail(not_supported("echo", "echo together with logprobs is not supported yet"));
  }
  for (PreparedPrompt& prompt : call.prompts) prompt.echo = utf8_sanitize(tokenizer.decode(prompt.ids));
}

void check_context(FieldReader& fields, const EngineInfo& info, const ApiCall& call) {
  for (const PreparedPrompt& prompt : call.prompts) {
    const size_t needed = prompt.ids.size() + 1;
    if (needed <= static_cast<size_t>(info.max_model_len)) continue;
    fields.fail(
        bad_field(call.chat ? "messages" : "prompt",
                  fmt::format("the prompt has {} tokens; with at least 1 token for the reply that makes {}, more "
                              "than the context of {} tokens",
                              prompt.ids.size(), needed, info.max_model_len),
                  "context_length_exceeded"));
  }
}

uint64_t derived_seed(uint64_t seed, int32_t choice) {
  if (choice == 0) return seed;
  // splitmix64: neighbouring choices get unrelated keys.
  uint64_t x = seed + 0x9e3779b97f4a7c15U * static_cast<uint64_t>(choice);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace

bool ServedModel::is(std::string_view asked) const {
  return asked == name || std::find(aliases.begin(), aliases.end(), asked) != aliases.end();
}

std::optional<ApiError> parse_chat_call(const Json& body, const ServedModel& model, const EngineInfo& info,
                                        const Tokenizer& tokenizer, ApiCall& call) {
  FieldReader fields(body);
  call.chat = true;
  read_model(fields, model, call);
  refuse_unsupported(fields);
  read_modalities(fields);
  read_sampling(fields, model.defaults, info, call);
  read_logit_edits(fields, info, tokenizer, call);
  read_stops(fields, info, call);
  read_timeout(fields, model.defaults, call);
  read_delivery(fields, call);
  const bool logprobs = fields.boolean("logprobs").value_or(false);
  const auto top = fields.integer("top_logprobs", 0, SamplingParams::kMaxLogprobs);
  if (top.value_or(0) > 0 && !logprobs) fields.fail("top_logprobs", "top_logprobs needs logprobs = true");
  if (logprobs) call.sampling.num_logprobs = static_cast<int32_t>(top.value_or(0));
  call.include_reasoning = fields.boolean("include_reasoning").value_or(true);
  call.single_tool_call = !fields.boolean("parallel_tool_calls").value_or(true);
  if (fields.ok()) read_chat_prompt(fields, model, tokenizer, call);
  if (fields.ok()) check_context(fields, info, call);
  if (fields.ok()) log_unknown(body);
  return fields.error();
}

std::optional<ApiError> parse_completion_call(const Json& body, const ServedModel& model, const EngineInfo& info,
                                              const Tokenizer& tokenizer, ApiCall& call) {
  FieldReader fields(body);
  call.chat = false;
  read_model(fields, model, call);
  refuse_unsupported(fields);
  read_sampling(fields, model.defaults, info, call);
  read_logit_edits(fields, info, tokenizer, call);
  read_stops(fields, info, call);
  read_timeout(fields, model.defaults, call);
  read_delivery(fields, call);
  const auto logprobs = fields.integer("logprobs", 0, SamplingParams::kMaxLogprobs);
  call.sampling.num_logprobs = static_cast<int32_t>(logprobs.value_or(-1));
  const Json* format = read_response_format(fields);
  if (format != nullptr && fields.ok() && *format->find("type") != Json("text")) {
    fields.fail(not_supported("response_format", "response_format is not supported for completions"));
  }
  if (fields.ok()) read_text_prompts(fields, info, tokenizer, call);
  if (fields.ok()) read_echo(fields, tokenizer, call);
  if (fields.ok()) check_context(fields, info, call);
  if (fields.ok()) log_unknown(body);
  return fields.error();
}

std::optional<ApiError> render_prompt(const Json& body, const ServedModel& model, const Tokenizer& tokenizer,
                                      ApiCall& call) {
  FieldReader fields(body);
  read_chat_prompt(fields, model, tokenizer, call);
  return fields.error();
}

std::vector<Request> make_engine_requests(const ApiCall& call, const std::string& id, const EngineInfo& info,
                                          const Tokenizer& tokenizer) {
  std::vector<Request> requests;
  for (const PreparedPrompt& prompt : call.prompts) {
    for (int32_t choice = 0; choice < call.num_choices; ++choice) {
      Request request;
      request.id = fmt::format("{}-{}", id, requests.size());
      request.prompt_ids = prompt.ids;
      request.message_ends = prompt.message_ends;
      request.sampling = call.sampling;
      const int32_t room = info.max_model_len - static_cast<int32_t>(prompt.ids.size());
      request.sampling.max_tokens = std::min(call.sampling.max_tokens, room);
      request.sampling.min_tokens = std::min(call.sampling.min_tokens, request.sampling.max_tokens);
      request.sampling.seed = derived_seed(call.sampling.seed, choice);
      request.priority = call.priority;
      request.cache_salt = call.cache_salt;
      request.speculative = call.speculative;
      request.constraint = make_call_constraint(call, tokenizer);
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

}  // namespace moat
