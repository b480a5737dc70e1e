// SPDX-License-Identifier: Apache-2.0
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <random>
#include <utility>

#include "engine/local_engine.h"
#include "main/commands.h"
#include "server/openai_request.h"
#include "text/reply_parser.h"
#include "text/tokenizer.h"

namespace moat {
namespace {

// Events of one request, handed from the engine's thread to this one.
class EventQueue {
 public:
  void push(TokenEvent event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    ready_.notify_one();
  }
  TokenEvent pop() {
    std::unique_lock lock(mutex_);
    ready_.wait(lock, [&] { return !events_.empty(); });
    TokenEvent event = std::move(events_.front());
    events_.pop_front();
    return event;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<TokenEvent> events_;
};

struct Prompt {
  std::vector<int32_t> ids;
  std::optional<ReplyParser::Options> chat;  // how to read the reply; absent for plain text
};

Result<Prompt> make_prompt(const GenerateOptions& o, const Tokenizer& tokenizer) {
  if (o.has_prompt == !o.messages_path.empty()) {
    return invalid_argument("give either --prompt or --messages");
  }
  if (o.has_prompt) return Prompt{tokenizer.encode_text(o.prompt), std::nullopt};
  MOAT_ASSIGN(const std::string text, read_input(o.messages_path));
  const std::string source = o.messages_path == "-" ? "standard input" : o.messages_path;
  Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(source);
  const Json request = json->is_array() ? Json::object({{"messages", *json}}) : *json;
  ApiCall call;
  if (const auto error = render_prompt(request, ServedModel{}, tokenizer, call)) {
    return invalid_argument("{}: {}{}", source, error->param.empty() ? "" : error->param + ": ", error->message);
  }
  return Prompt{call.prompts.front().ids, call.parser};
}

Json message_json(const ReplyMessage& message) {
  Json json = Json::object({{"role", "assistant"}});
  json.set("content", message.content.empty() && !message.calls.empty() ? Json() : Json(message.content));
  json.set("reasoning_content", message.reasoning.empty() ? Json() : Json(message.reasoning));
  if (message.calls.empty()) return json;
  Json calls = Json::array();
  for (const auto& call : message.calls) {
    calls.push_back(Json::object(
        {{"type", "function"}, {"function", Json::object({{"name", call.name}, {"arguments", call.arguments}})}}));
  }
  json.set("tool_calls", std::move(calls));
  return json;
}

// What the reply's parts look like on a terminal: an empty line between reasoning and what follows it.
class Terminal {
 public:
  void print(const std::vector<ReplyEvent>& events) {
    for (const ReplyEvent& e : events) {
      if (e.kind == ReplyEvent::Kind::kReasoning) in_reasoning_ = true;
      if (e.kind != ReplyEvent::Kind::kReasoning && std::exchange(in_reasoning_, false)) fmt::print("\n\n");
      if (e.kind == ReplyEvent::Kind::kCall) {
        fmt::print("{}[call {}: {}] ", std::exchange(at_start_, false) ? "" : "\n", e.call_index + 1, e.text);
      } else {
        fmt::print("{}", e.text);
        at_start_ = false;
      }
    }
    std::fflush(stdout);
  }

 private:
  bool in_reasoning_ = false;
  bool at_start_ = true;
};

struct Reply {
  std::vector<int32_t> ids;
  std::optional<ReplyMessage> message;
  TokenEvent last;
};

Result<Reply> collect(EventQueue& queue, const Tokenizer& tokenizer, const Prompt& prompt, bool print) {
  Reply reply;
  std::optional<ReplyParser> parser;
  if (prompt.chat) parser.emplace(tokenizer, *prompt.chat);
  Utf8Stream utf8;
  std::vector<ReplyEvent> events;
  Terminal terminal;
  do {
    reply.last = queue.pop();
    for (const SampledToken& token : reply.last.tokens) {
      reply.ids.push_back(token.token_id);
      if (parser) {
        parser->feed(token.token_id, events);
      } else if (print && !tokenizer.is_reserved(token.token_id)) {
        fmt::print("{}", utf8.push(tokenizer.token_bytes(token.token_id)));
        std::fflush(stdout);
      }
    }
    if (print) terminal.print(events);
    events.clear();
  } while (reply.last.finish == FinishReason::kNone);
  if (!reply.last.error.ok()) return reply.last.error;
  if (parser) reply.message = parser->finish(events);
  if (print) {
    terminal.print(events);
    fmt::print("{}\n", utf8.flush());
  }
  return reply;
}

Json reply_json(const Reply& reply, const Tokenizer& tokenizer) {
  const RequestTimings& t = reply.last.timings;
  const auto generated = static_cast<int64_t>(reply.ids.size());
  const double seconds = std::max(t.decode_seconds, 1e-9);
  std::vector<int32_t> text_ids = reply.ids;
  std::erase_if(text_ids, [&](int32_t id) { return !reply.message && tokenizer.is_reserved(id); });
  Json json = Json::object({
      {"text", utf8_sanitize(tokenizer.decode(text_ids))},
      {"ids", Json::Array(reply.ids.begin(), reply.ids.end())},
      {"finish_reason", std::string(finish_reason_name(reply.last.finish))},
      {"usage", Json::object({{"prompt_tokens", reply.last.num_prompt_tokens},
                              {"completion_tokens", generated},
                              {"total_tokens", reply.last.num_prompt_tokens + generated}})},
      {"timings",
       Json::object({{"queue_seconds", t.queue_seconds},
                     {"prefill_seconds", t.prefill_seconds},
                     {"decode_seconds", t.decode_seconds},
                     {"prompt_tokens_per_second", reply.last.num_prompt_tokens / std::max(t.prefill_seconds, 1e-9)},
                     {"tokens_per_second", generated > 1 ? static_cast<double>(generated - 1) / seconds : 0.0}})},
  });
  if (reply.message) {
    json.set("message", message_json(*reply.message));
    if (reply.message->finish == ReplyFinish::kToolCalls) json.set("finish_reason", "tool_calls");
  }
  return json;
}

}  // namespace

Status generate_command(const GenerateOptions& o) {
  MOAT_ASSIGN(const Tokenizer tokenizer, Tokenizer::load(o.model.model_dir));
  MOAT_ASSIGN(const Prompt prompt, make_prompt(o, tokenizer));
  MOAT_ASSIGN(SamplingParams sampling, load_sampling_defaults(o.model.model_dir));
  MOAT_ASSIGN(OpenModel open, open_model(o.model));
  MOAT_ASSIGN(const std::unique_ptr<LoadedDspark> drafter, open_drafter(o.draft, *open.pool));
  MOAT_ASSIGN(EngineParts parts, make_engine_parts(*open.loaded,
                                                   {.max_num_seqs = 1,
                                                    .reference = open.reference,
                                                    .drafter = drafter.get(),
                                                    .ngram_drafter = o.draft.ngram,
                                                    .num_draft_tokens = o.draft.num_draft_tokens},
                                                   *open.pool));
  LocalEngine engine(std::move(parts), 1);

  if (o.temperature) sampling.temperature = *o.temperature;
  if (o.top_p) sampling.top_p = *o.top_p;
  sampling.seed = o.seed ? *o.seed : std::random_device()();
  sampling.seeded = o.seed.has_value();
  sampling.ignore_eos = o.ignore_eos;
  const int64_t room = engine.info().max_model_len - static_cast<int64_t>(prompt.ids.size());
  if (room < 1) {
    return invalid_argument("the prompt has {} tokens, the context is {}", prompt.ids.size(),
                            engine.info().max_model_len);
  }
  sampling.max_tokens = static_cast<int32_t>(std::min<int64_t>(o.max_tokens, room));

  EventQueue queue;
  Request request;
  request.id = "generate";
  request.prompt_ids = prompt.ids;
  request.sampling = sampling;
  MOAT_RETURN_IF_ERROR(engine.submit(std::move(request), [&](TokenEvent e) { queue.push(std::move(e)); }).status());
  MOAT_ASSIGN(const Reply reply, collect(queue, tokenizer, prompt, !o.json));
  if (o.json) fmt::print("{}\n", reply_json(reply, tokenizer).dump());
  return {};
}

}  // namespace moat
