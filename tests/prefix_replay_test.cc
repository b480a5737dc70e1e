// SPDX-License-Identifier: Apache-2.0
// Is default_eviction_score better than the policies of the books? Agent traces go through the real scheduler and ledger
// without a model (the scripted replies are the answers), once for each policy, and the share of prompt tokens that
// were restored is compared. Prints the table.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent_trace.h"
#include "engine/scheduler.h"

namespace moat::test {
namespace {

constexpr int64_t kBlockSize = 64;
constexpr int64_t kConcurrent = 4;  // requests at the same time
constexpr uint64_t kHashSeed = 1;

// Bytes of a state, in tokens of the paged cache.
constexpr int64_t kK3SlotTokens = 15'700;
constexpr int64_t kNanoSlotTokens = 233;

struct Pool {
  int64_t num_blocks = 0;
  int64_t num_checkpoints = 0;  // slots besides those of running sequences
  int64_t slot_tokens = 0;
};

class Replay {
 public:
  Replay(const AgentTrace& trace, const Pool& pool, EvictionScore score)
      : trace_(trace),
        restored_(trace.turns.size()),
        scheduler_(
            {.max_num_seqs = kConcurrent, .max_model_len = AgentTraceOptions{}.max_history_tokens},
            {.block_size = kBlockSize, .num_blocks = pool.num_blocks, .num_slots = kConcurrent + pool.num_checkpoints},
            {.hash_seed = kHashSeed, .token_bytes = 1, .slot_bytes = pool.slot_tokens, .score = std::move(score)}) {}

  // Turns in order of arrival, each when the one before it of its conversation has ended.
  const Replay& run() {
    while (num_arrived_ < trace_.turns.size() || !scheduler_.idle()) {
      while (num_arrived_ < trace_.turns.size() && may_arrive()) arrive();
      step();
    }
    scheduler_.check_invariants();
    return *this;
  }

  size_t num_admitted() const { return num_arrived_ - static_cast<size_t>(scheduler_.num_waiting()); }
  const std::vector<int64_t>& restored() const { return restored_; }  // [turns], tokens
  const CacheLedger& ledger() const { return scheduler_.ledger(); }
  double hit_rate() const {
    const SchedulerStats& stats = scheduler_.stats();
    return static_cast<double>(stats.cached_prompt_tokens) / static_cast<double>(stats.admitted_prompt_tokens);
  }

 private:
  bool may_arrive() const {
    const int conversation = trace_.turns[num_arrived_].conversation;
    return static_cast<int64_t>(live_.size()) < kConcurrent &&
           std::ranges::none_of(live_, [&](size_t turn) { return trace_.turns[turn].conversation == conversation; });
  }

  void arrive() {
    const AgentTrace::Turn& turn = trace_.turns[num_arrived_];
    Request request;
    request.prompt_ids = turn.prompt_ids;
    request.message_ends = turn.message_ends;
    request.sampling.max_tokens = turn.max_tokens;
    scheduler_.add(static_cast<SequenceId>(num_arrived_), std::move(request));
    live_.push_back(num_arrived_++);
  }

  void step() {
    StepPlan plan;
    std::vector<SequenceEvent> events;
    scheduler_.schedule(plan, events);
    StepResult result;
    for (size_t i = 0; i < plan.sequences.size(); ++i) {
      if (!plan.wants_token[i]) continue;
      const SequenceId id = plan.sequences[i];
      StepResult::Row& row = result.rows.emplace_back();
      row.sequence = id;
      row.tokens.emplace_back().token_id =
          trace_.turns[id].reply_ids[static_cast<size_t>(scheduler_.num_generated(id))];
    }
    scheduler_.advance(plan, result, events);
    for (const SequenceEvent& e : events) {
      if (e.event.finish == FinishReason::kNone) continue;
      restored_[e.sequence] = e.event.num_cached_tokens;
      std::erase(live_, static_cast<size_t>(e.sequence));
    }
  }

  const AgentTrace& trace_;
  std::vector<int64_t> restored_;
  Scheduler scheduler_;
  size_t num_arrived_ = 0;
  std::vector<size_t> live_;  // turns that have arrived and not ended
};

double lru(const CheckpointFacts& f) { return -static_cast<double>(f.age); }
// Of those that were used as often, the oldest goes.
double lfu(const CheckpointFacts& f) { return static_cast<double>(f.hits) - 1e-9 * static_cast<double>(f.age); }
// Cao and Irani, "Cost-aware WWW proxy caching algorithms", 1997: H = L + cost / size.
double greedy_dual_size(const CheckpointFacts& f) {
  return f.inflation + static_cast<double>(f.saved_tokens) / static_cast<double>(f.bytes);
}
// Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency caching policy", 1998.
double greedy_dual_size_frequency(const CheckpointFacts& f) {
  return f.inflation +
         static_cast<double>(f.hits + 1) * static_cast<double>(f.saved_tokens) / static_cast<double>(f.bytes);
}

// Knows what the trace will ask for. After Belady: what is used last goes first; a slot also by what its checkpoint
// saves. No bound, since checkpoints differ in size and depend on each other; the unlimited pool is one.
class Clairvoyant {
 public:
  // `restored` by an unlimited pool: the checkpoints that are worth having.
  Clairvoyant(const AgentTrace& trace, std::vector<int64_t> restored) : restored_(std::move(restored)) {
    for (size_t turn = 0; turn < trace.turns.size(); ++turn) {
      KeyChain chain(root_key(kHashSeed, 0, ""), kBlockSize);
      chain.extend(trace.turns[turn].prompt_ids);
      for (const BlockKey& key : chain.keys()) uses_[key].push_back(turn);
    }
  }

  double score(const CheckpointFacts& f, size_t now) const {
    const auto it = uses_.find(f.key);
    if (it == uses_.end()) return 0;
    // A use that a later checkpoint of the same prefix serves better counts little.
    const auto next = std::ranges::lower_bound(it->second, now);
    const auto best = std::find_if(next, it->second.end(), [&](size_t turn) { return restored_[turn] == f.tokens; });
    const auto per_turn = [&](auto use) {
      return use == it->second.end() ? 0.0 : 1.0 / static_cast<double>(1 + *use - now);
    };
    if (f.scarce == Scarce::kBlocks) return per_turn(next);
    return static_cast<double>(f.saved_tokens) * (per_turn(best) + 1e-3 * per_turn(next));
  }

 private:
  std::unordered_map<BlockKey, std::vector<size_t>, BlockKeyHash> uses_;  // turns whose prompts start so
  std::vector<int64_t> restored_;
};

struct HitRates {
  double lru = 0, lfu = 0, gds = 0, gdsf = 0, ours = 0, clairvoyant = 0, unlimited = 0;
  double best_of_books() const { return std::max({lru, lfu, gds, gdsf}); }
};

// Which of the two pools is short.
enum class Shape {
  kShares,     // both hold the same share of what an unlimited pool would: blocks run out first
  kEqualBytes  // slots take as many bytes as blocks (plan/capacity.h); few of Kimi K3's, so that they run out first
};

class TraceReplays {
 public:
  explicit TraceReplays(uint64_t seed)
      : trace_(make_agent_trace({.seed = seed})),
        unlimited_(trace_, {.num_blocks = 60'000, .num_checkpoints = 20'000, .slot_tokens = 1}, lru),
        clairvoyant_(trace_, unlimited_.run().restored()) {
    EXPECT_EQ(unlimited_.ledger().evicted_total(), 0);
  }

  HitRates run(Shape shape, int64_t slot_tokens, int64_t parts) const {
    Pool pool{.num_blocks = unlimited_.ledger().blocks_cached() / parts, .slot_tokens = slot_tokens};
    pool.num_checkpoints = shape == Shape::kShares ? unlimited_.ledger().checkpoints() / parts
                                                   : pool.num_blocks * kBlockSize / slot_tokens;
    const auto rate = [&](const EvictionScore& score) { return Replay(trace_, pool, score).run().hit_rate(); };
    const Replay* current = nullptr;
    Replay seeing(trace_, pool,
                  [&](const CheckpointFacts& f) { return clairvoyant_.score(f, current->num_admitted()); });
    current = &seeing;
    return {.lru = rate(lru),
            .lfu = rate(lfu),
            .gds = rate(greedy_dual_size),
            .gdsf = rate(greedy_dual_size_frequency),
            .ours = rate(default_eviction_score),
            .clairvoyant = seeing.run().hit_rate(),
            .unlimited = unlimited_.hit_rate()};
  }

 private:
  AgentTrace trace_;
  Replay unlimited_;
  Clairvoyant clairvoyant_;
};

TEST(PrefixReplay, DefaultScoreBeatsTheBooks) {
  struct Row {
    const char* name;
    Shape shape;
    int64_t slot_tokens;
  };
  const Row rows[] = {{"K3, few blocks", Shape::kShares, kK3SlotTokens},
                      {"K3, few slots", Shape::kEqualBytes, kK3SlotTokens},
                      {"nano, few blocks", Shape::kShares, kNanoSlotTokens}};
  fmt::print("{:17} {:>4} {:>4} {:>7} {:>7} {:>7} {:>7} {:>7} {:>11} {:>9}\n", "pool", "part", "seed", "LRU", "LFU",
             "GDS", "GDSF", "ours", "clairvoyant", "unlimited");
  for (const uint64_t seed : {1, 2, 3}) {
    const TraceReplays replays(seed);
    for (const int64_t parts : {2, 4, 8}) {
      if (seed != 1 && parts != 4) continue;
      for (const Row& row : rows) {
        const HitRates r = replays.run(row.shape, row.slot_tokens, parts);
        fmt::print("{:17}  1/{} {:4} {:7.4f} {:7.4f} {:7.4f} {:7.4f} {:7.4f} {:11.4f} {:9.4f}\n", row.name, parts, seed,
                   r.lru, r.lfu, r.gds, r.gdsf, r.ours, r.clairvoyant, r.unlimited);
        // The promise is of this trace and a quarter. Elsewhere luck may take away a turn, up to 0.004 of all tokens seen.
        EXPECT_GE(r.ours, r.best_of_books() - (seed == 1 && parts == 4 ? 0.0 : 0.005)) << row.name << ", 1/" << parts;
        EXPECT_LE(r.ours, r.unlimited);
        EXPECT_LE(r.clairvoyant, r.unlimited);
      }
    }
  }
}

// A request in the queue is known future: what came after its checkpoint goes first.
TEST(PrefixReplay, WaitingRequestsKeepTheirPrefixes) {
  Scheduler scheduler({.max_num_seqs = 1, .max_model_len = 2 * kBlockSize},
                      {.block_size = kBlockSize, .num_blocks = 20, .num_slots = 4}, {.score = lru});
  std::map<SequenceId, int32_t> restored;
  const auto add = [&](SequenceId id, int32_t text) {
    Request request;
    request.prompt_ids.assign(static_cast<size_t>(kBlockSize + 1), text);
    request.sampling.max_tokens = 1;
    scheduler.add(id, std::move(request));
  };
  const auto run = [&] {
    while (!scheduler.idle()) {
      StepPlan plan;
      std::vector<SequenceEvent> events;
      scheduler.schedule(plan, events);
      StepResult result;
      if (plan.wants_token.at(0)) result.rows.push_back({.sequence = plan.sequences[0], .tokens = {{}}});
      scheduler.advance(plan, result, events);
      for (const SequenceEvent& e : events) restored[e.sequence] = e.event.num_cached_tokens;
    }
  };
  for (const int32_t text : {1, 2, 3}) {  // one checkpoint each: slots are out
    add(static_cast<SequenceId>(text), text);
    run();
  }
  add(4, 4);  // replaces one of them, while the next one waits
  add(5, 1);
  run();
  EXPECT_EQ(restored.at(5), kBlockSize);
  add(6, 2);
  run();
  EXPECT_EQ(restored.at(6), 0);
}

}  // namespace
}  // namespace moat::test
