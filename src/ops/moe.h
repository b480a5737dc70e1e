// SPDX-License-Identifier: Apache-2.0
// Mixture of experts: route, sort token copies by expert, one product per expert, combine (k3.md 3.7).
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// scores = sigmoid(logits); the k experts with the largest scores + bias (ties: lower index first), in that order; weights are
// the scores without bias, divided by (their sum + 1e-20) if renormalize, times scale.
struct RouterTopkArgs {
  Tensor expert_ids;      // [tokens, k] i32
  Tensor expert_weights;  // [tokens, k] f32
  Tensor logits;          // [tokens, experts] f32
  Tensor bias;            // [experts] f32
  bool renormalize = true;
  float scale = 1.0F;
};
extern const Op<RouterTopkArgs> kRouterTopk;
inline void router_topk(Exec& exec, const char* site, const RouterTopkArgs& args) {
  exec.call(site, kRouterTopk, args);
}

// Groups the tokens * k (token, choice) pairs by expert, stable in token order.
struct MoeDispatchArgs {
  Tensor offsets;        // [experts + 1] i32: pairs of expert e are at sorted positions offsets[e] .. offsets[e + 1]
  Tensor sorted_tokens;  // [tokens * k] i32: token of each sorted position
  Tensor positions;      // [tokens, k] i32: sorted position of each pair
  Tensor expert_ids;     // [tokens, k] i32
};
extern const Op<MoeDispatchArgs> kMoeDispatch;
inline void moe_dispatch(Exec& exec, const char* site, const MoeDispatchArgs& args) {
  exec.call(site, kMoeDispatch, args);
}

// For every sorted position p of expert e: out[p] = weights[e] x[rows ? rows[p] : p]. Experts are separate tensors, never one
// block, so that they can live in different places. Row-invariant like matmul.
struct GroupedMatmulArgs {
  Tensor out;                       // [pairs, n] f32
  Tensor x;                         // [tokens or pairs, k] f32
  Tensor rows;                      // [pairs] i32; absent: the identity
  Tensor offsets;                   // [experts + 1] i32
  std::span<const Tensor> weights;  // per expert [n, k] mxfp4, bf16 or f32; all of one dtype
};
extern const Op<GroupedMatmulArgs> kGroupedMatmul;
inline void grouped_matmul(Exec& exec, const char* site, const GroupedMatmulArgs& args) {
  exec.call(site, kGroupedMatmul, args);
}

// out[t] = sum over j in order of expert_weights[t, j] * y[positions[t, j]].
struct MoeCombineArgs {
  Tensor out;             // [tokens, width] f32
  Tensor y;               // [tokens * k, width] f32
  Tensor positions;       // [tokens, k] i32
  Tensor expert_weights;  // [tokens, k] f32
};
extern const Op<MoeCombineArgs> kMoeCombine;
inline void moe_combine(Exec& exec, const char* site, const MoeCombineArgs& args) {
  exec.call(site, kMoeCombine, args);
}

}  // namespace moat
