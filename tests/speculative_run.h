// SPDX-License-Identifier: Apache-2.0
// Speculative decoding of one sequence from the parts themselves: drafter, forward over drafts, verifier ops, commit. No
// engine, no scheduler, no sampler: what they do is compared with this, and this with the goldens. Random numbers come
// from outside.
#pragma once

#include <gtest/gtest.h>

#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/cache_memory.h"
#include "model/dspark.h"
#include "model/kimi.h"
#include "model/loader.h"
#include "ops/accept.h"
#include "ops/pointwise.h"
#include "ops/sample.h"

namespace moat::test {

struct SpeculativeModels {
  ThreadPool pool;
  std::unique_ptr<LoadedModel> target;
  std::unique_ptr<LoadedDspark> drafter;

  SpeculativeModels(const std::string& target_dir, const std::string& drafter_dir, int threads = 2) : pool(threads) {
    auto model = load_model(target_dir, {}, pool);
    EXPECT_TRUE(model.ok()) << model.status().message();
    if (model.ok()) target = std::move(model).value();
    auto draft = load_dspark(drafter_dir, pool);
    EXPECT_TRUE(draft.ok()) << draft.status().message();
    if (draft.ok()) drafter = std::move(draft).value();
  }
};

struct RunSampling {
  float temperature = 0.0F;
  int32_t top_k = 0;
  float top_p = 1.0F;
  AcceptRule rule = AcceptRule::kToken;
};

class SpeculativeRun {
 public:
  struct Round {
    std::vector<int32_t> drafts;
    std::vector<float> confidence;
    int32_t accepted = 0;
    int32_t bonus = -1;
  };
  // Numbers in [0, 1) for a round: one for each draft, for each test, and one for the last token.
  struct Numbers {
    std::vector<double> draft, accept;
    double bonus = 0;
  };

  SpeculativeRun(SpeculativeModels& models, int64_t max_tokens, const RunSampling& sampling = {})
      : models_(models),
        config_(models.target->config),
        sampling_(sampling),
        model_(models.target->config, models.target->weights),
        draft_model_(models.drafter->config, models.drafter->weights, models.target->weights.embed,
                     models.target->weights.lm_head),
        sizes_{.block_size = 64,
               .num_blocks = (max_tokens + 63) / 64 + 1,
               .num_slots = 3,
               .draft_layers = models.drafter->config.num_layers,
               .draft_row = models.drafter->config.row_width(),
               .verify_rows = 1 + models.drafter->config.block_size},
        caches_(config_, sizes_),
        arena_(size_t{256} << 20),
        exec_({.mode = ExecMode::kEager, .arch = host_arch(), .pool = &models.pool, .arena = &arena_, .comm = &comm_}) {
    plan_.block_tables.resize(static_cast<size_t>(sizes_.num_blocks));
    // Blocks are not in order.
    for (int64_t b = 0; b < sizes_.num_blocks; ++b) {
      plan_.block_tables[static_cast<size_t>(b)] = static_cast<int32_t>((b + 1) % sizes_.num_blocks);
    }
    plan_.max_blocks = sizes_.num_blocks;
  }

  // Computes the prompt in one pass; the first token is chosen with `bonus`.
  void prefill(std::span<const int32_t> prompt, double bonus = 0) {
    const ArenaScope scope(arena_);
    tokens_.assign(prompt.begin(), prompt.end());
    const Tensor logits = forward(prompt, 0, {});
    tokens_.push_back(choose(logits, bonus));
  }

  const DraftRoundOutput propose(int64_t num_drafts, std::span<const double> uniforms) {
    const std::vector<int32_t> anchors = {tokens_.back()};
    const std::vector<int32_t> positions = {static_cast<int32_t>(tokens_.size()) - 1};
    const std::vector<float> temperature = {sampling_.temperature};
    const std::vector<double> unused(static_cast<size_t>(num_drafts), 0.0);
    return draft_model_.propose(exec_,
                                {.anchors = anchors,
                                 .positions = positions,
                                 .block_tables = plan_.block_tables,
                                 .max_blocks = plan_.max_blocks,
                                 .temperature = temperature,
                                 .uniforms = uniforms.empty() ? std::span<const double>(unused) : uniforms,
                                 .num_drafts = num_drafts},
                                {.rows = caches_.draft_rows(), .block_size = sizes_.block_size});
  }

  Round round() { return round(Numbers()); }
  Round round(const Numbers& numbers, int64_t num_drafts = 0) {
    const ArenaScope scope(arena_);
    if (num_drafts == 0) num_drafts = draft_model_.config().block_size;
    const DraftRoundOutput proposed = propose(num_drafts, numbers.draft);
    Round out;
    out.drafts.assign(proposed.ids.i32(), proposed.ids.i32() + num_drafts);
    if (proposed.confidence.is_set()) {
      out.confidence.assign(proposed.confidence.f32(), proposed.confidence.f32() + num_drafts);
    }
    verify(out, proposed.probs, numbers);
    return out;
  }

  // One round with given drafts: forward, verdict, commit. `laws` may be unset for greedy ones.
  void verify(Round& out, const Tensor& laws, const Numbers& numbers) {
    const int32_t anchor = tokens_.back();
    const Tensor logits = forward({&anchor, 1}, static_cast<int64_t>(tokens_.size()) - 1, out.drafts);
    const int64_t rows = logits.dim(0);
    const Tensor accepted = arena_.alloc(DType::kI32, {1});
    const Tensor bonus = arena_.alloc(DType::kI32, {1});
    const std::vector<int32_t> cu_rows = {0, static_cast<int32_t>(rows)};
    std::vector<int32_t> drafts = out.drafts;
    drafts.push_back(-1);
    if (sampling_.temperature == 0.0F) {
      const Tensor chosen = arena_.alloc(DType::kI32, {rows});
      argmax(exec_, "argmax", {.ids = chosen, .logits = logits});
      match_drafts(exec_, "match",
                   {.accepted = accepted, .bonus = bonus, .chosen = chosen, .drafts = drafts, .cu_rows = cu_rows});
    } else {
      const Tensor probs = distribution(logits);
      std::vector<double> accept = numbers.accept;
      accept.resize(static_cast<size_t>(rows), 0.5);
      std::vector<int32_t> law_rows(static_cast<size_t>(rows));
      std::iota(law_rows.begin(), law_rows.end(), 0);
      const std::vector<AcceptRule> rules = {sampling_.rule};
      accept_drafts(exec_, "accept",
                    {.accepted = accepted,
                     .bonus = bonus,
                     .target = {.dense = probs},
                     .q = laws,
                     .q_rows = law_rows,
                     .drafts = drafts,
                     .cu_rows = cu_rows,
                     .rules = rules,
                     .accept_uniforms = accept,
                     .bonus_uniforms = {&numbers.bonus, 1}});
    }
    out.accepted = accepted.i32()[0];
    out.bonus = bonus.i32()[0];
    commit(out.accepted + 1);
    tokens_.insert(tokens_.end(), out.drafts.begin(), out.drafts.begin() + out.accepted);
    tokens_.push_back(out.bonus);
  }

  // Rows [first, first + ids + drafts) of the sequence; logits of the last 1 + drafts rows. Drafts change no state.
  Tensor forward(std::span<const int32_t> ids, int64_t first, std::span<const int32_t> drafts) {
    plan_.sequences = {1};
    plan_.num_tokens = {static_cast<int32_t>(ids.size())};
    plan_.first_positions = {static_cast<int32_t>(first)};
    plan_.state_slots = {1};
    plan_.wants_token = {1};
    plan_.num_drafts = {static_cast<int32_t>(drafts.size())};
    plan_.token_ids.assign(ids.begin(), ids.end());
    plan_.num_decode_seqs = 1;
    const StepDrafts step{.counts = {static_cast<int32_t>(drafts.size())}, .ids = {drafts.begin(), drafts.end()}};
    ForwardInput input = batch_.build(plan_, sizes_.block_size, step);
    input.tap_layers = draft_model_.config().target_layer_ids;
    input.tap_stream = draft_model_.config().tap_stream;
    const ForwardOutput output = model_.forward(exec_, input, caches_.view());
    draft_model_.extend_context(exec_,
                                {.taps = output.taps, .positions = input.positions, .slot_mapping = input.slot_mapping},
                                {.rows = caches_.draft_rows(), .block_size = sizes_.block_size});
    return output.logits;
  }

  void commit(int32_t rows) {
    const std::vector<int32_t> begins = {0}, ends = {rows}, slots = {1};
    model_.commit(exec_, {.begins = begins, .ends = ends, .slots = slots}, caches_.view());
  }

  // Temperature, top-k, top-p of each row, in place of `logits`.
  Tensor distribution(const Tensor& logits) {
    const auto rows = static_cast<size_t>(logits.dim(0));
    const std::vector<float> temperature(rows, sampling_.temperature), top_p(rows, sampling_.top_p);
    const std::vector<int32_t> top_k(rows,
                                     sampling_.top_k > 0 ? sampling_.top_k : static_cast<int32_t>(config_.vocab_size));
    softmax(exec_, "softmax", {.probs = logits, .logits = logits, .temperature = temperature});
    top_k_renorm(exec_, "top_k", {.probs = logits, .k = top_k});
    top_p_renorm(exec_, "top_p", {.probs = logits, .p = top_p});
    return logits;
  }

  int32_t choose(const Tensor& logits, double uniform) {
    const Tensor last = logits.rows(logits.dim(0) - 1, logits.dim(0));
    const Tensor ids = arena_.alloc(DType::kI32, {1});
    if (sampling_.temperature == 0.0F) {
      argmax(exec_, "argmax", {.ids = ids, .logits = last});
    } else {
      draw(exec_, "draw", {.ids = ids, .probs = distribution(last), .uniform = {&uniform, 1}});
    }
    return ids.i32()[0];
  }

  const std::vector<int32_t>& tokens() const { return tokens_; }
  CacheMemory& caches() { return caches_; }
  Arena& arena() { return arena_; }
  KimiModel& model() { return model_; }
  DsparkModel& draft_model() { return draft_model_; }
  Exec& exec() { return exec_; }

 private:
  SpeculativeModels& models_;
  const ModelConfig& config_;
  RunSampling sampling_;
  KimiModel model_;
  DsparkModel draft_model_;
  CacheSizes sizes_;
  CacheMemory caches_;
  Arena arena_;
  SingleRank comm_;
  Exec exec_;
  Batch batch_;
  StepPlan plan_;
  std::vector<int32_t> tokens_;
};

}  // namespace moat::test
