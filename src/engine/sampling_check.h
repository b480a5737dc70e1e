// SPDX-License-Identifier: Apache-2.0
// Which sampling parameters an engine takes. Ranges are those of the OpenAI API (penalties, biases) and of vLLM (the
// others); the bounds on lists are moat's own, so that no request makes a step slow for its batch mates.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/status.h"
#include "engine/request.h"

namespace moat {

constexpr double kMaxPenalty = 2;            // presence and frequency, either sign
constexpr double kMaxRepetitionPenalty = 2;  // above 0
constexpr double kMaxBias = 100;             // either sign
constexpr size_t kMaxBiases = 1024;
constexpr size_t kMaxBadWords = 1024;      // token sequences
constexpr size_t kMaxBadWordTokens = 128;  // of one sequence

// kInvalidArgument that names the first wrong parameter, got and expected. max_tokens is the caller's to check: it
// depends on the context.
Status check_sampling(const SamplingParams& params, int64_t vocab_size);

}  // namespace moat
