// SPDX-License-Identifier: Apache-2.0
// Kernels of the mixture-of-experts family. `_cpu` are plain C++, `_hwy` are vectorised with run-time dispatch.
#pragma once

#include <cmath>

#include "ops/moe.h"

namespace moat {

// Rounded once from double, so that every row and the reference select the same experts.
inline float router_score(float logit) {
  return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(logit))));
}

void router_topk_cpu(Exec& exec, const RouterTopkArgs& args);
void moe_dispatch_cpu(Exec& exec, const MoeDispatchArgs& args);
void moe_combine_cpu(Exec& exec, const MoeCombineArgs& args);
void grouped_matmul_cpu(Exec& exec, const GroupedMatmulArgs& args);
void grouped_matmul_hwy(Exec& exec, const GroupedMatmulArgs& args);

// Compact list of the experts that have rows: bytes for it, and itself (`list` has room for every expert).
inline int64_t active_experts_bytes(const GroupedMatmulArgs& args, const Exec&) {
  return static_cast<int64_t>(args.weights.size() * sizeof(int32_t));
}
inline int64_t find_active_experts(const GroupedMatmulArgs& args, int32_t* list) {
  const int32_t* offsets = args.offsets.i32();
  int64_t count = 0;
  for (size_t e = 0; e < args.weights.size(); ++e) {
    if (offsets[e + 1] > offsets[e]) list[count++] = static_cast<int32_t>(e);
  }
  return count;
}

}  // namespace moat
