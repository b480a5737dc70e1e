// SPDX-License-Identifier: Apache-2.0
// NgramDrafter: what followed the last time that the reply's latest tokens stood in this conversation. Costs next to
// nothing and needs no checkpoint; good where replies repeat their prompts (code edits, quotations, tables).
#pragma once

#include "engine/drafter.h"

namespace moat {

struct NgramOptions {
  int64_t max_drafts = 8;
  int64_t max_match = 4;        // tokens at the end that are looked for; shorter ends if those do not occur
  int64_t min_match = 2;        // ... but not shorter than these
  int64_t max_lookback = 8192;  // tokens that are searched, from the end: bounds the time of a round
};

class NgramDrafter final : public Drafter {
 public:
  explicit NgramDrafter(const NgramOptions& options) : options_(options) {}

  int64_t max_drafts() const override { return options_.max_drafts; }
  std::string describe() const override;
  Drafts propose(Exec& exec, std::span<const DraftSequence> sequences, int64_t max_blocks, int64_t num_drafts) override;

  // The latest earlier occurrence of the longest end of `tokens`, and up to `count` of the tokens after it.
  std::span<const int32_t> find(std::span<const int32_t> tokens, int64_t count) const;

 private:
  NgramOptions options_;
};

}  // namespace moat
