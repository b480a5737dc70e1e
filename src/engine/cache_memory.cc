// SPDX-License-Identifier: Apache-2.0
#include "engine/cache_memory.h"

#include <cstring>

#include "core/touch.h"
#include "ops/kda_verify.h"

namespace moat {

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
  if (sizes.verify_rows == 0) return view;
  view.kda_records = make_tensor(
      nullptr, DType::kF32,
      {config.num_kda_layers(), sizes.verify_rows, config.kda_num_heads, kda_record_width(config.kda_head_dim)});
  view.conv_records =
      make_tensor(nullptr, DType::kF32, {config.num_kda_layers(), sizes.verify_rows, 3, config.kda_width()});
  return view;
}

Tensor dry_draft_rows(const CacheSizes& sizes) {
  if (sizes.draft_row == 0) return {};
  return make_tensor(nullptr, DType::kF32, {sizes.draft_layers, sizes.num_blocks * sizes.block_size, sizes.draft_row});
}

CacheMemory::CacheMemory(const ModelConfig& config, const CacheSizes& sizes)
    : view_(dry_cache_view(config, sizes)), draft_rows_(dry_draft_rows(sizes)) {
  const auto fill = [](Buffer& buffer, Tensor& tensor) {
    if (!tensor.is_set()) return;
    buffer = Buffer(static_cast<size_t>(storage_bytes(tensor.dtype, tensor.dims)));
    tensor.data = buffer.data();
  };
  fill(mla_, view_.mla);
  fill(state_, view_.kda_state);
  fill(conv_, view_.kda_conv);
  fill(draft_, draft_rows_);
  fill(kda_records_, view_.kda_records);
  fill(conv_records_, view_.conv_records);
}

void CacheMemory::make_resident(ThreadPool& pool) {
  for (const Buffer* buffer : {&mla_, &state_, &conv_, &draft_, &kda_records_, &conv_records_}) {
    touch(pool, buffer->bytes());
  }
}

void CacheMemory::copy_states(std::span<const StateCopy> copies, ThreadPool& pool) {
  const int64_t layers = view_.kda_state.dim(0);
  for (const StateCopy& copy : copies) {
    pool.parallel_for(layers, 1, [&](int64_t first, int64_t last) {
      for (int64_t layer = first; layer < last; ++layer) {
        for (const Tensor& states : {view_.kda_state.at(layer), view_.kda_conv.at(layer)}) {
          const Tensor from = states.at(copy.from);
          std::memcpy(states.at(copy.to).data, from.data, static_cast<size_t>(storage_bytes(from.dtype, from.dims)));
        }
      }
    });
  }
}

int64_t CacheMemory::bytes() const {
  return static_cast<int64_t>(mla_.size() + state_.size() + conv_.size() + draft_.size() + kda_records_.size() +
                              conv_records_.size());
}

}  // namespace moat
