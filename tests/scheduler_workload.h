// SPDX-License-Identifier: Apache-2.0
// Random workloads for the scheduler, with a model of the caches' contents beside it: arrivals with shared prefixes and
// follow-up turns, cancels, timeouts, priorities, n > 1, failing rows, flushes, drafts, plans made one step ahead. Every
// choice comes from a Source, so that a seed or a fuzzer's bytes decide. Shared by scheduler_test and the fuzz target. A
// broken promise aborts with its number:
//   D1  every request ends exactly once, and nothing comes after its end.
//   D2  a plan has at most max_batched_tokens rows, and gives each sequence its own next tokens at their positions.
//   D3  the state slot of a sequence holds the state after exactly the tokens before its first row.
//   D4  the blocks of a sequence hold the rows of exactly the tokens before its first row.
//   D5  no two sequences of a plan have the same slot, and no plan copies to or from a slot that a sequence computes in,
//       other than its own.
//   D6  while a request is live and nothing is in flight, a plan is not empty.
//   D7  when all have ended nothing is held; after a flush nothing is cached.
//   D8  prefixes are shared only within a salt and between two flushes (D3 and D4 see it: the model's contents differ).
//   D9  a request whose time is over gets no further token once nothing of it is in flight.
//   D10 cancel ends a request at the next schedule() at which nothing of it is in flight.
//   D11 drafts come after the last token of a sequence alone, within the plan's room; the states take a row for each token
//       that was kept, and none of the drafts that were not.
//   D12 accepted drafts are counted once, by position and in all.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/rng.h"
#include "base/status.h"
#include "engine/scheduler.h"
#include "model/forward.h"

namespace moat::test {

// Where the choices come from.
class Source {
 public:
  virtual ~Source() = default;
  virtual int64_t below(int64_t n) = 0;  // in [0, n)
  virtual bool exhausted() const { return false; }
  bool one_in(int64_t n) { return below(n) == 0; }
};

class RandomSource final : public Source {
 public:
  explicit RandomSource(uint64_t seed) : rng_(seed) {}
  int64_t below(int64_t n) override { return rng_.below(n); }

 private:
  Rng rng_;
};

// The bytes decide; when they are used up, a generator that they seeded lets the workload end as it would in life.
class ByteSource final : public Source {
 public:
  ByteSource(const uint8_t* data, size_t size) : data_(data), size_(size) {
    for (size_t i = 0; i < size; ++i) seed_ = seed_ * 31 + data[i];
    rng_ = Rng(seed_);
  }
  int64_t below(int64_t n) override {
    if (exhausted()) return rng_.below(n);
    uint64_t value = next();
    if (n > 256) value = value << 8 | next();
    return static_cast<int64_t>(value % static_cast<uint64_t>(n));
  }
  bool exhausted() const override { return at_ >= size_; }

 private:
  uint64_t next() { return at_ < size_ ? data_[at_++] : 0; }
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
  uint64_t seed_ = 1;
  Rng rng_{1};
};

struct WorkloadCounts {
  int64_t steps = 0, requests = 0, preemptions = 0, hits = 0, cached_tokens = 0, saves = 0, evictions = 0, timeouts = 0,
          cancels = 0, errors = 0, flushes = 0, rounds = 0, drafted = 0, accepted = 0, saves_in_rounds = 0;
  void add(const WorkloadCounts& o) {
    steps += o.steps;
    requests += o.requests;
    preemptions += o.preemptions;
    hits += o.hits;
    cached_tokens += o.cached_tokens;
    saves += o.saves;
    evictions += o.evictions;
    timeouts += o.timeouts;
    cancels += o.cancels;
    errors += o.errors;
    flushes += o.flushes;
    rounds += o.rounds;
    drafted += o.drafted;
    accepted += o.accepted;
    saves_in_rounds += o.saves_in_rounds;
  }
};

class SchedulerWorkload {
 public:
  explicit SchedulerWorkload(Source& source) : source_(source) {
    options_ = {.max_num_seqs = 1 + source.below(8),
                .max_batched_tokens = 1 + source.below(200),
                .max_model_len = kMaxLen,
                .eos_token_id = kEos,
                .max_step_seconds = source.one_in(3) ? 0.01 : 0.0,
                .seconds_per_priority = static_cast<double>(source.below(20)),
                .checkpoint_interval = source.one_in(3) ? 0 : 1 + source.below(100),
                .checkpoint_gap = source.below(80),
                .deterministic = source.one_in(2)};
    sizes_.block_size = 1 + source.below(24);
    const int64_t longest = (kMaxLen + sizes_.block_size - 1) / sizes_.block_size;
    sizes_.num_blocks =
        longest + source.below(source.one_in(2) ? longest : 3 * longest);  // often less than the running sequences want
    sizes_.num_slots = options_.max_num_seqs + source.below(10);
    ledger_ = {.prefix_cache = !source.one_in(8), .hash_seed = 7};
    lag_ = source.one_in(3) ? 1 : 0;
    max_drafts_ = source.one_in(2) ? source.below(9) : 0;
    cost_ = {
        .rows_seconds = {{1, 0.001}, {100, 0.02}}, .seconds_per_decode_pair = 1e-5, .seconds_per_prefill_pair = 1e-6};
    if (max_drafts_ > 0) sizes_.verify_rows = 1 + source.below(60);
    scheduler_.emplace(options_, sizes_, ledger_);
    rows_.assign(static_cast<size_t>(sizes_.num_blocks * sizes_.block_size), kPoison);
    states_.assign(static_cast<size_t>(sizes_.num_slots), kPoison);
    for (auto& document : documents_) {
      for (int i = 0; i < 150; ++i) document.push_back(static_cast<int32_t>(source.below(kVocab)));
    }
  }

  // `arrivals` steps with arrivals, then until everything has ended.
  void run(int64_t arrivals) {
    for (int64_t step = 0; step < arrivals && !source_.exhausted(); ++step) {
      act();
      one_step();
    }
    int64_t left = 200'000;
    while (!scheduler_->idle() || !flying_.empty()) {
      MOAT_CHECK(--left > 0, "D6: the workload does not end: {}", scheduler_->describe());
      one_step();
    }
    const CacheLedger& ledger = scheduler_->ledger();
    MOAT_CHECK(ledger.blocks_used() == 0 && ledger.slots_used() == 0, "D7: {}", scheduler_->describe());
    for (const auto& [id, client] : clients_) MOAT_CHECK(client.ended, "D1: request {} never ended", id);
    scheduler_->flush_cache();
    scheduler_->check_invariants();
    MOAT_CHECK(ledger.blocks_cached() == 0 && ledger.checkpoints() == 0, "D7: {}", scheduler_->describe());
    counts_.preemptions = scheduler_->stats().preemptions;
    counts_.saves = ledger.saved_total();
    counts_.hits = ledger.restored_total();
    counts_.evictions = ledger.evicted_total();
    counts_.cached_tokens = scheduler_->stats().cached_prompt_tokens;
    counts_.rounds = scheduler_->stats().draft_rounds;
    counts_.drafted = scheduler_->stats().drafted_tokens;
    counts_.accepted = scheduler_->stats().accepted_tokens;
    const std::vector<int64_t>& at = scheduler_->stats().accepted_at;
    MOAT_CHECK(std::accumulate(at.begin(), at.end(), int64_t{0}) == counts_.accepted,
               "D12: accepted drafts by position are not {}", counts_.accepted);
  }
  const WorkloadCounts& counts() const { return counts_; }

 private:
  static constexpr int64_t kMaxLen = 260;
  static constexpr int32_t kVocab = 50;
  static constexpr int32_t kEos = 9;
  static constexpr uint64_t kPoison = 0xDEADBEEFDEADBEEFULL;

  struct Client {
    std::vector<int32_t> tokens;  // prompt, then what came
    uint64_t start = 0;           // of the model's contents: salt and flushes
    std::vector<uint64_t> hashes;
    size_t num_prompt = 0;
    int32_t max_tokens = 0;
    double deadline = 0;
    bool cancelled = false;
    bool ended = false;
    int in_flight = 0;
  };

  static uint64_t step_hash(uint64_t before, int32_t token) {
    uint64_t x = (before ^ static_cast<uint64_t>(token + 1)) * 0x9E3779B97F4A7C15ULL;
    return x ^ (x >> 29);
  }
  // Contents after each token: [i] after i tokens.
  static const std::vector<uint64_t>& contents(Client& client) {
    std::vector<uint64_t>& hashes = client.hashes;
    if (hashes.empty()) hashes.push_back(client.start);
    while (hashes.size() <= client.tokens.size()) {
      hashes.push_back(step_hash(hashes.back(), client.tokens[hashes.size() - 1]));
    }
    return hashes;
  }

  // Things that clients do between steps.
  void act() {
    now_ += 0.001 * static_cast<double>(source_.below(10));
    if (source_.one_in(4)) {
      for (int64_t n = source_.one_in(6) ? 1 + source_.below(4) : 1; n > 0; --n) add_request(n > 1);
    }
    if (source_.one_in(25) && next_id_ > 1) {
      const auto id = static_cast<SequenceId>(1 + source_.below(static_cast<int64_t>(next_id_ - 1)));
      if (!clients_.at(id).ended) {
        scheduler_->cancel(id);
        clients_.at(id).cancelled = true;
      }
    }
    if (source_.one_in(400)) {
      scheduler_->flush_cache();
      ++flushes_;
      ++counts_.flushes;
    }
  }

  void add_request(bool again) {
    Request r;
    if (again && !last_prompt_.empty()) {
      r.prompt_ids = last_prompt_;  // n > 1
    } else if (source_.one_in(2) && next_id_ > 1) {
      // A follow-up turn: what an earlier request has so far, and a little more.
      const auto id = static_cast<SequenceId>(1 + source_.below(static_cast<int64_t>(next_id_ - 1)));
      r.prompt_ids = clients_.at(id).tokens;
    } else {
      const auto& document = documents_[static_cast<size_t>(source_.below(3))];
      r.prompt_ids.assign(document.begin(), document.begin() + source_.below(static_cast<int64_t>(document.size())));
    }
    const auto mark = static_cast<int32_t>(r.prompt_ids.size());
    if (!again) {
      for (int64_t n = 1 + source_.below(source_.one_in(3) ? 120 : 12); n > 0; --n) {
        r.prompt_ids.push_back(static_cast<int32_t>(source_.below(kVocab)));
      }
    }
    r.sampling.max_tokens = static_cast<int32_t>(1 + source_.below(source_.one_in(2) ? 200 : 20));
    const auto longest = static_cast<size_t>(kMaxLen - r.sampling.max_tokens);
    if (r.prompt_ids.size() > longest) r.prompt_ids.resize(longest);
    if (r.prompt_ids.empty()) r.prompt_ids.push_back(1);
    last_prompt_ = r.prompt_ids;
    if (mark > 0 && mark < static_cast<int32_t>(r.prompt_ids.size())) r.message_ends = {mark};
    r.message_ends.push_back(static_cast<int32_t>(r.prompt_ids.size()));
    r.priority = static_cast<int32_t>(source_.below(3)) - 1;
    r.restore_prefix = !source_.one_in(10);
    r.speculative = !source_.one_in(10);
    if (source_.one_in(5)) r.cache_salt = "tenant";
    if (source_.one_in(12)) r.timeout_seconds = 0.001 * static_cast<double>(1 + source_.below(400));

    Client& client = clients_[next_id_];
    client.tokens = r.prompt_ids;
    client.num_prompt = r.prompt_ids.size();
    client.max_tokens = r.sampling.max_tokens;
    client.start = step_hash(step_hash(1, static_cast<int32_t>(flushes_)), r.cache_salt.empty() ? 0 : 1);
    client.deadline = r.timeout_seconds > 0 ? now_ + r.timeout_seconds : 1e300;
    scheduler_->add(next_id_++, std::move(r), now_);
    ++counts_.requests;
  }

  // One schedule(), then advance() of the plan made `lag_` steps ago.
  void one_step() {
    now_ += 0.001;
    StepPlan plan;
    std::vector<SequenceEvent> events;
    const int64_t max_drafts = max_drafts_ > 0 && !source_.one_in(4) ? source_.below(max_drafts_ + 1) : 0;
    scheduler_->schedule(plan, events, now_, cost_, {.max_drafts = max_drafts});
    take(events);
    for (auto it = clients_.find(live_first_); it != clients_.end(); ++it) {
      const auto& [id, client] = *it;
      MOAT_CHECK(client.ended || client.in_flight > 0 || !client.cancelled, "D10: request {} lives on", id);
      MOAT_CHECK(client.ended || client.in_flight > 0 || now_ < client.deadline, "D9: request {} lives on", id);
    }
    while (live_first_ < next_id_ && clients_.at(live_first_).ended) ++live_first_;
    MOAT_CHECK(!plan.empty() || !flying_.empty() || scheduler_->idle(), "D6: nothing goes on: {}",
               scheduler_->describe());
    const bool flies = !plan.empty();
    if (flies) {
      flying_.push_back({plan, compute(plan)});
      ++counts_.steps;
    }
    if (flying_.size() > static_cast<size_t>(lag_) || (!flies && !flying_.empty())) {
      const auto [done, result] = std::move(flying_.front());
      flying_.pop_front();
      for (const SequenceId id : done.sequences) --clients_.at(id).in_flight;
      commit(scheduler_->advance(done, result, events));
      take(events);
    }
    scheduler_->check_invariants();
  }

  // The states take verified rows, around the checkpoints that fall among them.
  void commit(const StateCommits& commits) {
    const auto state = [&](int32_t slot) -> uint64_t& { return states_.at(static_cast<size_t>(slot)); };
    for (const StateCommits::Entry& e : commits.entries) {
      counts_.saves_in_rounds += e.rows_to_save > 0;
      const std::vector<uint64_t>& records = records_.at(e.sequence);
      MOAT_CHECK(state(e.slot) == records.at(0), "D3: request {} is not committed onto its own state", e.sequence);
      MOAT_CHECK(0 <= e.rows_to_save && e.rows_to_save <= e.rows && e.rows < static_cast<int32_t>(records.size()),
                 "D11: {} and {} rows of {}", e.rows_to_save, e.rows, records.size() - 1);
      state(e.slot) = records[static_cast<size_t>(e.rows_to_save)];
    }
    for (const StateCopy& copy : commits.saves) state(copy.to) = state(copy.from);
    for (const StateCommits::Entry& e : commits.entries) {
      state(e.slot) = records_.at(e.sequence)[static_cast<size_t>(e.rows)];
    }
  }

  // What the devices would do with a plan, on the model's contents.
  StepResult compute(const StepPlan& plan) {
    const auto state = [&](int32_t slot) -> uint64_t& { return states_.at(static_cast<size_t>(slot)); };
    std::set<int32_t> slots;
    int64_t rows = 0;
    for (const int32_t slot : plan.state_slots) MOAT_CHECK(slots.insert(slot).second, "D5: slot {} twice", slot);
    for (const StateCopy& copy : plan.restores) {
      MOAT_CHECK(!slots.contains(copy.from) || copy.from != copy.to, "D5: slot {} onto itself", copy.from);
      state(copy.to) = state(copy.from);
    }
    StepResult result;
    size_t token = 0;
    for (size_t i = 0; i < plan.sequences.size(); ++i) {
      Client& client = clients_.at(plan.sequences[i]);
      ++client.in_flight;
      const auto first = static_cast<size_t>(plan.first_positions[i]);
      const auto count = static_cast<size_t>(plan.num_tokens[i]);
      const std::vector<uint64_t>& hashes = contents(client);
      MOAT_CHECK(count >= 1 && first + count <= client.tokens.size(), "D2: rows {} + {} of {} tokens", first, count,
                 client.tokens.size());
      MOAT_CHECK((static_cast<int64_t>(i) < plan.num_decode_seqs) ==
                     (options_.deterministic || plan.num_tokens[i] < kPrefillMinTokens),
                 "D2: sequence {} has the wrong form", i);
      const int32_t* table = plan.block_tables.data() + i * static_cast<size_t>(plan.max_blocks);
      const auto row_of = [&](size_t position) -> uint64_t& {
        const auto block_size = static_cast<size_t>(sizes_.block_size);
        return rows_.at(static_cast<size_t>(table[position / block_size]) * block_size + position % block_size);
      };
      for (size_t p = 0; p < first; ++p) {
        MOAT_CHECK(row_of(p) == hashes[p + 1], "D4: row {} of request {} holds something else", p, plan.sequences[i]);
      }
      if (first > 0) {
        MOAT_CHECK(state(plan.state_slots[i]) == hashes[first], "D3: the state of request {} at {} is another's",
                   plan.sequences[i], first);
      }
      for (size_t p = first; p < first + count; ++p, ++token) {
        MOAT_CHECK(plan.token_ids.at(token) == client.tokens[p], "D2: token {} of request {}", p, plan.sequences[i]);
        row_of(p) = hashes[p + 1];
      }
      MOAT_CHECK(plan.num_drafts[i] == 0 || (plan.wants_token[i] && plan.num_tokens[i] == 1),
                 "D11: drafts of a prefill");
      const auto drafts = static_cast<size_t>(source_.below(plan.num_drafts[i] + 1));
      std::vector<uint64_t>& records = records_[plan.sequences[i]];
      records = {hashes[first], hashes[first + count]};
      std::vector<int32_t> drafted;
      for (size_t d = 0; d < drafts; ++d) {
        drafted.push_back(source_.one_in(60) ? kEos : static_cast<int32_t>(10 + source_.below(kVocab - 10)));
        records.push_back(step_hash(records.back(), drafted.back()));
        row_of(first + 1 + d) = records.back();
      }
      if (drafts == 0) state(plan.state_slots[i]) = hashes[first + count];
      rows += static_cast<int64_t>(count) + plan.num_drafts[i];
      MOAT_CHECK(plan.wants_token[i] == (first + count == client.tokens.size()), "D2: wants_token");
      if (!plan.wants_token[i]) continue;
      StepResult::Row row{.sequence = plan.sequences[i]};
      row.num_drafts = static_cast<int32_t>(drafts);
      drafted.resize(static_cast<size_t>(source_.below(static_cast<int64_t>(drafts) + 1)));  // accepted
      drafted.push_back(source_.one_in(300) ? kEos : static_cast<int32_t>(10 + source_.below(kVocab - 10)));
      for (const int32_t id : drafted) row.tokens.emplace_back().token_id = id;
      if (source_.one_in(600)) {
        row.tokens.clear();
        row.error = "not finite";
      }
      result.rows.push_back(std::move(row));
    }
    MOAT_CHECK(rows <= options_.max_batched_tokens, "D2: {} rows, at most {}", rows, options_.max_batched_tokens);
    for (const StateCopy& copy : plan.saves) {
      MOAT_CHECK(slots.contains(copy.from) && !slots.contains(copy.to), "D5: {} is saved to {}", copy.from, copy.to);
      state(copy.to) = state(copy.from);
    }
    return result;
  }

  void take(std::vector<SequenceEvent>& events) {
    for (const SequenceEvent& e : events) {
      Client& client = clients_.at(e.sequence);
      MOAT_CHECK(!client.ended, "D1: an event of request {} after its end", e.sequence);
      for (const SampledToken& token : e.event.tokens) client.tokens.push_back(token.token_id);
      const auto generated = static_cast<int64_t>(client.tokens.size() - client.num_prompt);
      MOAT_CHECK(generated <= client.max_tokens, "D1: {} of {} tokens", generated, client.max_tokens);
      client.ended = e.event.finish != FinishReason::kNone;
      counts_.timeouts += e.event.finish == FinishReason::kTimeout;
      counts_.cancels += e.event.finish == FinishReason::kCancelled;
      counts_.errors += e.event.finish == FinishReason::kError;
    }
    events.clear();
  }

  struct Flying {
    StepPlan plan;
    StepResult result;
  };

  Source& source_;
  SchedulerOptions options_;
  CacheSizes sizes_;
  LedgerOptions ledger_;
  StepCost cost_;
  int64_t lag_ = 0;
  int64_t max_drafts_ = 0;
  std::optional<Scheduler> scheduler_;
  std::vector<uint64_t> rows_;                           // [blocks * block_size], contents of the MLA cache
  std::vector<uint64_t> states_;                         // [slots]
  std::map<SequenceId, std::vector<uint64_t>> records_;  // states before and after each row of the last step
  std::vector<int32_t> documents_[3];
  std::vector<int32_t> last_prompt_;
  std::map<SequenceId, Client> clients_;
  std::deque<Flying> flying_;
  SequenceId next_id_ = 1;
  SequenceId live_first_ = 1;  // all before it have ended
  uint64_t flushes_ = 0;
  double now_ = 0;
  WorkloadCounts counts_;
};

}  // namespace moat::test
