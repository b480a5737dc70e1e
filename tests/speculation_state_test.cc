// SPDX-License-Identifier: Apache-2.0
// What verification of drafts leaves in the caches, from the parts themselves, on random weights of the true head sizes:
// taps, rows, records, commits, memory. Traps carry the numbers of docs/design/dspark.md section 7.
#include <sys/mman.h>

#include <array>
#include <cstring>

#include "base/rng.h"
#include "draft_harness.h"
#include "drafted_engine.h"
#include "golden_file.h"
#include "ops/kda_verify.h"
#include "plan/capacity.h"
#include "verify_run.h"

namespace moat {
namespace {

using test::Ids;
using test::VerifyRun;

ThreadPool& pool() {
  static ThreadPool threads(2);
  return threads;
}
const LoadedModel& small() {
  static const std::unique_ptr<LoadedModel> model = [] {
    auto loaded = load_model(test::golden_dir() + "/k3-random-small", {}, pool());
    MOAT_CHECK(loaded.ok(), "{}", loaded.status().message());
    return std::move(loaded).value();
  }();
  return *model;
}

Ids text(uint64_t name, int64_t count) {
  Rng rng(name);
  Ids ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(rng.below(500)));
  return ids;
}
Ids part(const Ids& ids, int64_t begin, int64_t end) { return {ids.begin() + begin, ids.begin() + end}; }

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Drafts after ids[at]: the first `right` as in `ids`, the others not.
Ids drafts_after(const Ids& ids, int64_t at, int64_t right, int64_t count) {
  Ids drafts;
  for (int64_t k = 1; k <= count; ++k) {
    const int32_t truth = ids[static_cast<size_t>(at + k) % ids.size()];
    drafts.push_back(k <= right ? truth : (truth + 17) % 500);
  }
  return drafts;
}

// --- taps ---

TEST(Trap, T06_TheLastTapIsTheMixtureOfTheOutputSide) {
  const int64_t layers = small().config.num_layers;
  const Ids prompt = text(1, 40);
  std::vector<std::vector<float>> mix(static_cast<size_t>(layers) + 1), hidden(static_cast<size_t>(layers));
  for (const TapStream stream : {TapStream::kAttnRes, TapStream::kPrefix}) {
    VerifyRun run(small(), pool(), 1, 64);
    run.tap_stream = stream;
    for (int32_t l = 0; l < layers; ++l) run.tap_layers.push_back(l);
    run.model().set_probe([&](const char* name, int64_t layer, const Tensor& value) {
      const auto keep = [&](std::vector<float>& to) {
        to.clear();
        for (int64_t r = 0; r < value.dim(0); ++r) to.insert(to.end(), value.row(r), value.row(r) + value.dim(1));
      };
      if (std::string_view(name) == "mix") keep(mix[static_cast<size_t>(layer)]);
      if (std::string_view(name) == "hidden" && layer >= 0) keep(hidden[static_cast<size_t>(layer)]);
    });
    run.step({{.ids = prompt}});
    const auto width = static_cast<size_t>(small().config.hidden_size);
    ASSERT_EQ(run.taps.size(), prompt.size() * static_cast<size_t>(layers) * width);
    for (size_t l = 0; l < static_cast<size_t>(layers); ++l) {
      // What the attention side of the next layer reads, or the output side; un-normed. Or the running sum.
      const std::vector<float>& want = stream == TapStream::kAttnRes ? mix[l + 1] : hidden[l];
      for (size_t t = 0; t < prompt.size(); ++t) {
        const float* got = run.taps.data() + (t * static_cast<size_t>(layers) + l) * width;
        ASSERT_EQ(std::memcmp(got, want.data() + t * width, width * sizeof(float)), 0) << "layer " << l;
      }
    }
    EXPECT_FALSE(same_bits(mix.back(), hidden.back())) << "the streams do not differ, so this shows nothing";
  }
}

// --- rows ---

// Logits of rows under verification are those of decoding, whatever stands beside them.
TEST(Trap, T41_T42_RowsDoNotDependOnTheirNumber) {
  constexpr int64_t kSeqs = 8;
  std::vector<Ids> texts;
  std::vector<VerifyRun::Rows> prompts;
  for (int64_t s = 0; s < kSeqs; ++s) {
    texts.push_back(text(100 + static_cast<uint64_t>(s), 40));
    prompts.push_back({s, part(texts.back(), 0, 20 + s)});
  }
  std::vector<std::vector<std::vector<float>>> want(kSeqs);  // [seq][row]
  VerifyRun single(small(), pool(), kSeqs, 64);
  for (int64_t s = 0; s < kSeqs; ++s) {
    single.step({prompts[static_cast<size_t>(s)]});
    for (int64_t r = 0; r < 8; ++r) {
      want[static_cast<size_t>(s)].push_back(single.step({{s, {texts[static_cast<size_t>(s)][20 + s + r]}}})[0]);
    }
  }
  // 1 .. 8 sequences with 0 .. 7 drafts each, equally many and not.
  for (int64_t seqs = 1; seqs <= kSeqs; ++seqs) {
    VerifyRun run(small(), pool(), kSeqs, 64);
    run.step({prompts.begin(), prompts.begin() + seqs});
    for (int64_t drafts = 0; drafts < 9; ++drafts) {
      std::vector<VerifyRun::Rows> rows;
      for (int64_t s = 0; s < seqs; ++s) {
        const Ids& ids = texts[static_cast<size_t>(s)];
        const int64_t count = drafts < 8 ? drafts : 1 + s % 7;
        if (drafts == 0) continue;  // would change the states
        rows.push_back({s, {ids[static_cast<size_t>(20 + s)]}, drafts_after(ids, 20 + s, 7, count)});
      }
      if (rows.empty()) continue;
      const VerifyRun::Logits got = run.step(rows);
      size_t next = 0;
      for (const VerifyRun::Rows& r : rows) {
        for (size_t k = 0; k <= r.drafts.size(); ++k) {
          ASSERT_TRUE(same_bits(got[next++], want[static_cast<size_t>(r.seq)][k]))
              << seqs << " sequences, " << r.drafts.size() << " drafts, row " << k << " of sequence " << r.seq;
        }
      }
    }
  }
}

// --- commits ---

struct Decoded {
  std::vector<uint32_t> state, tails;
};
// The states after each token of `ids` from `first` on, decoded one by one.
std::vector<Decoded> decode(const Ids& ids, int64_t first) {
  VerifyRun run(small(), pool(), 1, 128);
  run.step({{0, part(ids, 0, first)}});
  std::vector<Decoded> all = {{run.state(0), run.tails(0)}};
  for (size_t i = static_cast<size_t>(first); i < ids.size(); ++i) {
    run.step({{0, {ids[i]}}});
    all.push_back({run.state(0), run.tails(0)});
  }
  return all;
}

TEST(Trap, T50_CommitAfterVerifyIsDecoding) {
  const Ids ids = text(2, 48);
  for (const int64_t first : {1, 2, 3, 20, 33}) {  // shorter than the convolution, and in prefill form
    const std::vector<Decoded> want = decode(part(ids, 0, first + 9), first);
    for (int64_t accepted = 0; accepted <= 7; ++accepted) {
      VerifyRun run(small(), pool(), 1, 128);
      run.step({{0, part(ids, 0, first)}});
      run.step({{0, {ids[static_cast<size_t>(first)]}, drafts_after(ids, first, accepted, 7)}});
      EXPECT_EQ(run.state(0), want[0].state) << "verification itself changes the state";
      EXPECT_EQ(run.tails(0), want[0].tails);
      run.commit(0, static_cast<int32_t>(accepted) + 1);
      EXPECT_EQ(run.state(0), want[static_cast<size_t>(accepted) + 1].state) << first << " + " << accepted;
      EXPECT_EQ(run.tails(0), want[static_cast<size_t>(accepted) + 1].tails) << first << " + " << accepted;
    }
  }
}

// The bonus token has no row: whatever the records hold after the accepted ones is not read.
TEST(Trap, T49_CommitReadsNoRowOfTheBonusToken) {
  const Ids ids = text(3, 32);
  const std::vector<Decoded> want = decode(part(ids, 0, 29), 20);
  for (int64_t accepted = 0; accepted <= 7; ++accepted) {
    VerifyRun run(small(), pool(), 1, 128);
    run.step({{0, part(ids, 0, 20)}});
    run.step({{0, {ids[20]}, drafts_after(ids, 20, accepted, 7)}});
    for (const Tensor& records : {run.view().kda_records, run.view().conv_records}) {
      for (int64_t l = 0; l < records.dim(0); ++l) {
        for (int64_t r = run.first_record(0) + accepted + 1; r < records.dim(1); ++r) {
          const Tensor row = records.at(l).at(r);
          std::fill_n(row.f32(), row.count(), std::numeric_limits<float>::quiet_NaN());
        }
      }
    }
    run.commit(0, static_cast<int32_t>(accepted) + 1);
    EXPECT_EQ(run.state(0), want[static_cast<size_t>(accepted) + 1].state) << accepted;
    EXPECT_EQ(run.tails(0), want[static_cast<size_t>(accepted) + 1].tails) << accepted;
  }
}

// What was rejected leaves nothing behind, and a state may be verified against many times before it is committed to.
TEST(Trap, T50_RejectedSuffixesLeaveNothingBehind) {
  const Ids ids = text(4, 40);
  const std::vector<Decoded> want = decode(part(ids, 0, 24), 20);
  std::vector<std::vector<float>> after;
  for (const int32_t offset : {1, 99, 250}) {
    VerifyRun run(small(), pool(), 1, 128);
    run.step({{0, part(ids, 0, 20)}});
    for (int repeat = 0; repeat < 2; ++repeat) {
      Ids drafts = drafts_after(ids, 20, 7, 7);
      for (size_t k = 3; k < drafts.size(); ++k) drafts[k] = (drafts[k] + offset + repeat) % 500;
      run.step({{0, {ids[20]}, drafts}});
    }
    run.commit(0, 4);
    EXPECT_EQ(run.state(0), want[4].state) << offset;
    EXPECT_EQ(run.tails(0), want[4].tails) << offset;
    // Rows of the paged cache that the rejected drafts wrote are written over before they are read.
    after.push_back(run.step({{0, {ids[24]}}})[0]);
    EXPECT_TRUE(same_bits(after.back(), after.front())) << offset;
  }
}

// Thousands of tokens, none of them forgotten or counted twice.
TEST(Trap, T51_LongGenerationsKeepTheStateOfPlainDecoding) {
  constexpr int64_t kTokens = 2500;
  const Ids ids = text(5, kTokens + 16);
  VerifyRun plain(small(), pool(), 1, kTokens + 16), drafted(small(), pool(), 1, kTokens + 16);
  plain.step({{0, part(ids, 0, 8)}});
  drafted.step({{0, part(ids, 0, 8)}});
  Rng rng(6);
  while (drafted.computed(0) < kTokens) {
    const int64_t at = drafted.computed(0);
    const int64_t count = 1 + rng.below(7), right = rng.below(count + 1);
    drafted.step({{0, {ids[static_cast<size_t>(at)]}, drafts_after(ids, at, right, count)}});
    drafted.commit(0, static_cast<int32_t>(right) + 1);
  }
  while (plain.computed(0) < drafted.computed(0)) plain.step({{0, {ids[static_cast<size_t>(plain.computed(0))]}}});
  EXPECT_EQ(drafted.state(0), plain.state(0));
  EXPECT_EQ(drafted.tails(0), plain.tails(0));
  const Ids next = {ids[static_cast<size_t>(plain.computed(0))]};
  EXPECT_TRUE(same_bits(drafted.step({{0, next}})[0], plain.step({{0, next}})[0]));
}

// One formula of the decay: the record is what the pass itself used, and the commit has no gate of its own.
TEST(Trap, T52_RecordsHoldTheDecayThatWasUsed) {
  constexpr int64_t kRows = 5, kHeads = 2, kDim = 128;
  test::Floats q({kRows, kHeads, kDim}, 0.1, 1), k({kRows, kHeads, kDim}, 0.1, 2), v({kRows, kHeads, kDim}, 1.0, 3),
      g({kRows, kHeads, kDim}, 0.5, 4), beta({kRows, kHeads}, 1.0, 5), states({1, kHeads, kDim, kDim}, 0.1, 6),
      out({kRows, kHeads, kDim}, 0, 7), records({kRows, kHeads, kda_record_width(kDim)}, 0, 8);
  for (float& decay : g.values) decay = -std::fabs(decay);
  const std::vector<int32_t> cu = {0, kRows}, slots = {0}, positions = {7};
  Arena arena(size_t{16} << 20);
  SingleRank comm;
  Exec exec({.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool(), .arena = &arena, .comm = &comm});
  kda_verify(exec, "verify",
             {.rows = {.out = out.tensor,
                       .q = q.tensor,
                       .k = k.tensor,
                       .v = v.tensor,
                       .g = g.tensor,
                       .beta_logits = beta.tensor,
                       .states = states.tensor,
                       .seqs = {.cu_seqlens = cu, .slots = slots, .first_positions = positions}},
              .records = records.tensor});
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* record = records.tensor.at(r).at(h).f32();
      const auto same = [&](const test::Floats& x, int64_t part) {
        return std::memcmp(record + part * kDim, x.tensor.at(r).at(h).f32(), kDim * sizeof(float)) == 0;
      };
      EXPECT_TRUE(same(k, 0) && same(v, 1) && same(g, 2)) << "row " << r << ", head " << h;
      EXPECT_EQ(record[3 * kDim], beta.values[static_cast<size_t>(r * kHeads + h)]);
    }
  }
  // In a whole step the gate is computed at one site, for rows of every kind.
  test::TinyModels models;
  test::DraftedEngine engine(models, {.options = {.max_model_len = 64, .max_num_seqs = 2, .max_batched_tokens = 64}});
  int gates = 0, commits = 0;
  for (const KernelPlan::Entry& entry : engine.parts().runner->kernel_plan().entries(0)) {
    gates += std::string_view(entry.op) == "kda_gate";
    commits += std::string_view(entry.op) == "kda_commit";
  }
  EXPECT_EQ(gates, 1);
  EXPECT_EQ(commits, 1);
}

// Windows of the convolution after T verified rows are those of T decoded ones, T = 1 .. 16.
TEST(Trap, T54_ConvolutionsGoOnFromWhatWasCommitted) {
  const Ids ids = text(7, 48);
  const std::vector<Decoded> want = decode(part(ids, 0, 37), 20);
  for (int32_t rows = 1; rows <= 16; ++rows) {
    VerifyRun run(small(), pool(), 1, 128);
    run.step({{0, part(ids, 0, 20)}});
    run.step({{0, {ids[20]}, drafts_after(ids, 20, 15, 15)}});
    run.commit(0, rows);
    ASSERT_EQ(run.tails(0), want[static_cast<size_t>(rows)].tails) << rows;
    run.step({{0, {ids[static_cast<size_t>(20 + rows)]}}});
    EXPECT_EQ(run.tails(0), want[static_cast<size_t>(rows) + 1].tails) << rows;
    EXPECT_EQ(run.state(0), want[static_cast<size_t>(rows) + 1].state) << rows;
  }
}

// What is saved of a sequence is everything that it goes on from.
TEST(Trap, T55_ACheckpointIsTheWholeState) {
  const ModelConfig& config = small().config;
  VerifyRun run(small(), pool(), 2, 64);
  const CacheView& view = run.caches().view();
  const int64_t per_slot = 4 * (view.kda_state.count() + view.kda_conv.count()) / view.kda_state.dim(1);
  EXPECT_EQ(slot_bytes(config), per_slot);
  EXPECT_GT(view.kda_conv.count(), 0);
  const Ids ids = text(8, 32);
  run.step({{0, part(ids, 0, 20)}});
  run.step({{1, part(text(9, 20), 0, 20)}});
  const std::vector<uint32_t> state = run.state(0), tails = run.tails(0);
  EXPECT_NE(run.tails(1), tails);
  const std::vector<StateCopy> copies = {{.from = 1, .to = 0}, {.from = 0, .to = 2}};
  run.caches().copy_states(copies, pool());
  EXPECT_EQ(run.state(1), state);
  EXPECT_EQ(run.tails(1), tails);
}

TEST(TrapDeathTest, T56_ACommitNeedsTheRecordsOfThisStep) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  test::TinyModels models;
  test::DraftedEngine engine(models, {.options = {.max_model_len = 64, .max_num_seqs = 2, .max_batched_tokens = 64}});
  const StateCommits stale{.entries = {{.sequence = 1, .slot = 0, .rows = 2}}, .saves = {}};
  EXPECT_DEATH(engine.parts().runner->commit(stale), "");
  engine.parts().runner->commit({});  // nothing was drafted: nothing to do
}

// --- memory ---

TEST(Trap, T59_NoTwoPoolsOverlap) {
  test::TinyModels models;
  auto made = make_engine_parts(
      *models.target,
      {.max_model_len = 256, .max_num_seqs = 4, .memory_bytes = int64_t{1} << 30, .drafter = models.drafter.get()},
      models.pool);
  ASSERT_TRUE(made.ok()) << made.status().message();
  const CacheView& view = made->caches->view();
  std::vector<std::pair<const char*, const char*>> ranges;
  int64_t bytes = 0;
  for (const Tensor& t :
       {view.mla, view.kda_state, view.kda_conv, view.kda_records, view.conv_records, made->caches->draft_rows()}) {
    ASSERT_TRUE(t.is_set());
    const auto* begin = static_cast<const char*>(t.data);
    ranges.emplace_back(begin, begin + storage_bytes(t.dtype, t.dims));
    bytes += storage_bytes(t.dtype, t.dims);
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) EXPECT_LE(ranges[i - 1].second, ranges[i].first);
  EXPECT_LE(bytes, made->caches->bytes());
}

// A mapping of which only what is touched takes memory.
class SparseFloats {
 public:
  explicit SparseFloats(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(float)) {
    data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~SparseFloats() {
    if (is_mapped()) ::munmap(data_, bytes_);
  }
  SparseFloats(const SparseFloats&) = delete;
  SparseFloats& operator=(const SparseFloats&) = delete;
  bool is_mapped() const { return data_ != MAP_FAILED; }
  float* data() const { return static_cast<float*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

// Offsets beyond 2^31 elements: of the latent cache, of the states and of the drafter's context.
TEST(Trap, T70_OffsetsHaveSixtyFourBits) {
  constexpr int64_t kFar = (int64_t{1} << 31) + 4096;
  const ModelConfig& config = small().config;
  {  // the paged cache of the target
    const int64_t blocks = kFar / (config.mla_row() * VerifyRun::kBlock) + 16;
    const int64_t rows = blocks * VerifyRun::kBlock;
    const SparseFloats memory(config.num_mla_layers() * rows * config.mla_row());
    if (!memory.is_mapped()) GTEST_SKIP() << "no address space";
    const Ids ids = text(10, 48);
    VerifyRun near(small(), pool(), 1, 64), far(small(), pool(), 1, 64);
    far.use_paged_cache(make_tensor(memory.data(), DType::kF32, {config.num_mla_layers(), rows, config.mla_row()}),
                        blocks - 8);
    for (VerifyRun* run : {&near, &far}) run->step({{0, part(ids, 0, 36)}});
    const std::vector<VerifyRun::Rows> verify = {{0, {ids[36]}, drafts_after(ids, 36, 3, 7)}};
    const VerifyRun::Logits a = near.step(verify), b = far.step(verify);
    for (size_t r = 0; r < a.size(); ++r) EXPECT_TRUE(same_bits(a[r], b[r])) << r;
  }
  {  // states and their records
    constexpr int64_t kHeads = 2, kDim = 16, kSlots = 3;
    const SparseFloats memory(kSlots * kFar);
    if (!memory.is_mapped()) GTEST_SKIP() << "no address space";
    test::Floats dense({1, kSlots, kHeads, kDim, kDim}, 0.3, 1),
        records({1, 4, kHeads, kda_record_width(kDim)}, 0.3, 2);
    Tensor states = dense.tensor;
    states.data = memory.data();
    states.strides[0] = kSlots * kFar;
    states.strides[1] = kFar;
    const Tensor want = dense.tensor.at(0).at(2), got = states.at(0).at(2);
    std::memcpy(got.data, want.data, static_cast<size_t>(want.count()) * sizeof(float));
    Arena arena(size_t{1} << 20);
    SingleRank comm;
    Exec exec({.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool(), .arena = &arena, .comm = &comm});
    const std::vector<int32_t> begins = {0}, ends = {4}, slots = {2};
    const CommitRanges ranges{.begins = begins, .ends = ends, .slots = slots};
    kda_commit(exec, "near", {.states = dense.tensor, .records = records.tensor, .ranges = ranges});
    kda_commit(exec, "far", {.states = states, .records = records.tensor, .ranges = ranges});
    EXPECT_EQ(std::memcmp(got.data, want.data, static_cast<size_t>(want.count()) * sizeof(float)), 0);
  }
  {  // the drafter's context
    test::Toy toy{test::TinyDraft(test::nested_draft_config())};
    const int64_t width = toy.drafter->model().row_width(), layers = toy.loaded->config.num_layers;
    const int64_t blocks = kFar / (width * test::kPage) + 16;
    const SparseFloats memory(layers * blocks * test::kPage * width);
    if (!memory.is_mapped()) GTEST_SKIP() << "no address space";
    const DraftCacheView cache{.rows = make_tensor(memory.data(), DType::kF32, {layers, blocks * test::kPage, width}),
                               .block_size = test::kPage};
    const Tensor taps = toy.taps(11, 3);
    std::vector<std::vector<float>> confidence;
    std::vector<Ids> ids;
    for (const int64_t first : {int64_t{0}, blocks - 8}) {
      std::vector<int32_t> positions, tables;
      std::vector<int64_t> slots;
      for (int32_t p = 0; p < 11; ++p) {
        positions.push_back(p);
        slots.push_back(first * test::kPage + p);
      }
      for (int32_t b = 0; b < 4; ++b) tables.push_back(static_cast<int32_t>(first) + b);
      Arena arena(size_t{16} << 20);
      SingleRank comm;
      Exec exec({.mode = ExecMode::kEager, .arch = host_arch(), .pool = &toy.pool, .arena = &arena, .comm = &comm});
      const DsparkModel& model = toy.drafter->model();
      model.extend_context(exec, {.taps = taps, .positions = positions, .slot_mapping = slots}, cache);
      const std::vector<int32_t> anchors = {5}, anchor_positions = {11};
      const std::vector<float> temperature = {0.0F};
      const std::vector<double> uniforms(4, 0.5);
      const DraftRoundOutput out = model.propose(exec,
                                                 {.anchors = anchors,
                                                  .positions = anchor_positions,
                                                  .block_tables = tables,
                                                  .max_blocks = 4,
                                                  .temperature = temperature,
                                                  .uniforms = uniforms,
                                                  .num_drafts = 4},
                                                 cache);
      ids.emplace_back(out.ids.i32(), out.ids.i32() + 4);
      confidence.emplace_back(out.confidence.f32(), out.confidence.f32() + 4);
    }
    EXPECT_EQ(ids[0], ids[1]);
    EXPECT_TRUE(same_bits(confidence[0], confidence[1]));
  }
}

// The drafter's context has its own pool beside the target's, and neither pads the other.
TEST(Trap, T77_TheDraftersPoolPadsNothing) {
  const ModelConfig& config = small().config;
  const CacheSizes plain{.block_size = 64, .num_blocks = 10, .num_slots = 3};
  CacheSizes drafted = plain;
  drafted.draft_layers = 5;
  drafted.draft_row = 7;
  const CacheMemory without(config, plain), with_drafts(config, drafted);
  EXPECT_EQ(without.view().mla.count(), with_drafts.view().mla.count());
  EXPECT_EQ(draft_block_bytes(drafted), 64 * 5 * 7 * 4);
  EXPECT_EQ(with_drafts.draft_rows().count(), 10 * 64 * 5 * 7);
  EXPECT_EQ(without.bytes(), plain.num_blocks * block_bytes(config, 64) + plain.num_slots * slot_bytes(config));
  EXPECT_LE(with_drafts.bytes() - without.bytes() - 10 * draft_block_bytes(drafted), 4096) << "rounding of one buffer";
}

// Everything that drafting takes is in the plan before sequences are promised.
TEST(Trap, T78_MemoryOfDraftingIsPlanned) {
  const ModelConfig& config = small().config;
  CapacityOptions options{.memory_bytes = int64_t{400} << 20,
                          .weight_bytes = int64_t{50} << 20,
                          .arena_bytes = int64_t{8} << 20,
                          .max_model_len = 4096,
                          .max_num_seqs = 512};
  const auto plain = plan_capacity(config, options);
  ASSERT_TRUE(plain.ok()) << plain.status().message();
  options.draft_weight_bytes = int64_t{40} << 20;
  options.draft_layers = 5;
  options.draft_row = 2048;
  options.verify_rows = 2048;
  const auto drafted = plan_capacity(config, options);
  ASSERT_TRUE(drafted.ok()) << drafted.status().message();
  EXPECT_LT(drafted->cache_token_capacity, plain->cache_token_capacity);
  int64_t sum = 0;
  for (size_t i = 0; i + 1 < drafted->lines.size(); ++i) sum += drafted->lines[i].bytes;
  EXPECT_EQ(sum, drafted->lines.back().bytes);
  EXPECT_LE(sum, static_cast<int64_t>(0.9 * static_cast<double>(options.memory_bytes)));
  EXPECT_NE(drafted->table().find(format_bytes(2048 * record_bytes(config))), std::string::npos) << drafted->table();
  options.draft_weight_bytes = int64_t{400} << 20;
  const auto refused = plan_capacity(config, options);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("speculation"), std::string::npos) << refused.status().message();
}

}  // namespace
}  // namespace moat
