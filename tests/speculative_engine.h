// SPDX-License-Identifier: Apache-2.0
// moat-nano with its drafter in the whole engine, and prompts that neither has seen: requests go in together, replies
// and what became of the drafts come out.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/local_engine.h"
#include "golden_file.h"
#include "speculation_scale.h"
#include "speculative_run.h"

namespace moat::test {

inline Json read_golden(const std::string& name) {
  auto text = read_file(golden_dir() + "/dspark/" + name);
  EXPECT_TRUE(text.ok()) << text.status().message();
  auto json = parse_json(*text);
  EXPECT_TRUE(json.ok()) << json.status().message();
  return std::move(json).value();
}

inline std::vector<int32_t> ints(const Json& list) {
  std::vector<int32_t> out;
  for (const Json& item : list.as_array()) out.push_back(static_cast<int32_t>(*item.as_int64()));
  return out;
}
inline SpeculativeModels& models() {
  static SpeculativeModels both(source_dir() + "/models/moat-nano", source_dir() + "/models/moat-nano-dspark");
  return both;
}

struct GoldenPrompt {
  std::vector<int32_t> prompt;
  int64_t new_tokens = 0;
  std::vector<int32_t> accepted;
  double gap = 0;
};
inline const std::vector<GoldenPrompt>& golden_prompts() {
  static const std::vector<GoldenPrompt> all = [] {
    std::vector<GoldenPrompt> out;
    const Json json = read_golden("prompts.json");
    for (const Json& row : json.as_array()) {
      out.push_back({ints(*row.find("prompt")), *row.find("new_tokens")->as_int64(), ints(*row.find("accepted")),
                     row.find("gap")->as_double()});
    }
    return out;
  }();
  return all;
}
// A part of them unless everything is asked for.
inline std::vector<size_t> chosen_prompts(size_t count) {
  std::vector<size_t> out;
  const size_t step = is_full_speculation() ? 1 : golden_prompts().size() / count;
  for (size_t i = 0; i < golden_prompts().size(); i += step) out.push_back(i);
  return out;
}

struct EngineUnderTest {
  EngineParts parts;
  explicit EngineUnderTest(EngineOptions options, int64_t block_size = 16) {
    if (options.custom_drafter == nullptr) options.drafter = models().drafter.get();
    options.max_model_len = 1024;
    options.max_num_seqs = 16;
    options.block_size = block_size;
    options.memory_bytes = int64_t{2} << 30;
    auto made = make_engine_parts(*models().target, options, models().pool);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (made.ok()) parts = std::move(made).value();
  }
};

struct Ask {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  bool speculative = true;
  int64_t cancel_after = -1;  // tokens
};

// A step of a sequence in which drafts were verified.
struct DraftedStep {
  int32_t drafted = 0, accepted = 0;
  bool ends = false;  // the reply: what was accepted behind its last token is not counted
};

struct Outcome {
  std::vector<std::vector<int32_t>> replies;
  std::vector<std::vector<SampledToken>> tokens;
  std::vector<std::vector<DraftedStep>> drafted_steps;
  SchedulerStats stats;
  int64_t restored = 0;
};

// All asks at once, in a pool of `blocks` (0: all there are). `fixed`: drafts a round; -1: as many as pay; 0: none.
inline Outcome run_all(EngineParts& parts, const std::vector<Ask>& asks, int64_t fixed, int64_t blocks = 0) {
  CacheSizes sizes = parts.capacity.cache;
  if (blocks > 0) sizes.num_blocks = std::min(blocks, sizes.num_blocks);
  Scheduler scheduler(parts.scheduler_options, sizes, parts.ledger_options);
  parts.draft_length = fixed == 0 ? DraftLength() : DraftLength(7, std::max<int64_t>(fixed, 0), true);
  Stepper stepper(parts, scheduler);
  Outcome out;
  out.replies.resize(asks.size());
  out.tokens.resize(asks.size());
  out.drafted_steps.resize(asks.size());
  for (size_t i = 0; i < asks.size(); ++i) {
    Request request;
    request.prompt_ids = asks[i].prompt;
    request.sampling = asks[i].sampling;
    request.speculative = asks[i].speculative;
    scheduler.add(i + 1, std::move(request));
  }
  StepPlan plan;
  std::vector<SequenceEvent> events;
  while (!scheduler.idle()) {
    stepper.schedule(plan, events, 0);
    if (!plan.empty()) stepper.run(plan, events);
    scheduler.check_invariants();
    for (const SequenceEvent& e : events) {
      const size_t i = e.sequence - 1;
      EXPECT_NE(e.event.finish, FinishReason::kError) << e.event.error.message();
      for (const SampledToken& t : e.event.tokens) {
        out.replies[i].push_back(t.token_id);
        out.tokens[i].push_back(t);
      }
      if (e.event.num_drafted_tokens > 0) {
        out.drafted_steps[i].push_back({.drafted = e.event.num_drafted_tokens,
                                        .accepted = e.event.num_accepted_drafts,
                                        .ends = e.event.finish != FinishReason::kNone});
      }
      const auto size = static_cast<int64_t>(out.replies[i].size());
      if (asks[i].cancel_after >= 0 && size >= asks[i].cancel_after) scheduler.cancel(e.sequence);
    }
    events.clear();
  }
  out.stats = scheduler.stats();
  out.restored = scheduler.ledger().restored_total();
  EXPECT_EQ(scheduler.ledger().blocks_used(), 0);
  return out;
}

}  // namespace moat::test
