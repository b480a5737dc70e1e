// SPDX-License-Identifier: Apache-2.0
#include "server/reply_stream.h"

#include <utility>

namespace moat {

ReplyStream::ReplyStream(const ApiCall& call, const Tokenizer& tokenizer)
    : call_(call), tokenizer_(tokenizer), stops_(call.stops), has_stops_(!call.stops.empty()) {
  if (call.chat) parser_.emplace(tokenizer, call.parser);
}

ReplyStream::Update ReplyStream::feed(TokenEvent event) {
  Update update;
  counts_.prompt = event.num_prompt_tokens;
  counts_.cached = event.num_cached_tokens;
  const bool by_token = event.finish == FinishReason::kStop && event.stop_token_id >= 0;
  for (size_t i = 0; i < event.tokens.size(); ++i) {
    feed_token(event.tokens[i], by_token && i + 1 == event.tokens.size(), update);
  }
  update.tokens = std::move(event.tokens);
  if (event.finish == FinishReason::kNone) return update;
  ended_ = true;
  if (event.finish == FinishReason::kStop || event.finish == FinishReason::kLength) {
    update.finish_reason = finish(event.finish, by_token, update);
  }
  return update;
}

void ReplyStream::feed_token(const SampledToken& token, bool is_terminator, Update& update) {
  ++counts_.completion;
  const int32_t id = token.token_id;
  if (parser_) {
    if (parser_->in_reasoning() && !tokenizer_.is_reserved(id)) ++counts_.reasoning;
    // A stop id of the client's is not part of the reply; the model's own ends the message, which the parser must see.
    if (is_terminator && !tokenizer_.is_reserved(id)) return;
    std::vector<ReplyEvent> events;
    parser_->feed(id, events);
    for (ReplyEvent& event : events) add(std::move(event), update);
  } else if (!is_terminator && id >= 0 && id < tokenizer_.num_ranks()) {  // reserved ids are no text
    add_content(text_.push(tokenizer_.token_bytes(id)), update);
  }
}

void ReplyStream::add(ReplyEvent event, Update& update) {
  if (stopped_) return;
  if (event.kind == ReplyEvent::Kind::kContent) return add_content(std::move(event.text), update);
  if (event.kind == ReplyEvent::Kind::kReasoning && !call_.include_reasoning) return;
  if (event.kind == ReplyEvent::Kind::kCall) called_ = true;
  const bool mergeable = event.kind != ReplyEvent::Kind::kCall && !update.events.empty() &&
                         update.events.back().kind == event.kind && update.events.back().call_index == event.call_index;
  if (mergeable) {
    update.events.back().text += event.text;
  } else if (event.kind == ReplyEvent::Kind::kCall || !event.text.empty()) {
    update.events.push_back(std::move(event));
  }
}

void ReplyStream::add_content(std::string text, Update& update) {
  if (stopped_) return;
  if (has_stops_) {
    text = stops_.push(text);
    stopped_ = stops_.matched();
    if (stopped_ && call_.include_stop) text += stops_.matched_stop();
  }
  if (text.empty()) return;
  if (!update.events.empty() && update.events.back().kind == ReplyEvent::Kind::kContent) {
    update.events.back().text += text;
  } else {
    update.events.push_back({.kind = ReplyEvent::Kind::kContent, .text = std::move(text)});
  }
}

std::string ReplyStream::finish(FinishReason reason, bool by_token, Update& update) {
  ReplyFinish parsed = reason == FinishReason::kStop ? ReplyFinish::kStop : ReplyFinish::kLength;
  if (parser_) {
    std::vector<ReplyEvent> events;
    parsed = parser_->finish(events).finish;
    for (ReplyEvent& event : events) add(std::move(event), update);
    // The parser cannot know of ids and strings that ended the reply from outside: to it the reply is cut.
    if (reason == FinishReason::kStop && parsed == ReplyFinish::kLength) parsed = ReplyFinish::kStop;
    // The engine was told to stop after the first call.
    const bool single = call_.single_tool_call && called_ && !stopped_ && !by_token;
    if (reason == FinishReason::kStop && single) parsed = ReplyFinish::kToolCalls;
  } else {
    add_content(text_.flush(), update);
  }
  if (has_stops_ && !stopped_) {
    std::string held = stops_.flush();
    if (!held.empty()) update.events.push_back({.kind = ReplyEvent::Kind::kContent, .text = std::move(held)});
  }
  switch (parsed) {
    case ReplyFinish::kStop: return "stop";
    case ReplyFinish::kLength: return "length";
    case ReplyFinish::kToolCalls: return "tool_calls";
  }
  return "stop";
}

}  // namespace moat
