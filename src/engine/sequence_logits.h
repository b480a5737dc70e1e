// SPDX-License-Identifier: Apache-2.0
// SequenceLogits: the logits of every position of one sequence at a time, without scheduler or sampling, in chunks of
// any size: what `moat logits`, the golden tests and perplexity use. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/thread_pool.h"
#include "engine/batch.h"
#include "engine/cache.h"
#include "engine/cache_memory.h"
#include "engine/runner.h"
#include "model/kimi.h"
#include "model/loader.h"

namespace moat {

class SequenceLogits {
 public:
  struct Options {
    bool reference = false;
    int64_t max_tokens = 8192;  // longest sequence
    int64_t chunk = 512;        // rows a forward
  };
  // `loaded` and `pool` must outlive the object. Fails when a call site has no kernel.
  static Result<std::unique_ptr<SequenceLogits>> create(const LoadedModel& loaded, const Options& options,
                                                        ThreadPool& pool);

  // Receives logits [rows, vocab] of positions first_position ..; valid during the call.
  using OnLogits = std::function<void(int64_t first_position, const Tensor& logits)>;

  void restart();  // forget the sequence
  // Appends `ids` in pieces of at most `chunk` (0: the option's). A piece of fewer than kPrefillMinTokens rows takes
  // the decode form. Fails if the sequence grows past max_tokens or an id is outside the vocabulary.
  Status append(std::span<const int32_t> ids, int64_t chunk, const OnLogits& on_logits);

  KimiModel& model() { return *model_; }
  const CacheView& caches() const { return caches_->view(); }  // the sequence is in slot 0
  const KernelPlan& kernel_plan() const { return plan_; }

 private:
  SequenceLogits() = default;

  Options options_;
  ThreadPool* pool_ = nullptr;
  std::unique_ptr<KimiModel> model_;
  std::unique_ptr<CacheMemory> caches_;
  KernelPlan plan_{{}};
  Arena arena_;
  Arch arch_;
  SingleRank comm_;
  Batch batch_;
  int64_t num_tokens_ = 0;
};

}  // namespace moat
