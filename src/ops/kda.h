// SPDX-License-Identifier: Apache-2.0
// Kimi Delta Attention (k3.md 3.5): short convolution, decay gate, and the gated delta rule in its recurrent and chunked forms.
// State is f32, [key, value] per head. States and tails live in slots; a sequence whose first row is at position 0 starts from
// zero whatever its slot holds.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// Rows of sequence s are cu_seqlens[s] - cu_seqlens[0] .. of the call's row tensors.
struct StateSequences {
  std::span<const int32_t> cu_seqlens;       // [seqs + 1]
  std::span<const int32_t> slots;            // [seqs], distinct
  std::span<const int32_t> first_positions;  // [seqs], absolute position of each sequence's first row

  int64_t num_seqs() const { return static_cast<int64_t>(slots.size()); }
  int64_t num_rows() const { return cu_seqlens.empty() ? 0 : cu_seqlens.back() - cu_seqlens.front(); }
};

// Causal depthwise convolution, then SiLU: out_t[c] = silu(sum_j weight[c, 0, j] * x_{t - W + 1 + j}[c]), inputs before the
// first row from the tail. The tail becomes the last W - 1 inputs, unless a record is given: then nobody knows yet which
// rows will stay (drafts), the tail is only read, and the inputs are kept for conv_commit (kda_verify.h).
struct ShortConvArgs {
  Tensor out;     // [rows, channels] f32; must not overlap x
  Tensor x;       // [rows, channels] f32, row-strided
  Tensor weight;  // [channels, 1, W] f32
  Tensor tails;   // [slots, W - 1, channels] f32, oldest first; may be strided in dim 0
  StateSequences seqs;
  Tensor record;  // [rows, channels] f32, row-strided; absent: the tails advance
};
extern const Op<ShortConvArgs> kShortConv;
inline void short_conv(Exec& exec, const char* site, const ShortConvArgs& args) { exec.call(site, kShortConv, args); }

// Log-decay per channel from z = raw + dt_bias. lower_bound < 0: lower_bound * sigmoid(exp(a_log) z) (K3);
// lower_bound == 0: -exp(a_log) softplus(z) (Kimi-Linear). `out` may be `raw`.
struct KdaGateArgs {
  Tensor out;      // [rows, heads, dim] f32
  Tensor raw;      // [rows, heads, dim] f32
  Tensor a_log;    // [heads] f32
  Tensor dt_bias;  // [heads * dim] f32
  float lower_bound = 0.0F;
};
extern const Op<KdaGateArgs> kKdaGate;
inline void kda_gate(Exec& exec, const char* site, const KdaGateArgs& args) { exec.call(site, kKdaGate, args); }

// Per row and head, in row order: S = diag(exp(g)) S; u = beta (v - S^T k); S += k u^T; out = S^T q.
// q and k are l2-normalised and q carries its scale; beta = sigmoid(beta_logits).
struct KdaArgs {
  Tensor out;          // [rows, heads, dim] f32
  Tensor q, k, v, g;   // [rows, heads, dim] f32
  Tensor beta_logits;  // [rows, heads] f32
  Tensor states;       // [slots, heads, dim, dim] f32; may be strided in dim 0
  StateSequences seqs;
};
// Token by token: row-invariant.
extern const Op<KdaArgs> kKdaRecurrent;
inline void kda_recurrent(Exec& exec, const char* site, const KdaArgs& args) { exec.call(site, kKdaRecurrent, args); }
// Chunk-parallel form of the same function; differs from it by rounding. Chunks are cut at absolute positions that are
// multiples of kKdaChunk, so how a prompt was scheduled shows only in partial chunks.
constexpr int64_t kKdaChunk = 64;
extern const Op<KdaArgs> kKdaChunked;
inline void kda_chunked(Exec& exec, const char* site, const KdaArgs& args) { exec.call(site, kKdaChunked, args); }

}  // namespace moat
