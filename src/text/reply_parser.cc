// SPDX-License-Identifier: Apache-2.0
#include "text/reply_parser.h"

#include "text/reply_machine.h"

namespace moat {

struct ReplyParser::Impl {
  ReplyMachine machine;
  ReplyMessage message;

  // Adds the events from `begin` on to the message.
  void collect(const std::vector<ReplyEvent>& events, size_t begin) {
    for (size_t i = begin; i < events.size(); ++i) {
      const ReplyEvent& event = events[i];
      switch (event.kind) {
        case ReplyEvent::Kind::kReasoning: message.reasoning.append(event.text); break;
        case ReplyEvent::Kind::kContent: message.content.append(event.text); break;
        case ReplyEvent::Kind::kCall: message.calls.push_back({event.text, {}}); break;
        case ReplyEvent::Kind::kArguments: message.calls.back().arguments.append(event.text); break;
      }
    }
  }
};

ReplyParser::ReplyParser(const Tokenizer& tokenizer, Options options)
    : impl_(std::make_unique<Impl>(Impl{ReplyMachine(tokenizer, options), {}})) {}
ReplyParser::ReplyParser(ReplyParser&&) noexcept = default;
ReplyParser& ReplyParser::operator=(ReplyParser&&) noexcept = default;
ReplyParser::~ReplyParser() = default;

void ReplyParser::feed(int32_t token_id, std::vector<ReplyEvent>& events) {
  const size_t begin = events.size();
  impl_->machine.feed(token_id, events);
  impl_->collect(events, begin);
}

ReplyMessage ReplyParser::finish(std::vector<ReplyEvent>& events) {
  const size_t begin = events.size();
  impl_->machine.finish(events);
  impl_->collect(events, begin);
  impl_->message.finish = impl_->machine.reason();
  return impl_->message;
}

bool ReplyParser::in_reasoning() const { return impl_->machine.in_reasoning(); }

}  // namespace moat
