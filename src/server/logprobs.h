// SPDX-License-Identifier: Apache-2.0
// Log-probabilities in the two OpenAI forms. Every generated token has an entry, markup and the stop token included, so
// the lists are as long as completion_tokens. Values JSON cannot hold become -9999.
#pragma once

#include <span>
#include <vector>

#include "base/json.h"
#include "engine/request.h"
#include "text/tokenizer.h"

namespace moat {

// Chat: [{"token", "logprob", "bytes", "top_logprobs": [...]}, ...], the value of logprobs.content.
Json::Array chat_logprobs(std::span<const SampledToken> tokens, const Tokenizer& tokenizer);

// Completions: {"tokens", "token_logprobs", "top_logprobs", "text_offset"}; `text_offset` counts characters of the text
// and is moved on by what the tokens add.
Json completion_logprobs(std::span<const SampledToken> tokens, const Tokenizer& tokenizer, int32_t num_logprobs,
                         int64_t& text_offset);

}  // namespace moat
