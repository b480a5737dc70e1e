// SPDX-License-Identifier: Apache-2.0
#include "ops/edit.h"

#include <cstring>
#include <limits>

#include "core/shape.h"
#include "ops/case_data.h"

namespace moat {
namespace {

// --- copy ---

Status check_copy(const CopyArgs& a) {
  return ShapeMatcher("copy")
      .match("out", a.out, {DType::kF32}, {"rows", "heads", "width"}, ShapeMatcher::Layout::kRowStrided)
      .match("x", a.x, {DType::kF32}, {"rows", "heads", "width"}, ShapeMatcher::Layout::kRowStrided)
      .status();
}

std::string describe_copy(const CopyArgs& a) { return fmt::format("x {}", a.x.describe()); }

Cost cost_copy(const CopyArgs& a) { return {0, 8.0 * static_cast<double>(a.x.count())}; }

void copy_row(const CopyArgs& a, int64_t r) {
  for (int64_t h = 0; h < a.x.dim(1); ++h) {
    std::memcpy(a.out.f32() + r * a.out.strides[0] + h * a.out.strides[1],
                a.x.f32() + r * a.x.strides[0] + h * a.x.strides[1], sizeof(float) * static_cast<size_t>(a.x.dim(2)));
  }
}

void reference_copy(const CopyArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t h = 0; h < a.x.dim(1); ++h) {
      for (int64_t d = 0; d < a.x.dim(2); ++d) {
        a.out.f32()[r * a.out.strides[0] + h * a.out.strides[1] + d] =
            a.x.f32()[r * a.x.strides[0] + h * a.x.strides[1] + d];
      }
    }
  }
}

void copy_cpu(Exec& exec, const CopyArgs& a) {
  exec.pool().parallel_for(a.x.dim(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) copy_row(a, r);
  });
}

std::vector<Case> cases_copy() {
  return {{{{"rows", 0}, {"heads", 4}, {"width", 8}}},
          {{{"rows", 1}, {"heads", 96}, {"width", 64}}},
          {{{"rows", 17}, {"heads", 3}, {"width", 33}}}};
}

Case random_copy(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(20)}, {"heads", 1 + rng.below(5)}, {"width", 1 + rng.below(70)}}};
}

CopyArgs build_copy(const Case& c, CaseData& data) {
  const int64_t width = c["width"];
  const Tensor wide = data.normal({c["rows"], c["heads"], width + 3});  // a column range of wider rows
  return {.out = data.output("out", {c["rows"], c["heads"], width}), .x = wide.cols(1, 1 + width)};
}

constexpr Kernel<CopyArgs> kCopyKernels[] = {{"copy.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, copy_cpu}};

// --- mask_logits ---

Status check_mask(const MaskLogitsArgs& a) {
  ShapeMatcher m("mask_logits");
  m.match("logits", a.logits, {DType::kF32}, {"rows", "vocab"})
      .match("allowed", a.allowed, {DType::kI32}, {"rows", "words"})
      .expect(m["words"] == (m["vocab"] + 31) / 32, "one bit a vocabulary entry");
  return m.status();
}

std::string describe_mask(const MaskLogitsArgs& a) { return fmt::format("logits {}", a.logits.describe()); }

Cost cost_mask(const MaskLogitsArgs& a) { return {0, 8.125 * static_cast<double>(a.logits.count())}; }

void mask_row(const MaskLogitsArgs& a, int64_t r) {
  const int32_t* words = a.allowed.i32() + r * a.allowed.dim(1);
  for (int64_t i = 0; i < a.logits.dim(1); ++i) {
    if ((static_cast<uint32_t>(words[i / 32]) >> (i % 32) & 1U) == 0) {
      a.logits.row(r)[i] = -std::numeric_limits<float>::infinity();
    }
  }
}

void reference_mask(const MaskLogitsArgs& a) {
  for (int64_t r = 0; r < a.logits.dim(0); ++r) mask_row(a, r);
}

void mask_cpu(Exec& exec, const MaskLogitsArgs& a) {
  exec.pool().parallel_for(a.logits.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) mask_row(a, r);
  });
}

std::vector<Case> cases_mask() {
  return {{{{"rows", 0}, {"vocab", 64}}}, {{{"rows", 3}, {"vocab", 5120}}}, {{{"rows", 2}, {"vocab", 33}}}};
}

Case random_mask(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(5)}, {"vocab", 1 + rng.below(200)}}};
}

MaskLogitsArgs build_mask(const Case& c, CaseData& data) {
  const Tensor logits = data.in_out("logits", data.normal({c["rows"], c["vocab"]}));
  const Tensor allowed = data.random_ints({c["rows"], (c["vocab"] + 31) / 32}, int64_t{1} << 31);
  return {.logits = logits, .allowed = allowed};
}

constexpr Kernel<MaskLogitsArgs> kMaskKernels[] = {
    {"mask_logits.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, mask_cpu}};

}  // namespace

constinit const Op<CopyArgs> kCopy{{.name = "copy",
                                    .check = check_copy,
                                    .describe = describe_copy,
                                    .cost = cost_copy,
                                    .reference = reference_copy,
                                    .cases = cases_copy,
                                    .random_case = random_copy,
                                    .build = build_copy,
                                    .tolerance = {0, 0},
                                    .kernels = kCopyKernels}};

constinit const Op<MaskLogitsArgs> kMaskLogits{{.name = "mask_logits",
                                                .check = check_mask,
                                                .describe = describe_mask,
                                                .cost = cost_mask,
                                                .reference = reference_mask,
                                                .cases = cases_mask,
                                                .random_case = random_mask,
                                                .build = build_mask,
                                                .tolerance = {0, 0},
                                                .kernels = kMaskKernels}};

}  // namespace moat
