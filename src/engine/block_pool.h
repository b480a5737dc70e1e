// SPDX-License-Identifier: Apache-2.0
// BlockPool: which blocks of one cache group are free. A block is an index; the memory belongs to Caches. One thread.
//
// Invariants: B1 every block is either free or has a reference count >= 1; B2 free + used = total.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace moat {

class BlockPool {
 public:
  explicit BlockPool(int64_t num_blocks);

  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_used() const { return num_blocks() - num_free(); }

  int32_t ref_count(int32_t block) const { return ref_counts_[static_cast<size_t>(block)]; }

  // `count` blocks with one reference each, or nothing.
  std::optional<std::vector<int32_t>> allocate(int64_t count);
  void add_reference(int32_t block);
  void release(int32_t block);  // drops one reference

  void check_invariants() const;  // CHECKs B1 and B2

 private:
  std::vector<int32_t> free_;        // most recently freed last
  std::vector<int32_t> ref_counts_;  // [num_blocks]
};

}  // namespace moat
