// SPDX-License-Identifier: Apache-2.0
#include "engine/sampling_check.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace moat {
namespace {

// Both ends included; NaN is outside.
Status check_range(std::string_view name, double value, double low, double high) {
  if (value >= low && value <= high) return {};
  return invalid_argument("{} is {}, expected a number from {} to {}", name, value, low, high);
}

Status check_above_zero(std::string_view name, double value, double high) {
  if (value > 0 && value <= high) return {};
  return invalid_argument("{} is {}, expected a number above 0, at most {}", name, value, high);
}

Status check_at_least(std::string_view name, int32_t value, int32_t low) {
  if (value >= low) return {};
  return invalid_argument("{} is {}, expected at least {}", name, value, low);
}

Status check_id(std::string_view name, int32_t id, int64_t vocab_size) {
  if (id >= 0 && id < vocab_size) return {};
  return invalid_argument("{} has token {}, expected ids from 0 to {}", name, id, vocab_size - 1);
}

Status check_logit_bias(const std::vector<TokenBias>& biases, int64_t vocab_size) {
  if (biases.size() > kMaxBiases) {
    return invalid_argument("logit_bias has {} entries, expected at most {}", biases.size(), kMaxBiases);
  }
  std::vector<int32_t> ids;
  for (const TokenBias& entry : biases) {
    MOAT_RETURN_IF_ERROR(check_id("logit_bias", entry.token_id, vocab_size));
    MOAT_RETURN_IF_ERROR(
        check_range(fmt::format("logit_bias of token {}", entry.token_id), entry.bias, -kMaxBias, kMaxBias));
    ids.push_back(entry.token_id);
  }
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice != ids.end()) return invalid_argument("logit_bias has token {} twice, expected distinct ids", *twice);
  return {};
}

Status check_bad_words(const std::vector<std::vector<int32_t>>& words, int64_t vocab_size) {
  if (words.size() > kMaxBadWords) {
    return invalid_argument("bad_words has {} sequences, expected at most {}", words.size(), kMaxBadWords);
  }
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i].empty() || words[i].size() > kMaxBadWordTokens) {
      return invalid_argument("bad_words[{}] has {} tokens, expected 1 to {}", i, words[i].size(), kMaxBadWordTokens);
    }
    for (const int32_t id : words[i]) MOAT_RETURN_IF_ERROR(check_id("bad_words", id, vocab_size));
  }
  return {};
}

}  // namespace

Status check_sampling(const SamplingParams& p, int64_t vocab_size) {
  if (!std::isfinite(p.temperature) || p.temperature < 0.0F) {
    return invalid_argument("temperature is {}, expected a finite number of at least 0", p.temperature);
  }
  MOAT_RETURN_IF_ERROR(check_at_least("top_k", p.top_k, 0));
  MOAT_RETURN_IF_ERROR(check_above_zero("top_p", p.top_p, 1));
  MOAT_RETURN_IF_ERROR(check_range("min_p", p.min_p, 0, 1));
  MOAT_RETURN_IF_ERROR(check_range("num_logprobs", p.num_logprobs, -1, SamplingParams::kMaxLogprobs));
  MOAT_RETURN_IF_ERROR(check_range("min_tokens", p.min_tokens, 0, p.max_tokens));
  MOAT_RETURN_IF_ERROR(check_range("presence_penalty", p.presence_penalty, -kMaxPenalty, kMaxPenalty));
  MOAT_RETURN_IF_ERROR(check_range("frequency_penalty", p.frequency_penalty, -kMaxPenalty, kMaxPenalty));
  MOAT_RETURN_IF_ERROR(check_above_zero("repetition_penalty", p.repetition_penalty, kMaxRepetitionPenalty));
  MOAT_RETURN_IF_ERROR(check_logit_bias(p.logit_bias, vocab_size));
  return check_bad_words(p.bad_words, vocab_size);
}

}  // namespace moat
