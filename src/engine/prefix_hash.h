// SPDX-License-Identifier: Apache-2.0
// Names of prefixes. The key of a full block stands for every token from the start of the prompt to the block's end:
// hash(parent's key, token ids, media), and the first parent is made of tenant salt, cache epoch and a seed that is
// drawn at start-up. Two prefixes are equal where their keys are; a holder of the ids checks them as well, so that a
// collision costs a miss and never a wrong answer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace moat {

struct BlockKey {
  uint64_t low = 0, high = 0;
  bool operator==(const BlockKey&) const = default;
};
struct BlockKeyHash {
  size_t operator()(const BlockKey& key) const { return static_cast<size_t>(key.low); }
};

// The parent of first blocks.
BlockKey root_key(uint64_t seed, uint64_t epoch, std::string_view salt);
// `media` names the images that the block's placeholder ids stand for; 0: none.
BlockKey child_key(const BlockKey& parent, std::span<const int32_t> ids, uint64_t media = 0);

// The keys of one sequence's full blocks, extended as tokens come.
class KeyChain {
 public:
  KeyChain() = default;
  KeyChain(const BlockKey& root, int64_t block_size) : root_(root), block_size_(block_size) {}

  // `ids` is the whole sequence; keys of blocks that are full and not yet named are added.
  void extend(std::span<const int32_t> ids);
  std::span<const BlockKey> keys() const { return keys_; }

 private:
  BlockKey root_;
  int64_t block_size_ = 1;
  std::vector<BlockKey> keys_;
};

}  // namespace moat
