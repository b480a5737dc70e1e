// SPDX-License-Identifier: Apache-2.0
#include "server/openai_response.h"

#include <utility>

#include "server/logprobs.h"
#include "server/random_id.h"

namespace moat {
namespace {

size_t num_choices(const ApiCall& call) { return call.prompts.size() * static_cast<size_t>(call.num_choices); }

const PreparedPrompt& prompt_of(const ApiCall& call, int32_t index) {
  return call.prompts[static_cast<size_t>(index / call.num_choices)];
}

Json id_array(const std::vector<int32_t>& ids) {
  Json::Array items;
  items.reserve(ids.size());
  for (const int32_t id : ids) items.emplace_back(id);
  return items;
}

Json token_id_array(const std::vector<SampledToken>& tokens) {
  Json::Array items;
  items.reserve(tokens.size());
  for (const SampledToken& token : tokens) items.emplace_back(token.token_id);
  return items;
}

void set_reasoning(Json& message, ReasoningField field, const Json& value) {
  if (field != ReasoningField::kReasoning) message.set("reasoning_content", value);
  if (field != ReasoningField::kReasoningContent) message.set("reasoning", value);
}

Json response_head(const ApiCall& call, const ResponseHead& head, bool chunk) {
  const char* object = call.chat ? (chunk ? "chat.completion.chunk" : "chat.completion") : "text_completion";
  Json json = Json::object({{"id", head.id}, {"object", object}, {"created", head.created}, {"model", call.model}});
  if (!head.fingerprint.empty()) json.set("system_fingerprint", head.fingerprint);
  return json;
}

Json finish_json(std::string_view reason) { return reason.empty() ? Json() : Json(reason); }

int64_t num_characters(std::string_view text) {
  int64_t count = 0;
  for (const char byte : text) count += (static_cast<unsigned char>(byte) & 0xc0U) != 0x80U ? 1 : 0;
  return count;
}

}  // namespace

Json usage_json(const Usage& usage) {
  Json completion = Json::object({{"reasoning_tokens", usage.reasoning}});
  if (usage.accepted_drafts + usage.rejected_drafts > 0) {
    completion.set("accepted_prediction_tokens", usage.accepted_drafts);
    completion.set("rejected_prediction_tokens", usage.rejected_drafts);
  }
  return Json::object({{"prompt_tokens", usage.prompt},
                       {"completion_tokens", usage.completion},
                       {"total_tokens", usage.prompt + usage.completion},
                       {"prompt_tokens_details", Json::object({{"cached_tokens", usage.cached}})},
                       {"completion_tokens_details", std::move(completion)}});
}

std::string sse_event(const Json& data) { return "data: " + data.dump() + "\n\n"; }

// --- ChunkWriter ---

ChunkWriter::ChunkWriter(const ApiCall& call, const Tokenizer& tokenizer, ResponseHead head)
    : call_(call), tokenizer_(tokenizer), head_(std::move(head)), choices_(num_choices(call)) {}

Json ChunkWriter::envelope(Json::Array choices) const {
  Json chunk = response_head(call_, head_, true);
  chunk.set("choices", std::move(choices));
  return chunk;
}

std::string ChunkWriter::write(int32_t index, const ReplyStream::Update& update, const Usage& usage) {
  std::string out;
  Choice& state = choices_[static_cast<size_t>(index)];
  const bool keep_tokens = call_.sampling.num_logprobs >= 0 || call_.return_token_ids;
  if (keep_tokens) state.unsent.insert(state.unsent.end(), update.tokens.begin(), update.tokens.end());
  const bool first = !std::exchange(state.begun, true);
  if (first && call_.chat) {
    append(out, index, Json::object({{"role", "assistant"}, {"content", ""}}), "", usage);
  } else if (first && !prompt_of(call_, index).echo.empty()) {
    append(out, index, prompt_of(call_, index).echo, "", usage);
    state.text_offset += num_characters(prompt_of(call_, index).echo);
  }
  for (const ReplyEvent& event : update.events) {
    append(out, index, call_.chat ? delta_of(event) : Json(event.text), "", usage);
  }
  if (!update.finish_reason.empty()) {
    append(out, index, call_.chat ? Json::object() : Json(""), update.finish_reason, usage);
  }
  return out;
}

void ChunkWriter::append(std::string& out, int32_t index, Json content, std::string_view finish, const Usage& usage) {
  Json choice = Json::object({{"index", index}});
  const bool opening = content.find("role") != nullptr;
  choice.set(call_.chat ? "delta" : "text", std::move(content));
  Choice& state = choices_[static_cast<size_t>(index)];
  if (opening) {
    choice.set("logprobs", nullptr);
  } else {
    add_token_fields(choice, state);
  }
  choice.set("finish_reason", finish_json(finish));
  Json chunk = envelope({std::move(choice)});
  if (opening && call_.return_token_ids) chunk.set("prompt_token_ids", id_array(prompt_of(call_, index).ids));
  if (call_.continuous_usage) {
    chunk.set("usage", usage_json(usage));
  } else if (call_.include_usage) {
    chunk.set("usage", nullptr);
  }
  out += sse_event(chunk);
}

void ChunkWriter::add_token_fields(Json& choice, Choice& state) {
  Json logprobs;
  if (call_.sampling.num_logprobs >= 0 && !state.unsent.empty()) {
    logprobs = call_.chat
                   ? Json::object({{"content", chat_logprobs(state.unsent, tokenizer_)}})
                   : completion_logprobs(state.unsent, tokenizer_, call_.sampling.num_logprobs, state.text_offset);
  }
  choice.set("logprobs", std::move(logprobs));
  if (call_.return_token_ids) choice.set("token_ids", token_id_array(state.unsent));
  state.unsent.clear();
}

Json ChunkWriter::delta_of(const ReplyEvent& event) const {
  Json delta = Json::object();
  switch (event.kind) {
    case ReplyEvent::Kind::kReasoning: set_reasoning(delta, head_.reasoning_field, event.text); break;
    case ReplyEvent::Kind::kContent: delta.set("content", event.text); break;
    case ReplyEvent::Kind::kCall:
      delta.set("tool_calls",
                Json::array({Json::object({{"index", event.call_index},
                                           {"id", random_id("call_")},
                                           {"type", "function"},
                                           {"function", Json::object({{"name", event.text}, {"arguments", ""}})}})}));
      break;
    case ReplyEvent::Kind::kArguments:
      delta.set("tool_calls", Json::array({Json::object({{"index", event.call_index},
                                                         {"function", Json::object({{"arguments", event.text}})}})}));
      break;
  }
  return delta;
}

std::string ChunkWriter::usage_chunk(const Usage& usage, const Json* timings) {
  if (!call_.include_usage && timings == nullptr) return "";
  Json chunk = envelope({});
  if (call_.include_usage) chunk.set("usage", usage_json(usage));
  if (timings != nullptr) chunk.set("timings", *timings);
  return sse_event(chunk);
}

// --- WholeWriter ---

WholeWriter::WholeWriter(const ApiCall& call, const Tokenizer& tokenizer, ResponseHead head)
    : call_(call), tokenizer_(tokenizer), head_(std::move(head)), choices_(num_choices(call)) {}

void WholeWriter::add(int32_t index, ReplyStream::Update update) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  for (ReplyEvent& event : update.events) {
    switch (event.kind) {
      case ReplyEvent::Kind::kReasoning: choice.reasoning += event.text; break;
      case ReplyEvent::Kind::kContent: choice.content += event.text; break;
      case ReplyEvent::Kind::kCall: choice.calls.push_back({random_id("call_"), std::move(event.text), ""}); break;
      case ReplyEvent::Kind::kArguments:
        if (!choice.calls.empty()) choice.calls.back().arguments += event.text;
        break;
    }
  }
  if (call_.sampling.num_logprobs >= 0 || call_.return_token_ids) {
    choice.tokens.insert(choice.tokens.end(), update.tokens.begin(), update.tokens.end());
  }
  if (!update.finish_reason.empty()) choice.finish_reason = std::move(update.finish_reason);
}

Json WholeWriter::message_of(Choice& choice) const {
  Json message = Json::object({{"role", "assistant"}});
  const bool no_text = choice.content.empty() && !choice.calls.empty();
  message.set("content", no_text ? Json() : Json(std::move(choice.content)));
  if (call_.include_reasoning) {
    set_reasoning(message, head_.reasoning_field,
                  choice.reasoning.empty() ? Json() : Json(std::move(choice.reasoning)));
  }
  if (choice.calls.empty()) return message;
  Json::Array calls;
  for (Call& call : choice.calls) {
    calls.push_back(Json::object(
        {{"id", std::move(call.id)},
         {"type", "function"},
         {"function", Json::object({{"name", std::move(call.name)}, {"arguments", std::move(call.arguments)}})}}));
  }
  message.set("tool_calls", std::move(calls));
  return message;
}

Json WholeWriter::choice_of(int32_t index, Choice& choice) const {
  Json json = Json::object({{"index", index}});
  const std::string& echo = prompt_of(call_, index).echo;
  Json logprobs;
  if (call_.chat) {
    json.set("message", message_of(choice));
    if (call_.sampling.num_logprobs >= 0) {
      logprobs = Json::object({{"content", chat_logprobs(choice.tokens, tokenizer_)}});
    }
  } else {
    json.set("text", echo + choice.content);
    int64_t text_offset = num_characters(echo);
    if (call_.sampling.num_logprobs >= 0) {
      logprobs = completion_logprobs(choice.tokens, tokenizer_, call_.sampling.num_logprobs, text_offset);
    }
  }
  json.set("logprobs", std::move(logprobs));
  json.set("finish_reason", finish_json(choice.finish_reason));
  if (call_.return_token_ids) {
    json.set("token_ids", token_id_array(choice.tokens));
    if (!call_.chat) json.set("prompt_token_ids", id_array(prompt_of(call_, index).ids));
  }
  return json;
}

Json WholeWriter::finish(const Usage& usage, const Json* timings) {
  Json response = response_head(call_, head_, false);
  Json::Array choices;
  for (size_t i = 0; i < choices_.size(); ++i) choices.push_back(choice_of(static_cast<int32_t>(i), choices_[i]));
  response.set("choices", std::move(choices));
  response.set("usage", usage_json(usage));
  if (call_.chat && call_.return_token_ids) response.set("prompt_token_ids", id_array(call_.prompts.front().ids));
  if (timings != nullptr) response.set("timings", *timings);
  return response;
}

}  // namespace moat
