// SPDX-License-Identifier: Apache-2.0
#include "engine/token_counts.h"

namespace moat {

void TokenCounts::update(std::span<const int32_t> tokens, int64_t num_prompt) {
  const bool longer_form =
      num_seen_ > 0 && num_seen_ <= tokens.size() && num_prompt_ == num_prompt && tokens[num_seen_ - 1] == last_seen_;
  if (!longer_form) *this = {};
  for (; num_seen_ < tokens.size(); ++num_seen_) {
    const auto [place, is_new] = index_.emplace(tokens[num_seen_], ids_.size());
    if (is_new) {
      ids_.push_back(tokens[num_seen_]);
      counts_.push_back(0);
    }
    if (static_cast<int64_t>(num_seen_) >= num_prompt) {
      ++counts_[place->second];
    } else {
      num_prompt_ids_ = ids_.size();
    }
  }
  num_prompt_ = num_prompt;
  if (!tokens.empty()) last_seen_ = tokens.back();
}

void TokenCounts::truncate(std::span<const int32_t> tokens, std::span<const int32_t> drafts) {
  if (num_seen_ <= tokens.size() || num_seen_ > tokens.size() + drafts.size()) return;
  for (; num_seen_ > tokens.size(); --num_seen_) {
    const auto place = index_.find(drafts[num_seen_ - 1 - tokens.size()]);
    if (--counts_[place->second] > 0 || place->second < num_prompt_ids_) continue;
    // First seen as a draft, so it is the last one.
    index_.erase(place);
    ids_.pop_back();
    counts_.pop_back();
  }
  if (!tokens.empty()) last_seen_ = tokens.back();
}

}  // namespace moat
