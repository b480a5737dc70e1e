// SPDX-License-Identifier: Apache-2.0
// What one forward pass takes and gives. The engine fills it; the model only reads. All arrays are flat and belong to
// the caller; shapes are in brackets. Sequences are ordered: first those that take the decode form of the attention
// leaves, then those with a long run of new tokens (prefill form). One step is one call, whatever mix it is.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/tensor.h"

namespace moat {

// Sequences with at least this many new tokens in a step take the prefill form of KDA and MLA (chunked, expanded keys).
// The decode form is row-invariant, so verification of drafts and decoding give the same bits.
constexpr int64_t kPrefillMinTokens = 32;

struct ForwardInput {
  std::span<const int32_t> token_ids;        // [tokens]
  std::span<const int32_t> positions;        // [tokens], consecutive within a sequence
  std::span<const int32_t> cu_seqlens;       // [seqs + 1], rows of sequence s are cu_seqlens[s] .. cu_seqlens[s + 1]
  std::span<const int32_t> first_positions;  // [seqs], position of each sequence's first row
  std::span<const int32_t> context_lens;     // [seqs], tokens in the cache once this step's rows are written
  std::span<const int64_t> slot_mapping;     // [tokens], row of the paged cache that the token's latent goes to
  std::span<const int32_t> block_tables;     // [seqs, max_blocks], pages of the sequence in order
  int64_t max_blocks = 0;
  std::span<const int32_t>
      state_slots;              // [seqs], distinct recurrent-state slots; a sequence at position 0 starts from zero
  int64_t num_decode_seqs = 0;  // the first ones, in decode form
  std::span<const int32_t> logits_rows;  // [logit rows], rows whose logits are wanted
  std::span<const int32_t> tap_layers;   // ascending layers whose AttnRes mixture (that of the next layer's attention
                                         // side; of the output for the last) goes to ForwardOutput::taps

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_seqs() const { return static_cast<int64_t>(context_lens.size()); }
  int64_t num_decode_tokens() const {
    return cu_seqlens.empty() ? 0 : cu_seqlens[static_cast<size_t>(num_decode_seqs)];
  }
};

// The caches of one rank, as views; owned by the engine's Caches.
struct CacheView {
  Tensor mla;  // [mla layers, num_blocks * block_size, kv_lora + rope] f32: normalised latent, then the shared key part
  Tensor kda_state;  // [kda layers, slots, heads, head_dim (key), head_dim (value)] f32
  Tensor kda_conv;   // [kda layers, slots, 3 (q, k, v), conv_kernel - 1, heads * head_dim] f32, oldest input first
  int64_t block_size = 0;
};

struct ForwardOutput {
  Tensor logits;  // [logit rows, vocab] f32, in the arena: valid until the step's scope ends
  Tensor taps;    // [tap_layers, tokens, hidden] f32; absent without tap_layers
};

// Sees intermediate values, for tests: name, layer (-1: none), value. Not called in dry mode.
using ForwardProbe = std::function<void(const char* name, int64_t layer, const Tensor& value)>;

}  // namespace moat
