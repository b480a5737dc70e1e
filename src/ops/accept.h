// SPDX-License-Identifier: Apache-2.0
// Which drafts of a speculative step become tokens, and the token after them. The emitted tokens follow the law of the
// target alone, whatever the drafts are worth: docs/design/dspark.md 3.2 to 3.5.
//
// Rows of all sequences are stacked: sequence s has rows cu_rows[s] .. cu_rows[s + 1], one more than its l >= 0 drafts.
// Row cu_rows[s] + k is the target's word on the token that follows the anchor and k drafts, and drafts[cu_rows[s] + k]
// is the draft it judges; the last entry of each sequence is not read. A cut draft is a shorter one: l is what is
// verified. A sequence without rows gets accepted 0 and bonus -1. Drafts outside [0, vocab) are never accepted.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"
#include "ops/sparse.h"

namespace moat {

// accepted[s] = how many leading drafts equal the token chosen in their row; bonus[s] = the token chosen in the row
// after them. For greedy decoding, for tokens drawn beforehand, and for proposals that are a function of the prefix
// (dspark.md 3.3). A chosen token of -1 is a row that could not be used: it equals no draft, and as a bonus it fails
// the request.
struct MatchDraftsArgs {
  Tensor accepted;                   // [seqs] i32
  Tensor bonus;                      // [seqs] i32
  Tensor chosen;                     // [rows] i32
  std::span<const int32_t> drafts;   // [rows]
  std::span<const int32_t> cu_rows;  // [seqs + 1]
};
extern const Op<MatchDraftsArgs> kMatchDrafts;
inline void match_drafts(Exec& exec, const char* site, const MatchDraftsArgs& args) {
  exec.call(site, kMatchDrafts, args);
}

enum class AcceptRule : uint8_t {
  kToken,   // draft by draft, up to the first failure
  kBlock,   // the longest prefix that passes; never fewer tokens on average than kToken
  kOneHot,  // the proposal is a point mass on the draft; q is not read
};

// Rows of the target's distribution, in one of two forms.
struct TargetRows {
  Tensor dense;         // [rows, vocab] f32; or
  CompactRows compact;  // [rows, width]; a row whose counts is not positive cannot be used
};

// p = target row, q = the law its draft was really drawn from, x = draft, u = its accept uniform, all f64.
//   kToken   accept x while u q(x) < p(x). After a failure the bonus is drawn from max(p - q, 0).
//   kBlock   w_0 = 1, w_i = min(w_{i-1} p(x_i) / q(x_i), 1); h_i = Z / (Z + 1 - w_i), 0 / 0 being 1, where Z is
//            sum max(w_i p - q, 0) of the row after draft i; h_l = w_l. accepted = the largest i with u_i < h_i: a later
//            success overrides an earlier failure. The bonus is drawn from max(w_a p - q, 0), a < l.
//   kOneHot  accept x while u < p(x). After a failure the bonus is drawn from p without x.
// All accepted, or a residual without mass: the bonus is drawn from p. Draws are by inverse CDF in index order, as in
// draw. bonus -1: the row that it comes from has a NaN, an infinity or no mass (or q has a NaN where p has mass): the
// caller fails that request, and no other is affected. Comparisons with a NaN accept nothing.
struct AcceptDraftsArgs {
  Tensor accepted;                   // [seqs] i32, 0 to l
  Tensor bonus;                      // [seqs] i32
  Tensor final_probs;                // [seqs, vocab] f32: what the bonus was drawn from, zero if unusable. For tests;
                                     // absent in production
  TargetRows target;                 // exactly one form
  Tensor q;                          // [laws, vocab] f32: what drafts were drawn from. May be absent if every rule is
                                     // kOneHot
  std::span<const int32_t> q_rows;   // [rows], row of q of the draft that a row judges; the last entry of each sequence
                                     // is not read. Empty: q has the rows of the target
  std::span<const int32_t> drafts;   // [rows]
  std::span<const int32_t> cu_rows;  // [seqs + 1]
  std::span<const AcceptRule> rules;        // [seqs]
  std::span<const double> accept_uniforms;  // [rows] in [0, 1), one a draft
  std::span<const double> bonus_uniforms;   // [seqs] in [0, 1); of another stream than accept_uniforms
};
extern const Op<AcceptDraftsArgs> kAcceptDrafts;
inline void accept_drafts(Exec& exec, const char* site, const AcceptDraftsArgs& args) {
  exec.call(site, kAcceptDrafts, args);
}

}  // namespace moat
