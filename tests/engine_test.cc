// SPDX-License-Identifier: Apache-2.0
// The engine: block pool, ledger, scheduler rules, random workloads with invariants, sampling, and the real engine on
// moat-nano: batch of different requests = each alone, rows bit-identical in any batch, cancel at every stage,
// refusals, drain.
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "base/rng.h"
#include "engine/local_engine.h"
#include "engine/sampler.h"
#include "golden_file.h"
#include "ops/case_data.h"
#include "ops/kda.h"

namespace moat {
namespace {

// --- capacity ---

TEST(Capacity, RefusesWithTheArithmetic) {
  ThreadPool pool(1);
  const auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, pool);
  ASSERT_TRUE(loaded.ok());
  const ModelConfig& config = (*loaded)->config;
  const auto fits = plan_capacity(
      config, {.memory_bytes = 1 << 30, .weight_bytes = 1 << 25, .max_model_len = 8192, .max_num_seqs = 8});
  ASSERT_TRUE(fits.ok());
  EXPECT_EQ(fits->max_num_seqs, 8);
  EXPECT_EQ(fits->cache.num_blocks, 8 * 128);
  const auto tight = plan_capacity(
      config, {.memory_bytes = 1 << 25, .weight_bytes = 1 << 25, .max_model_len = 8192, .max_num_seqs = 8});
  ASSERT_FALSE(tight.ok());
  EXPECT_EQ(tight.status().code(), StatusCode::kResourceExhausted);
  EXPECT_NE(tight.status().message().find("one sequence of 8192 tokens needs"), std::string::npos)
      << tight.status().message();
}

Request make_request(std::vector<int32_t> prompt, int32_t max_tokens) {
  Request r;
  r.prompt_ids = std::move(prompt);
  r.sampling.temperature = 0.0F;
  r.sampling.max_tokens = max_tokens;
  return r;
}

// --- sampler ---

struct SamplerBench {
  ThreadPool pool{2};
  Arena arena{size_t{64} << 20};
  SingleRank comm;
  Exec exec{{.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool, .arena = &arena, .comm = &comm}};
  CaseData data{7};
};

TEST(Sampler, ARowDoesNotDependOnItsBatchMates) {
  SamplerBench b;
  constexpr int64_t kVocab = 5120;
  constexpr int kRows = 24;
  const Tensor logits = b.data.normal({kRows, kVocab}, 3.0);
  std::vector<SamplingParams> params(kRows);
  std::vector<SampleRow> rows(kRows);
  Rng rng(3);
  for (int i = 0; i < kRows; ++i) {
    SamplingParams& p = params[static_cast<size_t>(i)];
    p.temperature = i % 3 == 0 ? 0.0F : 0.5F + static_cast<float>(rng.uniform());
    p.top_k = i % 4 == 1 ? 20 : 0;
    p.top_p = i % 5 == 2 ? 0.9F : 1.0F;
    p.min_p = i % 7 == 3 ? 0.05F : 0.0F;
    p.min_tokens = i % 6 == 5 ? 3 : 0;
    p.num_logprobs = i % 2 ? 5 : -1;
    p.seed = rng.next();
    rows[static_cast<size_t>(i)] = {.params = &p, .position = rng.below(1000), .num_generated = 0};
  }
  const Sampler sampler(kVocab, 17);
  const auto together = sampler.sample(b.exec, logits, rows);
  for (int i = 0; i < kRows; ++i) {
    const auto index = static_cast<size_t>(i);
    const auto alone = sampler.sample(b.exec, logits.rows(i, i + 1), {&rows[index], 1});
    EXPECT_EQ(alone.front().token.token_id, together[index].token.token_id) << "row " << i;
    EXPECT_EQ(alone.front().token.logprob, together[index].token.logprob);
    EXPECT_EQ(together[index].token.top.size(), params[index].num_logprobs > 0 ? 5U : 0U);
  }
}

TEST(Sampler, MasksStopsUntilMinTokensAndFailsOnlyTheBadRow) {
  SamplerBench b;
  constexpr int64_t kVocab = 64;
  const Tensor logits = b.data.normal({3, kVocab});
  for (int64_t r = 0; r < 3; ++r) logits.row(r)[17] = 50.0F;  // eos by far
  logits.row(2)[3] = NAN;
  SamplingParams wait;
  wait.temperature = 0.0F;
  wait.min_tokens = 2;
  SamplingParams free = wait;
  free.min_tokens = 0;
  const std::vector<SampleRow> rows = {{.params = &wait, .num_generated = 1}, {.params = &free}, {.params = &free}};
  const auto results = Sampler(kVocab, 17).sample(b.exec, logits, rows);
  EXPECT_NE(results[0].token.token_id, 17);
  EXPECT_GE(results[0].token.token_id, 0);
  EXPECT_EQ(results[1].token.token_id, 17);
  EXPECT_EQ(results[2].token.token_id, -1);
  EXPECT_FALSE(results[2].error.empty());
}

TEST(Sampler, DrawsFollowTheDistribution) {
  SamplerBench b;
  const Tensor logits = b.data.normal({1, 4});
  const float probs[4] = {0.5F, 0.25F, 0.15F, 0.1F};
  for (int i = 0; i < 4; ++i) logits.f32()[i] = std::log(probs[i]);
  SamplingParams p;
  p.seed = 11;
  const Sampler sampler(4, -1);
  int counts[4] = {};
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    const SampleRow row{.params = &p, .position = i};
    ++counts[sampler.sample(b.exec, logits, {&row, 1}).front().token.token_id];
  }
  for (int i = 0; i < 4; ++i) {
    const double deviation = std::sqrt(kDraws * probs[i] * (1 - probs[i]));
    EXPECT_NEAR(counts[i], kDraws * probs[i], 5 * deviation);
  }
}

// --- the real engine on moat-nano ---

class NanoEngine : public ::testing::Test {
 protected:
  struct Outcome {
    std::vector<int32_t> ids;
    std::vector<float> logprobs;
    FinishReason finish = FinishReason::kNone;
    Status error;
  };

  // Collects events of many requests; wait() until all have ended.
  class Collector {
   public:
    Engine::EventSink sink(int index) {
      return [this, index](TokenEvent e) {
        const std::lock_guard lock(mutex_);
        Outcome& o = outcomes_[index];
        for (const auto& t : e.tokens) {
          o.ids.push_back(t.token_id);
          o.logprobs.push_back(t.logprob);
        }
        EXPECT_EQ(o.finish, FinishReason::kNone) << "an event after the last";
        o.finish = e.finish;
        o.error = e.error;
        changed_.notify_all();
      };
    }
    void wait(size_t count) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        size_t ended = 0;
        for (const auto& [i, o] : outcomes_) ended += o.finish != FinishReason::kNone;
        return ended == count;
      });
    }
    void wait_for_tokens(int index, size_t count) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return outcomes_[index].ids.size() >= count; });
    }
    std::map<int, Outcome> outcomes() {
      const std::lock_guard lock(mutex_);
      return outcomes_;
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<int, Outcome> outcomes_;
  };

  static void SetUpTestSuite() {
    pool_ = new ThreadPool(2);
    auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, *pool_);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    loaded_ = std::move(loaded).value().release();
  }
  static void TearDownTestSuite() {
    delete loaded_;
    delete pool_;
  }

  static std::unique_ptr<LocalEngine> make_engine(const EngineOptions& options = {}) {
    auto parts = make_engine_parts(*loaded_, options, *pool_);
    EXPECT_TRUE(parts.ok()) << parts.status().message();
    return std::make_unique<LocalEngine>(std::move(parts).value(), options.max_queued);
  }

  // Eight chat prompts of different lengths, with greedy and sampled parameters.
  static std::vector<Request> make_requests(int count, int32_t max_tokens) {
    const test::GoldenFile golden(test::golden_dir() + "/moat-nano/golden.safetensors");
    std::vector<Request> requests;
    for (int i = 0; i < count; ++i) {
      Request r = make_request(golden.ints(fmt::format("greedy{}.prompt", i % 8)), max_tokens);
      r.sampling.temperature = i % 2 ? 1.0F : 0.0F;
      r.sampling.top_p = i % 2 ? 0.95F : 1.0F;
      r.sampling.seed = static_cast<uint64_t>(i) * 77;
      r.sampling.num_logprobs = 0;
      r.sampling.ignore_eos = true;
      requests.push_back(std::move(r));
    }
    return requests;
  }

  static ThreadPool* pool_;
  static LoadedModel* loaded_;
};
ThreadPool* NanoEngine::pool_ = nullptr;
LoadedModel* NanoEngine::loaded_ = nullptr;

TEST_F(NanoEngine, ABatchOfDifferentRequestsEqualsEachAlone) {
  std::map<int, Outcome> alone;
  {
    const auto engine = make_engine({.max_num_seqs = 1});
    Collector c;
    auto requests = make_requests(8, 48);
    for (int i = 0; i < 8; ++i) {
      ASSERT_TRUE(engine->submit(std::move(requests[static_cast<size_t>(i)]), c.sink(i)).ok());
      c.wait(static_cast<size_t>(i) + 1);
    }
    alone = c.outcomes();
  }
  // Small budgets cut prompts into pieces and mix prefill with decode; the last one queues most requests.
  struct Setting {
    int64_t seqs, tokens;
  };
  for (const auto& [seqs, tokens] : {Setting{8, 2048}, Setting{8, 70}, Setting{3, 33}}) {
    const auto engine = make_engine({.max_num_seqs = seqs, .max_batched_tokens = tokens});
    Collector c;
    auto requests = make_requests(8, 48);
    for (int i = 0; i < 8; ++i)
      ASSERT_TRUE(engine->submit(std::move(requests[static_cast<size_t>(i)]), c.sink(i)).ok());
    c.wait(8);
    for (const auto& [i, o] : c.outcomes()) {
      EXPECT_EQ(o.ids, alone[i].ids) << "request " << i << " with " << seqs << " sequences, " << tokens
                                     << " tokens a step";
      EXPECT_EQ(o.finish, FinishReason::kLength);
    }
    EXPECT_EQ(engine->stats().blocks_used + engine->stats().slots_used, 0);
  }
}

// architecture: the bits of a row do not depend on the other rows, nor on the thread count (f32 mode).
TEST_F(NanoEngine, LogitsOfARowAreBitIdenticalInABatchOfSeventeen) {
  constexpr int kSeqs = 17;
  // [threads - 1][alone or together][sequence] -> logits after three decode steps of made-up tokens
  std::map<std::pair<int, bool>, std::vector<std::vector<float>>> rows;
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    for (const bool together : {false, true}) {
      auto parts = make_engine_parts(*loaded_, {.max_model_len = 256, .max_num_seqs = kSeqs}, pool);
      ASSERT_TRUE(parts.ok()) << parts.status().message();
      auto& out = rows[{threads, together}];
      out.resize(kSeqs);
      const auto plan_for = [&](const std::vector<int>& seqs, int step) {
        StepPlan plan;
        for (const int s : seqs) {
          const int length = 1 + s % 5;  // different positions
          plan.sequences.push_back(static_cast<SequenceId>(s));
          plan.num_tokens.push_back(step == 0 ? length : 1);
          plan.first_positions.push_back(step == 0 ? 0 : length + step - 1);
          plan.state_slots.push_back(s);
          plan.wants_token.push_back(1);
          for (int i = 0; i < plan.num_tokens.back(); ++i)
            plan.token_ids.push_back((s * 131 + step * 17 + i * 7) % 4864);
          plan.block_tables.push_back(s);
        }
        plan.max_blocks = 1;
        plan.num_decode_seqs = static_cast<int64_t>(seqs.size());
        return plan;
      };
      std::vector<int> all(kSeqs);
      std::iota(all.begin(), all.end(), 0);
      std::vector<std::vector<int>> groups;
      if (together) groups = {all};
      if (!together) {
        for (const int s : all) groups.push_back({s});
      }
      for (const auto& group : groups) {
        for (int step = 0; step < 4; ++step) {
          const Tensor logits = parts->runner->forward(plan_for(group, step));
          for (size_t i = 0; i < group.size(); ++i) {
            const float* row = logits.row(static_cast<int64_t>(i));
            auto& all_steps = out[static_cast<size_t>(group[i])];
            all_steps.insert(all_steps.end(), row, row + logits.dim(1));
          }
        }
      }
    }
  }
  const auto& want = rows[{1, false}];
  for (const auto& [key, got] : rows) {
    for (size_t s = 0; s < kSeqs; ++s) {
      EXPECT_TRUE(got[s] == want[s]) << "sequence " << s << ", threads " << key.first << ", together " << key.second;
    }
  }
  fmt::print("row invariance: {} sequences x 4 steps bit-identical alone and in a batch of 17, with 1 and 2 threads\n",
             kSeqs);
}

TEST_F(NanoEngine, CancelAtEveryStage) {
  const auto engine = make_engine({.max_num_seqs = 2, .max_batched_tokens = 64});
  Collector c;
  auto requests = make_requests(6, 400);
  std::vector<Engine::RequestHandle> handles;
  for (int i = 0; i < 6; ++i) {
    auto handle = engine->submit(std::move(requests[static_cast<size_t>(i)]), c.sink(i));
    ASSERT_TRUE(handle.ok());
    handles.push_back(*handle);
  }
  engine->cancel(handles[5]);  // queued
  c.wait_for_tokens(0, 3);
  engine->cancel(handles[0]);  // decoding
  engine->cancel(handles[1]);
  for (int i = 2; i < 5; ++i) engine->cancel(handles[static_cast<size_t>(i)]);
  engine->cancel(handles[0]);  // twice
  engine->cancel(123456);      // nobody
  c.wait(6);
  for (const auto& [i, o] : c.outcomes()) EXPECT_EQ(o.finish, FinishReason::kCancelled) << i;
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.blocks_used + stats.slots_used + stats.num_running + stats.num_waiting, 0);
  EXPECT_EQ(stats.cancelled_total, 6);
}

TEST_F(NanoEngine, RefusesWhatCanNeverRunAndAFullQueue) {
  const auto engine = make_engine({.max_model_len = 512, .max_num_seqs = 1, .max_queued = 2});
  Collector c;
  const auto refused = [&](Request r) { return engine->submit(std::move(r), c.sink(99)).status(); };
  EXPECT_EQ(refused(make_request({}, 5)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(make_request({5120}, 5)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(make_request({-1}, 5)).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused(make_request({1}, 0)).code(), StatusCode::kInvalidArgument);
  const Status long_one = refused(make_request(std::vector<int32_t>(500, 1), 13));
  EXPECT_EQ(long_one.message(), "500 prompt tokens + 13 to generate = 513, but the context is 512");
  Request hot = make_request({1}, 5);
  hot.sampling.temperature = NAN;
  EXPECT_EQ(refused(std::move(hot)).code(), StatusCode::kInvalidArgument);

  auto requests = make_requests(8, 300);
  int accepted = 0;
  Status full;
  for (Request& r : requests) {
    const auto handle = engine->submit(std::move(r), c.sink(accepted));
    if (handle.ok()) {
      ++accepted;
    } else {
      full = handle.status();
    }
  }
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  engine->drain(std::chrono::steady_clock::now());  // cancels
  c.wait(static_cast<size_t>(accepted));
  EXPECT_EQ(engine->submit(make_request({1}, 5), c.sink(98)).status().code(), StatusCode::kUnavailable);
}

TEST_F(NanoEngine, DrainWaitsForLiveRequests) {
  const auto engine = make_engine({.max_num_seqs = 4});
  Collector c;
  auto requests = make_requests(6, 40);
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(engine->submit(std::move(requests[static_cast<size_t>(i)]), c.sink(i)).ok());
  engine->drain(std::chrono::steady_clock::now() + std::chrono::minutes(5));
  for (const auto& [i, o] : c.outcomes()) {
    EXPECT_EQ(o.finish, FinishReason::kLength);
    EXPECT_EQ(o.ids.size(), 40U);
  }
}

TEST_F(NanoEngine, SeedsDecideAloneAndDiffer) {
  const auto engine = make_engine();
  Collector c;
  for (int i = 0; i < 3; ++i) {
    auto r = make_requests(2, 40);
    r[1].sampling.temperature = 3.0F;  // the model is sure of itself: heat makes the draws differ
    r[1].sampling.seed = i == 2 ? 2 : 1;
    ASSERT_TRUE(engine->submit(std::move(r[1]), c.sink(i)).ok());
  }
  c.wait(3);
  auto o = c.outcomes();
  EXPECT_EQ(o[0].ids, o[1].ids);
  EXPECT_NE(o[0].ids, o[2].ids);
}

}  // namespace
}  // namespace moat
