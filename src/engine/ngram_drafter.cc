// SPDX-License-Identifier: Apache-2.0
#include "engine/ngram_drafter.h"

#include <algorithm>

namespace moat {

std::string NgramDrafter::describe() const {
  return fmt::format("n-gram: up to {} drafts after {} to {} matching tokens, {} tokens back", options_.max_drafts,
                     options_.min_match, options_.max_match, options_.max_lookback);
}

std::span<const int32_t> NgramDrafter::find(std::span<const int32_t> tokens, int64_t count) const {
  const auto size = static_cast<int64_t>(tokens.size());
  const int64_t first = std::max<int64_t>(0, size - options_.max_lookback);
  int64_t best_end = 0;
  int64_t best_length = options_.min_match - 1;
  // From the latest place backwards; a longer match wins, the later of equals.
  for (int64_t end = size - 1; end > first && best_length < options_.max_match; --end) {
    int64_t length = 0;
    while (length < options_.max_match && end - length > first &&
           tokens[static_cast<size_t>(end - 1 - length)] == tokens[static_cast<size_t>(size - 1 - length)]) {
      ++length;
    }
    if (length <= best_length) continue;
    best_length = length;
    best_end = end;
  }
  if (best_end == 0) return {};
  return tokens.subspan(static_cast<size_t>(best_end), static_cast<size_t>(std::min(count, size - best_end)));
}

Drafts NgramDrafter::propose(Exec&, std::span<const DraftSequence> sequences, int64_t, int64_t num_drafts) {
  Drafts drafts{.width = num_drafts};
  drafts.ids.assign(sequences.size() * static_cast<size_t>(num_drafts), -1);
  for (size_t s = 0; s < sequences.size(); ++s) {
    const std::span<const int32_t> found = find(sequences[s].tokens, num_drafts);
    std::copy(found.begin(), found.end(), drafts.ids.begin() + static_cast<int64_t>(s) * num_drafts);
  }
  return drafts;
}

}  // namespace moat
