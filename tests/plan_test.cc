// SPDX-License-Identifier: Apache-2.0
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

}  // namespace
}  // namespace moat
