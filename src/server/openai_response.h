// SPDX-License-Identifier: Apache-2.0
// Updates of the choices of one call -> the JSON of the answer, as chunks of an event stream or as one object. Both
// walk the same updates. One thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "server/openai_request.h"
#include "server/reply_stream.h"
#include "text/tokenizer.h"

namespace moat {

enum class ReasoningField { kReasoningContent, kReasoning, kBoth };  // the name clients look for differs

struct Usage {
  int64_t prompt = 0, cached = 0, completion = 0, reasoning = 0;
  int64_t accepted_drafts = 0, rejected_drafts = 0;  // shown if there were any
};
Json usage_json(const Usage& usage);

// What all chunks and the whole answer have in common.
struct ResponseHead {
  std::string id;
  int64_t created = 0;
  std::string fingerprint;  // empty: none
  ReasoningField reasoning_field = ReasoningField::kReasoningContent;
};

// The text of an event stream: "data: {...}\n\n" and so on.
std::string sse_event(const Json& data);
constexpr const char* kSseDone = "data: [DONE]\n\n";

class ChunkWriter {
 public:
  ChunkWriter(const ApiCall& call, const Tokenizer& tokenizer, ResponseHead head);

  // The events for what `update` of choice `index` adds; empty if nothing visible. `usage`: of the call so far.
  std::string write(int32_t index, const ReplyStream::Update& update, const Usage& usage);
  // After the last choice has finished, if the client asked for it.
  std::string usage_chunk(const Usage& usage, const Json* timings);

 private:
  struct Choice {
    bool begun = false;
    std::vector<SampledToken> unsent;  // tokens whose logprobs and ids wait for a chunk to travel in
    int64_t text_offset = 0;
  };

  void append(std::string& out, int32_t index, Json content, std::string_view finish, const Usage& usage);
  Json delta_of(const ReplyEvent& event) const;
  void add_token_fields(Json& choice, Choice& state);
  Json envelope(Json::Array choices) const;

  const ApiCall& call_;
  const Tokenizer& tokenizer_;
  const ResponseHead head_;
  std::vector<Choice> choices_;
};

class WholeWriter {
 public:
  WholeWriter(const ApiCall& call, const Tokenizer& tokenizer, ResponseHead head);

  void add(int32_t index, ReplyStream::Update update);
  Json finish(const Usage& usage, const Json* timings);

 private:
  struct Call {
    std::string id, name, arguments;
  };
  struct Choice {
    std::string reasoning, content, finish_reason;
    std::vector<Call> calls;
    std::vector<SampledToken> tokens;
  };

  Json message_of(Choice& choice) const;
  Json choice_of(int32_t index, Choice& choice) const;

  const ApiCall& call_;
  const Tokenizer& tokenizer_;
  const ResponseHead head_;
  std::vector<Choice> choices_;
};

}  // namespace moat
