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

// Which stream a drafter was trained to see after a layer (docs/design/dspark.md 1.2). Without AttnRes both are the
// residual stream.
enum class TapStream : uint8_t {
  kAttnRes,  // the mixture that the attention side of the next layer reads; of the output side after the last layer
  kPrefix,   // the running sum of the current block
};

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
  // The first of those: their last rows are drafts, so their recurrent states are only read, and what would have changed
  // them goes to the records of CacheView, in row order, for Model::commit.
  int64_t num_verify_seqs = 0;
  std::span<const int32_t> logits_rows;  // [logit rows], rows whose logits are wanted
  std::span<const int32_t> tap_layers;   // ascending, each in [0, num_layers); wanted in ForwardOutput::taps
  TapStream tap_stream = TapStream::kAttnRes;

  int64_t num_tokens() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_seqs() const { return static_cast<int64_t>(context_lens.size()); }
  int64_t num_decode_tokens() const {
    return cu_seqlens.empty() ? 0 : cu_seqlens[static_cast<size_t>(num_decode_seqs)];
  }
  int64_t num_verify_tokens() const {
    return cu_seqlens.empty() ? 0 : cu_seqlens[static_cast<size_t>(num_verify_seqs)];
  }
};

// Which of a step's verified rows stay: rows [begins[s], ends[s]) of the records, onto the states in slots[s].
struct CommitInput {
  std::span<const int32_t> begins, ends, slots;  // [seqs], slots distinct
};

// The caches of one rank, as views; owned by the engine's Caches.
struct CacheView {
  Tensor mla;  // [mla layers, num_blocks * block_size, kv_lora + rope] f32: normalised latent, then the shared key part
  Tensor kda_state;  // [kda layers, slots, heads, head_dim (key), head_dim (value)] f32
  Tensor kda_conv;   // [kda layers, slots, 3 (q, k, v), conv_kernel - 1, heads * head_dim] f32, oldest input first
  // Of one step's verified rows; absent where nothing is verified.
  Tensor kda_records;   // [kda layers, rows, heads, kda_record_width(head_dim)] f32
  Tensor conv_records;  // [kda layers, rows, 3 (q, k, v), heads * head_dim] f32
  int64_t block_size = 0;
};

struct ForwardOutput {
  Tensor logits;  // [logit rows, vocab] f32, in the arena: valid until the step's scope ends
  Tensor taps;    // [tokens, tap_layers * hidden] f32, side by side in their order; absent without tap_layers
};

// Sees intermediate values, for tests: name, layer (-1: none), value. Not called in dry mode.
using ForwardProbe = std::function<void(const char* name, int64_t layer, const Tensor& value)>;

}  // namespace moat
