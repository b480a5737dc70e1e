// SPDX-License-Identifier: Apache-2.0
// The body of /v1/chat/completions or /v1/completions -> an ApiCall (what the reply needs to know) and engine Requests
// (plain numbers). Every field that changes the result is either honoured or refused; fields without effect and unknown
// ones are ignored. Pure functions of their arguments, so they run on the prepare pool.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/engine.h"
#include "server/api_error.h"
#include "text/reply_parser.h"
#include "text/tokenizer.h"

namespace moat {

constexpr double kMaxTimeoutSeconds = 1e9;  // beyond any patience, and far from where clocks overflow

// Used where a request says nothing; main fills it from generation_config.json.
struct ServingDefaults {
  float temperature = 1.0F;
  float top_p = 1.0F;
  int32_t top_k = 0;
  float min_p = 0.0F;
  std::string reasoning_effort = "max";
  double timeout_seconds = 0;  // 0: none; a request may ask for less, not for more
};

// The model as the API shows it.
struct ServedModel {
  std::string name;
  std::vector<std::string> aliases;
  ServingDefaults defaults;

  bool is(std::string_view asked) const;
};

struct PreparedPrompt {
  std::vector<int32_t> ids;
  std::vector<int32_t> message_ends;
  std::string echo;  // completions with echo: the prompt's text, which the reply begins with
};

struct ApiCall {
  bool chat = true;
  std::string model;  // as the client called it
  std::vector<PreparedPrompt> prompts;
  int32_t num_choices = 1;  // per prompt

  SamplingParams sampling;  // of the first choice of each prompt; max_tokens not yet clamped to what each prompt leaves
  int32_t priority = 0;
  double timeout_seconds = 0;  // from the arrival of the call to its last token; 0: none
  std::string cache_salt;
  bool speculative = true;
  std::vector<std::string> stops;
  bool include_stop = false;
  bool single_tool_call = false;
  ReplyParser::Options parser;  // chat only

  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool include_reasoning = true;
  bool return_token_ids = false;
  bool timings = false;
};

std::optional<ApiError> parse_chat_call(const Json& body, const ServedModel& model, const EngineInfo& info,
                                        const Tokenizer& tokenizer, ApiCall& call);
std::optional<ApiError> parse_completion_call(const Json& body, const ServedModel& model, const EngineInfo& info,
                                              const Tokenizer& tokenizer, ApiCall& call);

// One Request a choice; choice i belongs to prompt i / num_choices. Seeds of further choices are derived from the
// first's. The timeout is left to whoever submits: the call's time is running.
std::vector<Request> make_engine_requests(const ApiCall& call, const std::string& id, const EngineInfo& info,
                                          const Tokenizer& tokenizer);

// The chat part alone, for /tokenize: messages, tools and thinking fields of `body` -> token ids.
std::optional<ApiError> render_prompt(const Json& body, const ServedModel& model, const Tokenizer& tokenizer,
                                      ApiCall& call);

}  // namespace moat
