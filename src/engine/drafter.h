// SPDX-License-Identifier: Apache-2.0
// Drafter: proposes what may come next. Whatever it proposes, the reply is that of decoding without it (Sampler::verify);
// a good one only makes it come sooner. Used by one thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "model/forward.h"
#include "ops/select.h"

namespace moat {

// A sequence that is drafted for. Its rows of the caches hold all its tokens but the last, the anchor.
struct DraftSequence {
  std::span<const int32_t> tokens;  // prompt, then generated
  const SamplingParams* params = nullptr;
  const int32_t* block_table = nullptr;  // [max_blocks] of the round
};

// What was proposed for the sequences of a round, in their order.
struct Drafts {
  int64_t width = 0;         // drafts a sequence, at most
  std::vector<int32_t> ids;  // [seqs, width]; -1 from where a sequence has none
  std::vector<float>
      confidence;  // [seqs, width], chance that a draft is accepted if those before it were, made without
                   // looking at it or later ones; empty: not estimated
  Tensor laws;     // [seqs * width, vocab] f32, in the arena: what each draft was drawn from, valid for
                   // is_drawn() sequences; unset: there are none
};

class Drafter {
 public:
  virtual ~Drafter() = default;

  virtual int64_t max_drafts() const = 0;
  virtual std::string describe() const = 0;  // one line, for people
  virtual bool has_confidence() const { return false; }

  // Layers whose taps extend() wants of every row that the target computes; none: extend() is not called.
  virtual std::span<const int32_t> tap_layers() const { return {}; }
  virtual TapStream tap_stream() const { return TapStream::kAttnRes; }
  // After each forward, before its drafts are judged: rows of drafts that are not accepted are written over later.
  virtual void extend(Exec&, const Tensor& /*taps*/, const ForwardInput&) {}

  // Up to num_drafts <= max_drafts() each.
  virtual Drafts propose(Exec& exec, std::span<const DraftSequence> sequences, int64_t max_blocks,
                         int64_t num_drafts) = 0;

  // Records every op call of propose() for `seqs` sequences and of extend() for `tokens` rows, at one end of a bucket.
  virtual void dry_propose(Exec&, int64_t /*seqs*/, int64_t /*max_blocks*/, bool /*upper_end*/) {}
  virtual void dry_extend(Exec&, int64_t /*tokens*/) {}
};

// Whether the drafts of a request are random draws whose law decides about them; else they are compared with what the
// target says (Sampler::verify).
inline bool is_drawn(const SamplingParams& params) { return params.temperature > 0.0F && !params.seeded; }

}  // namespace moat
