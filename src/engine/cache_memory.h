// SPDX-License-Identifier: Apache-2.0
// CacheMemory: the bytes of the caches that CacheLedger (cache.h) hands out by index. One thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/thread_pool.h"
#include "core/tensor.h"
#include "engine/cache.h"
#include "model/config.h"
#include "model/forward.h"
#include "plan/capacity.h"

namespace moat {

class CacheMemory {
 public:
  CacheMemory(const ModelConfig& config, const CacheSizes& sizes);
  const CacheView& view() const { return view_; }
  const Tensor& draft_rows() const {
    return draft_rows_;
  }  // [draft layers, num_blocks * block_size, draft_row]; or unset
  int64_t bytes() const;
  void make_resident(ThreadPool& pool);  // zeroes everything, so that no page is missing when the first request comes
  // Copies states, in order; each copy is spread over the pool.
  void copy_states(std::span<const StateCopy> copies, ThreadPool& pool);

 private:
  Buffer mla_, state_, conv_, draft_, kda_records_, conv_records_;
  CacheView view_;
  Tensor draft_rows_;
};

// Shapes of the caches with no memory behind them, for dry passes.
CacheView dry_cache_view(const ModelConfig& config, const CacheSizes& sizes);
Tensor dry_draft_rows(const CacheSizes& sizes);

}  // namespace moat
