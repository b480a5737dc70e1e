// SPDX-License-Identifier: Apache-2.0
// The law of plain decoding as it is defined, one id after the other in f64: what a row of logits, a request's
// parameters and its tokens so far say about the next one. Shares nothing with the sampler. Order and ties:
// docs/design/dspark.md 3.6.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "engine/request.h"

namespace moat::test {

inline void keep_at_least(std::vector<double>& probs, double limit) {
  double kept = 0;
  for (double& p : probs) kept += p = p >= limit ? p : 0.0;
  for (double& p : probs) p /= kept;
}

// Logits after penalties, bias and masks; without constraints.
inline std::vector<double> plain_logits(std::span<const float> logits, const SamplingParams& params,
                                        std::span<const int32_t> prompt, std::span<const int32_t> reply, int32_t eos) {
  std::vector<double> out(logits.begin(), logits.end());
  std::vector<int32_t> seen(logits.size()), generated(logits.size());
  for (const int32_t id : prompt) ++seen[static_cast<size_t>(id)];
  for (const int32_t id : reply) ++generated[static_cast<size_t>(id)];
  for (size_t id = 0; id < out.size(); ++id) {
    double& x = out[id];
    const double repetition = params.repetition_penalty;
    if (seen[id] + generated[id] > 0) x = x > 0 ? x / repetition : x * repetition;
    x -= double{params.frequency_penalty} * generated[id];
    if (generated[id] > 0) x -= params.presence_penalty;
  }
  for (const TokenBias& bias : params.logit_bias) out[static_cast<size_t>(bias.token_id)] += bias.bias;
  const auto forbid = [&](int32_t id) { out[static_cast<size_t>(id)] = -std::numeric_limits<double>::infinity(); };
  for (const std::vector<int32_t>& word : params.bad_words) {
    const size_t start = word.size() - 1;
    if (start <= reply.size() && std::equal(word.begin(), word.end() - 1, reply.end() - static_cast<int64_t>(start))) {
      forbid(word.back());
    }
  }
  if (static_cast<int64_t>(reply.size()) < params.min_tokens) {
    if (!params.ignore_eos) forbid(eos);
    for (const int32_t id : params.stop_token_ids) forbid(id);
  }
  return out;
}

inline std::vector<double> plain_law(std::span<const float> logits, const SamplingParams& params,
                                     std::span<const int32_t> prompt, std::span<const int32_t> reply, int32_t eos) {
  std::vector<double> probs = plain_logits(logits, params, prompt, reply, eos);
  const double largest = *std::max_element(probs.begin(), probs.end());
  if (params.temperature == 0.0F) {
    const auto first = std::find(probs.begin(), probs.end(), largest);
    std::fill(probs.begin(), first, 0.0);
    std::fill(first, probs.end(), 0.0);
    *first = 1.0;
    return probs;
  }
  for (double& x : probs) x = std::exp((x - largest) / params.temperature);
  keep_at_least(probs, 0.0);
  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < probs.size()) {
    std::vector<double> sorted = probs;
    std::sort(sorted.rbegin(), sorted.rend());
    keep_at_least(probs, sorted[static_cast<size_t>(params.top_k) - 1]);
  }
  if (params.top_p < 1.0F) {
    std::vector<double> sorted = probs;
    std::sort(sorted.begin(), sorted.end());
    double limit = sorted.back();
    double sum = 0;
    for (const double p : sorted) {
      if ((sum += p) < 1.0 - double{params.top_p}) continue;
      limit = p;
      break;
    }
    keep_at_least(probs, limit);
  }
  if (params.min_p > 0.0F) {
    keep_at_least(probs, double{params.min_p} * *std::max_element(probs.begin(), probs.end()));
  }
  return probs;
}

}  // namespace moat::test
