// SPDX-License-Identifier: Apache-2.0
// What a block drafter computes beyond what its target does: rotary positions, attention of a block of rows over a paged
// context, and the heads that turn a block into drafts (dspark.md 1.4, 1.6 to 1.8).
#pragma once

#include <cstdint>
#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

enum class RopeLayout : uint8_t {
  kHalves,  // component i turns with i + dim / 2 (NeoX)
  kPairs,   // component 2 i turns with 2 i + 1 (interleaved)
};

// In place, per head: x = x / sqrt(mean(x^2) + eps) * weight if there is a weight; then component pair i turns by the angle
// position * inv_freq[i], whose product is rounded to f32 as in training; cos and sin are multiplied with `magnitude`.
struct NormRopeArgs {
  Tensor x;                            // [rows, heads, dim] f32, last dim contiguous: a column range of wider rows
  std::span<const int32_t> positions;  // [rows], >= 0
  Tensor inv_freq;                     // [dim / 2] f32
  Tensor weight;                       // [dim] bf16 or f32; absent: no norm
  float eps = 0.0F;
  float magnitude = 1.0F;
  RopeLayout layout = RopeLayout::kHalves;
};
extern const Op<NormRopeArgs> kNormRope;
inline void norm_rope(Exec& exec, const char* site, const NormRopeArgs& args) { exec.call(site, kNormRope, args); }

// Blocks of gamma rows, each attending to the context of its sequence, positions 0 .. context_lens[s] - 1 of its pages, and
// to the rows of its own block: all of them, or with `causal` the row itself and those before it. Query head h reads kv
// head g = h / (heads / num_kv_heads), whose key is columns [g k_dim, (g + 1) k_dim) of a row and whose value is v_dim
// columns from value_offset + g v_dim on: keys then values side by side, or (latent attention) a value inside the key.
// score = scale * q . key; out = sum softmax(score) * value. A row's bits depend on its own keys alone.
struct BlockAttentionArgs {
  Tensor out;                             // [seqs * gamma, heads, v_dim] f32
  Tensor q;                               // [seqs * gamma, heads, k_dim] f32
  Tensor cache;                           // [slots, width] f32
  Tensor rows;                            // [seqs * gamma, width] f32: the blocks' own, laid out as in the cache
  std::span<const int32_t> context_lens;  // [seqs], >= 0
  std::span<const int32_t> block_tables;  // [seqs, max_blocks]
  int64_t max_blocks = 0;
  int64_t block_size = 0;  // of the cache: rows of a page
  int64_t gamma = 1;       // 1 .. 64
  int64_t num_kv_heads = 1;
  int64_t value_offset = 0;
  float scale = 1.0F;
  bool causal = false;

  int64_t num_seqs() const { return static_cast<int64_t>(context_lens.size()); }
  // Cache slot of a position of sequence s.
  int64_t slot_of(int64_t s, int64_t position) const {
    return block_tables[static_cast<size_t>(s * max_blocks + position / block_size)] * block_size +
           position % block_size;
  }
};
extern const Op<BlockAttentionArgs> kBlockAttention;
inline void block_attention(Exec& exec, const char* site, const BlockAttentionArgs& args) {
  exec.call(site, kBlockAttention, args);
}

// Gated Markov head: x *= sigmoid(gate + bias).
struct MarkovGateArgs {
  Tensor x;     // [rows, rank] f32, in place, row-strided
  Tensor gate;  // [rows, rank] f32
  Tensor bias;  // [rank] f32
};
extern const Op<MarkovGateArgs> kMarkovGate;
inline void markov_gate(Exec& exec, const char* site, const MarkovGateArgs& args) {
  exec.call(site, kMarkovGate, args);
}

// Recurrent Markov head: (g, c, o) = gates + bias; state = sigmoid(g) state + (1 - sigmoid(g)) tanh(c); out = tanh(o).
struct MarkovCellArgs {
  Tensor out;    // [rows, rank] f32
  Tensor state;  // [rows, rank] f32, in place, row-strided
  Tensor gates;  // [rows, 3 rank] f32: gate, candidate, output
  Tensor bias;   // [3 rank] f32
};
extern const Op<MarkovCellArgs> kMarkovCell;
inline void markov_cell(Exec& exec, const char* site, const MarkovCellArgs& args) {
  exec.call(site, kMarkovCell, args);
}

// out[r] = sigmoid(weight . [x[r] | y[r]] + bias).
struct ConfidenceArgs {
  Tensor out;     // [rows, 1] f32, row-strided
  Tensor x;       // [rows, width] f32, row-strided
  Tensor y;       // [rows, rank] f32, row-strided; absent: rank 0
  Tensor weight;  // [1, width + rank] bf16 or f32
  Tensor bias;    // [1] f32
};
extern const Op<ConfidenceArgs> kConfidence;
inline void confidence(Exec& exec, const char* site, const ConfidenceArgs& args) { exec.call(site, kConfidence, args); }

// A law over a pruned vocabulary as one over the whole: out[r, ids[i]] = x[r, i], 0 elsewhere.
struct ScatterProbsArgs {
  Tensor out;                    // [rows, vocab] f32, row-strided; apart from x
  Tensor x;                      // [rows, draft vocab] f32, row-strided
  std::span<const int32_t> ids;  // [draft vocab], distinct, in [0, vocab)
};
extern const Op<ScatterProbsArgs> kScatterProbs;
inline void scatter_probs(Exec& exec, const char* site, const ScatterProbsArgs& args) {
  exec.call(site, kScatterProbs, args);
}

}  // namespace moat
