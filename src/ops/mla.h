// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention over a paged cache of [latent | shared key part] rows, without positional rotation (k3.md 3.6).
// Row at position p of a sequence sees keys 0..p. Softmax in f32.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// The sequences of an attention call: rows of sequence s are cu_seqlens[s] - cu_seqlens[0] .. of the call's row tensors, its
// keys are the first context_lens[s] tokens of its pages, of which the last ones are the rows themselves.
struct PagedSequences {
  std::span<const int32_t> cu_seqlens;    // [seqs + 1]
  std::span<const int32_t> context_lens;  // [seqs]
  std::span<const int32_t> block_tables;  // [seqs, max_blocks]
  int64_t max_blocks = 0;
  int64_t block_size = 0;

  int64_t num_seqs() const { return static_cast<int64_t>(context_lens.size()); }
  int64_t num_rows() const { return cu_seqlens.empty() ? 0 : cu_seqlens.back() - cu_seqlens.front(); }
};

// cache[slot_mapping[t]] = rows[t].
struct MlaKvWriteArgs {
  Tensor cache;                           // [slots, width] f32
  Tensor rows;                            // [tokens, width] f32
  std::span<const int64_t> slot_mapping;  // [tokens]
};
extern const Op<MlaKvWriteArgs> kMlaKvWrite;
inline void mla_kv_write(Exec& exec, const char* site, const MlaKvWriteArgs& args) {
  exec.call(site, kMlaKvWrite, args);
}

// Absorbed form: q is in the latent space, a cached latent is key and value.
// score = scale * q . row; out = sum softmax(score) * row[0 : latent]. Row-invariant: a row's bits depend on its own keys alone.
struct MlaDecodeArgs {
  Tensor out;    // [rows, heads, latent] f32
  Tensor q;      // [rows, heads, latent + rope] f32
  Tensor cache;  // [slots, latent + rope] f32
  PagedSequences seqs;
  float scale = 0.0F;
};
extern const Op<MlaDecodeArgs> kMlaDecode;
inline void mla_decode(Exec& exec, const char* site, const MlaDecodeArgs& args) { exec.call(site, kMlaDecode, args); }

// Expanded form, cheaper for many rows: per head k = [kv_b_k latent | shared part], v = kv_b_v latent.
struct MlaPrefillArgs {
  Tensor out;    // [rows, heads, v_dim] f32
  Tensor q;      // [rows, heads, nope + rope] f32
  Tensor cache;  // [slots, latent + rope] f32
  Tensor kv_b;   // [heads * (nope + v_dim), latent] bf16 or f32: per head nope key rows, then v_dim value rows
  PagedSequences seqs;
  float scale = 0.0F;
};
extern const Op<MlaPrefillArgs> kMlaPrefill;
inline void mla_prefill(Exec& exec, const char* site, const MlaPrefillArgs& args) {
  exec.call(site, kMlaPrefill, args);
}

}  // namespace moat
