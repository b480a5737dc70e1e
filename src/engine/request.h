// SPDX-License-Identifier: Apache-2.0
// What a client asked (Request, plain numbers, immutable once submitted) and what it gets (TokenEvent). No JSON and no
// text here: prompts arrive as token ids and leave as token ids.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/constraint.h"
#include "base/status.h"

namespace moat {

struct TokenBias {
  int32_t token_id = 0;
  float bias = 0.0F;
};

// Order of application: penalties, logit_bias, masks (constraint, min_tokens, bad_words), then temperature, top_k, top_p,
// min_p (docs/design/dspark.md 3.6). engine/sampling_check.h checks ranges and bounds.
struct SamplingParams {
  float temperature = 1.0F;  // >= 0; 0 is greedy (ties: the lowest id)
  int32_t top_k = 0;         // keep the k most likely (ties at the boundary all kept); 0: off
  float top_p = 1.0F;        // (0, 1]; 1: off
  float min_p = 0.0F;        // [0, 1]; keep probabilities >= min_p * largest; 0: off
  uint64_t seed =
      0;  // key of the counter-based generator; whoever builds the Request draws one if the client gave none
  bool seeded = true;  // the client gave it: drafts are verified so that the tokens are those of decoding without them
  int32_t max_tokens = 0;          // > 0, already clamped to what the context leaves
  int32_t min_tokens = 0;          // stop ids are masked until this many tokens have come
  float presence_penalty = 0.0F;   // [-2, 2]; subtracted once from every token that has been generated
  float frequency_penalty = 0.0F;  // [-2, 2]; subtracted once for every time a token has been generated
  float repetition_penalty =
      1.0F;  // (0, 2]; divides positive and multiplies negative logits of tokens in prompt or reply
  std::vector<TokenBias> logit_bias;            // added to the logits; ids distinct
  std::vector<std::vector<int32_t>> bad_words;  // token sequences that may not be completed in the reply
  bool ignore_eos = false;                      // go on past the model's end-of-message token (load generators need it)
  std::vector<int32_t> stop_token_ids;          // besides the model's own
  int32_t num_logprobs =
      -1;  // -1: none; 0: of the chosen token; n > 0: of the n most likely as well (at most kMaxLogprobs)

  static constexpr int32_t kMaxLogprobs = 20;
};

// Whether `token_id` ends a reply (once min_tokens have come): the model's own end, or one of stop_token_ids.
bool is_stop_token(const SamplingParams& params, int32_t eos_token_id, int32_t token_id);

struct Request {
  std::string id;                     // unique among live requests; shows in logs
  std::vector<int32_t> prompt_ids;    // [prompt tokens], at least one, each in [0, vocab_size)
  std::vector<int32_t> message_ends;  // positions after the last token of each prompt message, ascending (cache hints)
  SamplingParams sampling;
  std::unique_ptr<Constraint> constraint;  // grammar, stop strings, budgets; may be null. Owned and used by the engine.
  int32_t priority = 0;                    // lower runs first
  std::string cache_salt;                  // requests with different salts never share cached prefixes
  bool restore_prefix = true;              // false: every prompt row is computed (prompt logprobs need them)
  double timeout_seconds = 0;              // from submit to the last token; 0: none
  bool speculative = true;                 // may be drafted for
};

// Every request ends with exactly one of these.
enum class FinishReason {
  kNone,       // not finished
  kStop,       // a stop token id or the constraint said so
  kLength,     // max_tokens or the context is used up
  kCancelled,  // the client went away or asked for it
  kTimeout,    // timeout_seconds passed, waiting or running; error says which
  kRejected,   // never ran: the message says which limit it breaks
  kError,      // failed while running (non-finite logits, device lost); others go on
};
std::string_view finish_reason_name(FinishReason reason);

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0.0F;  // natural log, of the model's distribution before temperature and filters
};

struct SampledToken {
  int32_t token_id = 0;
  float logprob = 0.0F;           // valid if num_logprobs >= 0
  std::vector<TokenLogprob> top;  // the num_logprobs most likely, descending
};

struct RequestTimings {
  double queue_seconds = 0;    // submit to first scheduled
  double prefill_seconds = 0;  // first scheduled to first token
  double decode_seconds = 0;   // first token to last
};

// One step's news of one request. The last one has finish != kNone.
struct TokenEvent {
  std::vector<SampledToken> tokens;  // in order; includes the stop token that ended the request, if any
  FinishReason finish = FinishReason::kNone;
  Status error;                // why, for kRejected and kError
  int32_t stop_token_id = -1;  // which id ended it; -1: none, or the constraint did
  int32_t num_prompt_tokens = 0;
  int32_t num_cached_tokens = 0;    // of the prompt, restored instead of computed
  int32_t num_drafted_tokens = 0;   // verified in this step
  int32_t num_accepted_drafts = 0;  // of `tokens`, the first ones
  RequestTimings timings;           // complete in the last event
};

}  // namespace moat
