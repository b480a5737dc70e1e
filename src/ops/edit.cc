// SPDX-License-Identifier: Apache-2.0
#include "ops/edit.h"

#include <algorithm>
#include <cmath>
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

// --- logits of listed tokens ---

// `per_entry`: length of an array that goes with the ids.
Status check_lists(const char* op, const Tensor& logits, const TokenLists& tokens, size_t per_entry) {
  ShapeMatcher m(op);
  m.match("logits", logits, {DType::kF32}, {"rows", "vocab"})
      .expect(static_cast<int64_t>(tokens.starts.size()) == m["rows"] + 1, "one start a row and the end")
      .expect(per_entry == tokens.ids.size(), "one value a listed token");
  return m.status();
}

// Reads and writes each listed logit once, and reads its id and its value.
Cost cost_lists(const TokenLists& tokens, double flops) {
  const auto entries = static_cast<double>(tokens.ids.size());
  return {flops * entries, 16.0 * entries + 4.0 * static_cast<double>(tokens.starts.size())};
}

std::string describe_lists(const Tensor& logits, const TokenLists& tokens) {
  return fmt::format("logits {} entries={}", logits.describe(), tokens.ids.size());
}

// As f32, and finite if the logit that it came from was.
float rounded_logit(double value, float before) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::isfinite(before) ? std::clamp(value, -kLargest, kLargest) : value);
}

// Calls body(logit, r, entry) for each listed token; each row by one thread.
template <class Body>
void for_each_listed(Exec& exec, const Tensor& logits, const TokenLists& tokens, const Body& body) {
  exec.pool().parallel_for(logits.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const auto row = static_cast<size_t>(r);
      for (auto e = static_cast<size_t>(tokens.starts[row]); e < static_cast<size_t>(tokens.starts[row + 1]); ++e) {
        body(logits.row(r)[tokens.ids[e]], row, e);
      }
    }
  });
}

// The entry of `id` in row r's list, -1 if it is not there.
int64_t entry_of(const TokenLists& tokens, int64_t r, int64_t id) {
  const auto row = static_cast<size_t>(r);
  for (int64_t e = tokens.starts[row]; e < tokens.starts[row + 1]; ++e) {
    if (tokens.ids[static_cast<size_t>(e)] == id) return e;
  }
  return -1;
}

std::vector<Case> cases_lists() {
  return {{{{"rows", 0}, {"vocab", 64}, {"listed", 8}}},
          {{{"rows", 1}, {"vocab", 1}, {"listed", 1}}},
          {{{"rows", 3}, {"vocab", 5120}, {"listed", 300}}},
          {{{"rows", 17}, {"vocab", 33}, {"listed", 33}}},
          {{{"rows", 4}, {"vocab", 70}, {"listed", 0}}}};
}

Case random_lists(uint64_t seed) {
  Rng rng(seed);
  const int64_t vocab = 1 + rng.below(200);
  return {{{"rows", rng.below(9)}, {"vocab", vocab}, {"listed", rng.below(vocab + 1)}}};
}

// Lists of about `listed` tokens of the vocabulary; every fourth row has none, every other one is in descending order.
TokenLists build_lists(const Case& c, CaseData& data) {
  std::vector<int32_t> starts = {0};
  std::vector<int32_t> ids;
  for (int64_t r = 0; r < c["rows"]; ++r) {
    for (int64_t id = 0; id < c["vocab"] && r % 4 != 3; ++id) {
      if (data.rng().below(c["vocab"]) < c["listed"]) ids.push_back(static_cast<int32_t>(id));
    }
    if (r % 2 == 1) std::reverse(ids.begin() + starts.back(), ids.end());
    starts.push_back(static_cast<int32_t>(ids.size()));
  }
  return {data.hold(std::move(starts)), data.hold(std::move(ids))};
}

// Some logits are masked already, zero, or at the end of the range.
Tensor build_listed_logits(const Case& c, CaseData& data) {
  const Tensor logits = data.in_out("logits", data.normal({c["rows"], c["vocab"]}, 3.0));
  constexpr float kEdges[] = {
      -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::infinity(), 0.0F, -0.0F,
      std::numeric_limits<float>::max(),       std::numeric_limits<float>::lowest()};
  for (const float edge : kEdges) {
    if (logits.count() > 0) logits.f32()[data.rng().below(logits.count())] = edge;
  }
  return logits;
}

// --- apply_penalties ---

Status check_penalties(const ApplyPenaltiesArgs& a) {
  MOAT_RETURN_IF_ERROR(check_lists("apply_penalties", a.logits, a.tokens, a.counts.size()));
  const auto rows = static_cast<size_t>(a.logits.dim(0));
  return ShapeMatcher("apply_penalties")
      .expect(a.repetition.size() == rows && a.frequency.size() == rows && a.presence.size() == rows,
              "repetition, frequency and presence of each row")
      .status();
}

std::string describe_penalties(const ApplyPenaltiesArgs& a) { return describe_lists(a.logits, a.tokens); }

Cost cost_penalties(const ApplyPenaltiesArgs& a) { return cost_lists(a.tokens, 4); }

void reference_penalties(const ApplyPenaltiesArgs& a) {
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const auto row = static_cast<size_t>(r);
    for (int64_t id = 0; id < a.logits.dim(1); ++id) {
      const int64_t entry = entry_of(a.tokens, r, id);
      if (entry < 0) continue;
      const float before = a.logits.row(r)[id];
      const int32_t count = a.counts[static_cast<size_t>(entry)];
      double x = before;
      x = x > 0 ? x / a.repetition[row] : x * a.repetition[row];
      x -= static_cast<double>(a.frequency[row]) * count;
      if (count > 0) x -= a.presence[row];
      a.logits.row(r)[id] = rounded_logit(x, before);
    }
  }
}

void penalties_cpu(Exec& exec, const ApplyPenaltiesArgs& a) {
  for_each_listed(exec, a.logits, a.tokens, [&](float& logit, size_t row, size_t entry) {
    const double repetition = a.repetition[row];
    const double count = a.counts[entry];
    const double repeated = logit > 0.0F ? logit / repetition : logit * repetition;
    const double present = count > 0 ? a.presence[row] : 0.0F;
    logit = rounded_logit(repeated - a.frequency[row] * count - present, logit);
  });
}

ApplyPenaltiesArgs build_penalties(const Case& c, CaseData& data) {
  ApplyPenaltiesArgs a{.logits = build_listed_logits(c, data), .tokens = build_lists(c, data)};
  std::vector<int32_t> counts(a.tokens.ids.size());
  for (int32_t& count : counts) count = static_cast<int32_t>(std::max<int64_t>(0, data.rng().below(50) - 20));
  std::vector<float> repetition, frequency, presence;
  for (int64_t r = 0; r < c["rows"]; ++r) {
    // Rows with one of the three, with none, with all; a repetition below 1 favours what was said.
    const auto pick = [&](int64_t off, double low, double high, float neutral) {
      return r % 5 == off || r % 5 == 4 ? static_cast<float>(data.rng().uniform(low, high)) : neutral;
    };
    repetition.push_back(r % 7 == 6 ? 1e-38F : pick(1, 0.25, 2.0, 1.0F));
    frequency.push_back(pick(2, -2.0, 2.0, 0.0F));
    presence.push_back(pick(3, -2.0, 2.0, 0.0F));
  }
  a.counts = data.hold(std::move(counts));
  a.repetition = data.hold(std::move(repetition));
  a.frequency = data.hold(std::move(frequency));
  a.presence = data.hold(std::move(presence));
  return a;
}

constexpr Kernel<ApplyPenaltiesArgs> kPenaltiesKernels[] = {
    {"apply_penalties.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, penalties_cpu}};

// --- bias_logits ---

Status check_bias(const BiasLogitsArgs& a) { return check_lists("bias_logits", a.logits, a.tokens, a.bias.size()); }

std::string describe_bias(const BiasLogitsArgs& a) { return describe_lists(a.logits, a.tokens); }

Cost cost_bias(const BiasLogitsArgs& a) { return cost_lists(a.tokens, 1); }

void reference_bias(const BiasLogitsArgs& a) {
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    for (int64_t id = 0; id < a.logits.dim(1); ++id) {
      const int64_t entry = entry_of(a.tokens, r, id);
      if (entry < 0) continue;
      const float before = a.logits.row(r)[id];
      a.logits.row(r)[id] = rounded_logit(static_cast<double>(before) + a.bias[static_cast<size_t>(entry)], before);
    }
  }
}

void bias_cpu(Exec& exec, const BiasLogitsArgs& a) {
  for_each_listed(exec, a.logits, a.tokens, [&](float& logit, size_t, size_t entry) {
    logit = rounded_logit(static_cast<double>(logit) + static_cast<double>(a.bias[entry]), logit);
  });
}

BiasLogitsArgs build_bias(const Case& c, CaseData& data) {
  BiasLogitsArgs a{.logits = build_listed_logits(c, data), .tokens = build_lists(c, data)};
  std::vector<float> bias(a.tokens.ids.size());
  for (float& b : bias) b = static_cast<float>(data.rng().uniform(-100, 100));
  if (!bias.empty()) bias.front() = std::numeric_limits<float>::lowest();
  a.bias = data.hold(std::move(bias));
  return a;
}

constexpr Kernel<BiasLogitsArgs> kBiasKernels[] = {
    {"bias_logits.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, bias_cpu}};

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

constinit const Op<ApplyPenaltiesArgs> kApplyPenalties{{.name = "apply_penalties",
                                                        .check = check_penalties,
                                                        .describe = describe_penalties,
                                                        .cost = cost_penalties,
                                                        .reference = reference_penalties,
                                                        .cases = cases_lists,
                                                        .random_case = random_lists,
                                                        .build = build_penalties,
                                                        .tolerance = {1e-6, 1e-6},
                                                        .kernels = kPenaltiesKernels}};

constinit const Op<BiasLogitsArgs> kBiasLogits{{.name = "bias_logits",
                                                .check = check_bias,
                                                .describe = describe_bias,
                                                .cost = cost_bias,
                                                .reference = reference_bias,
                                                .cases = cases_lists,
                                                .random_case = random_lists,
                                                .build = build_bias,
                                                .tolerance = {1e-6, 1e-6},
                                                .kernels = kBiasKernels}};

}  // namespace moat
