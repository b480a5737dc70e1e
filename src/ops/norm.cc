// SPDX-License-Identifier: Apache-2.0
#include "ops/norm.h"

#include "core/shape.h"
#include "ops/norm_kernels.h"
#include "ops/op_parts.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

double mean_square(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return sum / static_cast<double>(n);
}

DType weight_type(int64_t bf16) { return bf16 ? DType::kBF16 : DType::kF32; }

// Rows of very different size, so that an epsilon in the wrong place shows.
void scale_rows(const Tensor& x, int64_t width) {
  for (int64_t r = 0; r < x.count() / std::max<int64_t>(width, 1); ++r) {
    const float size[] = {1.0F, 1e-3F, 30.0F, 0.1F};
    for (int64_t i = 0; i < width; ++i) x.f32()[r * width + i] *= size[r % 4];
  }
}

// --- rms_norm ---

Status check_rms_norm(const RmsNormArgs& a) {
  return ShapeMatcher("rms_norm")
      .match("x", a.x, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .match("out", a.out, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .match("weight", a.weight, {DType::kBF16, DType::kF32}, {"width"})
      .expect(a.eps >= 0.0F, "eps >= 0")
      .status();
}

std::string describe_rms_norm(const RmsNormArgs& a) {
  return fmt::format("x={} weight={}", a.x.describe(), dtype_name(a.weight.dtype));
}

Cost cost_rms_norm(const RmsNormArgs& a) {
  return {4.0 * static_cast<double>(a.x.count()), bytes_of(a.x) + bytes_of(a.out) + bytes_of(a.weight)};
}

void rms_norm_reference(const RmsNormArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    const double root = std::sqrt(mean_square(a.x.row(r), a.x.dim(1)) + static_cast<double>(a.eps));
    for (int64_t i = 0; i < a.x.dim(1); ++i) {
      a.out.row(r)[i] = static_cast<float>(a.x.row(r)[i] / root * weight_at(a.weight, i));
    }
  }
}

std::vector<Case> rms_norm_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][3] = {{1, 7168, 1}, {17, 7168, 1}, {17, 1536, 1}, {3, 512, 1}, {130, 192, 1}, {17, 192, 0},
                               {0, 192, 1},  {1, 1, 0},     {17, 7, 1},    {5, 33, 0},  {2, 3584, 0}};
  for (const auto& [rows, width, bf16] : shapes) {
    for (const int64_t pad : {0, 64, 3}) {
      cases.push_back({{{"rows", rows}, {"width", width}, {"bf16", bf16}, {"pad", pad}, {"alias", (rows + pad) % 2}}});
    }
  }
  return cases;
}

Case random_rms_norm(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(40)},
           {"width", 1 + rng.below(400)},
           {"bf16", rng.below(2)},
           {"pad", rng.below(5)},
           {"alias", rng.below(2)}}};
}

RmsNormArgs build_rms_norm(const Case& c, CaseData& data) {
  RmsNormArgs a;
  const Tensor wide = data.normal({c["rows"], c["width"] + 2 * c["pad"]});
  scale_rows(wide, wide.dim(1));
  a.x = wide.cols(c["pad"], c["pad"] + c["width"]);
  a.weight = data.normal({c["width"]}, 1.0, weight_type(c["bf16"]));
  a.eps = 1e-5F;
  if (c["alias"]) {
    data.in_out("out", wide);
    a.out = a.x;
  } else {
    a.out = in_out_cols(data, "out", c["rows"], c["width"], c["pad"]);
  }
  return a;
}

constexpr Kernel<RmsNormArgs> kRmsNormKernels[] = {
    {"rms_norm.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, simd::rms_norm},
    {"rms_norm.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::rms_norm},
};

// --- gated_rms_norm ---

Status check_gated_rms_norm(const GatedRmsNormArgs& a) {
  return ShapeMatcher("gated_rms_norm")
      .match("o", a.o, {DType::kF32}, {"tokens", "heads", "dim"})
      .match("gate", a.gate, {DType::kF32}, {"tokens", "heads", "dim"})
      .match("out", a.out, {DType::kF32}, {"tokens", "heads", "dim"})
      .match("weight", a.weight, {DType::kF32}, {"dim"})
      .expect(a.eps >= 0.0F, "eps >= 0")
      .status();
}

std::string describe_gated_rms_norm(const GatedRmsNormArgs& a) { return fmt::format("o={}", a.o.describe()); }

Cost cost_gated_rms_norm(const GatedRmsNormArgs& a) {
  return {9.0 * static_cast<double>(a.o.count()),
          bytes_of(a.o) + bytes_of(a.gate) + bytes_of(a.out) + bytes_of(a.weight)};
}

void gated_rms_norm_reference(const GatedRmsNormArgs& a) {
  const int64_t dim = a.o.dim(2);
  for (int64_t r = 0; r < a.o.dim(0) * a.o.dim(1); ++r) {
    const float* o = a.o.f32() + r * dim;
    const double root = std::sqrt(mean_square(o, dim) + static_cast<double>(a.eps));
    for (int64_t i = 0; i < dim; ++i) {
      const double gate = sigmoid_f64(a.gate.f32()[r * dim + i]);
      a.out.f32()[r * dim + i] = static_cast<float>(o[i] / root * a.weight.f32()[i] * gate);
    }
  }
}

std::vector<Case> head_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][3] = {{1, 96, 128}, {5, 96, 128}, {17, 12, 128}, {33, 4, 64},
                               {0, 4, 64},   {1, 1, 1},    {17, 3, 7},    {2, 5, 33}};
  for (const auto& [tokens, heads, dim] : shapes) {
    cases.push_back({{{"tokens", tokens}, {"heads", heads}, {"dim", dim}, {"alias", 0}}});
    cases.push_back({{{"tokens", tokens}, {"heads", heads}, {"dim", dim}, {"alias", 1}}});
  }
  return cases;
}

Case random_heads(uint64_t seed) {
  Rng rng(seed);
  return {
      {{"tokens", rng.below(20)}, {"heads", 1 + rng.below(9)}, {"dim", 1 + rng.below(150)}, {"alias", rng.below(2)}}};
}

GatedRmsNormArgs build_gated_rms_norm(const Case& c, CaseData& data) {
  const Dims dims = {c["tokens"], c["heads"], c["dim"]};
  GatedRmsNormArgs a;
  a.o = data.normal(dims);
  scale_rows(a.o, c["dim"]);
  a.gate = data.normal(dims, 4.0);
  a.weight = data.normal({c["dim"]});
  a.eps = 1e-5F;
  a.out = c["alias"] ? data.in_out("out", a.o) : data.output("out", dims);
  return a;
}

constexpr Kernel<GatedRmsNormArgs> kGatedRmsNormKernels[] = {
    {"gated_rms_norm.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, simd::gated_rms_norm},
    {"gated_rms_norm.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::gated_rms_norm},
};

// --- l2_norm ---

Status check_l2_norm(const L2NormArgs& a) {
  return ShapeMatcher("l2_norm")
      .match("x", a.x, {DType::kF32}, {"tokens", "heads", "dim"})
      .expect(a.eps >= 0.0F, "eps >= 0")
      .status();
}

std::string describe_l2_norm(const L2NormArgs& a) { return fmt::format("x={}", a.x.describe()); }

Cost cost_l2_norm(const L2NormArgs& a) { return {3.0 * static_cast<double>(a.x.count()), 2 * bytes_of(a.x)}; }

void l2_norm_reference(const L2NormArgs& a) {
  const int64_t dim = a.x.dim(2);
  for (int64_t r = 0; r < a.x.dim(0) * a.x.dim(1); ++r) {
    float* x = a.x.f32() + r * dim;
    const double root = std::sqrt(mean_square(x, dim) * static_cast<double>(dim) + static_cast<double>(a.eps));
    for (int64_t i = 0; i < dim; ++i) x[i] = static_cast<float>(static_cast<double>(a.scale) * x[i] / root);
  }
}

L2NormArgs build_l2_norm(const Case& c, CaseData& data) {
  L2NormArgs a;
  a.x = data.in_out("x", data.normal({c["tokens"], c["heads"], c["dim"]}));
  scale_rows(a.x, c["dim"]);
  a.scale = c["alias"] ? 1.0F : static_cast<float>(1.0 / std::sqrt(static_cast<double>(c["dim"])));
  return a;
}

constexpr Kernel<L2NormArgs> kL2NormKernels[] = {
    {"l2_norm.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, simd::l2_norm},
    {"l2_norm.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::l2_norm},
};

// --- attn_res_mix ---

Status check_attn_res_mix(const AttnResMixArgs& a) {
  return ShapeMatcher("attn_res_mix")
      .match("prefix", a.prefix, {DType::kF32}, {"tokens", "hidden"})
      .match("out", a.out, {DType::kF32}, {"tokens", "hidden"}, Layout::kRowStrided)
      .match("blocks", a.blocks, {DType::kF32}, {"capacity", "tokens", "hidden"})
      .match("norm", a.norm, {DType::kBF16, DType::kF32}, {"hidden"})
      .match("proj", a.proj, {DType::kBF16, DType::kF32}, {1, "hidden"})
      .expect(a.num_blocks >= 0 && a.num_blocks <= a.blocks.dim(0), "0 <= num_blocks <= capacity")
      .expect(a.num_blocks < kMaxResidualCandidates, "fewer than 64 blocks")
      .expect(!overlap(a.out, a.prefix) && !overlap(a.out, a.blocks), "out apart from prefix and blocks")
      .status();
}

std::string describe_attn_res_mix(const AttnResMixArgs& a) {
  return fmt::format("prefix={} blocks={}", a.prefix.describe(), a.num_blocks);
}

Cost cost_attn_res_mix(const AttnResMixArgs& a) {
  const double candidates = static_cast<double>(a.num_blocks + 1);
  return {6.0 * candidates * static_cast<double>(a.prefix.count()),
          (candidates + 1.0) * bytes_of(a.prefix) + bytes_of(a.norm) + bytes_of(a.proj)};
}

void attn_res_mix_reference(const AttnResMixArgs& a) {
  const int64_t hidden = a.prefix.dim(1);
  for (int64_t t = 0; t < a.prefix.dim(0); ++t) {
    std::vector<const float*> candidates;
    for (int64_t j = 0; j < a.num_blocks; ++j) candidates.push_back(a.blocks.at(j).row(t));
    candidates.push_back(a.prefix.row(t));
    std::vector<double> scores;
    double largest = -INFINITY;
    for (const float* v : candidates) {
      const double root = std::sqrt(mean_square(v, hidden) + static_cast<double>(a.eps));
      double score = 0;
      for (int64_t d = 0; d < hidden; ++d) {
        score += v[d] / root * weight_at(a.norm, d) * static_cast<double>(weight_at(a.proj, d));
      }
      scores.push_back(score);
      largest = std::max(largest, score);
    }
    double total = 0;
    for (const double score : scores) total += std::exp(score - largest);
    for (int64_t d = 0; d < hidden; ++d) {
      double mix = 0;
      for (size_t j = 0; j < scores.size(); ++j) mix += std::exp(scores[j] - largest) / total * candidates[j][d];
      a.out.row(t)[d] = static_cast<float>(mix);
    }
  }
}

std::vector<Case> attn_res_mix_cases() {
  std::vector<Case> cases;
  for (int64_t blocks = 0; blocks <= 8; ++blocks) {
    cases.push_back({{{"tokens", 3}, {"hidden", 192}, {"capacity", 9}, {"blocks", blocks}, {"bf16", blocks % 2}}});
  }
  const int64_t shapes[][4] = {{1, 7168, 8, 8}, {17, 7168, 9, 5}, {0, 192, 9, 3},  {17, 192, 9, 8},
                               {2, 1, 9, 2},    {3, 7, 1, 1},     {5, 33, 12, 12}, {4, 33, 0, 0}};
  for (const auto& [tokens, hidden, capacity, blocks] : shapes) {
    cases.push_back(
        {{{"tokens", tokens}, {"hidden", hidden}, {"capacity", capacity}, {"blocks", blocks}, {"bf16", 1}}});
  }
  return cases;
}

Case random_attn_res_mix(uint64_t seed) {
  Rng rng(seed);
  const int64_t capacity = 1 + rng.below(10);
  return {{{"tokens", rng.below(20)},
           {"hidden", 1 + rng.below(300)},
           {"capacity", capacity},
           {"blocks", rng.below(capacity + 1)},
           {"bf16", rng.below(2)}}};
}

AttnResMixArgs build_attn_res_mix(const Case& c, CaseData& data) {
  const DType type = weight_type(c["bf16"]);
  AttnResMixArgs a;
  a.blocks = data.normal({c["capacity"], c["tokens"], c["hidden"]});
  a.prefix = data.normal({c["tokens"], c["hidden"]}, 2.0);
  a.norm = data.uniform({c["hidden"]}, 0.5, 1.5, type);
  // Scores of deviation 1.5: neither uniform nor one-hot.
  a.proj = data.normal({1, c["hidden"]}, 1.5 / std::sqrt(static_cast<double>(c["hidden"])), type);
  a.num_blocks = c["blocks"];
  a.eps = 1e-5F;
  a.out = in_out_cols(data, "out", c["tokens"], c["hidden"], c["blocks"] % 3);  // a tap goes to a column range
  return a;
}

// norm * proj.
int64_t attn_res_mix_workspace(const AttnResMixArgs& a, const Exec&) { return 4 * a.prefix.dim(1); }

constexpr Kernel<AttnResMixArgs> kAttnResMixKernels[] = {
    {"attn_res_mix.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, attn_res_mix_workspace, simd::attn_res_mix},
    {"attn_res_mix.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::attn_res_mix},
};

}  // namespace

constinit const Op<RmsNormArgs> kRmsNorm{{.name = "rms_norm",
                                          .check = check_rms_norm,
                                          .describe = describe_rms_norm,
                                          .cost = cost_rms_norm,
                                          .reference = rms_norm_reference,
                                          .cases = rms_norm_cases,
                                          .random_case = random_rms_norm,
                                          .build = build_rms_norm,
                                          .tolerance = {1e-6, 2e-6},
                                          .kernels = kRmsNormKernels}};

constinit const Op<GatedRmsNormArgs> kGatedRmsNorm{{.name = "gated_rms_norm",
                                                    .check = check_gated_rms_norm,
                                                    .describe = describe_gated_rms_norm,
                                                    .cost = cost_gated_rms_norm,
                                                    .reference = gated_rms_norm_reference,
                                                    .cases = head_cases,
                                                    .random_case = random_heads,
                                                    .build = build_gated_rms_norm,
                                                    .tolerance = {1e-6, 2e-6},
                                                    .kernels = kGatedRmsNormKernels}};

constinit const Op<L2NormArgs> kL2Norm{{.name = "l2_norm",
                                        .check = check_l2_norm,
                                        .describe = describe_l2_norm,
                                        .cost = cost_l2_norm,
                                        .reference = l2_norm_reference,
                                        .cases = head_cases,
                                        .random_case = random_heads,
                                        .build = build_l2_norm,
                                        .tolerance = {1e-6, 2e-6},
                                        .kernels = kL2NormKernels}};

constinit const Op<AttnResMixArgs> kAttnResMix{{.name = "attn_res_mix",
                                                .check = check_attn_res_mix,
                                                .describe = describe_attn_res_mix,
                                                .cost = cost_attn_res_mix,
                                                .reference = attn_res_mix_reference,
                                                .cases = attn_res_mix_cases,
                                                .random_case = random_attn_res_mix,
                                                .build = build_attn_res_mix,
                                                .tolerance = {3e-6, 3e-6},
                                                .kernels = kAttnResMixKernels}};

}  // namespace moat
