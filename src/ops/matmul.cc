// SPDX-License-Identifier: Apache-2.0
#include "ops/matmul.h"

#include <cmath>

#include "core/shape.h"
#include "ops/case_data.h"
#include "ops/matmul_kernels.h"

namespace moat {
namespace {

// f32 activations of a call as bytes.
double f32_bytes(const Tensor& t) { return 4.0 * static_cast<double>(t.count()); }
double weight_bytes(const Tensor& t, int64_t count) { return static_cast<double>(dtype_bytes(t.dtype, count)); }
DType weight_dtype(const Case& c) { return c["bf16"] ? DType::kBF16 : DType::kF32; }

// --- matmul ---

Status check_matmul(const MatmulArgs& a) {
  return ShapeMatcher("matmul")
      .match("out", a.out, {DType::kF32}, {"rows", "n"}, ShapeMatcher::Layout::kRowStrided)
      .match("x", a.x, {DType::kF32}, {"rows", "k"}, ShapeMatcher::Layout::kRowStrided)
      .match("weight", a.weight, {DType::kBF16, DType::kF32}, {"n", "k"})
      .expect(a.out.count() == 0 || a.out.data == nullptr || a.out.data != a.x.data, "out apart from x")
      .status();
}

std::string describe_matmul(const MatmulArgs& a) {
  return fmt::format("x {} weight {}", a.x.describe(), a.weight.describe());
}

Cost cost_matmul(const MatmulArgs& a) {
  if (a.x.dim(0) == 0) return {};
  return {2.0 * static_cast<double>(a.x.dim(0)) * static_cast<double>(a.weight.count()),
          f32_bytes(a.x) + f32_bytes(a.out) + weight_bytes(a.weight, a.weight.count())};
}

void reference_matmul(const MatmulArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t n = 0; n < a.weight.dim(0); ++n) {
      double sum = 0;
      for (int64_t k = 0; k < a.x.dim(1); ++k) sum += double{a.x.row(r)[k]} * element_f32(a.weight, n, k);
      a.out.row(r)[n] = static_cast<float>(sum);
    }
  }
}

Case matmul_case(int64_t rows, int64_t n, int64_t k, bool bf16, int64_t pad = 0) {
  return {{{"rows", rows}, {"n", n}, {"k", k}, {"bf16", bf16}, {"pad", pad}}};
}

std::vector<Case> cases_matmul() {
  return {
      matmul_case(1, 192, 7168, true),     // K3: a slice of the outputs of a hidden-wide projection
      matmul_case(5, 576, 1536, true),     // K3: from the compressed query
      matmul_case(17, 96, 7168, false),    // K3: router and decay weights are f32
      matmul_case(2, 300, 3584, true),     // K3: out of the expert latent
      matmul_case(1, 192, 192, true),      // k3-nano
      matmul_case(33, 160, 192, true),     // k3-nano, many rows
      matmul_case(300, 70, 512, true),     // several row blocks
      matmul_case(70, 130, 520, false),    // several row blocks, k not a multiple of a block
      matmul_case(0, 64, 64, true),        // nothing to do
      matmul_case(4, 1, 1, false),         // one product
      matmul_case(17, 3, 7, true),         // less than a vector
      matmul_case(9, 5, 33, true, 3),      // row-strided, odd rows
      matmul_case(3, 37, 100, false, 5),   // row-strided
      matmul_case(64, 33, 1000, true, 1),  // everything at once
  };
}

Case random_matmul(uint64_t seed) {
  Rng rng(seed);
  const int64_t rows = rng.below(2) ? rng.below(6) : rng.below(80);
  return matmul_case(rows, 1 + rng.below(70), 1 + rng.below(600), rng.below(2) != 0, rng.below(2) * rng.below(5));
}

MatmulArgs build_matmul(const Case& c, CaseData& data) {
  const int64_t rows = c["rows"], n = c["n"], k = c["k"], pad = c["pad"];
  const Tensor x = data.normal({rows, k + pad});
  const Tensor weight = data.normal({n, k}, 1.0 / std::sqrt(static_cast<double>(k)), weight_dtype(c));
  const Tensor out = data.in_out("out", data.normal({rows, n + pad}));  // what lies between the rows must stay
  return {.out = out.cols(pad, pad + n), .x = x.cols(pad, pad + k), .weight = weight};
}

constexpr Kernel<MatmulArgs> kMatmulKernels[] = {
    {"matmul.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, matmul_hwy},
    {"matmul.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, matmul_cpu}};

// --- head_matmul ---

Status check_head(const HeadMatmulArgs& a) {
  ShapeMatcher m("head_matmul");
  m.match("out", a.out, {DType::kF32}, {"tokens", "heads", "n"}, ShapeMatcher::Layout::kRowStrided)
      .match("x", a.x, {DType::kF32}, {"tokens", "heads", "k"}, ShapeMatcher::Layout::kRowStrided)
      .match("weight", a.weight, {DType::kBF16, DType::kF32}, {"rows", a.transposed ? "n" : "k"})
      .expect(m["heads"] > 0 && m["rows"] % m["heads"] == 0, "weight rows a multiple of the heads");
  if (!m.status().ok()) return m.status();
  m.expect(a.row_offset >= 0 && a.row_offset + m[a.transposed ? "k" : "n"] <= m["rows"] / m["heads"],
           "row_offset and rows within the head's group")
      .expect(a.out.count() == 0 || a.out.data == nullptr || a.out.data != a.x.data, "out apart from x");
  return m.status();
}

std::string describe_head(const HeadMatmulArgs& a) {
  return fmt::format("x {} weight {}{} -> {}", a.x.describe(), a.weight.describe(), a.transposed ? " transposed" : "",
                     a.out.dim(2));
}

Cost cost_head(const HeadMatmulArgs& a) {
  if (a.x.dim(0) == 0) return {};
  const int64_t used = a.x.dim(1) * a.x.dim(2) * a.out.dim(2);
  return {2.0 * static_cast<double>(a.x.dim(0)) * static_cast<double>(used),
          f32_bytes(a.x) + f32_bytes(a.out) + weight_bytes(a.weight, used)};
}

void reference_head(const HeadMatmulArgs& a) {
  const int64_t heads = a.x.dim(1);
  for (int64_t t = 0; t < a.x.dim(0); ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* x = a.x.f32() + t * a.x.strides[0] + h * a.x.strides[1];
      float* out = a.out.f32() + t * a.out.strides[0] + h * a.out.strides[1];
      const int64_t first = h * (a.weight.dim(0) / heads) + a.row_offset;
      for (int64_t n = 0; n < a.out.dim(2); ++n) {
        double sum = 0;
        for (int64_t k = 0; k < a.x.dim(2); ++k) {
          sum +=
              double{x[k]} * (a.transposed ? element_f32(a.weight, first + k, n) : element_f32(a.weight, first + n, k));
        }
        out[n] = static_cast<float>(sum);
      }
    }
  }
}

// `rest` are the rows of a head's group that this call does not use, half of them (rounded down) before the used ones.
Case head_case(int64_t tokens, int64_t heads, int64_t n, int64_t k, int64_t rest, bool transposed, bool bf16,
               int64_t pad = 0) {
  return {{{"tokens", tokens},
           {"heads", heads},
           {"n", n},
           {"k", k},
           {"rest", rest},
           {"transposed", transposed},
           {"bf16", bf16},
           {"pad", pad}}};
}

std::vector<Case> cases_head() {
  return {
      head_case(1, 12, 512, 128, 128, true, true,
                64),                                  // K3 at TP8: query into the latent space, beside the shared part
      head_case(5, 12, 128, 512, 128, false, true),   // K3 at TP8: value out of the latent space
      head_case(2, 3, 512, 128, 128, true, false),    // f32 weights
      head_case(17, 4, 128, 32, 32, true, true, 32),  // k3-nano
      head_case(17, 4, 32, 128, 32, false, true),     // k3-nano
      head_case(0, 4, 32, 32, 0, true, true),         // nothing to do
      head_case(0, 4, 32, 32, 0, false, true),        //
      head_case(3, 2, 7, 1, 1, true, true),           // less than a vector
      head_case(3, 2, 1, 7, 3, false, false, 1),      //
      head_case(70, 3, 33, 45, 5, true, true, 3),     // odd sizes, many rows
      head_case(70, 3, 45, 33, 5, false, true, 3),    //
  };
}

Case random_head(uint64_t seed) {
  Rng rng(seed);
  return head_case(rng.below(20), 1 + rng.below(5), 1 + rng.below(70), 1 + rng.below(70), rng.below(9),
                   rng.below(2) != 0, rng.below(2) != 0, rng.below(2) * rng.below(5));
}

HeadMatmulArgs build_head(const Case& c, CaseData& data) {
  const int64_t tokens = c["tokens"], heads = c["heads"], n = c["n"], k = c["k"], pad = c["pad"];
  const bool transposed = c["transposed"] != 0;
  const int64_t group = (transposed ? k : n) + c["rest"];
  const Tensor x = data.normal({tokens, heads, k + pad});
  const Tensor weight =
      data.normal({heads * group, transposed ? n : k}, 1.0 / std::sqrt(static_cast<double>(k)), weight_dtype(c));
  const Tensor out = data.in_out("out", data.normal({tokens, heads, n + pad}));
  return {.out = out.cols(0, n),
          .x = x.cols(pad, pad + k),
          .weight = weight,
          .row_offset = c["rest"] / 2,
          .transposed = transposed};
}

constexpr Kernel<HeadMatmulArgs> kHeadKernels[] = {
    {"head_matmul.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, head_matmul_hwy},
    {"head_matmul.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, head_matmul_cpu}};

}  // namespace

constinit const Op<MatmulArgs> kMatmul{{.name = "matmul",
                                        .check = check_matmul,
                                        .describe = describe_matmul,
                                        .cost = cost_matmul,
                                        .reference = reference_matmul,
                                        .cases = cases_matmul,
                                        .random_case = random_matmul,
                                        .build = build_matmul,
                                        .tolerance = {1e-5, 1e-5},
                                        .kernels = kMatmulKernels}};

constinit const Op<HeadMatmulArgs> kHeadMatmul{{.name = "head_matmul",
                                                .check = check_head,
                                                .describe = describe_head,
                                                .cost = cost_head,
                                                .reference = reference_head,
                                                .cases = cases_head,
                                                .random_case = random_head,
                                                .build = build_head,
                                                .tolerance = {1e-5, 1e-5},
                                                .kernels = kHeadKernels}};

}  // namespace moat
