// SPDX-License-Identifier: Apache-2.0
// Plans: what fits, what a step costs, and which kernels run.
//
// Golden kernel plans: which kernel every call site of a supported deployment uses, for every bucket, as text under tests/plans.
// A change of choice shows in the diff. Computed by dry passes, so no weights and no device are needed; run with
// MOAT_UPDATE_PLANS=1 to rewrite the files.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>

#include "base/rng.h"
#include "core/ceilings.h"
#include "core/touch.h"
#include "engine/runner.h"
#include "engine/step_cost_fit.h"
#include "golden_file.h"
#include "model/kimi.h"
#include "model/loader.h"
#include "plan/capacity.h"
#include "plan/decode_bytes.h"
#include "plan/host_memory.h"

namespace moat {
namespace {

struct Deployment {
  const char* name;
  const char* model_dir;
  int64_t context;
};

constexpr Deployment kDeployments[] = {
    {"moat-nano.cpu", "models/moat-nano", 8192},
    {"kimi-k3.cpu", "tests/golden/kimi-k3-release", 131072},
    {"kimi-linear-golden.cpu", "tests/golden/hf/kimi_linear", 4096},
};

TEST(Plan, GoldenPlans) {
  for (const Deployment& d : kDeployments) {
    const auto config = load_model_config(test::source_dir() + "/" + d.model_dir);
    ASSERT_TRUE(config.ok()) << config.status().message();
    KimiWeights weights;
    const CheckpointLayout layout{.mxfp4_experts = config->mxfp4_experts_declared};
    ASSERT_TRUE(shape_weights(*config, layout, Parallel{}, weights).ok());
    const KimiModel model(*config, weights);
    ThreadPool pool(1);
    auto dry = dry_run(
        model, {.arch = host_arch(), .max_batched_tokens = 2048, .max_num_seqs = 64, .max_model_len = d.context},
        {.num_blocks = d.context / 16, .num_slots = 1}, pool);
    ASSERT_TRUE(dry.ok()) << dry.status().message();
    const std::string path = fmt::format("{}/tests/plans/{}.txt", test::source_dir(), d.name);
    const std::string text = dry->plan.to_text();
    if (std::getenv("MOAT_UPDATE_PLANS") != nullptr) {
      ASSERT_TRUE(write_file(path, text).ok());
    }
    const auto golden = read_file(path);
    ASSERT_TRUE(golden.ok()) << golden.status().message();
    EXPECT_EQ(*golden, text) << "the kernel plan of " << d.name << " changed; MOAT_UPDATE_PLANS=1 rewrites the golden";
    fmt::print("plan {}: {}; step temporaries {}\n", d.name, dry->plan.summary(), format_bytes(dry->arena_bytes));
  }
}

// A missing row is found at plan time, with every row's reason, not while serving.
TEST(Plan, ABackendWithoutKernelsIsRefusedByName) {
  const auto config = load_model_config(test::source_dir() + "/models/moat-nano");
  ASSERT_TRUE(config.ok());
  KimiWeights weights;
  ASSERT_TRUE(shape_weights(*config, {}, Parallel{}, weights).ok());
  const KimiModel model(*config, weights);
  ThreadPool pool(1);
  const Arch gpu{.backend = Backend::kGpu, .name = "sm90", .level = "90", .lanes = 32};
  const auto dry = dry_run(model, {.arch = gpu, .max_batched_tokens = 8, .max_num_seqs = 8, .max_model_len = 64},
                           {.num_blocks = 4, .num_slots = 1}, pool);
  ASSERT_FALSE(dry.ok());
  for (const char* site : {"kda.q_proj", "mla.decode", "moe.w1", "sample.top_k", "lm_head"}) {
    EXPECT_NE(dry.status().message().find(site), std::string::npos) << dry.status().message();
  }
}

// --- capacity ---

ModelConfig config_of(const char* directory) {
  auto config = load_model_config(test::source_dir() + "/" + directory);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : ModelConfig{};
}

int64_t line_bytes(const Capacity& c, std::string_view component) {
  for (const Capacity::Line& line : c.lines) {
    if (line.component == component) return line.bytes;
  }
  ADD_FAILURE() << "no line " << component;
  return -1;
}

// What holds of every plan.
void check_capacity(const ModelConfig& config, const CapacityOptions& o, const Capacity& c) {
  EXPECT_EQ(c.cache.num_slots, c.max_num_seqs + c.num_checkpoints);
  EXPECT_GE(c.max_num_seqs, 1);
  EXPECT_LE(c.max_num_seqs, o.max_num_seqs);
  EXPECT_GE(c.cache.num_blocks * o.block_size, o.max_model_len) << "one sequence can be as long as the context";
  EXPECT_EQ(c.cache_token_capacity, c.cache.num_blocks * c.cache.block_size);
  EXPECT_EQ(line_bytes(c, "live states"), c.max_num_seqs * slot_bytes(config));
  EXPECT_EQ(line_bytes(c, "checkpoints"), c.num_checkpoints * slot_bytes(config));
  EXPECT_EQ(line_bytes(c, "MLA blocks"), c.cache.num_blocks * block_bytes(config, o.block_size));
  int64_t sum = 0;
  for (const Capacity::Line& line : c.lines) {
    EXPECT_GE(line.bytes, 0) << line.component;
    if (line.component != "total") sum += line.bytes;
  }
  EXPECT_EQ(line_bytes(c, "total"), sum);
  EXPECT_LE(static_cast<double>(sum), static_cast<double>(o.memory_bytes) * o.memory_fraction);
}

TEST(Capacity, ASmallModelTakesWhatItCanUseAndNoMore) {
  const ModelConfig config = config_of("models/moat-nano");
  const CapacityOptions o{.memory_bytes = int64_t{1} << 40,
                          .weight_bytes = 1 << 25,
                          .arena_bytes = 1 << 24,
                          .process_bytes = 1 << 26,
                          .block_size = 64,
                          .max_model_len = 8192,
                          .max_num_seqs = 64,
                          .checkpoint_memory_bytes = -1};
  const auto c = plan_capacity(config, o);
  ASSERT_TRUE(c.ok()) << c.status().message();
  fmt::print("moat-nano on 1 TiB\n{}", c->table());
  check_capacity(config, o, *c);
  EXPECT_EQ(c->max_num_seqs, 64);
  EXPECT_EQ(c->num_checkpoints, 4 * 64);
  EXPECT_EQ(c->cache.num_blocks, 64 * 128 + 256 * slot_bytes(config) / block_bytes(config, 64));
  EXPECT_EQ(c->num_seqs_of(8192), 64);
  EXPECT_LT(line_bytes(*c, "total"), int64_t{2} << 30);
  EXPECT_EQ(c->table().find("at once"), std::string::npos) << "nothing is short of blocks";
}

// Eight devices of 288 GB and the 1.56 TB of the release.
TEST(Capacity, KimiK3OnALargeMachine) {
  const ModelConfig config = config_of("tests/golden/kimi-k3-release");
  CapacityOptions o{.memory_bytes = 2'304'000'000'000,
                    .weight_bytes = 1'560'000'000'000,
                    .arena_bytes = 20'000'000'000,
                    .process_bytes = 1'000'000'000,
                    .block_size = 64,
                    .max_model_len = 262144,
                    .max_num_seqs = 64,
                    .checkpoint_memory_bytes = -1};
  const auto c = plan_capacity(config, o);
  ASSERT_TRUE(c.ok()) << c.status().message();
  fmt::print("Kimi K3 on 8 x 288 GB\n{}", c->table());
  check_capacity(config, o, *c);
  EXPECT_EQ(c->max_num_seqs, 64);
  EXPECT_EQ(c->num_checkpoints, 4 * 64);
  EXPECT_NE(c->table().find("at once: "), std::string::npos);
  EXPECT_LT(c->num_seqs_of(262144), c->num_seqs_of(32768));
  EXPECT_GT(line_bytes(*c, "total"), static_cast<int64_t>(0.99 * 0.9 * 2.304e12)) << "nothing is left lying about";

  // Below four checkpoints a sequence the two groups take equal halves.
  o.max_num_seqs = 128;
  const auto halves = plan_capacity(config, o);
  ASSERT_TRUE(halves.ok()) << halves.status().message();
  check_capacity(config, o, *halves);
  EXPECT_EQ(halves->max_num_seqs, 128);
  EXPECT_NEAR(static_cast<double>(line_bytes(*halves, "checkpoints")),
              static_cast<double>(line_bytes(*halves, "MLA blocks")),
              0.01 * static_cast<double>(line_bytes(*halves, "checkpoints")));

  // Sequences of 4096 tokens need few blocks: the checkpoints get what they leave.
  o.max_model_len = 4096;
  const auto chat = plan_capacity(config, o);
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  check_capacity(config, o, *chat);
  EXPECT_EQ(chat->num_checkpoints, 4 * 128);
  EXPECT_EQ(chat->num_seqs_of(4096), 128);

  // More sequences than half of the memory has states for.
  o.max_num_seqs = 4096;
  const auto crowd = plan_capacity(config, o);
  ASSERT_TRUE(crowd.ok()) << crowd.status().message();
  check_capacity(config, o, *crowd);
  EXPECT_LT(crowd->max_num_seqs, 4096);
  EXPECT_NE(crowd->bound.find("state slots"), std::string::npos) << crowd->bound;
}

TEST(Capacity, CheckpointMemoryIsWhatWasAsked) {
  const ModelConfig config = config_of("models/moat-nano");
  const int64_t slot = slot_bytes(config);
  CapacityOptions o{.memory_bytes = int64_t{1} << 30,
                    .weight_bytes = 1 << 25,
                    .block_size = 64,
                    .max_model_len = 8192,
                    .max_num_seqs = 8,
                    .checkpoint_memory_bytes = 0};
  for (const auto& [bytes, checkpoints] :
       {std::pair<int64_t, int64_t>{0, 0}, {slot - 1, 0}, {slot, 1}, {100 * slot + 5, 100}}) {
    o.checkpoint_memory_bytes = bytes;
    const auto c = plan_capacity(config, o);
    ASSERT_TRUE(c.ok()) << c.status().message();
    check_capacity(config, o, *c);
    EXPECT_EQ(c->num_checkpoints, checkpoints);
    EXPECT_EQ(c->max_num_seqs, 8);
    EXPECT_EQ(c->cache.num_blocks, 8 * 128 + checkpoints * slot / block_bytes(config, 64));
  }
  // More than fits beside one sequence is refused, and the message has the numbers.
  o.checkpoint_memory_bytes = int64_t{1} << 30;
  const auto refused = plan_capacity(config, o);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  for (const std::string& part : {fmt::format("beside {} checkpoints of ", (int64_t{1} << 30) / slot),
                                  std::string("one sequence of 8192 tokens needs")}) {
    EXPECT_NE(refused.status().message().find(part), std::string::npos) << refused.status().message();
  }
  o.checkpoint_memory_bytes = -2;
  EXPECT_EQ(plan_capacity(config, o).status().code(), StatusCode::kInvalidArgument);
}

// From "does not fit" upwards: wherever a plan is made, it holds one whole sequence and stays within the memory.
TEST(Capacity, TightMemory) {
  const ModelConfig config = config_of("models/moat-nano");
  bool fitted = false;
  Capacity before;
  for (int64_t mib = 16; mib <= 4096; mib += mib < 128 ? 1 : 64) {
    const CapacityOptions o{.memory_bytes = mib << 20,
                            .weight_bytes = 1 << 25,
                            .block_size = 64,
                            .max_model_len = 8192,
                            .max_num_seqs = 32,
                            .checkpoint_memory_bytes = -1};
    const auto c = plan_capacity(config, o);
    EXPECT_TRUE(c.ok() || !fitted) << mib << " MiB: " << c.status().message();
    if (!c.ok()) continue;
    if (!fitted) {
      EXPECT_EQ(c->cache_token_capacity, 8192);
      EXPECT_LE(c->cache.num_slots, 3) << "a sequence of the whole context comes before more of anything";
    }
    fitted = true;
    check_capacity(config, o, *c);
    EXPECT_GE(c->max_num_seqs, before.max_num_seqs) << mib;
    EXPECT_GE(c->cache.num_slots, before.cache.num_slots) << mib;
    before = *c;
  }
  EXPECT_EQ(before.max_num_seqs, 32);
  EXPECT_EQ(before.num_checkpoints, 128);
}

// --- memory of the host ---

// A root directory with /proc/self/cgroup and limits under /sys/fs/cgroup.
class FakeRoot {
 public:
  FakeRoot() : path_(::testing::TempDir() + "moat-cgroup-root") { std::filesystem::remove_all(path_); }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  FakeRoot& put(const std::string& name, std::string_view text) {
    std::filesystem::create_directories(std::filesystem::path(path_ + name).parent_path());
    EXPECT_TRUE(write_file(path_ + name, text).ok());
    return *this;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(HostMemory, SmallestLimitOnTheWayUp) {
  {
    FakeRoot root;
    EXPECT_EQ(cgroup_memory_limit(root.path()), 0) << "nothing is known";
    root.put("/proc/self/cgroup", "0::/user.slice/moat.service\n");
    root.put("/sys/fs/cgroup/user.slice/moat.service/memory.max", "max\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 0);
    root.put("/sys/fs/cgroup/user.slice/memory.max", "4096000000\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 4096000000) << "of an ancestor";
    root.put("/sys/fs/cgroup/user.slice/moat.service/memory.max", "8192000000\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 4096000000) << "the smaller one";
    root.put("/sys/fs/cgroup/user.slice/moat.service/memory.max", "2048000000\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 2048000000);
    root.put("/sys/fs/cgroup/other.slice/memory.max", "1000\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 2048000000) << "not of others";
  }
  {  // A container of version 2: its own group is the root that it sees.
    FakeRoot root;
    root.put("/proc/self/cgroup", "0::/\n").put("/sys/fs/cgroup/memory.max", "1073741824\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 1073741824);
  }
  {  // Version 1, with the controller among others, and the number that stands for no limit.
    FakeRoot root;
    root.put("/proc/self/cgroup", "12:cpu,cpuacct:/a\n4:hugetlb,memory:/docker/1f\n1:name=systemd:/b\n0::/c\n");
    root.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 0);
    root.put("/sys/fs/cgroup/memory/docker/1f/memory.limit_in_bytes", "3000000000\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 3000000000);
    // A container sees its limit at the root of the mount, and a path that is the host's.
    root.put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000000\n");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 2000000000);
  }
  {  // No file to read, or not what was expected.
    FakeRoot root;
    root.put("/proc/self/cgroup", "\n:\nmemory\n0:\n4:memory\n4:memory:relative\n");
    root.put("/sys/fs/cgroup/memory.max", "lots");
    EXPECT_EQ(cgroup_memory_limit(root.path()), 0);
  }
  EXPECT_GT(host_memory_bytes(), 0);
}

TEST(HostMemory, TouchedMemoryIsResident) {
  ThreadPool pool(2);
  const int64_t bytes = int64_t{64} << 20;
  const ResidentMemory before = resident_memory();
  ASSERT_GT(before.anonymous_bytes, 0);
  ASSERT_GT(before.file_bytes, 0);
  const Buffer buffer(static_cast<size_t>(bytes));
  const ResidentMemory allocated = resident_memory();
  EXPECT_LT(allocated.anonymous_bytes - before.anonymous_bytes, bytes / 2) << "allocation alone takes no pages";
  touch(pool, buffer.bytes());
  const ResidentMemory touched = resident_memory();
  EXPECT_NEAR(static_cast<double>(touched.anonymous_bytes - allocated.anonymous_bytes), static_cast<double>(bytes),
              0.03 * static_cast<double>(bytes));
  EXPECT_TRUE(std::all_of(buffer.bytes().begin(), buffer.bytes().end(), [](std::byte b) { return b == std::byte{0}; }));
  touch(pool, {});
}

// How the weights of a checkpoint appear: what is used in place as file pages, copies as anonymous memory.
TEST(HostMemory, WeightsAreResidentOnceLoaded) {
  ThreadPool pool(2);
  const ResidentMemory before = resident_memory();
  const auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, pool);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const ResidentMemory after = resident_memory();
  const auto mapped = static_cast<int64_t>((*loaded)->report.bytes_mapped);
  const auto owned = static_cast<int64_t>((*loaded)->report.bytes_owned);
  fmt::print("weights: mapped {}, owned {}; resident: files +{}, anonymous +{}\n", format_bytes(mapped),
             format_bytes(owned), format_bytes(after.file_bytes - before.file_bytes),
             format_bytes(after.anonymous_bytes - before.anonymous_bytes));
  EXPECT_GE(after.file_bytes - before.file_bytes, mapped * 97 / 100);
}

// --- what a step costs ---

TEST(StepCost, LinearBetweenPointsAndBeyondTheLast) {
  EXPECT_FALSE(StepCost().known());
  EXPECT_EQ(StepCost().seconds(7, 100, 100), 0);
  const StepCost cost{.rows_seconds = {{1, 1.0}, {2, 1.5}, {4, 3.5}},
                      .seconds_per_decode_pair = 0.25,
                      .seconds_per_prefill_pair = 0.125};
  EXPECT_EQ(cost.seconds(0, 8, 8), 0) << "no rows, no step";
  EXPECT_DOUBLE_EQ(cost.seconds(1, 0, 0), 1.0);
  EXPECT_DOUBLE_EQ(cost.seconds(2, 0, 0), 1.5);
  EXPECT_DOUBLE_EQ(cost.seconds(3, 0, 0), 2.5);
  EXPECT_DOUBLE_EQ(cost.seconds(4, 0, 0), 3.5);
  EXPECT_DOUBLE_EQ(cost.seconds(6, 0, 0), 5.5);
  EXPECT_DOUBLE_EQ(cost.seconds(2, 4, 8), 1.5 + 1.0 + 1.0);

  EXPECT_DOUBLE_EQ((StepCost{.rows_seconds = {{1, 2.0}}}.seconds(5, 0, 0)), 2.0);
}

// A machine whose steps take what other factors say, with noise and now and then a step that something held up: after
// some hundred steps of all kinds the forecast is right within the noise, whatever it was at first.
TEST(StepCost, TrackerLearnsWhatStepsTake) {
  const StepCost declared{.rows_seconds = {{1, 1.0}, {2, 1.2}, {4, 1.5}, {8, 2.0}, {16, 3.0}, {32, 5.0}, {64, 9.0}},
                          .seconds_per_decode_pair = 1e-3,
                          .seconds_per_prefill_pair = 5e-4};
  StepCost real = declared;
  for (size_t i = 0; i < real.rows_seconds.size(); ++i)
    real.rows_seconds[i].second *= 3.0 + 0.2 * static_cast<double>(i);
  real.seconds_per_decode_pair *= 7;
  real.seconds_per_prefill_pair *= 4;
  Rng rng(1);
  StepCostTracker tracker(declared);
  EXPECT_EQ(tracker.current().seconds(16, 100, 100), declared.seconds(16, 100, 100));
  tracker.observe(16, 1000, 0, real.seconds(16, 1000, 0));
  EXPECT_NEAR(tracker.current().seconds(16, 1000, 0) / real.seconds(16, 1000, 0), 1.0, 1e-9) << "one step is believed";
  tracker.observe(16, 1000, 0, 0);  // a clock that stands still
  double worst = 0;
  for (int step = 0; step < 4000; ++step) {
    const int64_t decodes = rng.below(17);
    const int64_t piece = rng.below(3) == 0 ? 0 : rng.below(40);
    if (decodes + piece == 0) continue;
    const double decode_pairs = static_cast<double>(decodes * rng.below(400));
    const double prefill_pairs = static_cast<double>(piece * rng.below(400));
    const double takes = real.seconds(decodes + piece, decode_pairs, prefill_pairs);
    if (step > 2000) {
      const double forecast = tracker.current().seconds(decodes + piece, decode_pairs, prefill_pairs);
      worst = std::max(worst, std::abs(forecast / takes - 1));
    }
    const double noise = 0.98 + 0.04 * rng.uniform();
    tracker.observe(decodes + piece, decode_pairs, prefill_pairs, takes * (step % 200 == 199 ? 20 : noise));
    const auto& points = tracker.current().rows_seconds;
    for (size_t i = 1; i < points.size(); ++i) ASSERT_GE(points[i].second, points[i - 1].second);
  }
  fmt::print("worst forecast after 2000 steps: {:.1f} % off\n", 100 * worst);
  EXPECT_LT(worst, 0.2);
}

void check_step_cost(const StepCost& cost, int64_t max_rows) {
  ASSERT_TRUE(cost.known());
  EXPECT_EQ(cost.rows_seconds.front().first, 1);
  EXPECT_EQ(cost.rows_seconds.back().first, max_rows);
  for (size_t i = 1; i < cost.rows_seconds.size(); ++i) {
    EXPECT_GT(cost.rows_seconds[i].first, cost.rows_seconds[i - 1].first);
    EXPECT_GE(cost.rows_seconds[i].second, cost.rows_seconds[i - 1].second) << cost.rows_seconds[i].first << " rows";
  }
  EXPECT_GT(cost.seconds_per_decode_pair, 0);
  EXPECT_GT(cost.seconds_per_prefill_pair, 0);
}

// No weights and no device: a machine of 8 x 8 TB/s. One row is bound by what it reads, and that is what decode_bytes
// counts.
TEST(StepCost, OfKimiK3FromItsShapes) {
  const ModelConfig config = config_of("tests/golden/kimi-k3-release");
  KimiWeights weights;
  ASSERT_TRUE(shape_weights(config, {.mxfp4_experts = true}, Parallel{}, weights).ok());
  const KimiModel model(config, weights);
  const StepCostOptions o{.arch = host_arch(),
                          .max_batched_tokens = 3000,
                          .max_num_seqs = 64,
                          .block_size = 64,
                          .read_bytes_per_second = 64e12,
                          .flops_per_second = 10e15};
  const double start = now_seconds();
  const StepCost cost = derive_step_cost(model, o);
  fmt::print("Kimi K3 at 64 TB/s, 10 PFLOP/s (derived in {:.0f} ms)\n", 1e3 * (now_seconds() - start));
  for (const auto& [rows, seconds] : cost.rows_seconds) fmt::print("  {:>5} rows {:8.3f} ms\n", rows, 1e3 * seconds);
  fmt::print("  a decode pair {:.3g} s, a prefill pair {:.3g} s\n", cost.seconds_per_decode_pair,
             cost.seconds_per_prefill_pair);
  check_step_cost(cost, 3000);
  for (const int64_t batch : {1, 8, 64}) {
    const double floor = decode_step_bytes(config, batch, 0) / o.read_bytes_per_second;
    EXPECT_NEAR(cost.seconds(batch, 0, 0) / floor, 1.0, 0.1) << batch << " rows";
  }
}

// The real thing: only the order of magnitude, since the machine may be busy.
TEST(StepCost, OfMoatNanoAgainstTheClock) {
  ThreadPool pool(num_usable_cpus());
  const auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, pool);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  const ModelConfig& config = (*loaded)->config;
  const KimiModel model(config, (*loaded)->weights);

  double start = now_seconds();
  const double bandwidth = measure_read_bandwidth(pool, Effort::kQuick);
  const double flops = measure_f32_flops(pool, Effort::kQuick);
  const double measuring = now_seconds() - start;
  start = now_seconds();
  const StepCost cost = derive_step_cost(model, {.arch = host_arch(),
                                                 .max_batched_tokens = 512,
                                                 .max_num_seqs = 16,
                                                 .read_bytes_per_second = bandwidth,
                                                 .flops_per_second = flops});
  fmt::print("moat-nano at {:.1f} GB/s, {:.1f} GFLOP/s (measured in {:.0f} ms, derived in {:.1f} ms)\n",
             bandwidth / 1e9, flops / 1e9, 1e3 * measuring, 1e3 * (now_seconds() - start));
  check_step_cost(cost, 512);

  const RunnerOptions options{
      .arch = host_arch(), .max_batched_tokens = 512, .max_num_seqs = 16, .max_model_len = 1024};
  const CacheSizes sizes{.block_size = 16, .num_blocks = 1024, .num_slots = 16};
  auto dry = dry_run(model, options, sizes, pool);
  ASSERT_TRUE(dry.ok()) << dry.status().message();
  CacheMemory caches(config, sizes);
  Runner runner(model, caches, pool, options, std::move(dry).value());
  // `decode` sequences of one row, or one prompt of `prefill` rows; returns the best of a few.
  const auto measure = [&](int decode, int prefill) {
    StepPlan plan;
    plan.max_blocks = 64;
    const int seqs = std::max(decode, 1);
    for (int s = 0; s < seqs; ++s) {
      plan.sequences.push_back(static_cast<SequenceId>(s + 1));
      plan.num_tokens.push_back(decode > 0 ? 1 : prefill);
      plan.first_positions.push_back(0);
      plan.state_slots.push_back(s);
      plan.wants_token.push_back(1);
      for (int b = 0; b < plan.max_blocks; ++b) plan.block_tables.push_back(s * 64 + b);
    }
    plan.token_ids.assign(static_cast<size_t>(decode + prefill), 17);
    plan.num_decode_seqs = decode;
    double best = 1e9;
    for (int i = 0; i < 5; ++i) {
      const double begin = now_seconds();
      runner.forward(plan);
      best = std::min(best, now_seconds() - begin);
    }
    return best;
  };
  for (const auto& [decode, prefill] : {std::pair{1, 0}, {8, 0}, {0, 512}}) {
    const double measured = measure(decode, prefill);
    const double ratio = measured / cost.seconds(decode + prefill, 0.5 * decode, 0.5 * prefill * prefill);
    fmt::print("  {:>3} rows: measured {:.3f} ms = {:.1f} x expected\n", decode + prefill, 1e3 * measured, ratio);
    EXPECT_GT(ratio, 0.02);
    EXPECT_LT(ratio, 50);
  }
}

}  // namespace
}  // namespace moat
