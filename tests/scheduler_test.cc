// SPDX-License-Identifier: Apache-2.0
// The scheduler and the cache ledger by themselves: rules one by one, then random workloads with a model of the caches'
// contents (scheduler_workload.h). MOAT_SCHEDULER_STEPS runs the latter longer.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "golden_file.h"
#include "scenario.h"
#include "scheduler_workload.h"

namespace moat {
namespace {

TEST(Scheduler, Scenarios) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(test::source_dir() + "/tests/scheduler")) {
    if (entry.path().extension() == ".scn") paths.push_back(entry.path().string());
  }
  ASSERT_GE(paths.size(), 18U);
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) EXPECT_EQ(test::Scenario::run_file(path), "");
}

TEST(SchedulerWorkload, KeepsEveryPromise) {
  const char* wanted = std::getenv("MOAT_SCHEDULER_STEPS");
  const int64_t steps = wanted != nullptr ? std::strtoll(wanted, nullptr, 10) : 100'000;
  test::WorkloadCounts total;
  uint64_t seed = 0;
  for (; total.steps < steps; ++seed) {
    test::RandomSource source(seed);
    test::SchedulerWorkload workload(source);
    workload.run(2'000);
    total.add(workload.counts());
  }
  fmt::print(
      "{} steps of {} workloads: {} requests, {} preemptions, {} restores ({} prompt tokens), {} checkpoints saved, {} "
      "evicted, {} timeouts, {} cancels, {} errors, {} flushes; {} of {} drafts accepted in {} rounds, {} of which "
      "saved a "
      "checkpoint\n",
      total.steps, seed, total.requests, total.preemptions, total.hits, total.cached_tokens, total.saves,
      total.evictions, total.timeouts, total.cancels, total.errors, total.flushes, total.accepted, total.drafted,
      total.rounds, total.saves_in_rounds);
  EXPECT_GT(total.preemptions, 0);
  EXPECT_GT(total.hits, 0);
  EXPECT_GT(total.evictions, 0);
  EXPECT_GT(total.timeouts, 0);
  EXPECT_GT(total.errors, 0);
  EXPECT_GT(total.rounds, 0);
  EXPECT_GT(total.accepted, 0);
  EXPECT_GT(total.saves_in_rounds, 0);
}

}  // namespace
}  // namespace moat
