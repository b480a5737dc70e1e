// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "ops/dot_cpu.h"
#include "ops/moe_kernels.h"

namespace moat {
namespace {

// The k best experts of one row, kept sorted in ids and values (k long). A candidate passes only those with a smaller
// value, so of equal ones the lower index, which came first, stays ahead.
void select_experts(const float* logits, const float* bias, int64_t experts, int64_t k, int32_t* ids, float* values) {
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const float value = router_score(logits[e]) + bias[e];
    if (count == k && !(value > values[k - 1])) continue;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      ids[at] = ids[at - 1];
      values[at] = values[at - 1];
    }
    ids[at] = static_cast<int32_t>(e);
    values[at] = value;
  }
}

}  // namespace

void router_topk_cpu(Exec& exec, const RouterTopkArgs& a) {
  const int64_t experts = a.logits.dim(1), k = a.expert_ids.dim(1);
  exec.pool().parallel_for(a.logits.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* logits = a.logits.row(t);
      int32_t* ids = a.expert_ids.i32() + t * k;
      float* weights = a.expert_weights.row(t);
      select_experts(logits, a.bias.f32(), experts, k, ids, weights);
      double sum = 0;
      for (int64_t j = 0; j < k; ++j) sum += router_score(logits[ids[j]]);
      const double factor = a.renormalize ? a.scale / (sum + 1e-20) : a.scale;
      for (int64_t j = 0; j < k; ++j) weights[j] = static_cast<float>(router_score(logits[ids[j]]) * factor);
    }
  });
}

// A counting sort; a step has at most some ten thousand pairs, so one thread does it.
void moe_dispatch_cpu(Exec&, const MoeDispatchArgs& a) {
  const int64_t experts = a.offsets.dim(0) - 1, pairs = a.expert_ids.count(), k = a.expert_ids.dim(1);
  const int32_t* ids = a.expert_ids.i32();
  int32_t* offsets = a.offsets.i32();
  std::fill_n(offsets, experts + 1, 0);
  for (int64_t p = 0; p < pairs; ++p) {
    MOAT_CHECK(ids[p] >= 0 && ids[p] < experts, "expert {} of {}", ids[p], experts);
    ++offsets[ids[p] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) offsets[e + 1] += offsets[e];
  // offsets[e] serves as the cursor of expert e and ends as the begin of e + 1; then everything moves up by one.
  for (int64_t p = 0; p < pairs; ++p) {
    const int32_t position = offsets[ids[p]]++;
    a.positions.i32()[p] = position;
    a.sorted_tokens.i32()[position] = static_cast<int32_t>(p / k);
  }
  for (int64_t e = experts; e > 0; --e) offsets[e] = offsets[e - 1];
  offsets[0] = 0;
}

void moe_combine_cpu(Exec& exec, const MoeCombineArgs& a) {
  constexpr int64_t kChunk = 512;  // columns; one token is shared by several threads
  const int64_t width = a.out.dim(1), k = a.positions.dim(1);
  const int64_t chunks = (width + kChunk - 1) / kChunk;
  exec.pool().parallel_for(a.out.dim(0) * chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t t = item / chunks, first = item % chunks * kChunk;
      const int64_t columns = std::min(kChunk, width - first);
      float* out = a.out.row(t) + first;
      std::fill_n(out, columns, 0.0F);
      for (int64_t j = 0; j < k; ++j) {
        const float weight = a.expert_weights.row(t)[j];
        const float* y = a.y.row(a.positions.i32()[t * k + j]) + first;
        for (int64_t c = 0; c < columns; ++c) out[c] += weight * y[c];
      }
    }
  });
}

// Threads take (expert, 4 outputs): each weight row is read once for all rows of its expert.
void grouped_matmul_cpu(Exec& exec, const GroupedMatmulArgs& a) {
  if (a.out.count() == 0) return;
  constexpr int64_t kOutputs = 4;
  const int64_t experts = static_cast<int64_t>(a.weights.size()), n = a.out.dim(1);
  const int32_t* offsets = a.offsets.i32();
  const int32_t* rows = a.rows.is_set() ? a.rows.i32() : nullptr;
  int32_t* active = exec.arena().alloc(DType::kI32, {experts}).i32();
  const int64_t groups = (n + kOutputs - 1) / kOutputs;
  exec.pool().parallel_for(find_active_experts(a, active) * groups, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t e = active[item / groups];
      const int64_t first = item % groups * kOutputs;
      for (int64_t i = first; i < std::min(n, first + kOutputs); ++i) {
        for (int64_t p = offsets[e]; p < offsets[e + 1]; ++p) {
          a.out.row(p)[i] = dot_row(a.x.row(rows ? rows[p] : p), a.weights[static_cast<size_t>(e)], i);
        }
      }
    }
  });
}

}  // namespace moat
