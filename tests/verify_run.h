// SPDX-License-Identifier: Apache-2.0
// A target over its caches, without engine, scheduler or sampler: rows go in, with drafts or without, and logits and
// states come out. The test says what is committed.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/batch.h"
#include "engine/cache_memory.h"
#include "model/kimi.h"
#include "model/loader.h"

namespace moat::test {

class VerifyRun {
 public:
  struct Rows {
    int64_t seq = 0;
    std::vector<int32_t> ids;
    std::vector<int32_t> drafts = {};
  };
  using Logits = std::vector<std::vector<float>>;  // [rows][vocab]

  // Sequence s has slot s + 1 and blocks of its own. Everything is NaN until it is written.
  VerifyRun(const LoadedModel& loaded, ThreadPool& pool, int64_t num_seqs, int64_t max_tokens)
      : model_(loaded.config, loaded.weights),
        blocks_of_seq_((max_tokens + kBlock - 1) / kBlock),
        caches_(loaded.config, {.block_size = kBlock,
                                .num_blocks = num_seqs * blocks_of_seq_,
                                .num_slots = num_seqs + 2,
                                .verify_rows = std::max<int64_t>(64, 16 * num_seqs)}),
        view_(caches_.view()),
        computed_(static_cast<size_t>(num_seqs), 0),
        first_record_(static_cast<size_t>(num_seqs), -1),
        pool_(pool) {
    for (const Tensor& t : {view_.mla, view_.kda_state, view_.kda_conv, view_.kda_records, view_.conv_records}) {
      std::fill_n(t.f32(), t.count(), std::numeric_limits<float>::quiet_NaN());
    }
  }

  // One step: logits of each sequence's last row and of its drafts' rows, in order. Drafts change no state until commit().
  Logits step(const std::vector<Rows>& rows) {
    plan_.clear();
    plan_.block_tables.clear();
    plan_.max_blocks = blocks_of_seq_;
    StepDrafts drafts;
    for (const Rows& r : rows) {
      plan_.sequences.push_back(static_cast<SequenceId>(r.seq));
      plan_.num_tokens.push_back(static_cast<int32_t>(r.ids.size()));
      plan_.first_positions.push_back(static_cast<int32_t>(computed_[static_cast<size_t>(r.seq)]));
      plan_.state_slots.push_back(static_cast<int32_t>(r.seq) + 1);
      plan_.wants_token.push_back(1);
      plan_.num_drafts.push_back(static_cast<int32_t>(r.drafts.size()));
      plan_.token_ids.insert(plan_.token_ids.end(), r.ids.begin(), r.ids.end());
      for (int64_t b = 0; b < blocks_of_seq_; ++b) {
        plan_.block_tables.push_back(static_cast<int32_t>(first_block_ + r.seq * blocks_of_seq_ + b));
      }
      plan_.num_decode_seqs += static_cast<int64_t>(r.ids.size()) < kPrefillMinTokens;
      drafts.counts.push_back(static_cast<int32_t>(r.drafts.size()));
      drafts.ids.insert(drafts.ids.end(), r.drafts.begin(), r.drafts.end());
    }
    ForwardInput input = batch_.build(plan_, kBlock, drafts);
    input.tap_layers = tap_layers;
    input.tap_stream = tap_stream;
    Exec exec = make_exec();
    const ArenaScope scope(arena_);
    const ForwardOutput out = model_.forward(exec, input, view_);
    if (out.taps.is_set()) taps.assign(out.taps.f32(), out.taps.f32() + out.taps.count());
    std::fill(first_record_.begin(), first_record_.end(), -1);
    Logits by_batch;
    for (int64_t r = 0; r < out.logits.dim(0); ++r) by_batch.emplace_back(out.logits.row(r), out.logits.row(r + 1));
    // Back from the order of the batch to that of `rows`.
    Logits logits;
    std::vector<size_t> begins(rows.size());
    size_t next = 0;
    for (size_t b = 0; b < rows.size(); ++b) {
      const auto s = static_cast<size_t>(batch_.order()[b]);
      begins[s] = next;
      next += 1 + rows[s].drafts.size();
      if (!rows[s].drafts.empty()) first_record_[static_cast<size_t>(rows[s].seq)] = input.cu_seqlens[b];
    }
    for (size_t s = 0; s < rows.size(); ++s) {
      for (size_t r = 0; r <= rows[s].drafts.size(); ++r) logits.push_back(by_batch[begins[s] + r]);
      if (rows[s].drafts.empty()) {
        computed_[static_cast<size_t>(rows[s].seq)] += static_cast<int64_t>(rows[s].ids.size());
      }
    }
    return logits;
  }

  // The first `rows` verified rows of the last step's sequence stay.
  void commit(int64_t seq, int32_t rows) {
    const int32_t first = first_record_[static_cast<size_t>(seq)];
    const std::vector<int32_t> begins = {first}, ends = {first + rows}, slots = {static_cast<int32_t>(seq) + 1};
    Exec exec = make_exec();
    const ArenaScope scope(arena_);
    model_.commit(exec, {.begins = begins, .ends = ends, .slots = slots}, view_);
    computed_[static_cast<size_t>(seq)] += rows;
  }

  // Bits of the sequence's recurrent state, and of its convolution tails.
  std::vector<uint32_t> state(int64_t seq) const { return bits(view_.kda_state, seq); }
  std::vector<uint32_t> tails(int64_t seq) const { return bits(view_.kda_conv, seq); }

  int64_t computed(int64_t seq) const { return computed_[static_cast<size_t>(seq)]; }
  int64_t first_record(int64_t seq) const { return first_record_[static_cast<size_t>(seq)]; }
  KimiModel& model() { return model_; }
  CacheMemory& caches() { return caches_; }
  CacheView& view() { return view_; }
  ThreadPool& pool() { return pool_; }
  // The paged cache is another one, of which the sequences' blocks begin at `first_block`.
  void use_paged_cache(const Tensor& mla, int64_t first_block) {
    view_.mla = mla;
    first_block_ = first_block;
  }

  static constexpr int64_t kBlock = 16;
  std::vector<int32_t> tap_layers;
  TapStream tap_stream = TapStream::kAttnRes;
  std::vector<float> taps;  // of the last step

 private:
  Exec make_exec() {
    return Exec({.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool_, .arena = &arena_, .comm = &comm_});
  }
  static std::vector<uint32_t> bits(const Tensor& states, int64_t seq) {
    std::vector<uint32_t> out;
    for (int64_t layer = 0; layer < states.dim(0); ++layer) {
      const Tensor one = states.at(layer).at(seq + 1);
      const size_t begin = out.size();
      out.resize(begin + static_cast<size_t>(one.count()));
      std::memcpy(out.data() + begin, one.data, static_cast<size_t>(storage_bytes(one.dtype, one.dims)));
    }
    return out;
  }

  KimiModel model_;
  int64_t blocks_of_seq_;
  CacheMemory caches_;
  CacheView view_;
  std::vector<int64_t> computed_;      // [seqs]
  std::vector<int32_t> first_record_;  // [seqs], of the last step; -1: no drafts
  ThreadPool& pool_;
  int64_t first_block_ = 0;
  Arena arena_{size_t{256} << 20};
  SingleRank comm_;
  Batch batch_;
  StepPlan plan_;
};

}  // namespace moat::test
