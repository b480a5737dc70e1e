// SPDX-License-Identifier: Apache-2.0
// Scheduler, runner and drafter together, on a model of a few kilobytes whose drafts are accepted as far as a test wants:
// replies, states, checkpoints and drafts against those of decoding without drafts. Traps carry the numbers of
// docs/design/dspark.md section 7.
#include <bit>
#include <cmath>
#include <set>

#include "drafted_engine.h"
#include "engine/ngram_drafter.h"
#include "golden_file.h"

namespace moat {
namespace {

using test::Answer;
using test::Ask;
using test::DraftedEngine;
using test::greedy_to;
using test::Ids;
using test::random_text;
using test::seeded_to;

test::TinyModels& models() {
  static test::TinyModels both;
  return both;
}

// Small steps and blocks, and the same bits whatever was cached and how prompts were cut.
DraftedEngine::Setup setup(EngineOptions options = {}) {
  if (options.max_model_len == 0) options.max_model_len = 512;
  options.max_num_seqs = 16;
  options.max_batched_tokens = 256;
  options.block_size = options.block_size == 64 ? 16 : options.block_size;
  options.deterministic = true;
  return {.options = options};
}

// Rounds with 0 .. 7 right drafts, by where they begin.
int64_t varied(int64_t size) { return Rng(static_cast<uint64_t>(size)).below(8); }

Ids joined(const Ids& a, const Ids& b) {
  Ids all = a;
  all.insert(all.end(), b.begin(), b.end());
  return all;
}

std::vector<Ask> varied_asks(uint64_t first, size_t count, int32_t max_tokens) {
  std::vector<Ask> asks;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t name = first + i;
    asks.push_back({.prompt = random_text(name, 3 + static_cast<int64_t>(name * 7 % 50)),
                    .sampling = seeded_to(max_tokens, name)});
  }
  return asks;
}

// --- draft cache and prefix cache ---

// Two turns of some conversations: what is restored does not depend on whether there are drafts.
TEST(Trap, T17_T19_TheSameIsRestoredAndItIsTheSame) {
  std::vector<Ask> first = varied_asks(10, 6, 50);
  std::vector<Answer> replies[2], again[2], second[2];
  test::StateMap states[2];
  for (const int64_t drafts : {0, 7}) {
    DraftedEngine engine(models(), setup());
    engine.drafter().right = varied;
    engine.drafter().texts = {};
    const size_t i = drafts > 0 ? 1 : 0;
    if (drafts > 0) engine.learn(first, replies[0]);
    replies[i] = engine.run(first, drafts);
    test::StateMap cold = std::exchange(engine.states, {});
    again[i] = engine.run(first, drafts);  // the same prompts, restored
    EXPECT_GT(test::expect_same_states(engine.states, cold, "the same prompt again"), 20);
    std::vector<Ask> turns = first;
    for (size_t k = 0; k < turns.size(); ++k) {
      turns[k].prompt = joined(joined(turns[k].prompt, replies[i][k].tokens), random_text(90 + k, 9));
    }
    if (drafts > 0) engine.learn(turns, second[0]);
    second[i] = engine.run(turns, drafts);
    states[i] = std::move(cold);
    for (const auto& [tokens, bits] : engine.states) states[i][tokens] = bits;
    for (size_t k = 0; k < first.size(); ++k) EXPECT_EQ(again[i][k].tokens, replies[i][k].tokens);
  }
  EXPECT_GT(test::expect_same_states(states[1], states[0], "with drafts"), 60);
  int64_t cached = 0;
  for (size_t k = 0; k < first.size(); ++k) {
    EXPECT_EQ(again[1][k], again[0][k]) << k;
    EXPECT_EQ(second[1][k], second[0][k]) << k << ": " << second[1][k].cached << " and " << second[0][k].cached;
    cached += second[0][k].cached;
  }
  EXPECT_GT(cached, 6 * 32);
}

// Sliding windows, whose ring would have to travel with the state, are refused.
TEST(Trap, T20_SlidingWindowsAreRefused) {
  const auto config = parse_dspark_config(test::with(test::flat_draft_config(), "use_sliding_window", true));
  ASSERT_FALSE(config.ok());
  EXPECT_NE(config.status().message().find("sliding windows"), std::string::npos) << config.status().message();
}

// What a drafter proposes after the same tokens, whatever happened to the caches before; a round may have asked for fewer.
// Returns how many that were.
int64_t expect_same_drafts(const std::map<Ids, Ids>& got, const std::map<Ids, Ids>& want) {
  int64_t common = 0;
  for (const auto& [tokens, drafts] : got) {
    const auto other = want.find(tokens);
    if (other == want.end()) continue;
    ++common;
    const auto count = static_cast<std::ptrdiff_t>(std::min(drafts.size(), other->second.size()));
    EXPECT_TRUE(std::equal(drafts.begin(), drafts.begin() + count, other->second.begin()))
        << "after " << tokens.size() << " tokens";
  }
  return common;
}

// Conversations in a pool that they fill, whose prefixes come and go: replies, drafts and accepted tokens are those of
// an engine without prefix cache and with room for all.
TEST(Trap, T21_T22_T74_DraftsSurviveEvictionAndMisses) {
  DraftedEngine::Setup roomy = setup({.prefix_cache = false});
  roomy.with_drafter = true;
  DraftedEngine reference(models(), roomy);
  DraftedEngine::Setup small = setup();
  small.with_drafter = true;
  small.num_blocks = 40;
  small.num_slots = 16 + 5;
  DraftedEngine tight(models(), small);
  reference.drafter().right = tight.drafter().right = varied;
  constexpr size_t kConversations = 12;
  std::vector<Ids> history;
  for (size_t c = 0; c < kConversations; ++c) history.push_back(random_text(200 + c, 20 + static_cast<int64_t>(c)));
  int64_t restored = 0, missed = 0;
  for (int turn = 0; turn < 4; ++turn) {
    std::vector<Ask> asks;
    for (size_t c = 0; c < kConversations; ++c) {
      asks.push_back({.prompt = history[c], .sampling = seeded_to(24, 300 + c)});
    }
    const std::vector<Answer> plain = reference.run(asks, 0);
    reference.learn(asks, plain);
    tight.learn(asks, plain);
    const int64_t before = reference.scheduler().stats().accepted_tokens;
    const int64_t rounds_before = reference.scheduler().stats().draft_rounds;
    const std::vector<Answer> want = reference.run(asks, 4);
    EXPECT_GT(reference.scheduler().stats().draft_rounds, rounds_before);
    EXPECT_GT(reference.scheduler().stats().accepted_tokens, before);
    const std::vector<Answer> got = tight.run(asks, 4);
    for (size_t c = 0; c < kConversations; ++c) {
      EXPECT_EQ(got[c].tokens, plain[c].tokens) << "turn " << turn << ", conversation " << c;
      EXPECT_EQ(want[c].tokens, plain[c].tokens);
      if (turn > 0) (got[c].cached > 0 ? restored : missed) += 1;
      history[c] = joined(joined(history[c], plain[c].tokens), random_text(400 + c, 5));
    }
  }
  EXPECT_GT(expect_same_drafts(tight.drafter().seen, reference.drafter().seen), 200);
  EXPECT_GT(test::expect_same_states(tight.states, reference.states, "in the small pool"), 200);
  const double occupancy = static_cast<double>(tight.most_blocks) / 40;
  const CacheLedger& ledger = tight.scheduler().ledger();
  fmt::print("occupancy up to {:.0f} %, {} evictions, {} restores, {} of later turns missed, {} preemptions\n",
             100 * occupancy, ledger.evicted_total(), ledger.restored_total(), missed,
             tight.scheduler().stats().preemptions);
  EXPECT_GT(occupancy, 0.95);
  EXPECT_GT(ledger.evicted_total(), 0);
  EXPECT_GT(restored, 0);
  EXPECT_GT(missed, 0);
}

// Sequences end, join, are cancelled and refuse drafts in between: the others' drafts are those that they get alone.
TEST(Trap, T25_DraftsDoNotDependOnWhoElseIsThere) {
  DraftedEngine::Setup with_drafter = setup();
  with_drafter.with_drafter = true;
  DraftedEngine alone(models(), with_drafter), crowd(models(), with_drafter);
  alone.drafter().right = crowd.drafter().right = varied;
  std::vector<Ask> asks = varied_asks(500, 40, 0);
  for (size_t i = 0; i < asks.size(); ++i) {
    asks[i].sampling.max_tokens = static_cast<int32_t>(1 + i * 11 % 40);
    asks[i].restore = i % 3 != 0;
  }
  const std::vector<Answer> plain = alone.plain(asks);
  for (const Ask& ask : asks) alone.run({ask}, 4);
  crowd.learn(asks, plain);
  for (size_t i = 0; i < asks.size(); ++i) asks[i].speculative = i % 5 != 4;
  Rng rng(7);
  size_t next = 0;
  SequenceId last = 0;
  while (next < asks.size() || !crowd.scheduler().idle()) {
    if (next < asks.size() && rng.below(2) == 0) last = crowd.add(asks[next++]);
    if (rng.below(12) == 0 && last > 0) crowd.scheduler().cancel(1 + static_cast<SequenceId>(rng.below(int64_t(last))));
    crowd.step(rng.below(5));
  }
  EXPECT_EQ(crowd.scheduler().ledger().blocks_used(), 0);
  EXPECT_GT(expect_same_drafts(crowd.drafter().seen, alone.drafter().seen), 50);
  EXPECT_GT(test::expect_same_states(crowd.states, alone.states, "in a crowd"), 200);
}

// --- verification ---

// Allows every other token, by what came before; after `kMasked` tokens it is satisfied, and ends the reply some tokens
// later. Its state is a digest of what it has accepted.
class DigestConstraint final : public Constraint {
 public:
  static constexpr size_t kMasked = 9, kTail = 5;
  explicit DigestConstraint(Ids* accepted) : accepted_(accepted) { accepted_->clear(); }

  bool mask(std::span<uint32_t> allowed) override {
    if (accepted_->size() >= kMasked) return false;
    for (int32_t id = 0; id < test::kTinyVocab; ++id) {
      if ((digest() + static_cast<uint64_t>(id)) % 2 == 0) allowed[static_cast<size_t>(id) / 32] &= ~(1U << id % 32);
    }
    return true;
  }
  ConstraintVerdict accept(int32_t token_id) override {
    accepted_->push_back(token_id);
    return accepted_->size() >= kMasked + kTail ? ConstraintVerdict::kStop : ConstraintVerdict::kContinue;
  }
  void rollback(int count) override { accepted_->resize(accepted_->size() - static_cast<size_t>(count)); }

 private:
  uint64_t digest() const {
    uint64_t x = 1;
    for (const int32_t id : *accepted_) x = (x ^ static_cast<uint64_t>(id)) * 1099511628211ULL;
    return x >> 17;
  }
  Ids* accepted_;
};

TEST(Trap, T39_ConstraintsFollowTheDraftsAndComeBack) {
  DraftedEngine engine(models(), setup());
  for (uint64_t name = 0; name < 8; ++name) {
    Ids accepted;
    Ask ask{.prompt = random_text(600 + name, 12), .sampling = name % 2 == 0 ? greedy_to(64) : seeded_to(64, name)};
    ask.constraint = [&] { return std::make_unique<DigestConstraint>(&accepted); };
    const Answer plain = engine.plain({ask}).front();
    EXPECT_EQ(accepted, plain.tokens);
    EXPECT_EQ(plain.tokens.size(), DigestConstraint::kMasked + DigestConstraint::kTail);
    for (int64_t right = 0; right <= 7; ++right) {
      engine.drafter().right = [right](int64_t) { return right; };
      const Answer drafted = engine.run({ask}, 7).front();
      EXPECT_EQ(drafted.tokens, plain.tokens) << right << " right drafts a round";
      EXPECT_EQ(drafted.finish, FinishReason::kStop);
      EXPECT_EQ(accepted, plain.tokens) << "the constraint is not where the reply is";
    }
  }
}

// Ends a reply after so many tokens, as a stop string does.
class StopAfter final : public Constraint {
 public:
  explicit StopAfter(int64_t tokens) : tokens_(tokens) {}
  bool mask(std::span<uint32_t>) override { return false; }
  ConstraintVerdict accept(int32_t) override {
    return ++accepted_ >= tokens_ ? ConstraintVerdict::kStop : ConstraintVerdict::kContinue;
  }
  void rollback(int count) override { accepted_ -= count; }

 private:
  int64_t tokens_, accepted_ = 0;
};

// Every way to end at every place of a round: the reply, its reason, and what a second turn finds in the cache.
TEST(Trap, T48_NothingIsKeptBeyondTheEnd) {
  DraftedEngine plain(models(), setup()), drafted(models(), setup());
  int64_t cached = 0;
  const auto check = [&](const Ask& ask, const char* what, int64_t at) {
    const Answer want = plain.plain({ask}).front();
    Ask longer = ask;  // so that right drafts go on beyond the end
    longer.constraint = {};
    longer.sampling = seeded_to(40, ask.sampling.seed);
    drafted.drafter().texts.clear();
    drafted.learn({longer}, plain.run({longer}, 0));
    const Answer got = drafted.run({ask}, 7).front();
    EXPECT_EQ(got.tokens, want.tokens) << what << " " << at;
    EXPECT_EQ(got.finish, want.finish) << what << " " << at;
    const Ask turn{.prompt = joined(joined(ask.prompt, want.tokens), random_text(700, 20)), .sampling = greedy_to(3)};
    plain.states.clear();
    drafted.states.clear();
    const Answer after_want = plain.run({turn}, 0).front(), after_got = drafted.run({turn}, 0).front();
    EXPECT_EQ(after_got, after_want) << what << " " << at;
    EXPECT_GE(test::expect_same_states(drafted.states, plain.states, what), 2);
    cached += after_got.cached;
  };
  for (int64_t at = 1; at <= 10; ++at) {
    // The prompt ends anywhere in a block of 16, so that ends fall on both sides of its boundary.
    const Ids prompt = random_text(static_cast<uint64_t>(800 + at), 24 + at * 5 % 16);
    Ask ask{.prompt = prompt, .sampling = seeded_to(static_cast<int32_t>(at), static_cast<uint64_t>(at))};
    check(ask, "max_tokens", at);

    const Answer free =
        plain.run({{.prompt = prompt, .sampling = seeded_to(40, static_cast<uint64_t>(at))}}, 0).front();
    const int32_t id = free.tokens[static_cast<size_t>(at)];
    ask.sampling.max_tokens = 40;
    ask.sampling.stop_token_ids = {id};
    check(ask, "stop id", at);  // where it comes first
    ask.sampling.stop_token_ids = {};
    ask.constraint = [at] { return std::make_unique<StopAfter>(at); };
    check(ask, "stop string", at);
  }
  EXPECT_GT(cached, 0);
  // The model's own end, wherever it comes.
  std::set<size_t> lengths;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Ask ask{.prompt = random_text(900 + seed, 20), .sampling = seeded_to(12, seed)};
    ask.sampling.ignore_eos = false;
    const Answer want = plain.run({ask}, 0).front();
    if (want.finish != FinishReason::kStop || !lengths.insert(want.tokens.size()).second) continue;
    check(ask, "eos", static_cast<int64_t>(want.tokens.size()));
  }
  EXPECT_GE(lengths.size(), 4U);
}

// --- state ---

TEST(Trap, T50_T51_StatesAreThoseOfPlainDecoding) {
  DraftedEngine engine(models(), setup({.max_model_len = 2048}));
  const std::vector<Ask> asks = {{.prompt = random_text(1000, 30), .sampling = seeded_to(1900, 5)},
                                 {.prompt = random_text(1001, 17), .sampling = greedy_to(1000)}};
  const std::vector<Answer> plain = engine.plain(asks);
  const test::StateMap want = std::exchange(engine.states, {});
  engine.drafter().right = varied;
  engine.rounds.clear();
  const std::vector<Answer> drafted = engine.run(asks, 7);
  for (size_t i = 0; i < asks.size(); ++i) EXPECT_EQ(drafted[i].tokens, plain[i].tokens);
  EXPECT_GT(test::expect_same_states(engine.states, want, "with drafts"), 500);
  std::set<std::pair<int32_t, int32_t>> kinds(engine.rounds.begin(), engine.rounds.end());
  for (int32_t rows = 1; rows <= 8; ++rows) EXPECT_TRUE(kinds.contains({7, rows})) << rows << " rows were never kept";
  for (const auto& [drafts, rows] : kinds) EXPECT_LE(rows, drafts + 1);
}

// A loop is what drafts like best: a state that drifts would look like speed.
TEST(Trap, T53_LoopingTextIsThatOfPlainDecoding) {
  DraftedEngine engine(models(), setup());
  NgramDrafter ngram({});
  const Ids loop = {5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9, 10};
  for (const SamplingParams& sampling : {greedy_to(300), seeded_to(300, 3)}) {
    engine.states.clear();
    const Answer plain = engine.plain({{.prompt = loop, .sampling = sampling}}).front();
    const test::StateMap want = std::exchange(engine.states, {});
    const auto& text = engine.drafter().texts.back();
    engine.drafter().right = [&](int64_t size) {  // as far as the loop goes on
      const auto found = ngram.find(std::span(text).first(static_cast<size_t>(size)), 7);
      int64_t right = 0;
      while (right < static_cast<int64_t>(found.size()) && size + right < static_cast<int64_t>(text.size()) &&
             found[static_cast<size_t>(right)] == text[static_cast<size_t>(size + right)]) {
        ++right;
      }
      return right;
    };
    EXPECT_EQ(engine.run({{.prompt = loop, .sampling = sampling}}, 7).front().tokens, plain.tokens);
    EXPECT_GT(test::expect_same_states(engine.states, want, "in a loop"), 30);
  }
}

// The first round right after prefill, and block boundaries at every place of a round: the checkpoints of the reply.
TEST(Trap, T57_CheckpointsInsideARound) {
  std::set<int64_t> offsets;  // of a checkpoint in its round
  DraftedEngine engine(models(), setup({.block_size = 8}));
  for (int64_t prompt = 9; prompt <= 26; ++prompt) {
    engine.scheduler().flush_cache();
    const Ask ask{.prompt = random_text(1100, prompt), .sampling = seeded_to(40, 9), .restore = false};
    const std::vector<Answer> plain = engine.plain({ask});
    const test::StateMap want = std::exchange(engine.checkpoints, {});
    ASSERT_GE(want.size(), 4U);
    for (const int64_t right : {0, 3, 7}) {
      engine.scheduler().flush_cache();
      engine.drafter().right = [right](int64_t) { return right; };
      EXPECT_EQ(engine.run({ask}, 7), plain);
      EXPECT_EQ(engine.checkpoints.size(), want.size()) << prompt << " + rounds of " << right + 1;
      EXPECT_EQ(test::expect_same_states(engine.checkpoints, want, "checkpoint"),
                static_cast<int64_t>(engine.checkpoints.size()));
      for (const auto& [tokens, bits] : engine.checkpoints) {
        offsets.insert((static_cast<int64_t>(tokens.size()) - prompt) % (right + 1) + 10 * right);
      }
      engine.checkpoints.clear();
    }
  }
  for (int64_t at = 0; at < 8; ++at) EXPECT_TRUE(offsets.contains(70 + at)) << "never " << at << " rows into a round";
}

// --- scheduling, memory, platform ---

// As many rounds' tokens and verdicts, whatever the number of threads.
TEST(Trap, T44_T61_RoundsAreTheSameOnEveryThreadCount) {
  std::vector<std::map<Ids, Ids>> drafts;
  std::vector<std::vector<Answer>> answers;
  std::vector<std::vector<std::pair<int32_t, int32_t>>> rounds;
  const std::vector<Ask> asks = varied_asks(1200, 5, 30);
  for (const int threads : {1, 2, 3}) {
    test::TinyModels own(threads);
    DraftedEngine::Setup with_drafter = setup();
    with_drafter.with_drafter = true;
    DraftedEngine engine(own, with_drafter);
    engine.plain(asks);
    engine.drafter().right = varied;
    engine.drafter().seen.clear();
    engine.rounds.clear();
    answers.push_back(engine.run(asks, 4));
    drafts.push_back(engine.drafter().seen);
    rounds.push_back(engine.rounds);
  }
  for (size_t i = 1; i < answers.size(); ++i) {
    EXPECT_EQ(answers[i], answers[0]);
    EXPECT_EQ(drafts[i], drafts[0]);
    EXPECT_EQ(rounds[i], rounds[0]);
  }
  EXPECT_GT(rounds[0].size(), 20U);
}

// As many sequences as may run, each as long as it may become, and a step that is full.
TEST(Trap, T63_FullStepsAtTheEndOfTheContext) {
  DraftedEngine::Setup full = setup({.max_model_len = 128});
  full.with_drafter = true;
  DraftedEngine engine(models(), full);
  std::vector<Ask> asks;
  for (uint64_t i = 0; i < 16; ++i) {
    asks.push_back(
        {.prompt = random_text(1300 + i, 128 - 8 - static_cast<int64_t>(i % 8)), .sampling = seeded_to(1, i)});
    asks.back().sampling.max_tokens = 128 - static_cast<int32_t>(asks.back().prompt.size());
  }
  const std::vector<Answer> plain = engine.plain(asks);
  for (const Answer& answer : plain) EXPECT_EQ(answer.finish, FinishReason::kLength);
  for (const int64_t right : {0, 4, 7}) {
    engine.drafter().right = [right](int64_t) { return right; };
    for (const int64_t drafts : {4, 7}) {
      const std::vector<Answer> got = engine.run(asks, drafts);
      for (size_t i = 0; i < asks.size(); ++i) EXPECT_EQ(got[i].tokens, plain[i].tokens) << i;
    }
  }
}

// The memory of a step is planned for its worst mix: one sequence with many drafts makes the round wide for all, and the
// laws of all their drafts stay while the step is computed and judged.
TEST(Trap, T63_ManyShortRoundsBesideALongOne) {
  test::TinyModels wide(2, 1024, 7);
  EngineOptions options{.max_model_len = 64,
                        .max_num_seqs = 100,
                        .max_batched_tokens = 300,
                        .block_size = 16,
                        .memory_bytes = int64_t{1} << 30};
  options.drafter = wide.drafter.get();
  auto parts = make_engine_parts(*wide.target, options, wide.pool);
  ASSERT_TRUE(parts.ok()) << parts.status().message();
  Scheduler scheduler(parts->scheduler_options, parts->capacity.cache, parts->ledger_options);
  StepPlan plan;
  std::vector<SequenceEvent> events;
  for (SequenceId id = 1; id <= 100; ++id) {
    Request request;
    request.prompt_ids = random_text(id, 2);
    request.sampling = {.temperature = 1.0F, .seed = id, .seeded = false, .max_tokens = id == 1 ? 40 : 4};
    request.sampling.ignore_eos = true;
    scheduler.add(id, std::move(request));
  }
  size_t widest = 0;
  while (!scheduler.idle()) {
    scheduler.schedule(plan, events, 0, {}, {.max_drafts = 7});
    const auto drafting = static_cast<size_t>(
        std::count_if(plan.num_drafts.begin(), plan.num_drafts.end(), [](int32_t drafts) { return drafts > 0; }));
    widest = std::max(widest, drafting);
    parts->runner->commit(scheduler.advance(plan, parts->runner->run(plan, scheduler), events));
  }
  EXPECT_GT(widest, 30U);
  for (const SequenceEvent& e : events) EXPECT_NE(e.event.finish, FinishReason::kError) << e.event.error.message();
}

// Prompts around the edges of the kernels' buckets, in both forms of the attention leaves: no row too many.
TEST(Trap, T66_PromptsAroundBucketEdges) {
  DraftedEngine::Setup chunked = setup();
  chunked.options.deterministic = false;
  DraftedEngine engine(models(), chunked), exact(models(), setup());
  for (const int64_t length : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256}) {
    const Ask ask{.prompt = random_text(1400, length), .sampling = seeded_to(9, 1), .restore = false};
    engine.states.clear();
    exact.states.clear();
    exact.run({ask}, 0);
    engine.run({ask}, 0);
    const auto got = engine.states.find(ask.prompt), other = exact.states.find(ask.prompt);
    ASSERT_TRUE(got != engine.states.end() && other != exact.states.end()) << length;
    double worst = 0;
    for (size_t i = 0; i < got->second.size(); ++i) {
      const auto a = std::bit_cast<float>(got->second[i]), b = std::bit_cast<float>(other->second[i]);
      worst = std::max(worst, double{std::fabs(a - b)} / (1e-2 + double{std::fabs(b)}));
    }
    EXPECT_LT(worst, 1e-3) << length << " tokens";
  }
}

// To the last token that the context has, whatever the size of a block.
TEST(Trap, T71_ToTheEndOfTheContextWithEveryBlockSize) {
  for (const int64_t block : {1, 16, 128, 65}) {
    DraftedEngine::Setup s = setup({.max_model_len = 200});
    s.options.block_size = block;
    DraftedEngine engine(models(), s);
    Ask ask{.prompt = random_text(1500, 90), .sampling = seeded_to(110, 2)};
    const std::vector<Answer> plain = engine.plain({ask});
    EXPECT_EQ(plain[0].tokens.size(), 110U);
    for (const int64_t right : {0, 2, 7}) {
      engine.drafter().right = [right](int64_t) { return right; };
      EXPECT_EQ(engine.run({ask}, 7)[0].tokens, plain[0].tokens) << "blocks of " << block << ", " << right;
    }
  }
}

// What a round needs is known, by name, before the first request: here on a device that has no kernels at all.
TEST(Trap, T73_TheStartNamesEveryKernelThatIsMissing) {
  DraftedEngine::Setup s = setup();
  s.with_drafter = true;
  DraftedEngine engine(models(), s);
  const Arch gpu{.backend = Backend::kGpu, .name = "sm90", .level = "90", .lanes = 32};
  const auto dry =
      dry_run(*engine.parts().model, {.arch = gpu, .max_batched_tokens = 64, .max_num_seqs = 8, .max_model_len = 512},
              engine.parts().capacity.cache, models().pool, &engine.drafter());
  ASSERT_FALSE(dry.ok());
  for (const char* site : {"draft.fc", "draft.lm_head", "draft.markov_out", "draft.confidence", "kda.verify",
                           "kda.commit", "kda.conv_commit", "verify.match", "verify.accept"}) {
    EXPECT_NE(dry.status().message().find(site), std::string::npos) << site << " is not in " << dry.status().message();
  }
}

// Verification and drafting have kernels for one row and for eight, on every instruction set.
TEST(Trap, T73_T76_EverySiteHasAKernelOnEveryInstructionSet) {
  DraftedEngine::Setup s = setup();
  s.with_drafter = true;
  DraftedEngine engine(models(), s);
  const std::vector<std::string> isas = host_isas();
  for (const std::string& isa : isas) {
    ASSERT_TRUE(force_isa(isa).ok());
    const Arch arch = host_arch();
    const RunnerOptions options{.arch = arch, .max_batched_tokens = 64, .max_num_seqs = 8, .max_model_len = 512};
    const auto dry =
        dry_run(*engine.parts().model, options, engine.parts().capacity.cache, models().pool, &engine.drafter());
    ASSERT_TRUE(dry.ok()) << arch.name << ": " << dry.status().message();
    for (const int64_t rows : {1, 8, 64}) {
      std::set<std::string> sites;
      for (const KernelPlan::Entry& entry : dry->plan.entries(dry->plan.bucket_of(rows))) {
        EXPECT_GE(entry.chosen, 0) << entry.site;
        sites.insert(entry.site);
      }
      for (const char* site : {"kda.verify", "kda.q_conv_verify", "kda.commit", "kda.conv_commit", "verify.match",
                               "verify.accept", "draft.lm_head", "draft.fc"}) {
        // A step that verifies has two rows at least.
        const bool is_judging = std::string_view(site).starts_with("verify.");
        EXPECT_TRUE(sites.contains(site) || (rows == 1 && is_judging)) << site << " of " << rows << " rows";
      }
    }
  }
  ASSERT_TRUE(force_isa(isas.front()).ok());
}

// 1 to 64 sequences at once.
TEST(Trap, T75_ConcurrencyLadder) {
  EngineOptions options{.max_model_len = 128, .max_num_seqs = 64, .max_batched_tokens = 512, .block_size = 16};
  options.deterministic = true;
  DraftedEngine engine(models(), {.options = options, .with_drafter = true});
  const std::vector<Ask> asks = varied_asks(1600, 64, 12);
  const std::vector<Answer> plain = engine.plain(asks);
  engine.drafter().right = varied;
  for (size_t count = 1; count <= asks.size(); count *= 2) {
    const std::vector<Answer> got = engine.run({asks.begin(), asks.begin() + static_cast<int64_t>(count)}, 7);
    for (size_t i = 0; i < count; ++i) EXPECT_EQ(got[i].tokens, plain[i].tokens) << i << " of " << count;
  }
}

TEST(Trap, T80_NoDraftsMeansOffEverywhere) {
  EngineOptions options{.max_model_len = 128, .max_num_seqs = 2, .memory_bytes = int64_t{1} << 30};
  options.drafter = models().drafter.get();
  options.num_draft_tokens = 0;
  auto off = make_engine_parts(*models().target, options, models().pool);
  ASSERT_TRUE(off.ok()) << off.status().message();
  EXPECT_EQ(off->drafter, nullptr);
  EXPECT_EQ(off->draft_model, nullptr);
  EXPECT_FALSE(off->caches->draft_rows().is_set());
  EXPECT_FALSE(off->caches->view().kda_records.is_set());
  EXPECT_EQ(off->draft_length.demand(std::vector<DraftRecord>(4), 100, {}).max_drafts, 0);
  for (const KernelPlan::Entry& entry : off->runner->kernel_plan().entries(0)) {
    EXPECT_FALSE(entry.site.starts_with("draft.")) << entry.site;
  }
  // A single request that wants none.
  DraftedEngine engine(models(), setup());
  Ask ask{.prompt = random_text(1700, 20), .sampling = seeded_to(20, 1), .speculative = false};
  const std::vector<Answer> plain = engine.plain({ask});
  EXPECT_EQ(engine.run({ask}, 7)[0].tokens, plain[0].tokens);
  EXPECT_EQ(engine.scheduler().stats().draft_rounds, 0);
  EXPECT_TRUE(engine.rounds.empty());
}

// Every number of rows that verification may have: R sequences with l drafts each.
TEST(Trap, T82_EveryNumberOfVerifiedRowsIsPlanned) {
  EngineOptions options{.max_model_len = 128, .max_num_seqs = 8, .max_batched_tokens = 128, .block_size = 16};
  options.deterministic = true;
  DraftedEngine engine(models(), {.options = options, .with_drafter = true});
  const std::vector<Ask> asks = varied_asks(1800, 8, 24);
  const std::vector<Answer> plain = engine.plain(asks);
  engine.drafter().right = varied;
  for (size_t seqs = 1; seqs <= asks.size(); ++seqs) {
    for (int64_t drafts = 1; drafts <= 7; ++drafts) {
      const std::vector<Answer> got = engine.run({asks.begin(), asks.begin() + static_cast<int64_t>(seqs)}, drafts);
      for (size_t i = 0; i < seqs; ++i) EXPECT_EQ(got[i].tokens, plain[i].tokens) << seqs << " x " << drafts;
    }
  }
}

// --- the n-gram drafter ---

TEST(Ngram, RepetitivePromptsAreDraftedWell) {
  EngineOptions options{.max_model_len = 512, .max_num_seqs = 4, .block_size = 16, .memory_bytes = int64_t{1} << 30};
  options.ngram_drafter = true;
  options.num_draft_tokens = 5;
  options.deterministic = true;
  ThreadPool pool(2);
  auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, pool);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  auto parts = make_engine_parts(**loaded, options, pool);
  ASSERT_TRUE(parts.ok()) << parts.status().message();
  EXPECT_EQ(parts->drafter->max_drafts(), 5);
  Ids prompt;
  for (int repeat = 0; repeat < 6; ++repeat) {
    for (const int32_t id : {300, 417, 522, 610, 98, 1203, 44}) prompt.push_back(id);
  }
  const auto reply = [&](int64_t drafts, SchedulerStats& stats) {
    Scheduler scheduler(parts->scheduler_options, parts->capacity.cache, parts->ledger_options);
    Request request;
    request.prompt_ids = prompt;
    request.sampling = greedy_to(60);
    scheduler.add(1, std::move(request));
    Ids ids;
    StepPlan plan;
    std::vector<SequenceEvent> events;
    while (!scheduler.idle()) {
      scheduler.schedule(plan, events, 0, {}, {.max_drafts = drafts});
      parts->runner->commit(scheduler.advance(plan, parts->runner->run(plan, scheduler), events));
    }
    for (const SequenceEvent& e : events) {
      for (const SampledToken& t : e.event.tokens) ids.push_back(t.token_id);
    }
    stats = scheduler.stats();
    return ids;
  };
  SchedulerStats off, on;
  EXPECT_EQ(reply(5, on), reply(0, off));
  EXPECT_EQ(off.draft_rounds, 0);
  EXPECT_GT(on.draft_rounds, 0);
  EXPECT_GT(on.accepted_tokens, 0);
  fmt::print("{} of {} drafts accepted\n", on.accepted_tokens, on.drafted_tokens);
}

}  // namespace
}  // namespace moat
