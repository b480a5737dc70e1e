// SPDX-License-Identifier: Apache-2.0
// ReplyMachine: the state machine under ReplyParser. It turns token ids into events and keeps only what the next token
// needs, so that a copy is cheap (a constraint copies it to take back rejected drafts). One thread.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "text/reply_parser.h"
#include "text/tokenizer.h"

namespace moat {

class ReplyMachine {
 public:
  ReplyMachine(const Tokenizer& tokenizer, ReplyParser::Options options);

  void feed(int32_t token_id, std::vector<ReplyEvent>& events);
  void finish(std::vector<ReplyEvent>& events);  // releases what was held back
  ReplyFinish reason() const;                    // if the reply ended now
  bool in_reasoning() const;

 private:
  enum class Element { kThink, kResponse, kTools, kCall, kArgument, kJson, kUnknown };
  // A control token and the text that followed it, until <|sep|>.
  struct Header {
    bool opens = false;
    std::string text;
  };
  struct Call {
    std::set<std::string> keys;
    bool raw = false;      // has a json element
    bool written = false;  // some of its arguments were emitted
  };
  struct Argument {
    std::string key;
    std::string text;  // of types other than string, which are emitted at their end
    bool is_string = true;
  };

  static Element element_of(std::string_view tag);

  void add_text(std::string text);
  void add_thought(std::string text);
  void release_held();
  void open_element(std::string_view header);
  void open_call(std::string_view header);
  void open_arguments(std::string_view header, Element element);
  void close_element(std::string_view header);
  void close_argument();
  void leave(size_t depth);
  std::string key_prefix();
  void emit(ReplyEvent::Kind kind, std::string text);

  const Tokenizer* tokenizer_;
  bool tools_;
  std::vector<ReplyEvent>* events_ = nullptr;  // of the running call of feed or finish
  Utf8Stream utf8_;
  std::vector<Element> path_;        // open elements, outermost first; empty: directly in the message
  std::optional<Header> header_;     // set between a control token and its <|sep|>
  std::optional<std::string> held_;  // the beginning of the thoughts, while it may still spell their opener
  bool answered_ = false;            // a response or tools element was opened
  bool closed_ = false;              // the message has ended
  int num_calls_ = 0;
  std::optional<Call> call_;
  std::optional<Argument> argument_;
};

}  // namespace moat
