// SPDX-License-Identifier: Apache-2.0
// Agent traffic on a real model: many conversations at once with histories that grow, pools that hold a quarter of them,
// so that prefixes are restored, evicted, and sequences preempted all the time; and every reply is the one that the
// request gets alone, without cache. Histories are scripted (agent_trace.h): what a turn was answered does not change
// the next one's prompt, so one difference does not spread.
//
// In deterministic mode ids and log-probabilities are equal to the last bit. In the default form prompts are cut where
// something was restored, which rounds differently: at the first differing token of a reply the two candidates are apart
// by less than kRounding, and so is every log-probability before.
//
// Environment: MOAT_TRAFFIC=full for 40 conversations of 12 turns (default: 10 of 6); MOAT_TRAFFIC_MODEL, a checkpoint
// (default: models/moat-nano); MOAT_TRAFFIC_TOKENS, the longest history; MOAT_TRAFFIC_COMPARED, how many requests, drawn
// at random, are also computed alone (default: all).
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <numeric>
#include <thread>

#include "agent_trace.h"
#include "golden_file.h"
#include "traffic_run.h"

namespace moat {
namespace {

using test::Client;
using test::Closeness;
using test::Reply;

using Turn = test::AgentTrace::Turn;

constexpr double kRounding = 1e-3;

int64_t env_or(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

struct Size {
  std::string model;
  int64_t conversations = 0, turns = 0;
  int64_t max_tokens = 0;   // of a history
  int64_t num_seqs = 0;     // running at once
  int64_t num_batched = 0;  // tokens a step
  int64_t block_size = 0;
  int32_t long_reply = 0;  // several blocks
  int64_t compared = 0;    // requests computed alone as well
  bool preempts = false;   // pools so small that somebody has to go
};

Size wanted_size() {
  const char* mode = std::getenv("MOAT_TRAFFIC");
  const char* model = std::getenv("MOAT_TRAFFIC_MODEL");
  const bool full = mode != nullptr && std::string(mode) == "full";
  Size s{.model = model != nullptr ? model : test::source_dir() + "/models/moat-nano",
         .conversations = full ? 40 : 10,
         .turns = full ? 12 : 6,
         .max_tokens = env_or("MOAT_TRAFFIC_TOKENS", full ? 8192 : 800),
         .num_seqs = full ? 24 : 12,
         .num_batched = full ? 2048 : 512,
         .block_size = full ? 64 : 16,
         .long_reply = full ? 400 : 150,
         .preempts = !full};
  s.compared = env_or("MOAT_TRAFFIC_COMPARED", 1 << 30);
  return s;
}

// Allows the scripted reply and nothing else, so that the next turn goes on from what was really generated.
class Script final : public Constraint {
 public:
  explicit Script(const std::vector<int32_t>& ids) : ids_(ids) {}
  bool mask(std::span<uint32_t> allowed) override {
    std::fill(allowed.begin(), allowed.end(), 0U);
    const auto id = static_cast<size_t>(ids_[std::min(next_, ids_.size() - 1)]);
    allowed[id / 32] |= 1U << (id % 32);
    return true;
  }
  ConstraintVerdict accept(int32_t /*token_id*/) override {
    ++next_;
    return ConstraintVerdict::kContinue;
  }
  void rollback(int count) override { next_ -= static_cast<size_t>(count); }

 private:
  const std::vector<int32_t>& ids_;
  size_t next_ = 0;
};

// One choice of one turn: a request that can be made as often as it is wanted.
struct Ask {
  const Turn* turn = nullptr;
  int choice = 0;
  bool scripted = false;
  SamplingParams sampling;

  Request request() const {
    Request r;
    r.prompt_ids = turn->prompt_ids;
    r.message_ends = turn->message_ends;
    r.sampling = sampling;
    if (scripted) r.constraint = std::make_unique<Script>(turn->reply_ids);
    return r;
  }
};

// Only then does the gap between two candidates say how near they were; of the others, all log-probabilities do.
bool is_plainly_greedy(const SamplingParams& s) { return s.temperature == 0 && s.presence_penalty == 0; }

class Traffic : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    auto loaded = load_model(size_.model, {}, pool_);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    loaded_ = std::move(loaded).value();
    trace_ = test::make_agent_trace({.conversations = static_cast<int>(size_.conversations),
                                     .turns = static_cast<int>(size_.turns),
                                     .max_history_tokens = size_.max_tokens,
                                     .reply_tokens = 16,
                                     .vocab_size = static_cast<int32_t>(loaded_->config.vocab_size)});
    make_questions();
    for (size_t i = 0; i < trace_.turns.size(); ++i) {
      add_asks(trace_.turns[i]);
      if (i % 3 == 1) asks_.push_back(long_reply_to(questions_[i / 3]));
    }
  }

  // Beside the agents: short prompts with long replies. They are admitted into small gaps and then grow, for which
  // somebody has to go.
  void make_questions() {
    questions_.resize(trace_.turns.size() / 3 + 1);
    for (size_t i = 0; i < questions_.size(); ++i) {
      Turn& q = questions_[i];
      q.conversation = -1 - static_cast<int>(i);
      q.prompt_ids = test::text(900 + i % 3, 20 + static_cast<int64_t>(i % 7) * 11, loaded_->config.vocab_size);
      q.max_tokens = size_.long_reply;
    }
  }

  Ask long_reply_to(const Turn& question) const {
    Ask ask{.turn = &question};
    ask.sampling.temperature = question.conversation % 2 == 0 ? 1.0F : 0.0F;
    ask.sampling.seed = static_cast<uint64_t>(-question.conversation);
    ask.sampling.max_tokens = question.max_tokens;
    ask.sampling.ignore_eos = true;
    ask.sampling.num_logprobs = SamplingParams::kMaxLogprobs;
    return ask;
  }

  // A third of the conversations get the scripted replies. Of the others most turns are greedy; some are sampled, some
  // asked for twice, some penalised.
  void add_asks(const Turn& turn) {
    const int i = turn.conversation * 31 + turn.turn;
    Ask ask{.turn = &turn, .scripted = turn.conversation % 3 == 0};
    SamplingParams& s = ask.sampling;
    s.temperature = i % 4 == 1 && !ask.scripted ? 1.0F : 0.0F;
    s.seed = static_cast<uint64_t>(i) * 1000;
    s.max_tokens = turn.max_tokens;
    s.ignore_eos = true;
    s.num_logprobs = SamplingParams::kMaxLogprobs;
    if (i % 6 == 3) {
      s.presence_penalty = 0.4F;
      s.repetition_penalty = 1.05F;
    }
    asks_.push_back(ask);
    if (i % 8 != 1) return;
    ask.choice = 1;
    ++s.seed;
    asks_.push_back(ask);
  }

  int64_t blocks_of(int64_t tokens) const { return (tokens + size_.block_size - 1) / size_.block_size; }

  int32_t room_after(const Turn& turn) const {
    return static_cast<int32_t>(loaded_->config.max_position_embeddings - static_cast<int64_t>(turn.prompt_ids.size()));
  }

  EngineOptions options(bool deterministic) const {
    return {.max_model_len = std::min(size_.max_tokens + size_.long_reply, loaded_->config.max_position_embeddings),
            .max_num_seqs = size_.num_seqs,
            .max_batched_tokens = size_.num_batched,
            .max_queued = 1 << 20,
            .block_size = size_.block_size,
            .deterministic = deterministic};
  }

  // Indices of the asks that are computed alone as well, drawn at random.
  std::vector<size_t> draw_compared() const {
    std::vector<size_t> order(asks_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    Rng rng(1);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
    }
    order.resize(std::min(order.size(), static_cast<size_t>(size_.compared)));
    std::sort(order.begin(), order.end());
    return order;
  }

  std::vector<Reply> run_traffic(bool deterministic, EngineStats& stats);
  std::vector<Reply> run_alone(bool deterministic, const std::vector<size_t>& list);

  Size size_ = wanted_size();
  ThreadPool pool_{2};
  std::unique_ptr<LoadedModel> loaded_;
  test::AgentTrace trace_;
  std::vector<Turn> questions_;
  std::vector<Ask> asks_;  // in order of arrival; the choices of a turn together
};

// Turns in order of arrival, as many at a time as clients wait; a turn starts when every choice of the one before has
// ended. Beside them, requests that are cancelled at any stage.
std::vector<Reply> Traffic::run_traffic(bool deterministic, EngineStats& stats) {
  std::map<int, int64_t> final_tokens;  // of each conversation
  for (const Turn& t : trace_.turns) {
    int64_t& tokens = final_tokens[t.conversation];
    tokens = std::max(tokens, static_cast<int64_t>(t.prompt_ids.size()) + t.max_tokens);
  }
  int64_t total_blocks = 0;
  for (const auto& [conversation, tokens] : final_tokens) total_blocks += blocks_of(tokens);
  const int64_t longest = blocks_of(options(deterministic).max_model_len);
  const test::Pools pools{.blocks = std::max(total_blocks / 4, longest), .checkpoints = size_.conversations};
  fmt::print("  pools: {} of {} blocks of {}, {} checkpoints, {} sequences\n", pools.blocks, total_blocks,
             size_.block_size, pools.checkpoints, size_.num_seqs);
  std::fflush(stdout);
  const auto engine = test::make_engine(*loaded_, options(deterministic), pools, pool_);
  Client client(*engine);
  std::vector<Reply> replies(asks_.size());
  constexpr size_t kNobody = ~size_t{0};  // a request that will be cancelled
  std::vector<size_t> ask_of;             // by index of the client
  std::map<int, int> open;                // choices of a conversation that have not ended
  std::map<int, int> next_turn;
  std::vector<char> started(asks_.size(), 0);
  std::vector<std::pair<size_t, size_t>> to_cancel;  // index of the client, when so many have ended
  size_t num_open = 0;
  size_t num_ended = 0;
  const auto start = [&](size_t a) {
    started[a] = 1;
    ++open[asks_[a].turn->conversation];
    ++num_open;
    ask_of.push_back(a);
    client.start(asks_[a].request());
  };
  const auto start_what_may = [&] {
    for (size_t a = 0; a < asks_.size() && num_open < static_cast<size_t>(2 * size_.num_seqs); ++a) {
      const Turn& turn = *asks_[a].turn;
      if (started[a] || open[turn.conversation] > 0 || turn.turn != next_turn[turn.conversation]) continue;
      for (size_t b = a; b < asks_.size() && asks_[b].turn == &turn; ++b) start(b);
      if (a % 11 != 5) continue;
      Request r = asks_[a].request();
      r.constraint = nullptr;
      r.sampling.max_tokens = std::min(size_.long_reply, room_after(*asks_[a].turn));
      ask_of.push_back(kNobody);
      to_cancel.emplace_back(client.start(std::move(r)), num_ended + a % 13);
    }
  };
  start_what_may();
  while (num_open > 0) {
    const size_t index = client.wait_any();
    const size_t a = ask_of[index];
    if (a == kNobody) continue;
    --num_open;
    ++num_ended;
    std::erase_if(to_cancel, [&](const auto& entry) {
      if (num_ended < entry.second) return false;
      client.cancel(entry.first);
      return true;
    });
    replies[a] = client.wait(index);
    const Turn& turn = *asks_[a].turn;
    if (--open[turn.conversation] == 0) ++next_turn[turn.conversation];
    start_what_may();
  }
  engine->drain(std::chrono::steady_clock::now() + std::chrono::minutes(10));
  stats = engine->stats();
  EXPECT_EQ(num_ended, asks_.size());
  return replies;
}

// Each of these by itself, without cache. Two engines with a thread each share the list.
std::vector<Reply> Traffic::run_alone(bool deterministic, const std::vector<size_t>& list) {
  EngineOptions alone = options(deterministic);
  alone.max_num_seqs = 1;
  alone.prefix_cache = false;
  std::vector<Reply> replies(list.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    ThreadPool pool(1);
    const auto engine = test::make_engine(*loaded_, alone, {.blocks = blocks_of(alone.max_model_len)}, pool);
    Client client(*engine);
    for (size_t i = next++; i < list.size(); i = next++) {
      replies[i] = client.ask(asks_[list[i]].request());
      if (i % 50 != 49) continue;
      fmt::print("  {} of {} alone\n", i + 1, list.size());
      std::fflush(stdout);
    }
  };
  std::thread other(work);
  work();
  other.join();
  return replies;
}

TEST_P(Traffic, EveryReplyIsThatOfTheRequestAlone) {
  using Clock = std::chrono::steady_clock;
  const bool deterministic = GetParam();
  const auto seconds = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  int64_t longest = 0;
  for (const Ask& a : asks_) longest = std::max(longest, static_cast<int64_t>(a.turn->prompt_ids.size()));
  fmt::print("{}, {}: {} conversations, {} requests, prompts up to {} tokens\n", size_.model,
             deterministic ? "deterministic" : "default form", size_.conversations, asks_.size(), longest);
  const auto start = Clock::now();
  EngineStats stats;
  const std::vector<Reply> replies = run_traffic(deterministic, stats);
  fmt::print(
      "  traffic: {:.1f} s, {} steps; {} of {} prompt tokens cached ({:.1f} %), {} preemptions; checkpoints: {} saved, "
      "{} restored, {} evicted; {} cancelled, {} errors\n",
      seconds(start), stats.steps_total, stats.cached_tokens_total, stats.prompt_tokens_total,
      100.0 * static_cast<double>(stats.cached_tokens_total) / static_cast<double>(stats.prompt_tokens_total),
      stats.preemptions_total, stats.checkpoints_saved_total, stats.checkpoints_restored_total,
      stats.checkpoints_evicted_total, stats.cancelled_total, stats.errors_total);
  std::fflush(stdout);
  EXPECT_GT(stats.cached_tokens_total, 0);
  EXPECT_TRUE(stats.preemptions_total > 0 || !size_.preempts);
  EXPECT_GT(stats.checkpoints_evicted_total, 0);
  EXPECT_EQ(stats.errors_total, 0);
  EXPECT_EQ(stats.blocks_used + stats.slots_used, 0);

  const auto alone_start = Clock::now();
  const std::vector<size_t> compared = draw_compared();
  const std::vector<Reply> alone = run_alone(deterministic, compared);
  const double alone_seconds = seconds(alone_start);
  int64_t differing = 0;
  int64_t prompt_tokens = 0;
  int64_t hits = 0;
  double deviation = 0;
  double gap = 0;
  for (size_t done = 0; done < compared.size(); ++done) {
    const size_t a = compared[done];
    const Reply& want = alone[done];
    ASSERT_EQ(want.finish, FinishReason::kLength) << want.error.message();
    const Reply& got = replies[a];
    const std::string what =
        fmt::format("conversation {}, turn {}, choice {}: {} prompt tokens, {} cached", asks_[a].turn->conversation,
                    asks_[a].turn->turn, asks_[a].choice, got.num_prompt_tokens, got.num_cached_tokens);
    prompt_tokens += want.num_prompt_tokens;
    hits += got.num_cached_tokens > 0;
    const Closeness c = test::compare_closely(got, want);
    deviation = std::max(deviation, c.deviation);
    if (deterministic) {
      const std::string difference = test::bitwise_difference(got, want);
      differing += !difference.empty();
      EXPECT_EQ(difference, "") << what;
    } else {
      differing += c.differs;
      EXPECT_EQ(got.finish, want.finish) << what << ": " << got.error.message();
      EXPECT_LT(c.deviation, kRounding) << what;
      if (c.differs && is_plainly_greedy(asks_[a].sampling)) {
        EXPECT_LT(c.gap, kRounding) << what << ", token " << c.common;
        gap = std::max(gap, c.gap);
      }
    }
  }
  fmt::print(
      "  alone: {} of {} requests ({} of them restored a prefix), {} prompt tokens, {:.1f} s; {} replies differ, gap "
      "at most {:.2g}, log-probabilities "
      "deviate by {:.2g} at most\n",
      compared.size(), asks_.size(), hits, prompt_tokens, alone_seconds, differing, gap, deviation);
}

INSTANTIATE_TEST_SUITE_P(Forms, Traffic, ::testing::Values(true, false),
                         [](const auto& form) { return form.param ? "Deterministic" : "Default"; });

}  // namespace
}  // namespace moat
