// SPDX-License-Identifier: Apache-2.0
// KDA over rows that may be taken back (drafts under verification): the pass computes them without changing any state
// and keeps what it would take to change it; once it is known how many rows stay, one commit a step repeats those rows
// from the records, over all layers at once (docs/design/dspark.md section 4.3). The commit does the arithmetic of
// kda_recurrent in its order: the state is, bit for bit, that of decoding the committed rows one by one.
#pragma once

#include "ops/kda.h"

namespace moat {

// As kda_recurrent, but the states are only read. A record is k, v, g and the logit of beta of one row and head.
constexpr int64_t kda_record_width(int64_t dim) { return 3 * dim + 1; }
struct KdaVerifyArgs {
  KdaArgs rows;
  Tensor records;  // [rows, heads, kda_record_width] f32
};
extern const Op<KdaVerifyArgs> kKdaVerify;
inline void kda_verify(Exec& exec, const char* site, const KdaVerifyArgs& args) { exec.call(site, kKdaVerify, args); }

// Records of sequence s that are committed: rows [begins[s], ends[s]) of the record tensors; none leaves the state be.
struct CommitRanges {
  std::span<const int32_t> begins, ends;  // [seqs]
  std::span<const int32_t> slots;         // [seqs], distinct

  int64_t num_seqs() const { return static_cast<int64_t>(slots.size()); }
};

// The states take the committed rows: S = diag(exp(g)) S; S += k (beta (v - S^T k))^T, row by row.
struct KdaCommitArgs {
  Tensor states;   // [layers, slots, heads, dim, dim] f32; may be strided in the first two dims
  Tensor records;  // [layers, rows, heads, kda_record_width] f32
  CommitRanges ranges;
};
extern const Op<KdaCommitArgs> kKdaCommit;
inline void kda_commit(Exec& exec, const char* site, const KdaCommitArgs& args) { exec.call(site, kKdaCommit, args); }

// The convolution tails of q, k and v take the committed inputs: they become the last W - 1 of (tail, inputs).
struct ConvCommitArgs {
  Tensor tails;    // [layers, slots, 3, W - 1, channels] f32; may be strided in the first two dims
  Tensor records;  // [layers, rows, 3, channels] f32, kept by short_conv
  CommitRanges ranges;
};
extern const Op<ConvCommitArgs> kConvCommit;
inline void conv_commit(Exec& exec, const char* site, const ConvCommitArgs& args) {
  exec.call(site, kConvCommit, args);
}

}  // namespace moat
