// SPDX-License-Identifier: Apache-2.0
// Routing, dispatch and combination; the products of the experts are in grouped_matmul.cc.
#include "ops/moe.h"

#include <limits>

#include "core/shape.h"
#include "ops/case_data.h"
#include "ops/moe_kernels.h"

namespace moat {
namespace {

double f32_bytes(const Tensor& t) { return 4.0 * static_cast<double>(t.count()); }

// --- router_topk ---

Status check_router(const RouterTopkArgs& a) {
  ShapeMatcher m("router_topk");
  m.match("expert_ids", a.expert_ids, {DType::kI32}, {"tokens", "k"})
      .match("expert_weights", a.expert_weights, {DType::kF32}, {"tokens", "k"})
      .match("logits", a.logits, {DType::kF32}, {"tokens", "experts"})
      .match("bias", a.bias, {DType::kF32}, {"experts"})
      .expect(m["k"] >= 1 && m["k"] <= m["experts"], "between one and all experts a token");
  return m.status();
}

std::string describe_router(const RouterTopkArgs& a) {
  return fmt::format("logits {} k {}", a.logits.describe(), a.expert_ids.dim(1));
}

Cost cost_router(const RouterTopkArgs& a) {
  return {4.0 * static_cast<double>(a.logits.count()),
          f32_bytes(a.logits) + f32_bytes(a.bias) + 2 * f32_bytes(a.expert_ids)};
}

void reference_router(const RouterTopkArgs& a) {
  const int64_t experts = a.logits.dim(1), k = a.expert_ids.dim(1);
  for (int64_t t = 0; t < a.logits.dim(0); ++t) {
    int32_t* ids = a.expert_ids.i32() + t * k;
    std::vector<bool> taken(static_cast<size_t>(experts));
    double sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      int64_t best = -1;
      float best_value = 0;
      for (int64_t e = 0; e < experts; ++e) {
        const float value = router_score(a.logits.row(t)[e]) + a.bias.f32()[e];
        if (taken[static_cast<size_t>(e)] || (best >= 0 && !(value > best_value))) continue;
        best = e;
        best_value = value;
      }
      taken[static_cast<size_t>(best)] = true;
      ids[j] = static_cast<int32_t>(best);
      sum += router_score(a.logits.row(t)[best]);
    }
    for (int64_t j = 0; j < k; ++j) {
      const double score = router_score(a.logits.row(t)[ids[j]]);
      a.expert_weights.row(t)[j] = static_cast<float>((a.renormalize ? score / (sum + 1e-20) : score) * a.scale);
    }
  }
}

// levels == 0: random logits; else logits take only that many values (1: all equal), so that ties are everywhere.
Case router_case(int64_t tokens, int64_t experts, int64_t k, bool renormalize, int64_t levels) {
  return {{{"tokens", tokens}, {"experts", experts}, {"k", k}, {"renormalize", renormalize}, {"levels", levels}}};
}

std::vector<Case> cases_router() {
  return {
      router_case(3, 896, 16, true, 0),  // K3
      router_case(4, 256, 8, true, 0),   // Kimi-Linear
      router_case(17, 16, 4, true, 0),   // k3-nano
      router_case(0, 16, 4, true, 0),    // nothing to do
      router_case(2, 896, 16, true, 1),  // all equal
      router_case(17, 64, 6, false, 3),  // ties, scores as they are
      router_case(3, 5, 5, true, 2),     // every expert
      router_case(2, 1, 1, false, 0),    // one expert
  };
}

Case random_router(uint64_t seed) {
  Rng rng(seed);
  const int64_t experts = 1 + rng.below(100);
  return router_case(rng.below(20), experts, 1 + rng.below(experts), rng.below(2) != 0, rng.below(4));
}

RouterTopkArgs build_router(const Case& c, CaseData& data) {
  const int64_t tokens = c["tokens"], experts = c["experts"], levels = c["levels"];
  const Tensor logits = data.normal({tokens, experts}, 2.0);
  const Tensor bias = data.normal({experts}, 0.1);
  if (levels > 0) {
    for (int64_t i = 0; i < logits.count(); ++i) logits.f32()[i] = static_cast<float>(data.rng().below(levels)) - 1.0F;
    for (int64_t e = 0; e < experts; ++e) bias.f32()[e] = 0.25F;
  }
  return {.expert_ids = data.output("expert_ids", {tokens, c["k"]}, DType::kI32),
          .expert_weights = data.output("expert_weights", {tokens, c["k"]}),
          .logits = logits,
          .bias = bias,
          .renormalize = c["renormalize"] != 0,
          .scale = 2.446F};
}

constexpr Kernel<RouterTopkArgs> kRouterKernels[] = {
    {"router_topk.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, router_topk_cpu}};

// --- moe_dispatch ---

Status check_dispatch(const MoeDispatchArgs& a) {
  ShapeMatcher m("moe_dispatch");
  m.match("expert_ids", a.expert_ids, {DType::kI32}, {"tokens", "k"})
      .match("positions", a.positions, {DType::kI32}, {"tokens", "k"})
      .match("sorted_tokens", a.sorted_tokens, {DType::kI32}, {m["tokens"] * m["k"]})
      .match("offsets", a.offsets, {DType::kI32}, {"experts + 1"})
      .expect(m["experts + 1"] >= 2 && m["k"] >= 1, "at least one expert and one choice")
      .expect(m["tokens"] * m["k"] <= std::numeric_limits<int32_t>::max(), "fewer than 2^31 pairs");
  return m.status();
}

std::string describe_dispatch(const MoeDispatchArgs& a) {
  return fmt::format("expert_ids {} experts {}", a.expert_ids.describe(), a.offsets.dim(0) - 1);
}

Cost cost_dispatch(const MoeDispatchArgs& a) { return {0, 3 * f32_bytes(a.expert_ids) + f32_bytes(a.offsets)}; }

void reference_dispatch(const MoeDispatchArgs& a) {
  const int64_t k = a.expert_ids.dim(1);
  int32_t position = 0;
  for (int64_t e = 0; e + 1 < a.offsets.dim(0); ++e) {
    a.offsets.i32()[e] = position;
    for (int64_t p = 0; p < a.expert_ids.count(); ++p) {
      if (a.expert_ids.i32()[p] != e) continue;
      a.sorted_tokens.i32()[position] = static_cast<int32_t>(p / k);
      a.positions.i32()[p] = position++;
    }
  }
  a.offsets.i32()[a.offsets.dim(0) - 1] = position;
}

// used: choices fall on the first `used` experts; 1: all pairs on one expert.
Case dispatch_case(int64_t tokens, int64_t experts, int64_t k, int64_t used) {
  return {{{"tokens", tokens}, {"experts", experts}, {"k", k}, {"used", used}}};
}

std::vector<Case> cases_dispatch() {
  return {
      dispatch_case(17, 896, 16, 896),  // K3
      dispatch_case(1, 896, 16, 896),   //
      dispatch_case(17, 16, 4, 16),     // k3-nano
      dispatch_case(0, 16, 4, 16),      // nothing to do
      dispatch_case(64, 16, 4, 1),      // all pairs on one expert
      dispatch_case(33, 8, 2, 3),       // empty experts at the end
      dispatch_case(3, 1, 1, 1),        //
  };
}

Case random_dispatch(uint64_t seed) {
  Rng rng(seed);
  const int64_t experts = 1 + rng.below(50);
  return dispatch_case(rng.below(40), experts, 1 + rng.below(6), 1 + rng.below(experts));
}

MoeDispatchArgs build_dispatch(const Case& c, CaseData& data) {
  const int64_t tokens = c["tokens"], k = c["k"];
  return {.offsets = data.output("offsets", {c["experts"] + 1}, DType::kI32),
          .sorted_tokens = data.output("sorted_tokens", {tokens * k}, DType::kI32),
          .positions = data.output("positions", {tokens, k}, DType::kI32),
          .expert_ids = data.random_ints({tokens, k}, c["used"])};
}

constexpr Kernel<MoeDispatchArgs> kDispatchKernels[] = {
    {"moe_dispatch.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, moe_dispatch_cpu}};

// --- moe_combine ---

Status check_combine(const MoeCombineArgs& a) {
  ShapeMatcher m("moe_combine");
  m.match("out", a.out, {DType::kF32}, {"tokens", "width"}, ShapeMatcher::Layout::kRowStrided)
      .match("positions", a.positions, {DType::kI32}, {"tokens", "k"})
      .match("expert_weights", a.expert_weights, {DType::kF32}, {"tokens", "k"})
      .match("y", a.y, {DType::kF32}, {m["tokens"] * m["k"], "width"}, ShapeMatcher::Layout::kRowStrided);
  return m.status();
}

std::string describe_combine(const MoeCombineArgs& a) {
  return fmt::format("y {} k {}", a.y.describe(), a.positions.dim(1));
}

Cost cost_combine(const MoeCombineArgs& a) {
  return {2.0 * static_cast<double>(a.y.count()), f32_bytes(a.y) + f32_bytes(a.out) + 2 * f32_bytes(a.positions)};
}

void reference_combine(const MoeCombineArgs& a) {
  const int64_t k = a.positions.dim(1);
  for (int64_t t = 0; t < a.out.dim(0); ++t) {
    for (int64_t c = 0; c < a.out.dim(1); ++c) {
      double sum = 0;
      for (int64_t j = 0; j < k; ++j) {
        sum += double{a.expert_weights.row(t)[j]} * a.y.row(a.positions.i32()[t * k + j])[c];
      }
      a.out.row(t)[c] = static_cast<float>(sum);
    }
  }
}

Case combine_case(int64_t tokens, int64_t k, int64_t width) {
  return {{{"tokens", tokens}, {"k", k}, {"width", width}}};
}

std::vector<Case> cases_combine() {
  return {combine_case(3, 16, 3584), combine_case(17, 4, 96), combine_case(0, 4, 96), combine_case(1, 1, 1),
          combine_case(33, 3, 517)};
}

Case random_combine(uint64_t seed) {
  Rng rng(seed);
  return combine_case(rng.below(20), 1 + rng.below(6), 1 + rng.below(700));
}

MoeCombineArgs build_combine(const Case& c, CaseData& data) {
  const int64_t tokens = c["tokens"], k = c["k"];
  std::vector<int32_t> order(static_cast<size_t>(tokens * k));
  for (size_t i = 0; i < order.size(); ++i) {  // a random permutation
    order[i] = static_cast<int32_t>(i);
    std::swap(order[i], order[static_cast<size_t>(data.rng().below(static_cast<int64_t>(i) + 1))]);
  }
  return {.out = data.output("out", {tokens, c["width"]}),
          .y = data.normal({tokens * k, c["width"]}),
          .positions = data.ints(std::move(order)).reshape({tokens, k}),
          .expert_weights = data.uniform({tokens, k}, 0.01, 0.5)};
}

constexpr Kernel<MoeCombineArgs> kCombineKernels[] = {
    {"moe_combine.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, moe_combine_cpu}};

}  // namespace

constinit const Op<RouterTopkArgs> kRouterTopk{{.name = "router_topk",
                                                .check = check_router,
                                                .describe = describe_router,
                                                .cost = cost_router,
                                                .reference = reference_router,
                                                .cases = cases_router,
                                                .random_case = random_router,
                                                .build = build_router,
                                                .tolerance = {1e-7, 1e-6},
                                                .kernels = kRouterKernels}};

constinit const Op<MoeDispatchArgs> kMoeDispatch{{.name = "moe_dispatch",
                                                  .check = check_dispatch,
                                                  .describe = describe_dispatch,
                                                  .cost = cost_dispatch,
                                                  .reference = reference_dispatch,
                                                  .cases = cases_dispatch,
                                                  .random_case = random_dispatch,
                                                  .build = build_dispatch,
                                                  .tolerance = {0, 0},
                                                  .kernels = kDispatchKernels}};

constinit const Op<MoeCombineArgs> kMoeCombine{{.name = "moe_combine",
                                                .check = check_combine,
                                                .describe = describe_combine,
                                                .cost = cost_combine,
                                                .reference = reference_combine,
                                                .cases = cases_combine,
                                                .random_case = random_combine,
                                                .build = build_combine,
                                                .tolerance = {1e-6, 1e-6},
                                                .kernels = kCombineKernels}};

}  // namespace moat
