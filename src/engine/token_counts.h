// SPDX-License-Identifier: Apache-2.0
// TokenCounts: the distinct tokens of one sequence and how often each was generated, which is what penalties ask for.
// Kept from step to step so that a step counts what is new, not the whole history. Nothing but a cache of the token
// list: whatever it has seen before, after update() it is what counting afresh would give. Owned by the sequence.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace moat {

class TokenCounts {
 public:
  // `tokens` is the whole list, prompt first. Counts what was appended since the last call; a list that cannot be a
  // longer form of the last one (shorter, another prompt length, another token where that one ended) is counted anew.
  void update(std::span<const int32_t> tokens, int64_t num_prompt);

  // Takes back what was counted of `drafts`, which may have been the last tokens of an update() after `tokens`.
  void truncate(std::span<const int32_t> tokens, std::span<const int32_t> drafts);

  std::span<const int32_t> ids() const { return ids_; }        // [distinct], in order of first appearance
  std::span<const int32_t> counts() const { return counts_; }  // [distinct], times generated; 0: only in the prompt

 private:
  std::vector<int32_t> ids_;
  std::vector<int32_t> counts_;
  std::unordered_map<int32_t, size_t> index_;  // id -> its place in ids_
  size_t num_prompt_ids_ = 0;                  // of ids_, that are in the prompt
  size_t num_seen_ = 0;
  int64_t num_prompt_ = 0;
  int32_t last_seen_ = -1;
};

}  // namespace moat
