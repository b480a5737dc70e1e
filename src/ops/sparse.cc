// SPDX-License-Identifier: Apache-2.0
#include "ops/sparse.h"

#include <algorithm>
#include <cmath>

#include "core/shape.h"
#include "ops/op_parts.h"
#include "ops/sample.h"
#include "ops/sparse_kernels.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

double compact_bytes(const CompactRows& rows) {
  return bytes_of(rows.ids) + bytes_of(rows.probs) + bytes_of(rows.counts);
}

// --- top_k_probs ---

Status check_top_k_probs(const TopKProbsArgs& a) {
  const auto rows = static_cast<int64_t>(a.temperature.size());
  const auto is_one_a_row = [&](const auto& values) { return static_cast<int64_t>(values.size()) == rows; };
  return ShapeMatcher("top_k_probs")
      .match("logits", a.logits, {DType::kF32}, {rows, "vocab"}, Layout::kRowStrided)
      .match("ids", a.out.ids, {DType::kI32}, {rows, "width"})
      .match("probs", a.out.probs, {DType::kF32}, {rows, "width"})
      .match("counts", a.out.counts, {DType::kI32}, {rows})
      .expect(a.logits.rank() == 2 && a.logits.dim(1) > 0, "a vocabulary")
      .expect(a.out.ids.rank() == 2 && a.out.ids.dim(1) > 0, "width > 0")
      .expect(is_one_a_row(a.k) && is_one_a_row(a.top_p) && is_one_a_row(a.min_p), "k, top_p and min_p of each row")
      .status();
}

std::string describe_top_k_probs(const TopKProbsArgs& a) {
  return fmt::format("logits={} width={}", a.logits.describe(), a.out.ids.dim(1));
}

Cost cost_top_k_probs(const TopKProbsArgs& a) {
  return {static_cast<double>(a.logits.count()), bytes_of(a.logits) + compact_bytes(a.out)};
}

// The definition is the dense path itself, by its own definitions.
void top_k_probs_reference(const TopKProbsArgs& a) {
  const int64_t rows = a.logits.dim(0);
  const int64_t vocab = a.logits.dim(1);
  const int64_t width = a.out.ids.dim(1);
  std::vector<float> memory(static_cast<size_t>(rows * vocab));
  const Tensor dense = make_tensor(memory.data(), DType::kF32, {rows, vocab});
  kSoftmax->reference({.probs = dense, .logits = a.logits, .temperature = a.temperature});
  kTopKRenorm->reference({.probs = dense, .k = a.k});
  kTopPRenorm->reference({.probs = dense, .p = a.top_p});
  kMinPRenorm->reference({.probs = dense, .min_p = a.min_p});
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = dense.row(r);
    int32_t* ids = a.out.ids.i32() + r * width;
    float* probs = a.out.probs.row(r);
    std::fill(ids, ids + width, -1);
    std::fill(probs, probs + width, 0.0F);
    // Survivors of top-k are what has to fit, before other filters thin them out.
    const float* logits = a.logits.row(r);
    std::vector<float> sorted(logits, logits + vocab);
    const int64_t count = std::count_if(row, row + vocab, [](float p) { return p > 0; });
    int64_t candidates = count;
    if (count > 0) {
      std::sort(sorted.rbegin(), sorted.rend());
      const float kth = sorted[static_cast<size_t>(std::clamp<int64_t>(a.k[static_cast<size_t>(r)], 1, vocab) - 1)];
      candidates = std::count_if(sorted.begin(), sorted.end(), [&](float x) { return std::isfinite(x) && x >= kth; });
    }
    a.out.counts.i32()[r] = candidates > width ? -1 : static_cast<int32_t>(count);
    for (int64_t i = 0, at = 0; i < vocab && candidates <= width; ++i) {
      if (!(row[i] > 0)) continue;
      ids[at] = static_cast<int32_t>(i);
      probs[at++] = row[i];
    }
  }
}

std::vector<Case> top_k_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][3] = {{1, 163840, 64}, {3, 163840, 32}, {17, 5120, 64}, {8, 1000, 40},
                               {0, 5120, 8},    {3, 1, 1},       {17, 7, 7},     {12, 129, 16}};
  for (const auto& [rows, vocab, width] : shapes) {
    for (int64_t kind = 0; kind < 3; ++kind) {
      cases.push_back({{{"rows", rows}, {"vocab", vocab}, {"width", width}, {"kind", kind}}});
    }
  }
  return cases;
}

Case random_top_k(uint64_t seed) {
  Rng rng(seed);
  return {
      {{"rows", rng.below(20)}, {"vocab", 1 + rng.below(3000)}, {"width", 1 + rng.below(100)}, {"kind", rng.below(3)}}};
}

// kind 0: distinct logits; 1: whole numbers, so that most rows have ties at rank k, and damaged rows; 2: rounded to
// bf16.
TopKProbsArgs build_top_k_probs(const Case& c, CaseData& data) {
  const int64_t rows = c["rows"];
  const int64_t vocab = c["vocab"];
  TopKProbsArgs a;
  a.logits = data.normal({rows, vocab + 3}, 3.0).cols(1, 1 + vocab);
  std::vector<float> temperature, top_p, min_p;
  std::vector<int32_t> k;
  for (int64_t r = 0; r < rows; ++r) {
    float* row = a.logits.row(r);
    for (int64_t i = 0; i < vocab; ++i) {
      if (c["kind"] == 1) row[i] = std::round(row[i]);
      if (c["kind"] == 2) row[i] = bf16_to_f32(f32_to_bf16(row[i]));
    }
    if (c["kind"] == 1 && vocab > 1) {
      if (r % 8 == 1) std::fill(row, row + vocab - 1, -INFINITY);
      if (r % 8 == 2) std::fill(row, row + vocab, -INFINITY);
      if (r % 8 == 3) row[data.rng().below(vocab)] = NAN;
      if (r % 8 == 5) row[data.rng().below(vocab)] = INFINITY;
      if (r % 8 == 6) std::fill(row, row + vocab, 1.5F);
    }
    const int64_t most = std::min(vocab, c["width"] + 1);
    const int32_t edges[] = {20, 1, 0, -1};
    k.push_back(r < 4 ? edges[r] : static_cast<int32_t>(1 + data.rng().below(most)));
    temperature.push_back(r % 5 == 4 ? 0.01F : static_cast<float>(data.rng().uniform(0.3, 2.0)));
    const float nuclei[] = {0.95F, 1.0F, 0.5F, 0.0F, 1.5F};
    top_p.push_back(r < 5 ? nuclei[r] : static_cast<float>(data.rng().uniform()));
    min_p.push_back(r % 3 == 2 ? static_cast<float>(data.rng().uniform(0.0, 0.3)) : 0.0F);
  }
  a.temperature = data.hold(std::move(temperature));
  a.k = data.hold(std::move(k));
  a.top_p = data.hold(std::move(top_p));
  a.min_p = data.hold(std::move(min_p));
  a.out = {.ids = data.output("ids", {rows, c["width"]}, DType::kI32),
           .probs = data.output("probs", {rows, c["width"]}),
           .counts = data.output("counts", {rows}, DType::kI32)};
  // -1 is an answer.
  std::fill(a.out.ids.i32(), a.out.ids.i32() + a.out.ids.count(), 0x5a5a5a5a);
  std::fill(a.out.counts.i32(), a.out.counts.i32() + rows, 0x5a5a5a5a);
  return a;
}

constexpr Kernel<TopKProbsArgs> kTopKProbsKernels[] = {
    {"top_k_probs.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, top_k_probs_workspace, simd::top_k_probs},
    {"top_k_probs.cpu", Backend::kCpu, Tier::kPortable, nullptr, top_k_probs_workspace, cpu::top_k_probs},
};

// --- draw_compact ---

Status check_draw_compact(const DrawCompactArgs& a) {
  const auto rows = static_cast<int64_t>(a.uniform.size());
  return ShapeMatcher("draw_compact")
      .match("probs.ids", a.probs.ids, {DType::kI32}, {rows, "width"})
      .match("probs.probs", a.probs.probs, {DType::kF32}, {rows, "width"})
      .match("probs.counts", a.probs.counts, {DType::kI32}, {rows})
      .match("ids", a.ids, {DType::kI32}, {rows})
      .status();
}
std::string describe_draw_compact(const DrawCompactArgs& a) {
  return fmt::format("probs={}", a.probs.probs.describe());
}
Cost cost_draw_compact(const DrawCompactArgs& a) {
  return {2.0 * static_cast<double>(a.probs.probs.count()), compact_bytes(a.probs) + bytes_of(a.ids)};
}

void draw_compact_reference(const DrawCompactArgs& a) {
  for (int64_t r = 0; r < a.probs.ids.dim(0); ++r) {
    std::vector<double> cumulative;
    for (int64_t i = 0; i < a.probs.counts.i32()[r]; ++i) {
      cumulative.push_back((i > 0 ? cumulative.back() : 0.0) + static_cast<double>(a.probs.probs.row(r)[i]));
    }
    const double total = cumulative.empty() ? 0.0 : cumulative.back();
    const auto found =
        std::upper_bound(cumulative.begin(), cumulative.end(), a.uniform[static_cast<size_t>(r)] * total);
    const bool usable = std::isfinite(total) && found != cumulative.end();
    a.ids.i32()[r] = usable ? a.probs.ids.i32()[r * a.probs.ids.dim(1) + (found - cumulative.begin())] : -1;
  }
}

std::vector<Case> draw_compact_cases() {
  return {{{{"rows", 17}, {"width", 64}}}, {{{"rows", 0}, {"width", 8}}}, {{{"rows", 9}, {"width", 1}}}};
}
Case random_draw_compact(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(40)}, {"width", 1 + rng.below(90)}}};
}

DrawCompactArgs build_draw_compact(const Case& c, CaseData& data) {
  const int64_t rows = c["rows"];
  const int64_t width = c["width"];
  DrawCompactArgs a;
  a.probs = {.ids = data.random_ints({rows, width}, 7),
             .probs = data.uniform({rows, width}, 0.01, 1.0),
             .counts = data.random_ints({rows}, width + 1)};
  std::vector<double> uniform;
  for (int64_t r = 0; r < rows; ++r) {
    int32_t* ids = a.probs.ids.i32() + r * width;
    for (int64_t i = 0; i < width; ++i) ids[i] += i > 0 ? ids[i - 1] + 1 : 0;  // ascending
    if (r % 7 == 6) a.probs.counts.i32()[r] = -1;
    if (r % 7 == 5) a.probs.probs.row(r)[data.rng().below(width)] = NAN;
    uniform.push_back(r % 5 == 1 ? 0.0 : r % 5 == 2 ? 1.0 - 0x1.0p-30 : data.rng().uniform());
  }
  a.uniform = data.hold(std::move(uniform));
  a.ids = data.output("ids", {rows}, DType::kI32);
  std::fill(a.ids.i32(), a.ids.i32() + rows, 0x5a5a5a5a);  // -1 is an answer
  return a;
}

constexpr Kernel<DrawCompactArgs> kDrawCompactKernels[] = {
    {"draw_compact.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::draw_compact},
};

}  // namespace

constinit const Op<TopKProbsArgs> kTopKProbs{{.name = "top_k_probs",
                                              .check = check_top_k_probs,
                                              .describe = describe_top_k_probs,
                                              .cost = cost_top_k_probs,
                                              .reference = top_k_probs_reference,
                                              .cases = top_k_cases,
                                              .random_case = random_top_k,
                                              .build = build_top_k_probs,
                                              .tolerance = {1e-9, 1e-6},
                                              .kernels = kTopKProbsKernels}};

constinit const Op<DrawCompactArgs> kDrawCompact{{.name = "draw_compact",
                                                  .check = check_draw_compact,
                                                  .describe = describe_draw_compact,
                                                  .cost = cost_draw_compact,
                                                  .reference = draw_compact_reference,
                                                  .cases = draw_compact_cases,
                                                  .random_case = random_draw_compact,
                                                  .build = build_draw_compact,
                                                  .tolerance = {0, 0},
                                                  .kernels = kDrawCompactKernels}};

}  // namespace moat
