// SPDX-License-Identifier: Apache-2.0
// The prefix cache on a real model, moat-nano: what is restored, what is not, and that no answer shows it. Names are
// those of the public list of cases. Every pool starts as NaN (traffic_run.h), so that each hit also shows that nothing
// is read that was not written. Deterministic mode compares bits; the default form may round differently where a prompt
// was cut (kRounding). MOAT_TRAFFIC_MODEL names another checkpoint than moat-nano.
#include <gtest/gtest.h>

#include <cstdlib>

#include "golden_file.h"
#include "traffic_run.h"

namespace moat {
namespace {

using test::Client;
using test::join;
using test::Pools;
using test::Reply;

constexpr int64_t kBlock = 64;
constexpr double kRounding = 1e-3;  // log-probabilities, f32

// Greedy, with log-probabilities, to the last token.
Request make_request(std::vector<int32_t> prompt, int32_t max_tokens) {
  Request r;
  r.prompt_ids = std::move(prompt);
  r.sampling.temperature = 0;
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  r.sampling.num_logprobs = 5;
  return r;
}

class Cache : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    pool_ = new ThreadPool(2);
    const char* model = std::getenv("MOAT_TRAFFIC_MODEL");
    auto loaded = load_model(model != nullptr ? model : test::source_dir() + "/models/moat-nano", {}, *pool_);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    loaded_ = std::move(loaded).value().release();
  }
  static void TearDownTestSuite() {
    delete loaded_;
    delete pool_;
  }

  static std::unique_ptr<LocalEngine> make_engine(const EngineOptions& options, const Pools& pools) {
    return test::make_engine(*loaded_, options, pools, *pool_);
  }

  // The first `count` tokens of an endless text with this name, of ordinary tokens.
  static std::vector<int32_t> text(uint64_t name, int64_t count) {
    return test::text(name, count, loaded_->config.vocab_size * 15 / 16);
  }

  static Request mixed_request(size_t i);

  static int64_t engine_blocks(const EngineOptions& options) {
    const int64_t context = options.max_model_len > 0 ? options.max_model_len : loaded_->config.max_position_embeddings;
    return (context + options.block_size - 1) / options.block_size;
  }

  // Each request by itself in an engine that caches nothing.
  template <class MakeRequest>
  static std::vector<Reply> alone(size_t count, EngineOptions options, const MakeRequest& make_request) {
    options.max_num_seqs = 1;
    options.prefix_cache = false;
    const auto engine = make_engine(options, {.blocks = engine_blocks(options)});
    Client client(*engine);
    std::vector<Reply> replies;
    for (size_t i = 0; i < count; ++i) replies.push_back(client.ask(make_request(i)));
    return replies;
  }

  static ThreadPool* pool_;
  static LoadedModel* loaded_;
};
ThreadPool* Cache::pool_ = nullptr;
LoadedModel* Cache::loaded_ = nullptr;

void expect_same(const Reply& got, const Reply& want, bool deterministic, const std::string& what) {
  if (deterministic) {
    EXPECT_EQ(test::bitwise_difference(got, want), "") << what;
    return;
  }
  const test::Closeness c = test::compare_closely(got, want);
  EXPECT_EQ(got.finish, want.finish) << what << ": " << got.error.message();
  EXPECT_LT(c.deviation, kRounding) << what;
  if (c.differs) {
    EXPECT_LT(c.gap, kRounding) << what << ", at token " << c.common;
  }
}

// CACHE-04: prompts of every length around the block boundaries give the same first tokens with the cache on and off.
TEST_F(Cache, Case04_EveryPromptLengthAnswersAsWithoutCache) {
  for (const bool deterministic : {true, false}) {
    std::vector<int64_t> lengths;
    for (int64_t n = 1; n <= 4 * kBlock + 3; ++n) {
      // The default form is looked at where something changes: around blocks and around the shortest prefill.
      if (deterministic || n % kBlock <= 3 || n % kBlock >= 62 || n % 32 <= 1 || n % 32 == 31) lengths.push_back(n);
    }
    const EngineOptions options{.max_model_len = 512, .deterministic = deterministic};
    const auto request = [&](size_t i) { return make_request(text(4, lengths[i]), 2); };
    const std::vector<Reply> want = alone(lengths.size(), options, request);
    const auto engine = make_engine(options, {.blocks = 64, .checkpoints = 16});
    Client client(*engine);
    int64_t hits = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const Reply got = client.ask(request(i));
      expect_same(got, want[i], deterministic, fmt::format("{} prompt tokens", lengths[i]));
      EXPECT_LE(got.num_cached_tokens, (lengths[i] - 1) / kBlock * kBlock);
      hits += got.num_cached_tokens > 0;
    }
    EXPECT_GT(hits, static_cast<int64_t>(lengths.size()) / 2);
  }
}

// CACHE-05: a prompt that shares 10,000 tokens with a longer one resumes at a position that both groups have: at the
// checkpoint at 8,192, although the blocks go on to 9,984. A context that is too short for it, as moat-nano's, has an
// eighth of all that.
TEST_F(Cache, Case05_ResumesAtAMultipleThatBothGroupsHave) {
  const int64_t interval = loaded_->config.max_position_embeddings >= 16384 ? 4096 : 512;
  const int64_t shared = interval == 4096 ? 10000 : 1250;
  const std::vector<int32_t> first = text(5, shared + 500);
  const std::vector<int32_t> second = join(text(5, shared), text(51, 300));
  for (const bool deterministic : {true, false}) {
    const EngineOptions options{.max_model_len = shared + 1000,
                                .max_num_seqs = 2,
                                .checkpoint_interval = interval,
                                .deterministic = deterministic};
    const std::vector<Reply> want =
        alone(2, options, [&](size_t i) { return make_request(i == 0 ? first : second, 4); });
    const auto engine = make_engine(options, {.blocks = 2 * engine_blocks(options), .checkpoints = 8});
    Client client(*engine);
    const Reply cold = client.ask(make_request(first, 4));
    EXPECT_EQ(cold.num_cached_tokens, 0);
    expect_same(cold, want[0], deterministic, "first");
    const Reply hit = client.ask(make_request(second, 4));
    EXPECT_EQ(hit.num_cached_tokens, 2 * interval);
    EXPECT_EQ(hit.num_prompt_tokens, shared + 300);
    expect_same(hit, want[1], deterministic, "second");
    // The same prompt again resumes at its last whole block.
    const Reply again = client.ask(make_request(second, 4));
    EXPECT_EQ(again.num_cached_tokens, (shared + 299) / kBlock * kBlock);
    expect_same(again, want[1], deterministic, "second again");
  }
}

// Requests of all kinds: greedy and sampled, penalties, biases, forbidden words, stop ids.
Request Cache::mixed_request(size_t i) {
  Rng rng(100 + i);
  Request r = make_request(text(200 + i % 5, 20 + rng.below(110)), static_cast<int32_t>(60 + rng.below(130)));
  SamplingParams& s = r.sampling;
  s.temperature = i % 3 == 0 ? 0.0F : 1.0F;
  s.seed = rng.next();
  if (i % 4 == 1) s.top_p = 0.95F;
  if (i % 4 == 2) s.top_k = 50;
  if (i % 2 == 1) {
    s.presence_penalty = 0.5F;
    s.frequency_penalty = 0.25F;
    s.repetition_penalty = 1.1F;
  }
  if (i % 5 == 2) s.logit_bias = {{.token_id = 17, .bias = 4.0F}, {.token_id = 18, .bias = -100.0F}};
  if (i % 5 == 3) s.bad_words = {{17}, {20, 21}};
  if (i % 4 == 3) {
    s.min_tokens = 20;
    for (int32_t id = 0; id < 300; ++id) s.stop_token_ids.push_back(id * loaded_->config.vocab_size / 300);
  }
  return r;
}

// CACHE-08: preempted at any step and resumed, a request ends with the tokens of an uninterrupted one; penalties, stop
// ids and seeds included.
TEST_F(Cache, Case08_PreemptedRequestsEndAsUninterruptedOnes) {
  constexpr size_t kRequests = 16;
  for (const bool deterministic : {true, false}) {
    const EngineOptions options{.max_model_len = 400,
                                .max_num_seqs = 8,
                                .max_batched_tokens = 256,
                                .block_size = 16,
                                .deterministic = deterministic};
    const std::vector<Reply> want = alone(kRequests, options, mixed_request);
    std::string counts;
    int64_t stopped = 0;
    for (const Reply& reply : want) stopped += reply.finish == FinishReason::kStop;
    EXPECT_GT(stopped, 0);
    for (const int64_t blocks : {25, 36, 50}) {  // other sizes, other steps
      const auto engine = make_engine(options, {.blocks = blocks, .checkpoints = 8});
      Client client(*engine);
      std::vector<size_t> index;
      for (size_t i = 0; i < kRequests; ++i) index.push_back(client.start(mixed_request(i)));
      for (size_t i = 0; i < kRequests; ++i) {
        expect_same(client.wait(index[i]), want[i], deterministic, fmt::format("request {}, {} blocks", i, blocks));
      }
      const EngineStats stats = engine->stats();
      EXPECT_GT(stats.preemptions_total, 0) << blocks << " blocks";
      counts += fmt::format(" {}", stats.preemptions_total);
      EXPECT_EQ(stats.blocks_used + stats.slots_used, 0);
    }
    fmt::print("CACHE-08: {} requests, preemptions with 25, 36 and 50 blocks of 16 tokens:{}, {}\n", kRequests, counts,
               deterministic ? "deterministic" : "default form");
  }
}

// CACHE-11: in a chat that only grows, a turn computes its new tokens and at most a block.
TEST_F(Cache, Case11_AppendOnlyChatComputesOnlyWhatIsNew) {
  constexpr int kTurns = 30;
  const EngineOptions options{.max_num_seqs = 2, .deterministic = true};
  const auto engine = make_engine(options, {.blocks = 128, .checkpoints = 8});
  Client client(*engine);
  Rng rng(11);
  std::vector<int32_t> history = text(11, 300);
  std::vector<int32_t> ends = {100, 300};
  size_t known = 0;  // tokens of prompt and reply at the end of the last turn
  std::vector<std::vector<int32_t>> prompts;
  std::vector<Reply> replies;
  for (int turn = 0; turn < kTurns; ++turn) {
    Request r = make_request(history, static_cast<int32_t>(10 + rng.below(60)));
    r.message_ends = ends;
    const Reply reply = client.ask(std::move(r));
    ASSERT_EQ(reply.finish, FinishReason::kLength) << reply.error.message();
    const auto computed = static_cast<int64_t>(history.size()) - reply.num_cached_tokens;
    if (turn > 0) {
      EXPECT_LE(computed, static_cast<int64_t>(history.size() - known) + kBlock) << "turn " << turn;
    }
    prompts.push_back(history);
    replies.push_back(reply);
    history = join(history, reply.ids());
    known = history.size();
    ends.push_back(static_cast<int32_t>(known));
    history = join(history, text(110 + static_cast<uint64_t>(turn), 20 + rng.below(70)));
    ends.push_back(static_cast<int32_t>(history.size()));
  }
  for (const size_t turn : {size_t{3}, size_t{14}}) {
    const auto max_tokens = static_cast<int32_t>(replies[turn].tokens.size());
    const auto want = alone(1, options, [&](size_t) { return make_request(prompts[turn], max_tokens); });
    expect_same(replies[turn], want[0], true, fmt::format("turn {}", turn));
  }
}

// CACHE-15: what one salt has cached no other restores; nor does anybody after a flush, nor who asks for every row.
TEST_F(Cache, Case15_SaltsFlushAndRequestsThatRestoreNothing) {
  const EngineOptions options{.max_model_len = 1024, .max_num_seqs = 2, .deterministic = true};
  const auto engine = make_engine(options, {.blocks = 64, .checkpoints = 16});
  Client client(*engine);
  const auto ask = [&](const std::string& salt, bool restore = true) {
    Request r = make_request(text(15, 300), 6);
    r.cache_salt = salt;
    r.restore_prefix = restore;
    return client.ask(std::move(r));
  };
  const Reply cold = ask("");
  EXPECT_EQ(cold.num_cached_tokens, 0);
  const auto expect = [&](const Reply& reply, int32_t cached, const char* what) {
    EXPECT_EQ(reply.num_cached_tokens, cached) << what;
    expect_same(reply, cold, true, what);
  };
  expect(ask(""), 256, "no salt again");
  expect(ask("a"), 0, "salt a");
  expect(ask("b"), 0, "salt b");
  expect(ask("a"), 256, "salt a again");
  expect(ask("", false), 0, "restores nothing");
  expect(ask(""), 256, "after one that restored nothing");
  engine->flush_cache();
  expect(ask(""), 0, "after a flush");
  expect(ask("a"), 0, "salt a after a flush");
  expect(ask(""), 256, "cached again");
  EXPECT_EQ(engine->stats().blocks_used, 0);
}

// KV-01: what the pool can never hold is refused at once, with both numbers; others go on.
TEST_F(Cache, CaseKv01_ARequestLargerThanThePoolIsRefusedAtOnce) {
  const auto engine = make_engine({.max_num_seqs = 4}, {.blocks = 32, .checkpoints = 4});
  Client client(*engine);
  const size_t before = client.start(make_request(text(1, 500), 100));
  const auto refused = engine->submit(make_request(text(2, 3000), 8), [](const TokenEvent&) { ADD_FAILURE(); });
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(refused.status().message(),
            "the request needs a cache of 3007 tokens, but the pool holds 2048 (32 blocks of 64)");
  // The last token is never computed: 2,048 tokens of cache are enough for 2,049.
  const size_t fits = client.start(make_request(text(3, 2041), 8));
  EXPECT_EQ(client.wait(before).finish, FinishReason::kLength);
  EXPECT_EQ(client.wait(fits).finish, FinishReason::kLength);
  EXPECT_EQ(client.wait(fits).tokens.size(), 8U);
}

// KV-03: room for one and a half of eight sequences; all end, with the right tokens.
TEST_F(Cache, CaseKv03_EightSequencesWithRoomForOneAndAHalf) {
  for (const bool deterministic : {true, false}) {
    const EngineOptions options{.max_model_len = 1024, .max_num_seqs = 8, .deterministic = deterministic};
    const auto request = [](size_t i) { return make_request(text(30 + i, 100), 220); };  // five blocks each
    const std::vector<Reply> want = alone(8, options, request);
    const auto engine = make_engine(options, {.blocks = 7, .checkpoints = 4});
    Client client(*engine);
    std::vector<size_t> index;
    for (size_t i = 0; i < 8; ++i) index.push_back(client.start(request(i)));
    for (size_t i = 0; i < 8; ++i) {
      expect_same(client.wait(index[i]), want[i], deterministic, fmt::format("sequence {}", i));
    }
    EXPECT_GT(engine->stats().preemptions_total, 0);
  }
}

// SAMP-10: in deterministic mode the log-probabilities are the same to the last bit, whatever was cached, batched or
// cut into pieces.
TEST_F(Cache, CaseSamp10_LogprobsHaveTheSameBitsHoweverTheyWereComputed) {
  constexpr size_t kRequests = 8;
  const auto request = [](size_t i) {
    Request r = make_request(join(text(10, 150), text(100 + i, 30 + 25 * static_cast<int64_t>(i))), 24);
    r.sampling.temperature = i % 2 == 0 ? 0.0F : 1.0F;
    r.sampling.seed = i;
    r.sampling.num_logprobs = SamplingParams::kMaxLogprobs;
    return r;
  };
  EngineOptions options{.max_model_len = 1024, .deterministic = true};
  const std::vector<Reply> want = alone(kRequests, options, request);
  for (const int64_t seqs : {1, 8}) {
    for (const int64_t tokens : {2048, 100, 33}) {
      options.max_num_seqs = seqs;
      options.max_batched_tokens = tokens;
      const auto engine = make_engine(options, {.blocks = 128, .checkpoints = 32});
      Client client(*engine);
      for (const char* pass : {"cold", "prefix hit"}) {
        std::vector<size_t> index;
        for (size_t i = 0; i < kRequests; ++i) index.push_back(client.start(request(i)));
        for (size_t i = 0; i < kRequests; ++i) {
          EXPECT_EQ(test::bitwise_difference(client.wait(index[i]), want[i]), "")
              << pass << ", request " << i << ", " << seqs << " sequences, " << tokens << " tokens a step";
        }
      }
      EXPECT_GT(engine->stats().cached_tokens_total, 0);
    }
  }
}

// A priority request among 64 queued ones is next.
TEST_F(Cache, APriorityRequestAmongSixtyFourQueuedOnesIsNext) {
  const auto engine = make_engine({.max_model_len = 1024, .max_num_seqs = 1}, {.blocks = 32, .checkpoints = 4});
  Client client(*engine);
  const size_t running = client.start(make_request(text(1, 100), 400));
  client.wait_for_tokens(running, 1);
  for (size_t i = 0; i < 64; ++i) client.start(make_request(text(500 + i, 20), 2));
  Request urgent = make_request(text(600, 20), 2);
  urgent.priority = -1;
  const size_t next = client.start(std::move(urgent));
  EXPECT_EQ(client.wait_any(), running);
  EXPECT_EQ(client.wait_any(), next);
  for (size_t i = 0; i < 64; ++i) EXPECT_EQ(client.wait_any(), i + 1) << "first come, first served";
}

}  // namespace
}  // namespace moat
