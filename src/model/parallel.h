// SPDX-License-Identifier: Apache-2.0
// Parallel: how one model is split over ranks, and all shard arithmetic. One rank is the trivial split.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "core/tensor.h"

namespace moat {

struct Parallel {
  int tp = 1;         // tensor parallel: heads, intermediate widths, vocabulary
  int ep = 1;         // expert parallel: whole experts
  int pp = 1;         // pipeline stages: ranges of layers
  int kv_shards = 1;  // MLA cache rows of one sequence spread over this many ranks
  int rank = 0;       // of this process, 0 <= rank < tp * pp (ep and kv_shards divide tp)
  bool operator==(const Parallel&) const = default;
};

// How a checkpoint tensor is cut across tensor-parallel ranks. "Rows" are stored rows (outputs), "columns" inputs.
enum class ShardRule : uint8_t {
  kReplicate,  // everywhere, whole
  kRows,       // dim 0 in equal contiguous parts (heads are contiguous rows)
  kCols,       // dim 1 in equal contiguous parts
  kExperts,    // whole under expert parallel; the owner is expert / (num_experts / ep)
  kLeading,    // the first `live` entries of dim 0 in equal parts, padding dropped (A_log)
};

struct Slice {
  int dim = 0;
  int64_t begin = 0, end = 0;  // elements along dim
};

// The part of a tensor with `dims` that rank `p.rank` holds. Fails when the dimension does not divide.
// `live` is for kLeading: how many leading entries are real.
Result<Slice> shard_slice(ShardRule rule, const Dims& dims, const Parallel& p, int64_t live = 0);

// n / parts with the check that it divides.
Result<int64_t> shard_count(const char* what, int64_t n, int parts);

}  // namespace moat
