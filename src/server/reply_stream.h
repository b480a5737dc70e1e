// SPDX-License-Identifier: Apache-2.0
// ReplyStream: the state machine of one choice, from engine events to what the client gets to see. Streaming sends its
// updates, the non-streamed answer sums them up: the two cannot differ. One thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/openai_request.h"
#include "text/reply_parser.h"
#include "text/stop_strings.h"
#include "text/tokenizer.h"

namespace moat {

class ReplyStream {
 public:
  struct Update {
    std::vector<ReplyEvent> events;    // visible pieces, neighbours of one kind merged; completions: kContent only
    std::vector<SampledToken> tokens;  // all that came, visible or not
    std::string finish_reason;         // "stop", "length" or "tool_calls" in the last update, else empty
  };
  struct Counts {
    int32_t prompt = 0, cached = 0, completion = 0, reasoning = 0;
  };

  // `call` and `tokenizer` must outlive the stream.
  ReplyStream(const ApiCall& call, const Tokenizer& tokenizer);

  // After an event with finish kCancelled, kTimeout, kRejected or kError there is no finish reason: the reply failed.
  Update feed(TokenEvent event);
  bool ended() const { return ended_; }
  const Counts& counts() const { return counts_; }

 private:
  void feed_token(const SampledToken& token, bool is_terminator, Update& update);
  void add(ReplyEvent event, Update& update);
  void add_content(std::string text, Update& update);
  std::string finish(FinishReason reason, bool by_token, Update& update);

  const ApiCall& call_;
  const Tokenizer& tokenizer_;
  std::optional<ReplyParser> parser_;  // chat
  Utf8Stream text_;                    // completions
  StopMatcher stops_;
  bool has_stops_;
  bool stopped_ = false;  // a stop string came: nothing after it is shown
  bool called_ = false;   // a tool call was shown
  bool ended_ = false;
  Counts counts_;
};

}  // namespace moat
