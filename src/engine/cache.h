// SPDX-License-Identifier: Apache-2.0
// Caches: who holds which pages of the MLA cache and which recurrent-state slot. CacheLedger does the accounting and
// touches no memory, so the scheduler that owns it can be tested by itself; CacheMemory owns the bytes. One thread
// each.
//
// Tokens are the only unit the groups share. Groups: *paged* (MLA latent rows, block_size tokens a block) and *state*
// (KDA and convolution state, one slot a sequence). admit() reserves in both groups or in neither.
//
// Invariants, checked by check_invariants():
//   C1  blocks: free + used = total, and every used block belongs to exactly one sequence's table (until prefixes are
//       shared).
//   C2  slots: free + used = total, one per admitted sequence, no slot twice.
//   C3  an admitted sequence holds ceil(reserved tokens / block_size) blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/tensor.h"
#include "engine/block_pool.h"
#include "model/config.h"
#include "model/forward.h"
#include "plan/capacity.h"

namespace moat {

using SequenceId = uint64_t;

class CacheLedger {
 public:
  explicit CacheLedger(const CacheSizes& sizes);

  struct Admission {
    SequenceId sequence = 0;
    std::span<const int32_t> prompt_ids;
    std::string_view salt;
    int64_t reserve_tokens = 0;  // the most the sequence will ever hold
  };
  // Reserves blocks and a slot; returns how many prompt tokens both groups can restore (0: nothing is shared yet), or
  // nothing if it does not fit now.
  std::optional<int64_t> admit(const Admission& admission);
  bool can_ever_fit(int64_t reserve_tokens) const { return blocks_for(reserve_tokens) <= blocks_.num_blocks(); }
  void free(SequenceId sequence);

  std::span<const int32_t> block_table(SequenceId sequence) const;
  int32_t state_slot(SequenceId sequence) const;

  int64_t blocks_for(int64_t tokens) const { return (tokens + sizes_.block_size - 1) / sizes_.block_size; }
  const CacheSizes& sizes() const { return sizes_; }
  int64_t blocks_used() const { return blocks_.num_used(); }
  int64_t slots_used() const { return slots_.num_used(); }

  void check_invariants() const;

 private:
  struct Holding {
    std::vector<int32_t> blocks;
    int32_t slot = -1;
    int64_t reserve_tokens = 0;
  };
  CacheSizes sizes_;
  BlockPool blocks_;
  BlockPool slots_;  // a slot is a block of its own group
  std::unordered_map<SequenceId, Holding> holdings_;
};

class CacheMemory {
 public:
  CacheMemory(const ModelConfig& config, const CacheSizes& sizes);
  const CacheView& view() const { return view_; }
  int64_t bytes() const;

 private:
  Buffer mla_, state_, conv_;
  CacheView view_;
};

// Shapes of the caches with no memory behind them, for dry passes.
CacheView dry_cache_view(const ModelConfig& config, const CacheSizes& sizes);

}  // namespace moat
