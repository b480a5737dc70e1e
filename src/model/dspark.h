// SPDX-License-Identifier: Apache-2.0
// The DSpark drafter: gamma draft tokens a round from one pass over a block of gamma rows (dspark.md section 1).
//
// What it knows of a sequence is the draft context: for each draft layer one row of keys and values per committed token,
// computed once from the target's taps by extend_context(), kept in the same blocks as the target's paged cache, so that
// whatever moves, shares or frees a block carries the draft context too. propose() reads the context and writes nothing:
// the rows of the block itself are temporaries.
//
//   invariant: before a round whose anchor (the newest committed token) stands at position P, rows 0 .. P-1 are in the
//   context and no row of the anchor is. The anchor enters through its embedding alone.
//
// Both calls are const and may be made by one thread per Exec; temporaries come from the arena. The bits of a sequence's
// drafts depend neither on the other sequences of the round nor on threads. In dry mode tensors have shapes but no data;
// the arrays of the inputs hold values in every mode, within the ranges given here.
//
// Kernel plan: extend_context() runs under exec.begin_step(tokens) and propose() under exec.begin_step(seqs). Their sites
// all begin with "draft." and differ, so that one plan holds both, and the target's. A dry pass takes num_drafts = 1 at a
// bucket's lower end and gamma at its upper end.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "model/dspark_config.h"
#include "model/dspark_weights.h"
#include "model/forward.h"
#include "ops/select.h"

namespace moat {

// The draft context of all sequences, as a view; slots are those of CacheView::mla (CacheView::block_size too).
struct DraftCacheView {
  Tensor rows;  // [draft layers, num_blocks * block_size, row_width()] f32
  int64_t block_size = 0;
};

// Committed tokens whose taps the target has computed: any tokens of any sequences, in any order, each once.
struct DraftContextInput {
  Tensor taps;                            // [tokens, num_taps * hidden] f32, in the order of target_layer_ids
  std::span<const int32_t> positions;     // [tokens], >= 0, in its own sequence
  std::span<const int64_t> slot_mapping;  // [tokens], row of the cache: the one that holds the token's latent
};

struct DraftRoundInput {
  std::span<const int32_t> anchors;       // [seqs], newest committed token, in [0, target vocab)
  std::span<const int32_t> positions;     // [seqs], its position P; the context holds 0 .. P-1
  std::span<const int32_t> block_tables;  // [seqs, max_blocks], pages of the sequence in order
  int64_t max_blocks = 0;
  std::span<const float> temperature;  // [seqs], of the request; 0: the drafts are argmaxima
  std::span<const double> uniforms;    // [seqs, num_drafts] in [0, 1), read for temperature > 0 alone
  int64_t num_drafts = 0;  // wanted, 1 .. gamma; fewer give the same leading drafts (the block has gamma rows)

  int64_t num_seqs() const { return static_cast<int64_t>(anchors.size()); }
};

// In the arena: valid until the caller's scope ends.
struct DraftRoundOutput {
  // [seqs, num_drafts] i32, in the target's vocabulary. -1 where the logits cannot be used (argmax and draw in
  // ops/sample.h say when) and from there to the row's end: that sequence has no drafts from there on.
  Tensor ids;
  // [seqs * num_drafts, target vocab] f32, row s * num_drafts + k: the conditional law that draft k of sequence s was
  // drawn from, given drafts 0 .. k-1; 0 outside a pruned draft vocabulary. Rows of argmax sequences (their law is one
  // at the draft) and rows of id -1 are undefined. Absent when no sequence has temperature > 0; dry passes have it.
  Tensor probs;
  // [seqs, num_drafts] f32 in (0, 1): estimate that the target accepts draft k given that it accepted the earlier ones.
  // Depends on drafts 0 .. k-1, not on draft k. Undefined where the id is -1. Absent without a confidence head.
  Tensor confidence;
};

class DsparkModel {
 public:
  // `config` and `weights` must outlive the model; check_against_target() has passed. target_embed and target_lm_head
  // are the target's, whole, [vocab, hidden] bf16 or f32; each is used unless the drafter has its own.
  DsparkModel(const DsparkConfig& config, const DsparkWeights& weights, const Tensor& target_embed,
              const Tensor& target_lm_head);

  const DsparkConfig& config() const { return config_; }
  int64_t vocab_size() const { return vocab_size_; }  // of the target
  // Values per token and draft layer: keys then values of all kv heads (GQA), or latent and rotated key part (MLA).
  int64_t row_width() const { return config_.row_width(); }

  // cache.rows[l][slot_mapping[t]] = layer l's keys and values of token t, for all layers from one feature of the taps.
  void extend_context(Exec& exec, const DraftContextInput& input, const DraftCacheView& cache) const;

  // One round for each sequence.
  DraftRoundOutput propose(Exec& exec, const DraftRoundInput& input, const DraftCacheView& cache) const;

  // Shows intermediate values to a test: "features" [tokens, hidden], "context_kv" [tokens, layers * row_width()] as
  // cached; "layer" [seqs * gamma, hidden], the block's rows after each layer; then per wanted draft "hidden"
  // [seqs * num_drafts, hidden], final-normed, "base_logits" [seqs * num_drafts, draft vocab], before the Markov bias;
  // and per step k, as layer, "bias" [seqs, draft vocab].
  void set_probe(ForwardProbe probe) { probe_ = std::move(probe); }

 private:
  const DsparkConfig& config_;
  const DsparkWeights& weights_;
  int64_t vocab_size_ = 0;
  Tensor embed_;       // [vocab or more, hidden]
  Tensor lm_head_;     // [draft vocab, hidden], rows beyond the target's vocabulary cut off
  Tensor markov_out_;  // [draft vocab, rank], likewise; absent without a Markov head
  Tensor inv_freq_;    // [rotated width / 2] f32, a view of the config's
  ForwardProbe probe_;
};

}  // namespace moat
