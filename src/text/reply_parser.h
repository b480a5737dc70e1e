// SPDX-License-Identifier: Apache-2.0
// One generated reply, token by token -> reasoning, content and tool calls (docs/design/k3.md 6.7). Structure is carried by
// token ids alone; text that looks like markup is text. Streaming sends the events; the non-streamed message is their sum.
// One parser per reply, one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "text/chat.h"
#include "text/tokenizer.h"

namespace moat {

struct ReplyEvent {
  enum class Kind {
    kReasoning,  // text
    kContent,    // text
    kCall,       // a tool call begins: call_index, text = function name
    kArguments,  // text to append to the arguments string of call_index
  };
  Kind kind = Kind::kContent;
  int call_index = -1;
  std::string text;
  bool operator==(const ReplyEvent&) const = default;
};

enum class ReplyFinish { kStop, kLength, kToolCalls };

struct ReplyMessage {
  struct Call {
    std::string name;
    std::string arguments;  // JSON text; cut short if the reply was
    bool operator==(const Call&) const = default;
  };
  std::string reasoning;  // empty: null in the API
  std::string content;    // empty and calls present: null in the API
  std::vector<Call> calls;
  ReplyFinish finish = ReplyFinish::kLength;
};

class ReplyParser {
 public:
  struct Options {
    ReplyChannel start = ReplyChannel::kThink;
    bool tools = false;  // tools were declared and tool_choice is not "none"
  };
  // `tokenizer` must outlive the parser and have XTML control ids.
  ReplyParser(const Tokenizer& tokenizer, Options options);
  ReplyParser(ReplyParser&&) noexcept;
  ReplyParser& operator=(ReplyParser&&) noexcept;
  ~ReplyParser();

  // Appends what `token_id` makes known to `events`.
  void feed(int32_t token_id, std::vector<ReplyEvent>& events);
  // After the last id: releases what was held back and returns the whole message.
  ReplyMessage finish(std::vector<ReplyEvent>& events);

  bool in_reasoning() const;  // the next ordinary token would be reasoning (for usage.reasoning_tokens)

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moat
