// SPDX-License-Identifier: Apache-2.0
// Fuzz target of scheduler and cache ledger: the input's bytes make every choice of a random workload, whose promises
// (tests/scheduler_workload.h) and invariants are checked at each step. MOAT_FUZZ_STEPS ends the process after so many
// scheduler steps in all, with a summary.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>

#include "scheduler_workload.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static moat::test::WorkloadCounts total;
  static int64_t workloads = 0;
  static const char* limit = std::getenv("MOAT_FUZZ_STEPS");

  moat::test::ByteSource source(data, size);
  moat::test::SchedulerWorkload workload(source);
  workload.run(1'000'000);  // the input ends first
  total.add(workload.counts());
  ++workloads;
  if (limit != nullptr && total.steps >= std::strtoll(limit, nullptr, 10)) {
    fmt::print(
        "{} steps of {} workloads: {} requests, {} preemptions, {} restores ({} prompt tokens), {} checkpoints saved, "
        "{} evicted, {} timeouts, {} cancels, {} errors, {} flushes; {} of {} drafts accepted in {} rounds, {} of which "
        "saved a checkpoint\n",
        total.steps, workloads, total.requests, total.preemptions, total.hits, total.cached_tokens, total.saves,
        total.evictions, total.timeouts, total.cancels, total.errors, total.flushes, total.accepted,
        total.drafted, total.rounds, total.saves_in_rounds);
    std::fflush(stdout);
    std::_Exit(0);
  }
  return 0;
}
