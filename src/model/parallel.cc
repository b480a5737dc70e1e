// SPDX-License-Identifier: Apache-2.0
#include "model/parallel.h"

namespace moat {

Result<int64_t> shard_count(const char* what, int64_t n, int parts) {
  if (parts < 1 || n % parts != 0) return invalid_argument("{} = {} does not divide over {} ranks", what, n, parts);
  return n / parts;
}

Result<Slice> shard_slice(ShardRule rule, const Dims& dims, const Parallel& p, int64_t live) {
  const int tp_rank = p.rank % p.tp;
  switch (rule) {
    case ShardRule::kReplicate:
    case ShardRule::kExperts: return Slice{0, 0, dims.rank() ? dims[0] : 1};
    case ShardRule::kRows:
    case ShardRule::kLeading: {
      const int64_t whole = rule == ShardRule::kRows ? dims[0] : live;
      MOAT_ASSIGN(const int64_t part, shard_count("rows", whole, p.tp));
      return Slice{0, tp_rank * part, (tp_rank + 1) * part};
    }
    case ShardRule::kCols: {
      MOAT_ASSIGN(const int64_t part, shard_count("columns", dims[1], p.tp));
      return Slice{1, tp_rank * part, (tp_rank + 1) * part};
    }
  }
  return internal_error("unknown shard rule");
}

}  // namespace moat
