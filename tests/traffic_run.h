// SPDX-License-Identifier: Apache-2.0
// Running a real engine in tests: pools of exactly the wanted size, filled with NaN; a client that collects replies; and
// the comparison of a reply with that of the same request alone.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "engine/local_engine.h"

namespace moat::test {

struct Pools {
  int64_t blocks = 0;
  int64_t checkpoints = 0;  // slots beyond those of running sequences
};

// Whatever is read before it is written is NaN, and shows as an error of the request.
inline void poison(const CacheView& view) {
  for (const Tensor& t : {view.mla, view.kda_state, view.kda_conv}) {
    std::fill_n(t.f32(), t.count(), std::numeric_limits<float>::quiet_NaN());
  }
}

inline std::unique_ptr<LocalEngine> make_engine(const LoadedModel& loaded, const EngineOptions& options,
                                                const Pools& pools, ThreadPool& pool) {
  auto made = make_engine_parts(loaded, options, pool);
  EXPECT_TRUE(made.ok()) << made.status().message();
  if (!made.ok()) return nullptr;
  EngineParts parts = std::move(made).value();
  EXPECT_EQ(parts.info.max_num_seqs, options.max_num_seqs) << parts.capacity.table();
  const CacheSizes sizes{.block_size = options.block_size,
                         .num_blocks = pools.blocks,
                         .num_slots = options.max_num_seqs + pools.checkpoints};
  const RunnerOptions runner{.arch = host_arch(),
                             .reference = options.reference,
                             .max_batched_tokens = options.max_batched_tokens,
                             .max_num_seqs = options.max_num_seqs,
                             .max_model_len = parts.info.max_model_len};
  auto dry = dry_run(*parts.model, runner, sizes, pool);
  EXPECT_TRUE(dry.ok()) << dry.status().message();
  if (!dry.ok()) return nullptr;
  parts.runner.reset();
  parts.capacity.cache = sizes;
  parts.caches = std::make_unique<CacheMemory>(loaded.config, sizes);
  parts.runner = std::make_unique<Runner>(*parts.model, *parts.caches, pool, runner, std::move(dry).value());
  poison(parts.caches->view());
  return std::make_unique<LocalEngine>(std::move(parts), options.max_queued);
}

struct Reply {
  std::vector<SampledToken> tokens;
  FinishReason finish = FinishReason::kNone;
  Status error;
  int32_t stop_token_id = -1;
  int32_t num_prompt_tokens = 0;
  int32_t num_cached_tokens = 0;

  std::vector<int32_t> ids() const {
    std::vector<int32_t> ids;
    for (const SampledToken& t : tokens) ids.push_back(t.token_id);
    return ids;
  }
};

// Submits requests to one engine and collects what comes back. Must outlive the engine's requests.
class Client {
 public:
  explicit Client(LocalEngine& engine) : engine_(engine) {}

  // Returns the index of its reply.
  size_t start(Request request) {
    Reply* reply = nullptr;
    size_t index = 0;
    {
      const std::lock_guard lock(mutex_);
      index = replies_.size();
      replies_.push_back(std::make_unique<Reply>());
      reply = replies_.back().get();
    }
    const auto handle = engine_.submit(std::move(request), [this, index, reply](TokenEvent e) {
      const std::lock_guard lock(mutex_);
      EXPECT_EQ(reply->finish, FinishReason::kNone) << "an event after the last";
      for (SampledToken& t : e.tokens) reply->tokens.push_back(std::move(t));
      reply->finish = e.finish;
      if (e.finish != FinishReason::kNone) {
        reply->error = e.error;
        reply->stop_token_id = e.stop_token_id;
        reply->num_prompt_tokens = e.num_prompt_tokens;
        reply->num_cached_tokens = e.num_cached_tokens;
        ended_.push_back(index);
      }
      changed_.notify_all();
    });
    EXPECT_TRUE(handle.ok()) << handle.status().message();
    handles_.resize(index + 1);
    if (handle.ok()) handles_[index] = *handle;
    return index;
  }

  const Reply& wait(size_t index) {
    std::unique_lock lock(mutex_);
    const Reply& reply = *replies_[index];
    changed_.wait(lock, [&] { return reply.finish != FinishReason::kNone; });
    return reply;
  }

  // The next request that ends, in order of ending; each is returned once.
  size_t wait_any() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_taken_ < ended_.size(); });
    return ended_[num_taken_++];
  }

  void wait_for_tokens(size_t index, size_t count) {
    std::unique_lock lock(mutex_);
    const Reply& reply = *replies_[index];
    changed_.wait(lock, [&] { return reply.tokens.size() >= count || reply.finish != FinishReason::kNone; });
  }

  void cancel(size_t index) { engine_.cancel(handles_[index]); }

  Reply ask(Request request) { return wait(start(std::move(request))); }

 private:
  LocalEngine& engine_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Reply>> replies_;
  std::vector<Engine::RequestHandle> handles_;  // of the thread that starts
  std::vector<size_t> ended_;
  size_t num_taken_ = 0;
};

// --- comparison ---

// Same ids, same log-probabilities to the last bit. Empty: yes; else where they part.
inline std::string bitwise_difference(const Reply& got, const Reply& want) {
  if (got.finish != want.finish) {
    return fmt::format("finish {} ({}), expected {} ({})", finish_reason_name(got.finish), got.error.message(),
                       finish_reason_name(want.finish), want.error.message());
  }
  if (got.tokens.size() != want.tokens.size()) {
    return fmt::format("{} tokens, expected {}", got.tokens.size(), want.tokens.size());
  }
  for (size_t i = 0; i < want.tokens.size(); ++i) {
    const SampledToken& g = got.tokens[i];
    const SampledToken& w = want.tokens[i];
    bool same = g.token_id == w.token_id && g.logprob == w.logprob && g.top.size() == w.top.size();
    for (size_t j = 0; same && j < w.top.size(); ++j) {
      same = g.top[j].token_id == w.top[j].token_id && g.top[j].logprob == w.top[j].logprob;
    }
    if (!same) {
      return fmt::format("token {} is {} ({:.9g}), expected {} ({:.9g})", i, g.token_id, g.logprob, w.token_id,
                         w.logprob);
    }
  }
  return "";
}

// What two replies of one request differ by when only rounding may.
struct Closeness {
  size_t common = 0;     // tokens up to the first difference
  bool differs = false;  // there is one
  double gap = 0;        // there: what the two candidates are apart by, in the reference's distribution
  double deviation = 0;  // largest difference of a log-probability up to there, of tokens both replies list
};

inline Closeness compare_closely(const Reply& got, const Reply& want) {
  Closeness c;
  const auto listed = [](const SampledToken& t, int32_t id) -> double {
    if (t.token_id == id) return t.logprob;
    for (const TokenLogprob& entry : t.top) {
      if (entry.token_id == id) return entry.logprob;
    }
    return -std::numeric_limits<double>::infinity();
  };
  const size_t least = std::min(got.tokens.size(), want.tokens.size());
  for (size_t i = 0; i < least && !c.differs; ++i) {
    const SampledToken& g = got.tokens[i];
    const SampledToken& w = want.tokens[i];
    for (const TokenLogprob& entry : w.top) {
      const double other = listed(g, entry.token_id);
      if (std::isfinite(other)) c.deviation = std::max(c.deviation, std::abs(other - double{entry.logprob}));
    }
    if (g.token_id == w.token_id) {
      c.deviation = std::max(c.deviation, std::abs(double{g.logprob} - double{w.logprob}));
      ++c.common;
      continue;
    }
    c.differs = true;
    c.gap = std::abs(double{w.logprob} - listed(w, g.token_id));
  }
  if (!c.differs && got.tokens.size() != want.tokens.size()) {
    c.differs = true;
    c.gap = std::numeric_limits<double>::infinity();
  }
  return c;
}

// --- texts ---

// The first `count` tokens of an endless text with this name, of ids below `vocab`.
inline std::vector<int32_t> text(uint64_t name, int64_t count, int64_t vocab) {
  Rng rng(name);
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(vocab));
  return ids;
}

inline std::vector<int32_t> join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace moat::test
