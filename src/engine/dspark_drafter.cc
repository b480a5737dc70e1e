// SPDX-License-Identifier: Apache-2.0
#include "engine/dspark_drafter.h"

#include <algorithm>

#include "base/rng.h"

namespace moat {

DsparkDrafter::DsparkDrafter(const DsparkModel& model, const Tensor& rows, int64_t block_size)
    : model_(model), cache_{.rows = rows, .block_size = block_size} {}

std::string DsparkDrafter::describe() const {
  const DsparkConfig& c = model_.config();
  return fmt::format("DSpark: up to {} drafts, {} layers, taps of {} after layers {}", c.block_size, c.num_layers,
                     c.tap_stream == TapStream::kAttnRes ? "attn_res" : "prefix", fmt::join(c.target_layer_ids, ", "));
}

void DsparkDrafter::extend(Exec& exec, const Tensor& taps, const ForwardInput& input) {
  model_.extend_context(exec, {.taps = taps, .positions = input.positions, .slot_mapping = input.slot_mapping}, cache_);
}

Drafts DsparkDrafter::propose(Exec& exec, std::span<const DraftSequence> sequences, int64_t max_blocks,
                              int64_t num_drafts) {
  std::vector<int32_t> anchors, positions, tables;
  std::vector<float> temperature;
  std::vector<double> uniforms;
  for (const DraftSequence& s : sequences) {
    anchors.push_back(s.tokens.back());
    positions.push_back(static_cast<int32_t>(s.tokens.size()) - 1);
    tables.insert(tables.end(), s.block_table, s.block_table + max_blocks);
    temperature.push_back(s.params->temperature);
    const auto next = static_cast<uint64_t>(s.tokens.size());  // position of the first draft; where the round begins
    for (uint64_t k = 0; k < static_cast<uint64_t>(num_drafts); ++k) {
      // A seeded request is compared with draws that use these very numbers: like laws then give like tokens.
      uniforms.push_back(is_drawn(*s.params)
                             ? random_uniform(s.params->seed, draft_counter(next, k), RandomPurpose::kDraft)
                             : random_uniform(s.params->seed, next + k, RandomPurpose::kSample));
    }
  }
  const DraftRoundOutput out = model_.propose(exec,
                                              {.anchors = anchors,
                                               .positions = positions,
                                               .block_tables = tables,
                                               .max_blocks = max_blocks,
                                               .temperature = temperature,
                                               .uniforms = uniforms,
                                               .num_drafts = num_drafts},
                                              cache_);
  Drafts drafts{.width = num_drafts, .laws = out.probs};
  if (exec.dry()) return drafts;
  drafts.ids.assign(out.ids.i32(), out.ids.i32() + out.ids.count());
  if (out.confidence.is_set()) {
    drafts.confidence.assign(out.confidence.f32(), out.confidence.f32() + out.confidence.count());
  }
  return drafts;
}

void DsparkDrafter::dry_propose(Exec& exec, int64_t seqs, int64_t max_blocks, bool upper_end) {
  const SamplingParams params{.temperature = 1.0F, .seeded = false};
  const std::vector<int32_t> tokens = {0, 0};
  const std::vector<int32_t> table(static_cast<size_t>(max_blocks), 0);
  const std::vector<DraftSequence> sequences(
      static_cast<size_t>(seqs), DraftSequence{.tokens = tokens, .params = &params, .block_table = table.data()});
  const ArenaScope scope(exec.arena());
  propose(exec, sequences, max_blocks, upper_end ? max_drafts() : 1);
}

void DsparkDrafter::dry_extend(Exec& exec, int64_t tokens) {
  const auto width = static_cast<int64_t>(tap_layers().size()) * model_.config().hidden_size;
  const std::vector<int32_t> positions(static_cast<size_t>(tokens), 0);
  const std::vector<int64_t> slots(static_cast<size_t>(tokens), 0);
  const ForwardInput input{.positions = positions, .slot_mapping = slots};
  extend(exec, make_tensor(nullptr, DType::kF32, {tokens, width}), input);
}

}  // namespace moat
