// SPDX-License-Identifier: Apache-2.0
#include "engine/cache.h"

#include <set>

#include "base/status.h"

namespace moat {

CacheLedger::CacheLedger(const CacheSizes& sizes) : sizes_(sizes), blocks_(sizes.num_blocks), slots_(sizes.num_slots) {
  MOAT_CHECK(sizes.block_size > 0, "block size {}", sizes.block_size);
}

std::optional<int64_t> CacheLedger::admit(const Admission& admission) {
  MOAT_CHECK(!holdings_.contains(admission.sequence), "sequence {} is admitted twice", admission.sequence);
  auto slot = slots_.allocate(1);
  if (!slot) return std::nullopt;
  auto blocks = blocks_.allocate(blocks_for(admission.reserve_tokens));
  if (!blocks) {
    slots_.release(slot->front());
    return std::nullopt;
  }
  holdings_[admission.sequence] = {std::move(*blocks), slot->front(), admission.reserve_tokens};
  return 0;
}

void CacheLedger::free(SequenceId sequence) {
  const auto it = holdings_.find(sequence);
  MOAT_CHECK(it != holdings_.end(), "sequence {} holds nothing", sequence);
  for (const int32_t block : it->second.blocks) blocks_.release(block);
  slots_.release(it->second.slot);
  holdings_.erase(it);
}

std::span<const int32_t> CacheLedger::block_table(SequenceId sequence) const { return holdings_.at(sequence).blocks; }

int32_t CacheLedger::state_slot(SequenceId sequence) const { return holdings_.at(sequence).slot; }

void CacheLedger::check_invariants() const {
  blocks_.check_invariants();
  slots_.check_invariants();
  std::set<int32_t> blocks;
  std::set<int32_t> slots;
  for (const auto& [id, holding] : holdings_) {
    for (const int32_t b : holding.blocks) MOAT_CHECK(blocks.insert(b).second, "C1: block {} is in two tables", b);
    MOAT_CHECK(slots.insert(holding.slot).second, "C2: slot {} is held twice", holding.slot);
    MOAT_CHECK(static_cast<int64_t>(holding.blocks.size()) == blocks_for(holding.reserve_tokens), "C3: sequence {}",
               id);
  }
  MOAT_CHECK(static_cast<int64_t>(blocks.size()) == blocks_.num_used(), "C1: {} blocks in tables, {} used",
             blocks.size(), blocks_.num_used());
  MOAT_CHECK(static_cast<int64_t>(slots.size()) == slots_.num_used(), "C2: {} slots held, {} used", slots.size(),
             slots_.num_used());
}

CacheView dry_cache_view(const ModelConfig& config, const CacheSizes& sizes) {
  CacheView view;
  view.block_size = sizes.block_size;
  view.mla = make_tensor(nullptr, DType::kF32,
                         {config.num_mla_layers(), sizes.num_blocks * sizes.block_size, config.mla_row()});
  view.kda_state = make_tensor(
      nullptr, DType::kF32,
      {config.num_kda_layers(), sizes.num_slots, config.kda_num_heads, config.kda_head_dim, config.kda_head_dim});
  view.kda_conv = make_tensor(
      nullptr, DType::kF32, {config.num_kda_layers(), sizes.num_slots, 3, config.conv_kernel - 1, config.kda_width()});
  return view;
}

CacheMemory::CacheMemory(const ModelConfig& config, const CacheSizes& sizes) : view_(dry_cache_view(config, sizes)) {
  const auto fill = [](Buffer& buffer, Tensor& tensor) {
    buffer = Buffer(static_cast<size_t>(storage_bytes(tensor.dtype, tensor.dims)));
    tensor.data = buffer.data();
  };
  fill(mla_, view_.mla);
  fill(state_, view_.kda_state);
  fill(conv_, view_.kda_conv);
}

int64_t CacheMemory::bytes() const { return static_cast<int64_t>(mla_.size() + state_.size() + conv_.size()); }

}  // namespace moat
