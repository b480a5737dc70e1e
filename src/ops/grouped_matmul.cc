// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "core/shape.h"
#include "ops/case_data.h"
#include "ops/moe_kernels.h"

namespace moat {
namespace {

Status check(const GroupedMatmulArgs& a) {
  ShapeMatcher m("grouped_matmul");
  const auto experts = static_cast<int64_t>(a.weights.size());
  m.match("out", a.out, {DType::kF32}, {"pairs", "n"}, ShapeMatcher::Layout::kRowStrided)
      .match("offsets", a.offsets, {DType::kI32}, {experts + 1})
      .match_optional("rows", a.rows, {DType::kI32}, {"pairs"})
      .match("x", a.x, {DType::kF32}, {a.rows.is_set() ? "tokens" : "pairs", "k"}, ShapeMatcher::Layout::kRowStrided)
      .expect(experts > 0, "at least one expert")
      .expect(a.out.count() == 0 || a.out.data == nullptr || a.out.data != a.x.data, "out apart from x");
  if (!m.status().ok()) return m.status();
  const Tensor& first = a.weights.front();
  m.match("weights[0]", first, {DType::kMxfp4, DType::kBF16, DType::kF32}, {"n", "k"})
      .expect(first.dtype != DType::kMxfp4 || m["k"] % kMxfp4Group == 0, "k a multiple of 32 for mxfp4");
  // Up to 896 experts on every call: compared with the first rather than matched.
  for (const Tensor& w : a.weights) {
    const bool alike = w.dtype == first.dtype && w.rank() == 2 && w.dims[0] == first.dims[0] &&
                       w.dims[1] == first.dims[1] && w.strides[0] == first.strides[0] &&
                       w.strides[1] == first.strides[1] &&
                       (w.dtype != DType::kMxfp4 || w.data == nullptr || w.scales != nullptr);
    if (!alike) return m.expect(false, "experts of one shape and type").status();
  }
  return m.status();
}

std::string describe(const GroupedMatmulArgs& a) {
  return fmt::format("x {} pairs {} weights {} x {}", a.x.describe(), a.out.dim(0), a.weights.size(),
                     a.weights.front().describe());
}

Cost cost(const GroupedMatmulArgs& a) {
  const auto experts = static_cast<int64_t>(a.weights.size());
  double active = 0;  // experts with at least one pair, whose weights are read
  if (a.offsets.data != nullptr) {
    for (int64_t e = 0; e < experts; ++e) active += a.offsets.i32()[e + 1] > a.offsets.i32()[e];
  } else {
    // A dry pass has no offsets: as many as pairs that fall on any expert alike are expected to hit.
    const auto count = static_cast<double>(experts);
    active = count * (1.0 - std::pow(1.0 - 1.0 / count, static_cast<double>(a.out.dim(0))));
  }
  const Tensor& w = a.weights.front();
  return {2.0 * static_cast<double>(a.out.dim(0)) * static_cast<double>(w.count()),
          4.0 * static_cast<double>(a.x.count() + a.out.count()) +
              active * static_cast<double>(storage_bytes(w.dtype, w.dims))};
}

void reference(const GroupedMatmulArgs& a) {
  for (size_t e = 0; e < a.weights.size(); ++e) {
    for (int64_t p = a.offsets.i32()[e]; p < a.offsets.i32()[e + 1]; ++p) {
      const float* x = a.x.row(a.rows.is_set() ? a.rows.i32()[p] : p);
      for (int64_t n = 0; n < a.out.dim(1); ++n) {
        double sum = 0;
        for (int64_t k = 0; k < a.x.dim(1); ++k) sum += double{x[k]} * element_f32(a.weights[e], n, k);
        a.out.row(p)[n] = static_cast<float>(sum);
      }
    }
  }
}

enum : int64_t { kF32 = 0, kBF16 = 1, kMxfp4 = 2 };

// tokens > 0: pairs take rows of x [tokens, k]; 0: x is per pair. used: pairs fall on `used` of the experts.
Case make_case(int64_t pairs, int64_t tokens, int64_t experts, int64_t used, int64_t n, int64_t k, int64_t type) {
  return {{{"pairs", pairs},
           {"tokens", tokens},
           {"experts", experts},
           {"used", used},
           {"n", n},
           {"k", k},
           {"type", type},
           {"pad", pairs % 2}}};
}

std::vector<Case> cases() {
  return {
      make_case(3, 1, 4, 4, 64, 3584, kMxfp4),     // K3 w1, w3: a slice of the outputs
      make_case(16, 0, 4, 4, 64, 3072, kMxfp4),    // K3 w2
      make_case(4, 2, 3, 3, 48, 2304, kBF16),      // Kimi-Linear
      make_case(40, 10, 16, 16, 64, 96, kMxfp4),   // k3-nano
      make_case(40, 0, 16, 16, 96, 64, kMxfp4),    //
      make_case(40, 10, 16, 16, 64, 96, kBF16),    //
      make_case(0, 10, 16, 16, 64, 96, kMxfp4),    // nothing to do
      make_case(1, 1, 16, 1, 33, 32, kMxfp4),      // one pair, empty experts
      make_case(150, 40, 8, 1, 70, 352, kMxfp4),   // all pairs on one expert
      make_case(150, 0, 8, 1, 70, 333, kBF16),     //
      make_case(17, 0, 3, 2, 5, 33, kF32),         // k not a multiple of a vector
      make_case(17, 5, 3, 3, 1, 1, kF32),          //
      make_case(9, 5, 3, 3, 3, 7, kBF16),          //
      make_case(130, 65, 2, 2, 37, 1056, kMxfp4),  // many rows, several blocks
  };
}

Case random_case(uint64_t seed) {
  Rng rng(seed);
  const int64_t pairs = rng.below(2) ? rng.below(8) : rng.below(100);
  const int64_t experts = 1 + rng.below(8);
  const int64_t type = rng.below(3);
  return make_case(pairs, rng.below(2) * (1 + rng.below(20)), experts, 1 + rng.below(experts), 1 + rng.below(70),
                   type == kMxfp4 ? 32 * (1 + rng.below(20)) : 1 + rng.below(300), type);
}

GroupedMatmulArgs build(const Case& c, CaseData& data) {
  const int64_t pairs = c["pairs"], tokens = c["tokens"], experts = c["experts"], n = c["n"], k = c["k"],
                pad = c["pad"];
  std::vector<int32_t> offsets(static_cast<size_t>(experts) + 1);
  const int64_t shift = data.rng().below(experts);  // so that the used experts are not always the first
  for (int64_t p = 0; p < pairs; ++p) {
    ++offsets[static_cast<size_t>((data.rng().below(c["used"]) + shift) % experts) + 1];
  }
  for (size_t e = 0; e < static_cast<size_t>(experts); ++e) offsets[e + 1] += offsets[e];
  const double deviation = 1.0 / std::sqrt(static_cast<double>(k));
  std::vector<Tensor> weights;
  for (int64_t e = 0; e < experts; ++e) {
    weights.push_back(c["type"] == kMxfp4 ? data.mxfp4(n, k)
                                          : data.normal({n, k}, 1.0, c["type"] == kBF16 ? DType::kBF16 : DType::kF32));
  }
  const Tensor x = data.normal({tokens > 0 ? tokens : pairs, k + pad}, deviation).cols(pad, k + pad);
  return {.out = data.output("out", {pairs, n}),
          .x = x,
          .rows = tokens > 0 ? data.random_ints({pairs}, tokens) : Tensor(),
          .offsets = data.ints(std::move(offsets)),
          .weights = data.hold(std::move(weights))};
}

constexpr Kernel<GroupedMatmulArgs> kKernels[] = {
    {"grouped_matmul.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, active_experts_bytes, grouped_matmul_hwy},
    {"grouped_matmul.cpu", Backend::kCpu, Tier::kPortable, nullptr, active_experts_bytes, grouped_matmul_cpu}};

}  // namespace

constinit const Op<GroupedMatmulArgs> kGroupedMatmul{{.name = "grouped_matmul",
                                                      .check = check,
                                                      .describe = describe,
                                                      .cost = cost,
                                                      .reference = reference,
                                                      .cases = cases,
                                                      .random_case = random_case,
                                                      .build = build,
                                                      .tolerance = {1e-5, 1e-5},
                                                      .kernels = kKernels}};

}  // namespace moat
