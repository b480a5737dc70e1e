// SPDX-License-Identifier: Apache-2.0
// Sampler: logits rows and per-request parameters -> token ids, through the sample ops. What a row gets depends on its
// own logits, parameters, tokens, seed and position alone, never on its batch mates. Used by one thread.
//
// Order, for each row: penalties, logit_bias, masks (constraint, min_tokens, bad_words), then argmax, or temperature,
// top-k, top-p, min-p and a draw. Log-probabilities are of the logits as they came. sampler_verify.cc judges drafts.
//
// A row with a small top-k becomes the few entries that are left (ops/sparse.h), any other a distribution over the
// vocabulary (ops/sample.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/token_counts.h"
#include "ops/select.h"
#include "ops/sparse.h"

namespace moat {

struct SampleRow {
  const SamplingParams* params = nullptr;
  Constraint* constraint = nullptr;   // may be null
  int64_t position = 0;               // absolute position of the token to choose: the counter of its random number
  int64_t num_generated = 0;          // before this token
  std::span<const int32_t> tokens;    // prompt, then the generated ones; read by penalties and bad_words only
  TokenCounts* counts = nullptr;      // of this sequence's tokens; null: counted afresh if penalties ask
  const uint32_t* allowed = nullptr;  // what `constraint` allows, asked before; null: it is asked here
};

struct SampledRow {
  SampledToken token;  // token_id -1: see error
  std::string error;
};

// One sequence of a step with drafts to verify. It has 1 + drafts rows of the logits, one after the other.
struct VerifySequence {
  const SamplingParams* params = nullptr;
  Constraint* constraint = nullptr;  // may be null; as it was when the call returns
  std::span<const int32_t> tokens;   // prompt, then the generated ones
  std::span<const int32_t> drafts;   // of the tokens after those; none: an ordinary row
  int64_t num_generated = 0;         // without drafts
  TokenCounts* counts = nullptr;
  int64_t law_row = -1;  // row of `laws` of the first draft; -1: whatever proposed them, they are judged as given
  // The numbers in [0, 1) that decide where drafts are judged by their law. Absent, as in serving: drawn from the
  // request's seed. Given: an outcome is a function of its arguments, whose law can be found exactly.
  std::span<const double> accept_uniforms;  // [drafts]
  std::optional<double> bonus_uniform;
};

struct VerifiedSequence {
  std::vector<SampledToken> tokens;  // the accepted drafts and one more; empty: see error
  int64_t num_drafts = 0;            // that were judged: none after one that ends the reply
  std::string error;
};

class Sampler {
 public:
  Sampler(int64_t vocab_size, int32_t eos_token_id) : vocab_size_(vocab_size), eos_token_id_(eos_token_id) {}

  // logits [rows, vocab] f32, not changed. Results in the order of `rows`.
  std::vector<SampledRow> sample(Exec& exec, const Tensor& logits, std::span<const SampleRow> rows) const;

  // Judges drafts (docs/design/dspark.md section 3) and samples where there are none. Row k of a sequence is treated as
  // if the k drafts before it were part of the reply: penalties, masks, min_tokens.
  //   greedy, seeded, or without a law: a draft is accepted if it is the token that sample() would give for its row, so
  //     the tokens are those of decoding without drafts;
  //   otherwise: block verification against `laws` [law rows, vocab] f32, the conditional distributions that the drafts
  //     were drawn from; the tokens have the law of decoding without drafts.
  std::vector<VerifiedSequence> verify(Exec& exec, const Tensor& logits, std::span<const VerifySequence> sequences,
                                       const Tensor& laws) const;

  // Records every op call of sample() and, with drafts, of verify(), for the rows of `logits`.
  void dry(Exec& exec, const Tensor& logits, int64_t max_drafts) const;

 private:
  using RowList = std::vector<int32_t>;
  Tensor gather(Exec& exec, const Tensor& logits, const RowList& list) const;
  void penalize(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const;
  void bias(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const;
  void apply_masks(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const;
  enum class Access : uint8_t { kRead, kWrite };
  Tensor edit(Exec& exec, const Tensor& logits, const RowList& list, std::span<const SampleRow> rows,
              Access access) const;
  enum class Path : uint8_t { kGreedy, kFew, kDense };
  Path path_of(const SamplingParams& params) const;
  struct Filters {  // of listed rows
    std::vector<float> temperature, top_p, min_p;
    std::vector<int32_t> top_k;
  };
  Filters filters_of(const RowList& list, std::span<const SampleRow> rows) const;
  CompactRows few_probs(Exec& exec, const Tensor& logits, const Filters& filters) const;
  void to_probs(Exec& exec, const Tensor& work, const Filters& filters) const;
  Tensor choose_ids(Exec& exec, const Tensor& logits, const RowList& list, std::span<const SampleRow> rows, Path path,
                    RowList& overflow) const;
  void choose(Exec& exec, const Tensor& logits, const RowList& list, std::span<const SampleRow> rows,
              std::vector<SampledRow>& results) const;
  void add_logprobs(Exec& exec, const Tensor& logits, std::span<const SampleRow> rows,
                    std::vector<SampledRow>& results) const;

  struct Rows;  // of a verify() call
  Rows expand(std::span<const VerifySequence> sequences) const;
  void match(Exec& exec, const Tensor& logits, std::span<const VerifySequence> sequences, Rows& rows) const;
  void accept(Exec& exec, const Tensor& logits, std::span<const VerifySequence> sequences, const Tensor& laws,
              Rows& rows) const;
  RowList judge(Exec& exec, const Tensor& logits, std::span<const VerifySequence> sequences, const RowList& members,
                Path path, const Tensor& laws, Rows& rows) const;

  // Most entries that top-k may leave on the path of few, and room for those that tie with the last.
  static constexpr int32_t kMostFew = 128;
  static constexpr int64_t kFewWidth = 2 * kMostFew;
  static constexpr const char* kUnusableRow = "the model's output is not finite, or nothing may come next";

  int64_t vocab_size_;
  int32_t eos_token_id_;
};

}  // namespace moat
