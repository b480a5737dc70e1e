// SPDX-License-Identifier: Apache-2.0
// Kernel selection with a made-up op: what each row refuses is recorded from both ends of a bucket, and nothing is
// missing silently.
#include "ops/select.h"

#include <gtest/gtest.h>

namespace moat {
namespace {

struct FakeArgs {
  int64_t tokens = 0;
  int* chosen = nullptr;
};

Status check(const FakeArgs&) { return {}; }
std::string describe(const FakeArgs& a) { return fmt::format("tokens={}", a.tokens); }
Cost cost(const FakeArgs& a) { return {2.0 * static_cast<double>(a.tokens), static_cast<double>(a.tokens)}; }
void reference(const FakeArgs& a) { *a.chosen = -1; }
std::vector<Case> cases() { return {{{{"tokens", 1}}}}; }
Case random_case(uint64_t seed) { return {{{"tokens", static_cast<int64_t>(seed % 7)}}}; }
FakeArgs build(const Case& c, CaseData&) { return {c["tokens"]}; }

template <int kIndex>
void run(Exec&, const FakeArgs& a) {
  *a.chosen = kIndex;
}
Reject only_many(const FakeArgs& a, const Arch&) {
  if (a.tokens >= 8) return {};
  return fmt::format("tokens={} fewer than 8", a.tokens);
}
Reject only_few(const FakeArgs& a, const Arch&) {
  if (a.tokens <= 64) return {};
  return fmt::format("tokens={} more than 64", a.tokens);
}
int64_t kilobyte(const FakeArgs&, const Exec&) { return 1024; }

constexpr Kernel<FakeArgs> kRows[] = {
    {"fake.gpu", Backend::kGpu, Tier::kTuned, nullptr, nullptr, nullptr},
    {"fake.cpu.many", Backend::kCpu, Tier::kTuned, only_many, nullptr, run<1>},
    {"fake.cpu.few via pad(16)", Backend::kCpu, Tier::kTuned, only_few, kilobyte, run<2>},
    {"fake.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, run<3>},
};
constexpr Op<FakeArgs>::Definition definition(const char* name, std::span<const Kernel<FakeArgs>> kernels) {
  return {.name = name,
          .check = check,
          .describe = describe,
          .cost = cost,
          .reference = reference,
          .cases = cases,
          .random_case = random_case,
          .build = build,
          .kernels = kernels};
}
constinit const Op<FakeArgs> kFake{definition("fake", kRows)};
// Without the portable row some buckets have no kernel.
constinit const Op<FakeArgs> kHoles{definition("holes", std::span(kRows).first(3))};

// One dry pass over every bucket, both ends, with one call at `site`.
void dry_pass(KernelPlan& plan, const Op<FakeArgs>& op, const char* site, Backend backend = Backend::kCpu) {
  Arena arena;
  ThreadPool pool(1);
  Exec exec(
      {.mode = ExecMode::kDry, .arch = {backend, "test", "test", 4}, .pool = &pool, .arena = &arena, .plan = &plan});
  for (const Bucket& bucket : plan.buckets()) {
    for (const bool upper : {false, true}) {
      const int64_t tokens = upper ? bucket.last : bucket.first;
      exec.begin_step(tokens, upper);
      exec.call(site, op, FakeArgs{tokens, nullptr});
    }
  }
}

TEST(Buckets, CoverEveryCountOnce) {
  EXPECT_EQ(default_buckets(1), (std::vector<Bucket>{{1, 1}}));
  EXPECT_EQ(default_buckets(5), (std::vector<Bucket>{{1, 1}, {2, 5}}));
  EXPECT_EQ(default_buckets(512), (std::vector<Bucket>{{1, 1}, {2, 8}, {9, 64}, {65, 512}}));
  EXPECT_EQ(default_buckets(8192), (std::vector<Bucket>{{1, 1}, {2, 8}, {9, 64}, {65, 512}, {513, 8192}}));
  for (const int64_t max : {1, 2, 8, 9, 64, 65, 600}) {
    const KernelPlan plan(default_buckets(max));
    for (int64_t tokens = 1; tokens <= max; ++tokens) {
      const Bucket& b = plan.buckets()[static_cast<size_t>(plan.bucket_of(tokens))];
      EXPECT_TRUE(b.first <= tokens && tokens <= b.last);
    }
  }
}

TEST(Select, ARowMustTakeBothEnds) {
  KernelPlan plan(std::vector<Bucket>{{1, 1}, {2, 8}, {8, 64}, {65, 512}});
  dry_pass(plan, kFake, "site");
  ASSERT_TRUE(plan.freeze().ok());
  const int expected[] = {2, 2, 1, 1};  // rows of the op's table, the GPU row counted
  for (int b = 0; b < 4; ++b) {
    EXPECT_EQ(plan.row(b, "site"), expected[b]) << "bucket " << b;
    EXPECT_EQ(plan.entries(b).size(), 1U);
    EXPECT_EQ(plan.entries(b)[0].calls, 1);
  }
  // Refused at the lower end only, with the lower end's reason.
  const KernelPlan::Entry& low = plan.entries(1)[0];
  ASSERT_EQ(low.candidates.size(), 3U);
  ASSERT_TRUE(low.candidates[0].reject.has_value());
  EXPECT_EQ(*low.candidates[0].reject, "tokens=2 fewer than 8");
  EXPECT_FALSE(low.candidates[1].reject.has_value());
  EXPECT_EQ(low.shapes, "tokens=8");
  EXPECT_EQ(low.cost.flops, 16.0);
}

TEST(Select, RefusalOfTheUpperEndAloneCounts) {
  KernelPlan plan(std::vector<Bucket>{{9, 65}});
  dry_pass(plan, kFake, "site");
  ASSERT_TRUE(plan.freeze().ok());
  const KernelPlan::Entry& entry = plan.entries(0)[0];
  EXPECT_FALSE(entry.candidates[0].reject.has_value());
  ASSERT_TRUE(entry.candidates[1].reject.has_value());
  EXPECT_EQ(*entry.candidates[1].reject, "tokens=65 more than 64");
}

TEST(Select, AHoleFailsWithEveryReason) {
  KernelPlan plan(std::vector<Bucket>{{1, 1}, {2, 100}});
  dry_pass(plan, kHoles, "layer.site");
  const Status status = plan.freeze();
  ASSERT_FALSE(status.ok());
  EXPECT_FALSE(plan.frozen());
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(),
            "no kernel for:\n"
            "  layer.site (holes, 2 to 100 tokens) tokens=100:\n"
            "    fake.cpu.many: tokens=2 fewer than 8\n"
            "    fake.cpu.few via pad(16): tokens=100 more than 64");
}

TEST(Select, ABackendWithoutRowsIsAHole) {
  constinit static const Op<FakeArgs> cpu_only{definition("cpu_only", std::span(kRows).last(1))};
  KernelPlan plan(std::vector<Bucket>{{1, 1}});
  dry_pass(plan, cpu_only, "site", Backend::kGpu);
  const Status status = plan.freeze();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("no row"), std::string::npos) << status.message();
}

TEST(Select, TextIsStable) {
  KernelPlan plan(std::vector<Bucket>{{1, 1}, {2, 8}, {9, 100}});
  dry_pass(plan, kFake, "b");
  dry_pass(plan, kFake, "a");
  ASSERT_TRUE(plan.freeze().ok());
  EXPECT_EQ(plan.to_text(),
            "1-1 b fake fake.cpu.few via pad(16) tuned\n"
            "1-1 a fake fake.cpu.few via pad(16) tuned\n"
            "2-8 b fake fake.cpu.few via pad(16) tuned\n"
            "2-8 a fake fake.cpu.few via pad(16) tuned\n"
            "9-100 b fake fake.cpu.many tuned\n"
            "9-100 a fake fake.cpu.many tuned\n");
  EXPECT_EQ(plan.summary(), "kernels: 6 tuned (4 via adapter), 0 portable, 0 missing");
}

TEST(Select, PortableRowsAreCounted) {
  constinit static const Op<FakeArgs> slow{definition("slow", std::span(kRows).last(1))};
  KernelPlan plan(std::vector<Bucket>{{1, 1}, {2, 8}});
  dry_pass(plan, slow, "site");
  ASSERT_TRUE(plan.freeze().ok());
  EXPECT_EQ(plan.summary(), "kernels: 0 tuned (0 via adapter), 2 portable, 0 missing");
}

TEST(Exec, RunsThePlannedRow) {
  KernelPlan plan(std::vector<Bucket>{{1, 7}, {8, 100}});
  dry_pass(plan, kFake, "site");
  ASSERT_TRUE(plan.freeze().ok());
  Arena arena(4096);
  ThreadPool pool(1);
  Profile profile;
  Exec exec({.mode = ExecMode::kRun,
             .arch = {Backend::kCpu, "test", "test", 4},
             .pool = &pool,
             .arena = &arena,
             .plan = &plan,
             .profile = &profile});
  int chosen = 0;
  exec.begin_step(3);
  exec.call("site", kFake, FakeArgs{3, &chosen});
  EXPECT_EQ(chosen, 2);
  exec.begin_step(50);
  exec.call("site", kFake, FakeArgs{50, &chosen});
  EXPECT_EQ(chosen, 1);
  EXPECT_EQ(profile.sites.at("site").calls, 2);
  EXPECT_EQ(profile.sites.at("site").cost.flops, 106.0);
}

TEST(Exec, EagerAndReferenceModes) {
  Arena arena(4096);
  ThreadPool pool(1);
  const Arch arch = {Backend::kCpu, "test", "test", 4};
  int chosen = 0;
  Exec eager({.mode = ExecMode::kEager, .arch = arch, .pool = &pool, .arena = &arena});
  eager.call("site", kFake, FakeArgs{100, &chosen});
  EXPECT_EQ(chosen, 1);
  Exec reference({.mode = ExecMode::kReference, .arch = arch, .pool = &pool, .arena = &arena});
  reference.call("site", kFake, FakeArgs{100, &chosen});
  EXPECT_EQ(chosen, -1);
  const Result<int> none = select_row(kHoles, FakeArgs{100, &chosen}, {Backend::kGpu, "sm90", "90", 32});
  ASSERT_FALSE(none.ok());
  EXPECT_NE(none.status().message().find("fake.gpu: not in this build"), std::string::npos) << none.status().message();
}

TEST(Exec, DryPassesCountWorkspace) {
  KernelPlan plan(std::vector<Bucket>{{1, 1}});
  Arena arena;
  ThreadPool pool(1);
  Exec exec({.mode = ExecMode::kDry,
             .arch = {Backend::kCpu, "test", "test", 4},
             .pool = &pool,
             .arena = &arena,
             .plan = &plan});
  exec.begin_step(1, true);
  exec.call("site", kFake, FakeArgs{1, nullptr});
  EXPECT_EQ(arena.used(), 0U);
  EXPECT_EQ(arena.high_water(), 1024U);
}

}  // namespace
}  // namespace moat
