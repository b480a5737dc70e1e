// SPDX-License-Identifier: Apache-2.0
// A drafter under test: with a paged cache of its own, and as a small random one that went through files.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "draft_checkpoint.h"
#include "model/dspark.h"

namespace moat::test {

constexpr int64_t kPage = 4;  // rows of a cache page: small, so that contexts cross pages

// A drafter with a cache of its own: sequence s has pages s, s + 8, s + 16, ... of it.
class Drafter {
 public:
  Drafter(const DsparkConfig& config, const DsparkWeights& weights, const Tensor& embed, const Tensor& lm_head,
          ThreadPool& pool)
      : model_(config, weights, embed, lm_head), pool_(pool) {
    const Dims dims = {config.num_layers, kPages * kPage, model_.row_width()};
    memory_ = Buffer(static_cast<size_t>(storage_bytes(DType::kF32, dims)));
    cache_ = {make_tensor(memory_.data(), DType::kF32, dims), kPage};
    // What nobody wrote must not be read.
    std::fill_n(cache_.rows.f32(), cache_.rows.count(), std::numeric_limits<float>::quiet_NaN());
  }

  DsparkModel& model() { return model_; }
  void set_mode(ExecMode mode) { mode_ = mode; }  // kEager or kReference
  const DraftCacheView& cache() const { return cache_; }
  int64_t slot(int64_t seq, int64_t position) const {
    return (seq + position / kPage * kSeqs) * kPage + position % kPage;
  }

  // taps [tokens, taps * hidden] of positions first ..
  void extend(int64_t seq, int64_t first, const Tensor& taps) {
    std::vector<int32_t> positions;
    std::vector<int64_t> slots;
    for (int64_t p = first; p < first + taps.dim(0); ++p) {
      positions.push_back(static_cast<int32_t>(p));
      slots.push_back(slot(seq, p));
    }
    Exec exec = make_exec();
    model_.extend_context(exec, {.taps = taps, .positions = positions, .slot_mapping = slots}, cache_);
  }

  struct Round {
    std::vector<int32_t> ids;                      // [seqs, drafts]
    std::vector<float> probs, confidence, hidden;  // flat; hidden [seqs * drafts, hidden]
    std::vector<float> base_logits;                // [seqs * drafts, draft vocab]
    std::vector<std::vector<float>> bias;          // [drafts][seqs * draft vocab]
    std::vector<float> row(const std::vector<float>& all, int64_t i, int64_t rows) const {
      const auto width = static_cast<std::ptrdiff_t>(all.size()) / rows;
      return {all.begin() + i * width, all.begin() + (i + 1) * width};
    }
  };
  struct Ask {
    int64_t seq = 0;
    int32_t anchor = 0;
    int32_t position = 0;
    float temperature = 0.0F;
    std::vector<double> uniforms = std::vector<double>(64, 0.5);
  };

  Round propose(const std::vector<Ask>& asks, int64_t drafts) {
    std::vector<int32_t> anchors, positions, tables;
    std::vector<float> temperature;
    std::vector<double> uniforms;
    for (const Ask& a : asks) {
      anchors.push_back(a.anchor);
      positions.push_back(a.position);
      temperature.push_back(a.temperature);
      uniforms.insert(uniforms.end(), a.uniforms.begin(), a.uniforms.begin() + drafts);
      for (int64_t b = 0; b < kPages / kSeqs; ++b) tables.push_back(static_cast<int32_t>(a.seq + b * kSeqs));
    }
    Round round;
    const auto keep = [](const Tensor& t) { return std::vector<float>(t.f32(), t.f32() + t.count()); };
    model_.set_probe([&](const char* name, int64_t, const Tensor& value) {
      if (std::string_view(name) == "hidden") round.hidden = keep(value);
      if (std::string_view(name) == "base_logits") round.base_logits = keep(value);
      if (std::string_view(name) == "bias") round.bias.push_back(keep(value));
    });
    const ArenaScope scope(arena_);
    Exec exec = make_exec();
    const DraftRoundOutput out = model_.propose(exec,
                                                {.anchors = anchors,
                                                 .positions = positions,
                                                 .block_tables = tables,
                                                 .max_blocks = kPages / kSeqs,
                                                 .temperature = temperature,
                                                 .uniforms = uniforms,
                                                 .num_drafts = drafts},
                                                cache_);
    model_.set_probe({});
    EXPECT_EQ(out.ids.dims, (Dims{static_cast<int64_t>(asks.size()), drafts}));
    round.ids.assign(out.ids.i32(), out.ids.i32() + out.ids.count());
    if (out.probs.is_set()) round.probs = keep(out.probs);
    if (out.confidence.is_set()) round.confidence = keep(out.confidence);
    return round;
  }

 private:
  static constexpr int64_t kSeqs = 8, kPages = 512;
  Exec make_exec() {
    return Exec({.mode = mode_, .arch = host_arch(), .pool = &pool_, .arena = &arena_, .comm = &comm_});
  }

  DsparkModel model_;
  ThreadPool& pool_;
  ExecMode mode_ = ExecMode::kEager;
  Buffer memory_;
  DraftCacheView cache_;
  Arena arena_{size_t{64} << 20};
  SingleRank comm_;
};

struct Floats {
  std::vector<float> values;
  Tensor tensor;
  Floats(Dims dims, double deviation, uint64_t seed) : values(static_cast<size_t>(dims.count())) {
    Rng rng(seed);
    for (float& v : values) v = static_cast<float>(deviation * rng.normal());
    tensor = make_tensor(values.data(), DType::kF32, dims);
  }
};

// A checkpoint that went through files, with a random target around it.
struct Toy {
  explicit Toy(TinyDraft tiny, int num_shards = 1) : draft(std::move(tiny)) {
    draft.write(dir.path(), num_shards);
    auto result = load_dspark(dir.path(), pool);
    MOAT_CHECK(result.ok(), "{}", result.status().message());
    loaded = std::move(result).value();
    drafter = std::make_unique<Drafter>(loaded->config, loaded->weights, embed.tensor, lm_head.tensor, pool);
  }

  Tensor taps(int64_t tokens, uint64_t seed) {
    all_taps.push_back(std::make_unique<Floats>(Dims{tokens, loaded->config.num_taps() * kTinyHidden}, 1.0, seed));
    return all_taps.back()->tensor;
  }
  ReferenceRound reference(const Tensor& taps, int32_t anchor, const std::vector<int32_t>& drafts) const {
    std::vector<Row> rows;
    for (int64_t t = 0; t < taps.dim(0); ++t) rows.emplace_back(taps.row(t), taps.row(t) + taps.dim(1));
    return DraftReference(draft, embed.tensor, lm_head.tensor).round(rows, anchor, drafts);
  }

  TinyDraft draft;
  TempDir dir;
  ThreadPool pool{2};
  Floats embed{{kTinyVocab, kTinyHidden}, 1.0, 11};
  Floats lm_head{{kTinyVocab, kTinyHidden}, 0.4, 12};
  std::unique_ptr<LoadedDspark> loaded;
  std::unique_ptr<Drafter> drafter;
  std::vector<std::unique_ptr<Floats>> all_taps;
};

}  // namespace moat::test
