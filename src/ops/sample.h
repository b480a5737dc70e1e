// SPDX-License-Identifier: Apache-2.0
// From logits to tokens. Probabilities are f32 rows over the vocabulary. Definitions, ties and edges: docs/design/dspark.md
// 3.6 (threshold semantics: all ties at a boundary are kept). Order: temperature, top-k, top-p, min-p.
// A row that cannot be used (logits with NaN or +inf, or all masked; probabilities that are not finite) becomes zero, unless the
// filter is off for it; draw answers it with -1.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// probs = softmax(logits / temperature[row]), max subtracted, sum in f64. temperature > 0.
struct SoftmaxArgs {
  Tensor probs;                        // [rows, vocab] f32; may be `logits`
  Tensor logits;                       // [rows, vocab] f32
  std::span<const float> temperature;  // [rows]
};
extern const Op<SoftmaxArgs> kSoftmax;
inline void softmax(Exec& exec, const char* site, const SoftmaxArgs& args) { exec.call(site, kSoftmax, args); }

// In place: keep every probability >= the k-th largest, renormalise. k <= 0 acts as 1; k >= vocab leaves the row bit for bit;
// a zero row stays zero.
struct TopKRenormArgs {
  Tensor probs;                // [rows, vocab] f32
  std::span<const int32_t> k;  // [rows]
};
extern const Op<TopKRenormArgs> kTopKRenorm;
inline void top_k_renorm(Exec& exec, const char* site, const TopKRenormArgs& args) {
  exec.call(site, kTopKRenorm, args);
}

// In place: the threshold is the first element in ascending order whose cumulative sum (f64, rounded to f32) reaches
// float(1.0 - p); keep all >= it; none reaches it, or p <= 0: the row maximum. p >= 1 leaves the row bit for bit; p is clamped
// to [0, 1].
struct TopPRenormArgs {
  Tensor probs;              // [rows, vocab] f32
  std::span<const float> p;  // [rows]
};
extern const Op<TopPRenormArgs> kTopPRenorm;
inline void top_p_renorm(Exec& exec, const char* site, const TopPRenormArgs& args) {
  exec.call(site, kTopPRenorm, args);
}

// In place: keep probabilities >= min_p * the row's largest, renormalise. min_p <= 0 leaves the row bit for bit.
struct MinPRenormArgs {
  Tensor probs;                  // [rows, vocab] f32
  std::span<const float> min_p;  // [rows]
};
extern const Op<MinPRenormArgs> kMinPRenorm;
inline void min_p_renorm(Exec& exec, const char* site, const MinPRenormArgs& args) {
  exec.call(site, kMinPRenorm, args);
}

// ids[row] = first index whose cumulative probability (f64) exceeds uniform[row] * total; -1 if the row is all zero or not
// finite (the caller fails that request, never picks a default id).
struct DrawArgs {
  Tensor ids;                       // [rows] i32
  Tensor probs;                     // [rows, vocab] f32
  std::span<const double> uniform;  // [rows] in [0, 1)
};
extern const Op<DrawArgs> kDraw;
inline void draw(Exec& exec, const char* site, const DrawArgs& args) { exec.call(site, kDraw, args); }

// ids[row] = index of the largest logit (ties: the lowest); -1 if any logit is NaN or none is finite.
struct ArgmaxArgs {
  Tensor ids;     // [rows] i32
  Tensor logits;  // [rows, vocab] f32
};
extern const Op<ArgmaxArgs> kArgmax;
inline void argmax(Exec& exec, const char* site, const ArgmaxArgs& args) { exec.call(site, kArgmax, args); }

// logprob of ids[row] and the num_top most likely (descending; ties: lower id first) under softmax(logits), natural log.
struct LogprobsArgs {
  Tensor chosen;        // [rows] f32
  Tensor top_ids;       // [rows, num_top] i32; absent when num_top is 0
  Tensor top_logprobs;  // [rows, num_top] f32; absent when num_top is 0
  Tensor logits;        // [rows, vocab] f32
  Tensor ids;           // [rows] i32, each in [0, vocab)
};
extern const Op<LogprobsArgs> kLogprobs;
inline void logprobs(Exec& exec, const char* site, const LogprobsArgs& args) { exec.call(site, kLogprobs, args); }

}  // namespace moat
