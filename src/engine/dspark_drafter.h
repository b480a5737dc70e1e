// SPDX-License-Identifier: Apache-2.0
// DsparkDrafter: the block-diffusion drafter (model/dspark.h) behind the Drafter interface. Its context lives in the
// blocks of the target's paged cache, and every row that the target computes is written to it, so prefix hits,
// preemption and requests that are not drafted for need no care.
#pragma once

#include <memory>

#include "engine/drafter.h"
#include "model/dspark.h"

namespace moat {

class DsparkDrafter final : public Drafter {
 public:
  // `model` must outlive the drafter. `rows` are those of CacheMemory::draft_rows(), or shapes for dry passes.
  DsparkDrafter(const DsparkModel& model, const Tensor& rows, int64_t block_size);

  int64_t max_drafts() const override { return model_.config().block_size; }
  std::string describe() const override;
  bool has_confidence() const override { return model_.config().confidence_head; }
  std::span<const int32_t> tap_layers() const override { return model_.config().target_layer_ids; }
  TapStream tap_stream() const override { return model_.config().tap_stream; }
  void extend(Exec& exec, const Tensor& taps, const ForwardInput& input) override;
  Drafts propose(Exec& exec, std::span<const DraftSequence> sequences, int64_t max_blocks, int64_t num_drafts) override;
  void dry_propose(Exec& exec, int64_t seqs, int64_t max_blocks, bool upper_end) override;
  void dry_extend(Exec& exec, int64_t tokens) override;

 private:
  const DsparkModel& model_;
  DraftCacheView cache_;
};

}  // namespace moat
