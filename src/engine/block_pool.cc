// SPDX-License-Identifier: Apache-2.0
#include "engine/block_pool.h"

#include "base/status.h"

namespace moat {

BlockPool::BlockPool(int64_t num_blocks) : ref_counts_(static_cast<size_t>(num_blocks), 0) {
  free_.reserve(static_cast<size_t>(num_blocks));
  for (int64_t b = num_blocks - 1; b >= 0; --b) free_.push_back(static_cast<int32_t>(b));
}

std::optional<std::vector<int32_t>> BlockPool::allocate(int64_t count) {
  if (count > num_free()) return std::nullopt;
  const std::vector<int32_t> blocks(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - static_cast<size_t>(count));
  for (const int32_t b : blocks) ref_counts_[static_cast<size_t>(b)] = 1;
  return blocks;
}

void BlockPool::add_reference(int32_t block) {
  MOAT_CHECK(ref_counts_[static_cast<size_t>(block)] > 0, "block {} is free", block);
  ++ref_counts_[static_cast<size_t>(block)];
}

void BlockPool::release(int32_t block) {
  int32_t& count = ref_counts_[static_cast<size_t>(block)];
  MOAT_CHECK(count > 0, "block {} is released twice", block);
  if (--count == 0) free_.push_back(block);
}

void BlockPool::check_invariants() const {
  std::vector<bool> is_free(ref_counts_.size(), false);
  for (const int32_t b : free_) {
    MOAT_CHECK(!is_free[static_cast<size_t>(b)], "B1: block {} is free twice", b);
    MOAT_CHECK(ref_counts_[static_cast<size_t>(b)] == 0, "B1: free block {} has references", b);
    is_free[static_cast<size_t>(b)] = true;
  }
  for (size_t b = 0; b < ref_counts_.size(); ++b) {
    MOAT_CHECK(is_free[b] == (ref_counts_[b] == 0), "B2: block {} is neither free nor used", b);
  }
}

}  // namespace moat
