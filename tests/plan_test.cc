// SPDX-License-Identifier: Apache-2.0
// Plans: what fits, what a step costs, and which kernels run.
//
// Golden kernel plans: which kernel every call site of a supported deployment uses, for every bucket, as text under tests/plans.
// A change of choice shows in the diff. Computed by dry passes, so no weights and no device are needed; run with
// MOAT_UPDATE_PLANS=1 to rewrite the files.
#include <gtest/gtest.h>

#include "engine/runner.h"
#include "golden_file.h"
#include "model/kimi.h"
#include "plan/capacity.h"

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

}  // namespace
}  // namespace moat
