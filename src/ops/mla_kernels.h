// SPDX-License-Identifier: Apache-2.0
// Kernels of the latent attention family, and what they share. `_cpu` are plain C++, `_hwy` are vectorised with
// run-time dispatch. All walk the keys in blocks of kKeyBlock by absolute position with an online softmax, so that the
// bits of a row depend on its own keys alone.
#pragma once

#include <algorithm>

#include "ops/mla.h"

namespace moat {

constexpr int64_t kKeyBlock = 64;
constexpr int64_t kQueryBlock = 64;  // rows that meet an expanded block of keys at once

void mla_kv_write_cpu(Exec& exec, const MlaKvWriteArgs& args);
void mla_decode_cpu(Exec& exec, const MlaDecodeArgs& args);
void mla_decode_hwy(Exec& exec, const MlaDecodeArgs& args);
void mla_prefill_cpu(Exec& exec, const MlaPrefillArgs& args);
void mla_prefill_hwy(Exec& exec, const MlaPrefillArgs& args);
int64_t mla_prefill_cpu_workspace(const MlaPrefillArgs& args, const Exec& exec);
int64_t mla_prefill_hwy_workspace(const MlaPrefillArgs& args, const Exec& exec);

// The rows of one sequence in the call's row tensors, and how many keys the first of them sees.
struct SequenceRows {
  int64_t begin = 0, end = 0;
  int64_t first_keys = 0;

  int64_t keys_of(int64_t row) const { return first_keys + (row - begin); }
};

inline SequenceRows sequence_rows(const PagedSequences& seqs, int64_t s) {
  const auto i = static_cast<size_t>(s);
  const int64_t begin = seqs.cu_seqlens[i] - seqs.cu_seqlens[0];
  const int64_t end = seqs.cu_seqlens[i + 1] - seqs.cu_seqlens[0];
  return {begin, end, seqs.context_lens[i] - (end - begin) + 1};
}

// The sequence of a row.
inline int64_t sequence_of(const PagedSequences& seqs, int64_t row) {
  const auto at = std::upper_bound(seqs.cu_seqlens.begin(), seqs.cu_seqlens.end(), seqs.cu_seqlens[0] + row);
  return at - seqs.cu_seqlens.begin() - 1;
}

// Cache slot of a position.
inline int64_t slot_of(const PagedSequences& seqs, int64_t s, int64_t position) {
  const int32_t page = seqs.block_tables[static_cast<size_t>(s * seqs.max_blocks + position / seqs.block_size)];
  return page * seqs.block_size + position % seqs.block_size;
}

}  // namespace moat
