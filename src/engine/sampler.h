// SPDX-License-Identifier: Apache-2.0
// Sampler: logits rows and per-request parameters -> token ids, through the sample ops. What a row gets depends on its
// own logits, parameters, tokens, seed and position alone, never on its batch mates. Used by one thread.
//
// Order, for each row: penalties, logit_bias, masks (constraint, min_tokens, bad_words), then argmax, or temperature,
// top-k, top-p, min-p and a draw. Log-probabilities are of the logits as they came.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/token_counts.h"
#include "ops/select.h"

namespace moat {

struct SampleRow {
  const SamplingParams* params = nullptr;
  Constraint* constraint = nullptr;  // may be null
  int64_t position = 0;              // absolute position of the token to choose: the counter of its random number
  int64_t num_generated = 0;         // before this token
  std::span<const int32_t> tokens;   // prompt, then the generated ones; read by penalties and bad_words only
  TokenCounts* counts = nullptr;     // of this sequence's tokens; null: counted afresh if penalties ask
};

struct SampledRow {
  SampledToken token;  // token_id -1: see error
  std::string error;
};

class Sampler {
 public:
  Sampler(int64_t vocab_size, int32_t eos_token_id) : vocab_size_(vocab_size), eos_token_id_(eos_token_id) {}

  // logits [rows, vocab] f32, not changed. Results in the order of `rows`.
  std::vector<SampledRow> sample(Exec& exec, const Tensor& logits, std::span<const SampleRow> rows) const;

  // Records every op call of sample() for `rows` rows.
  void dry(Exec& exec, const Tensor& logits) const;

 private:
  using RowList = std::vector<int32_t>;
  Tensor gather(Exec& exec, const Tensor& logits, const RowList& list) const;
  void penalize(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const;
  void bias(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const;
  void apply_masks(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const;
  Tensor choose_greedy(Exec& exec, const Tensor& work) const;
  Tensor choose_sampled(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const;
  void add_logprobs(Exec& exec, const Tensor& logits, std::span<const SampleRow> rows,
                    std::vector<SampledRow>& results) const;

  int64_t vocab_size_;
  int32_t eos_token_id_;
};

}  // namespace moat
