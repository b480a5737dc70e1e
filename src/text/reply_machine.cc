// SPDX-License-Identifier: Apache-2.0
#include "text/reply_machine.h"

#include <algorithm>
#include <utility>

#include "base/json.h"
#include "text/unicode.h"

namespace moat {
namespace {

// Models at times spell their own opener with ordinary tokens.
constexpr std::string_view kSpelledOpener = "<|open|>think<|sep|>";

bool is_word_byte(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte >= 0x80 || byte == '_' || (byte >= '0' && byte <= '9') || (byte >= 'A' && byte <= 'Z') ||
         (byte >= 'a' && byte <= 'z');
}

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  for (size_t at; (at = text.find(from)) != std::string_view::npos; text.remove_prefix(at + from.size())) {
    out.append(text.substr(0, at)).append(to);
  }
  return out.append(text);
}

// The value of WORD="VALUE" in a header, unescaped; of repeated words the last.
std::optional<std::string> attribute(std::string_view header, std::string_view word) {
  std::optional<std::string> value;
  size_t from = 0;
  for (size_t at = 0; (at = header.find("=\"", at)) != std::string_view::npos;) {
    size_t begin = at;
    while (begin > from && is_word_byte(header[begin - 1])) --begin;
    if (begin == at) {
      ++at;
      continue;
    }
    const size_t end = header.find('"', at + 2);
    if (end == std::string_view::npos) break;
    if (header.substr(begin, at - begin) == word) value = std::string(header.substr(at + 2, end - at - 2));
    from = at = end + 1;
  }
  if (value) {
    value = replace_all(replace_all(*value, "&quot;", "\""), "&amp;", "&");
  }
  return value;
}

std::string json_string(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}

}  // namespace

ReplyMachine::ReplyMachine(const Tokenizer& tokenizer, ReplyParser::Options options)
    : tokenizer_(&tokenizer), tools_(options.tools) {
  MOAT_CHECK(tokenizer.has_xtml(), "a reply parser needs a tokenizer with XTML control ids");
  if (options.start == ReplyChannel::kThink) {
    path_ = {Element::kThink};
    held_.emplace();
  } else {
    path_ = {Element::kResponse};
    answered_ = true;
  }
}

ReplyMachine::Element ReplyMachine::element_of(std::string_view tag) {
  if (tag == "think") return Element::kThink;
  if (tag == "response") return Element::kResponse;
  if (tag == "tools") return Element::kTools;
  if (tag == "call") return Element::kCall;
  if (tag == "argument") return Element::kArgument;
  if (tag == "json") return Element::kJson;
  return Element::kUnknown;
}

void ReplyMachine::feed(int32_t token_id, std::vector<ReplyEvent>& events) {
  if (token_id < 0 || token_id >= tokenizer_->vocab_size()) return;
  events_ = &events;
  const Tokenizer::ControlIds& control = tokenizer_->control();
  const bool opens = token_id == control.open, closes = token_id == control.close;
  const bool separates = token_id == control.sep, ends = token_id == control.end_of_msg;
  if (!opens && !closes && !separates && !ends) {
    add_text(utf8_.push(tokenizer_->token_bytes(token_id)));
    return;
  }
  add_text(utf8_.flush());  // an incomplete character never crosses a control token
  release_held();
  if (ends) {
    leave(0);
    closed_ = true;
  } else if (closed_) {
    return;
  } else if (separates) {
    if (!header_) return;
    const Header header = *std::exchange(header_, std::nullopt);
    if (header.opens) {
      open_element(header.text);
    } else {
      close_element(header.text);
    }
  } else {
    header_ = Header{opens, {}};  // a control token inside a header starts a new one
  }
}

void ReplyMachine::finish(std::vector<ReplyEvent>& events) {
  events_ = &events;
  add_text(utf8_.flush());
  release_held();
}

ReplyFinish ReplyMachine::reason() const {
  const bool cut_in_tools = !closed_ && !path_.empty() && path_[0] == Element::kTools;
  if (cut_in_tools) return ReplyFinish::kLength;
  if (num_calls_ > 0) return ReplyFinish::kToolCalls;
  return closed_ ? ReplyFinish::kStop : ReplyFinish::kLength;
}

bool ReplyMachine::in_reasoning() const {
  return !closed_ && !header_ && !path_.empty() && path_.back() == Element::kThink;
}

void ReplyMachine::release_held() {
  if (held_) emit(ReplyEvent::Kind::kReasoning, *std::exchange(held_, std::nullopt));
}

void ReplyMachine::add_text(std::string text) {
  if (text.empty() || closed_) return;
  if (header_) {
    header_->text.append(text);
    return;
  }
  if (path_.empty()) {
    if (!answered_) emit(ReplyEvent::Kind::kContent, std::move(text));
    return;
  }
  switch (path_.back()) {
    case Element::kThink: add_thought(std::move(text)); break;
    case Element::kResponse: emit(ReplyEvent::Kind::kContent, std::move(text)); break;
    case Element::kArgument:
      if (!argument_) break;
      if (argument_->is_string) {
        const std::string quoted = json_string(text);
        emit(ReplyEvent::Kind::kArguments, quoted.substr(1, quoted.size() - 2));
      } else {
        argument_->text.append(text);
      }
      break;
    case Element::kJson:
      if (call_) emit(ReplyEvent::Kind::kArguments, std::move(text));
      break;
    default: break;  // between the calls: no channel
  }
}

void ReplyMachine::add_thought(std::string text) {
  if (held_) {
    text = std::exchange(held_, std::nullopt)->append(text);
    if (text.starts_with(kSpelledOpener)) {
      text.erase(0, kSpelledOpener.size());
    } else if (kSpelledOpener.starts_with(text)) {
      held_ = std::move(text);
      return;
    }
  }
  emit(ReplyEvent::Kind::kReasoning, std::move(text));
}

void ReplyMachine::emit(ReplyEvent::Kind kind, std::string text) {
  if (text.empty()) return;
  int index = -1;
  if (kind == ReplyEvent::Kind::kArguments) {
    call_->written = true;
    index = num_calls_ - 1;
  }
  events_->push_back({kind, index, std::move(text)});
}

// Closes every element inside the outermost `depth` ones, as if each had its own close.
void ReplyMachine::leave(size_t depth) {
  if (path_.size() > depth) {
    if (path_.back() == Element::kArgument && argument_) close_argument();
    if (depth <= 1 && call_) {
      if (!call_->keys.empty()) {
        emit(ReplyEvent::Kind::kArguments, "}");
      } else if (!call_->written) {
        emit(ReplyEvent::Kind::kArguments, "{}");
      }
      call_.reset();
    }
    path_.resize(depth);
  }
  argument_.reset();
}

void ReplyMachine::open_element(std::string_view header) {
  const Element element = element_of(header.substr(0, header.find(' ')));
  const auto inside = [&](size_t depth, Element wanted) { return path_.size() > depth && path_[depth] == wanted; };
  switch (element) {
    case Element::kThink:
      if (answered_ || std::find(path_.begin(), path_.end(), Element::kThink) != path_.end()) break;
      leave(0);
      path_ = {Element::kThink};
      break;
    case Element::kResponse:
    case Element::kTools:
      leave(0);
      path_ = {element};
      answered_ = true;
      break;
    case Element::kCall:
      if (inside(0, Element::kTools)) open_call(header);
      break;
    case Element::kArgument:
    case Element::kJson:
      if (inside(0, Element::kTools) && inside(1, Element::kCall)) open_arguments(header, element);
      break;
    case Element::kUnknown: break;
  }
}

void ReplyMachine::open_call(std::string_view header) {
  leave(1);
  path_.push_back(Element::kCall);
  auto name = attribute(header, "tool");
  if (!tools_ || !name || name->empty()) return;
  call_.emplace();
  events_->push_back({ReplyEvent::Kind::kCall, num_calls_++, std::move(*name)});
}

void ReplyMachine::open_arguments(std::string_view header, Element element) {
  leave(2);
  if (!call_ || call_->raw) return;
  if (element == Element::kJson) {
    if (!call_->keys.empty()) return;  // raw arguments, or none if there are others already
    path_.push_back(element);
    call_->raw = true;
    return;
  }
  std::string key = attribute(header, "key").value_or("");
  if (call_->keys.contains(key)) return;  // of repeated keys the first counts
  path_.push_back(element);
  const bool is_string = attribute(header, "type").value_or("string") == "string";
  argument_ = Argument{std::move(key), {}, is_string};
  if (is_string) emit(ReplyEvent::Kind::kArguments, key_prefix() + '"');
}

// What precedes the value of the current argument.
std::string ReplyMachine::key_prefix() {
  std::string out = call_->keys.empty() ? "{" : ", ";
  call_->keys.insert(argument_->key);
  append_json_string(out, argument_->key);
  return out.append(": ");
}

void ReplyMachine::close_element(std::string_view header) {
  const std::string_view tag = python_strip(header);
  if (tag == "message") {
    leave(0);
    closed_ = true;
    return;
  }
  const Element element = element_of(tag);
  const auto found = std::find(path_.begin(), path_.end(), element);
  if (element != Element::kUnknown && found != path_.end()) leave(static_cast<size_t>(found - path_.begin()));
}

void ReplyMachine::close_argument() {
  if (argument_->is_string) {
    emit(ReplyEvent::Kind::kArguments, "\"");
  } else {
    // Valid JSON verbatim, so that numbers keep their spelling.
    std::string raw(python_strip(argument_->text));
    if (!parse_json(raw).ok()) raw = json_string(argument_->text);
    emit(ReplyEvent::Kind::kArguments, key_prefix() + raw);
  }
  argument_.reset();
}

}  // namespace moat
