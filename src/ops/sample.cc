// SPDX-License-Identifier: Apache-2.0
#include "ops/sample.h"

#include <algorithm>
#include <numeric>

#include "core/shape.h"
#include "ops/op_parts.h"
#include "ops/sample_kernels.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

// --- rows of cases ---

std::vector<Case> vocab_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][2] = {{1, 163840}, {3, 163840}, {17, 5120}, {8, 1000}, {0, 5120}, {3, 1}, {17, 7}, {12, 33}};
  for (const auto& [rows, vocab] : shapes) {
    for (int64_t kind = 0; kind < 2; ++kind) cases.push_back({{{"rows", rows}, {"vocab", vocab}, {"kind", kind}}});
  }
  return cases;
}

Case random_vocab(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(20)}, {"vocab", 1 + rng.below(700)}, {"kind", rng.below(2)}}};
}

// kind 0: distinct logits; kind 1: few values, so many exact ties.
Tensor build_logits(const Case& c, CaseData& data) {
  const Tensor logits = data.normal({c["rows"], c["vocab"]}, 3.0);
  if (c["kind"] == 1) {
    for (int64_t i = 0; i < logits.count(); ++i) logits.f32()[i] = std::round(logits.f32()[i]);
  }
  return logits;
}

// What grammar masks and broken models leave: every fourth row of kind 1 has masked entries, is all masked, or holds a
// NaN.
void damage_rows(const Case& c, CaseData& data, const Tensor& logits, float masked) {
  const int64_t vocab = logits.dim(1);
  if (c["kind"] == 0 || vocab < 2) return;
  for (int64_t r = 0; r < logits.dim(0); ++r) {
    float* row = logits.row(r);
    if (r % 8 == 1) std::fill(row, row + vocab - 1, masked);
    if (r % 8 == 3) std::fill(row, row + vocab, masked);
    if (r % 8 == 5) row[data.rng().below(vocab)] = NAN;
    if (r % 8 == 7) row[data.rng().below(vocab)] = INFINITY;
  }
}

// Rows of probabilities: softmax of build_logits; with kind 1 also one-hot, all zero, flat and non-finite rows.
Tensor build_probs(const Case& c, CaseData& data) {
  const Tensor probs = build_logits(c, data);
  const int64_t vocab = c["vocab"];
  for (int64_t r = 0; r < c["rows"]; ++r) {
    float* row = probs.row(r);
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(static_cast<double>(row[i]));
    for (int64_t i = 0; i < vocab; ++i) row[i] = static_cast<float>(std::exp(static_cast<double>(row[i])) / sum);
    if (c["kind"] == 0) continue;
    if (r % 8 == 2) std::fill(row, row + vocab, 1.0F / static_cast<float>(vocab));
    if (r % 8 == 1) row[vocab / 2] = 1.0F;  // after damage_rows: one-hot
  }
  damage_rows(c, data, probs, 0.0F);
  for (int64_t r = 1; r < c["rows"] && c["kind"] == 1; r += 8) {
    std::fill(probs.row(r), probs.row(r) + vocab, 0.0F);
    probs.row(r)[vocab / 2] = 1.0F;
  }
  return probs;
}

Cost row_cost(const Tensor& in, const Tensor& out, double flops) {
  return {flops * static_cast<double>(in.count()), bytes_of(in) + bytes_of(out)};
}

// --- softmax ---

Status check_softmax(const SoftmaxArgs& a) {
  return ShapeMatcher("softmax")
      .match("logits", a.logits, {DType::kF32}, {static_cast<int64_t>(a.temperature.size()), "vocab"},
             Layout::kRowStrided)
      .match("probs", a.probs, {DType::kF32}, {static_cast<int64_t>(a.temperature.size()), "vocab"},
             Layout::kRowStrided)
      .status();
}
std::string describe_softmax(const SoftmaxArgs& a) { return fmt::format("logits={}", a.logits.describe()); }
Cost cost_softmax(const SoftmaxArgs& a) { return row_cost(a.logits, a.probs, 5); }

void softmax_reference(const SoftmaxArgs& a) {
  const int64_t vocab = a.logits.dim(1);
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    std::vector<double> x(a.logits.row(r), a.logits.row(r) + vocab);
    const bool nan = std::any_of(x.begin(), x.end(), [](double v) { return std::isnan(v); });
    const double largest = vocab > 0 && !nan ? *std::max_element(x.begin(), x.end()) : INFINITY;
    double sum = 0;
    for (double& v : x) sum += v = std::exp((v - largest) / a.temperature[static_cast<size_t>(r)]);
    for (int64_t i = 0; i < vocab; ++i) {
      a.probs.row(r)[i] = std::isfinite(largest) ? static_cast<float>(x[static_cast<size_t>(i)] / sum) : 0.0F;
    }
  }
}

SoftmaxArgs build_softmax(const Case& c, CaseData& data) {
  SoftmaxArgs a;
  a.logits = build_logits(c, data);
  damage_rows(c, data, a.logits, -INFINITY);
  std::vector<float> temperature;
  for (int64_t r = 0; r < c["rows"]; ++r) {
    temperature.push_back(r % 4 == 3 ? 1e-3F : static_cast<float>(data.rng().uniform(0.3, 2.0)));
  }
  a.temperature = data.hold(std::move(temperature));
  a.probs = c["kind"] ? data.in_out("probs", a.logits) : data.output("probs", a.logits.dims);
  return a;
}

constexpr Kernel<SoftmaxArgs> kSoftmaxKernels[] = {
    {"softmax.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::softmax},
};

// --- top_k_renorm, top_p_renorm, min_p_renorm ---

template <class Span>
Status check_filter(const char* op, const Tensor& probs, const Span& values) {
  return ShapeMatcher(op)
      .match("probs", probs, {DType::kF32}, {static_cast<int64_t>(values.size()), "vocab"}, Layout::kRowStrided)
      .expect(probs.rank() == 2 && probs.dim(1) > 0, "a vocabulary")
      .status();
}
Status check_top_k(const TopKRenormArgs& a) { return check_filter("top_k_renorm", a.probs, a.k); }
Status check_top_p(const TopPRenormArgs& a) { return check_filter("top_p_renorm", a.probs, a.p); }
Status check_min_p(const MinPRenormArgs& a) { return check_filter("min_p_renorm", a.probs, a.min_p); }

std::string describe_probs(const Tensor& probs) { return fmt::format("probs={}", probs.describe()); }
std::string describe_top_k(const TopKRenormArgs& a) { return describe_probs(a.probs); }
std::string describe_top_p(const TopPRenormArgs& a) { return describe_probs(a.probs); }
std::string describe_min_p(const MinPRenormArgs& a) { return describe_probs(a.probs); }

Cost cost_top_k(const TopKRenormArgs& a) { return row_cost(a.probs, a.probs, 4); }
Cost cost_top_p(const TopPRenormArgs& a) { return row_cost(a.probs, a.probs, 4); }
Cost cost_min_p(const MinPRenormArgs& a) { return row_cost(a.probs, a.probs, 4); }

// The rule of all three filters: a row that is not finite becomes zero, else values below threshold(sorted row) go.
template <class Threshold>
void filter_reference(const Tensor& probs, int64_t r, const Threshold& threshold) {
  float* row = probs.row(r);
  const int64_t vocab = probs.dim(1);
  if (has_nonfinite(row, vocab)) {
    std::fill(row, row + vocab, 0.0F);
    return;
  }
  std::vector<float> ascending(row, row + vocab);
  std::sort(ascending.begin(), ascending.end());
  keep_and_renormalise(row, vocab, threshold(ascending));
}

void top_k_reference(const TopKRenormArgs& a) {
  for (int64_t r = 0; r < a.probs.dim(0); ++r) {
    const int64_t k = std::max<int64_t>(a.k[static_cast<size_t>(r)], 1);
    if (k >= a.probs.dim(1)) continue;
    filter_reference(a.probs, r, [&](const std::vector<float>& v) { return v[v.size() - static_cast<size_t>(k)]; });
  }
}

void top_p_reference(const TopPRenormArgs& a) {
  for (int64_t r = 0; r < a.probs.dim(0); ++r) {
    const float p = a.p[static_cast<size_t>(r)];
    if (p >= 1.0F) continue;
    filter_reference(a.probs, r, [&](const std::vector<float>& ascending) {
      double sum = 0;
      for (const float value : ascending) {
        sum += value;
        if (p > 0.0F && static_cast<float>(sum) >= top_p_limit(p)) return value;
      }
      return ascending.back();
    });
  }
}

void min_p_reference(const MinPRenormArgs& a) {
  for (int64_t r = 0; r < a.probs.dim(0); ++r) {
    const float min_p = a.min_p[static_cast<size_t>(r)];
    if (!(min_p > 0.0F)) continue;
    filter_reference(a.probs, r, [&](const std::vector<float>& ascending) { return min_p * ascending.back(); });
  }
}

TopKRenormArgs build_top_k(const Case& c, CaseData& data) {
  TopKRenormArgs a;
  a.probs = data.in_out("probs", build_probs(c, data));
  std::vector<int32_t> k;
  const auto vocab = static_cast<int32_t>(c["vocab"]);
  for (int64_t r = 0; r < c["rows"]; ++r) {
    const int32_t edges[] = {50, 1, 0, -1, vocab, vocab + 9, vocab - 1};
    k.push_back(r < 7 ? edges[r] : static_cast<int32_t>(1 + data.rng().below(vocab)));
    // A filter that is off would leave the NaN, which comparisons refuse.
    if (has_nonfinite(a.probs.row(r), c["vocab"])) k.back() = 1;
  }
  a.k = data.hold(std::move(k));
  return a;
}

TopPRenormArgs build_top_p(const Case& c, CaseData& data) {
  TopPRenormArgs a;
  a.probs = data.in_out("probs", build_probs(c, data));
  std::vector<float> p;
  for (int64_t r = 0; r < c["rows"]; ++r) {
    const float edges[] = {0.95F, 0.9F, 0.5F, 0.0F, 1.0F, 1.5F, -1.0F, 0.999F};
    p.push_back(r < 8 ? edges[r] : static_cast<float>(data.rng().uniform()));
    if (has_nonfinite(a.probs.row(r), c["vocab"])) p.back() = 0.5F;  // as above
  }
  a.p = data.hold(std::move(p));
  return a;
}

MinPRenormArgs build_min_p(const Case& c, CaseData& data) {
  MinPRenormArgs a;
  a.probs = data.in_out("probs", build_probs(c, data));
  std::vector<float> min_p;
  for (int64_t r = 0; r < c["rows"]; ++r) {
    const float edges[] = {0.05F, 0.0F, 1.0F, -1.0F};
    min_p.push_back(r < 4 ? edges[r] : static_cast<float>(data.rng().uniform()));
  }
  a.min_p = data.hold(std::move(min_p));
  return a;
}

constexpr Kernel<TopKRenormArgs> kTopKRenormKernels[] = {
    {"top_k_renorm.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::top_k_renorm},
};
constexpr Kernel<TopPRenormArgs> kTopPRenormKernels[] = {
    {"top_p_renorm.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::top_p_renorm},
};
constexpr Kernel<MinPRenormArgs> kMinPRenormKernels[] = {
    {"min_p_renorm.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::min_p_renorm},
};

// --- draw ---

Status check_draw(const DrawArgs& a) {
  const auto rows = static_cast<int64_t>(a.uniform.size());
  return ShapeMatcher("draw")
      .match("probs", a.probs, {DType::kF32}, {rows, "vocab"}, Layout::kRowStrided)
      .match("ids", a.ids, {DType::kI32}, {rows})
      .status();
}
std::string describe_draw(const DrawArgs& a) { return describe_probs(a.probs); }
Cost cost_draw(const DrawArgs& a) { return row_cost(a.probs, a.ids, 2); }

void draw_reference(const DrawArgs& a) {
  for (int64_t r = 0; r < a.probs.dim(0); ++r) {
    std::vector<double> cumulative(a.probs.row(r), a.probs.row(r) + a.probs.dim(1));
    std::partial_sum(cumulative.begin(), cumulative.end(), cumulative.begin());
    const double total = cumulative.empty() ? 0.0 : cumulative.back();
    int32_t id = -1;
    for (size_t i = cumulative.size(); i-- > 0 && std::isfinite(total);) {
      if (cumulative[i] > a.uniform[static_cast<size_t>(r)] * total) id = static_cast<int32_t>(i);
    }
    a.ids.i32()[r] = id;
  }
}

DrawArgs build_draw(const Case& c, CaseData& data) {
  DrawArgs a;
  a.probs = build_probs(c, data);
  std::vector<double> uniform;
  for (int64_t r = 0; r < c["rows"]; ++r) {
    uniform.push_back(r % 5 == 1 ? 0.0 : r % 5 == 2 ? 1.0 - 0x1.0p-53 : data.rng().uniform());
  }
  a.uniform = data.hold(std::move(uniform));
  a.ids = data.output("ids", {c["rows"]}, DType::kI32);
  std::fill(a.ids.i32(), a.ids.i32() + c["rows"], 0x5a5a5a5a);  // -1 is an answer
  return a;
}

constexpr Kernel<DrawArgs> kDrawKernels[] = {
    {"draw.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::draw},
};

// --- argmax ---

Status check_argmax(const ArgmaxArgs& a) {
  return ShapeMatcher("argmax")
      .match("logits", a.logits, {DType::kF32}, {"rows", "vocab"}, Layout::kRowStrided)
      .match("ids", a.ids, {DType::kI32}, {"rows"})
      .status();
}
std::string describe_argmax(const ArgmaxArgs& a) { return fmt::format("logits={}", a.logits.describe()); }
Cost cost_argmax(const ArgmaxArgs& a) { return row_cost(a.logits, a.ids, 1); }

void argmax_reference(const ArgmaxArgs& a) {
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const float* row = a.logits.row(r);
    const float* end = row + a.logits.dim(1);
    const bool nan = std::any_of(row, end, [](float v) { return std::isnan(v); });
    const bool finite = std::any_of(row, end, [](float v) { return std::isfinite(v); });
    a.ids.i32()[r] = nan || !finite ? -1 : static_cast<int32_t>(std::max_element(row, end) - row);
  }
}

ArgmaxArgs build_argmax(const Case& c, CaseData& data) {
  ArgmaxArgs a;
  a.logits = build_logits(c, data);
  damage_rows(c, data, a.logits, -INFINITY);
  a.ids = data.output("ids", {c["rows"]}, DType::kI32);
  std::fill(a.ids.i32(), a.ids.i32() + c["rows"], 0x5a5a5a5a);  // -1 is an answer
  return a;
}

constexpr Kernel<ArgmaxArgs> kArgmaxKernels[] = {
    {"argmax.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::argmax},
};

// --- logprobs ---

Status check_logprobs(const LogprobsArgs& a) {
  return ShapeMatcher("logprobs")
      .match("logits", a.logits, {DType::kF32}, {"rows", "vocab"}, Layout::kRowStrided)
      .match("ids", a.ids, {DType::kI32}, {"rows"})
      .match("chosen", a.chosen, {DType::kF32}, {"rows"})
      .match_optional("top_ids", a.top_ids, {DType::kI32}, {"rows", "num_top"})
      .match_optional("top_logprobs", a.top_logprobs, {DType::kF32}, {"rows", "num_top"})
      .expect(a.top_ids.is_set() == a.top_logprobs.is_set(), "top_ids and top_logprobs, or neither")
      .expect(!a.top_ids.is_set() || a.top_ids.dim(1) <= a.logits.dim(1), "num_top <= vocab")
      .status();
}
std::string describe_logprobs(const LogprobsArgs& a) {
  return fmt::format("logits={} top={}", a.logits.describe(), a.top_ids.is_set() ? a.top_ids.dim(1) : 0);
}
Cost cost_logprobs(const LogprobsArgs& a) {
  return {4.0 * static_cast<double>(a.logits.count()),
          bytes_of(a.logits) + bytes_of(a.ids) + bytes_of(a.chosen) + bytes_of(a.top_ids) + bytes_of(a.top_logprobs)};
}

void logprobs_reference(const LogprobsArgs& a) {
  const int64_t vocab = a.logits.dim(1);
  const int64_t num_top = a.top_ids.is_set() ? a.top_ids.dim(1) : 0;
  for (int64_t r = 0; r < a.logits.dim(0); ++r) {
    const float* row = a.logits.row(r);
    const double largest = *std::max_element(row, row + vocab);
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(row[i] - largest);
    const auto logprob = [&](int64_t id) { return static_cast<float>(row[id] - largest - std::log(sum)); };
    a.chosen.f32()[r] = logprob(a.ids.i32()[r]);
    std::vector<int32_t> order(static_cast<size_t>(vocab));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return row[x] > row[y]; });
    for (int64_t j = 0; j < num_top; ++j) {
      a.top_ids.i32()[r * num_top + j] = order[static_cast<size_t>(j)];
      a.top_logprobs.f32()[r * num_top + j] = logprob(order[static_cast<size_t>(j)]);
    }
  }
}

LogprobsArgs build_logprobs(const Case& c, CaseData& data) {
  LogprobsArgs a;
  a.logits = build_logits(c, data);
  a.ids = data.random_ints({c["rows"]}, c["vocab"]);
  a.chosen = data.output("chosen", {c["rows"]});
  const int64_t num_top = c["rows"] == 1 ? 0 : std::min<int64_t>(c["vocab"], 20);
  if (num_top > 0) {
    a.top_ids = data.output("top_ids", {c["rows"], num_top}, DType::kI32);
    a.top_logprobs = data.output("top_logprobs", {c["rows"], num_top});
  }
  // Masked tokens have logprob -inf.
  if (c["kind"] == 1 && c["vocab"] > 1) {
    for (int64_t r = 0; r < c["rows"]; r += 3) a.logits.row(r)[data.rng().below(c["vocab"])] = -INFINITY;
  }
  return a;
}

constexpr Kernel<LogprobsArgs> kLogprobsKernels[] = {
    {"logprobs.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::logprobs},
};

}  // namespace

constinit const Op<SoftmaxArgs> kSoftmax{{.name = "softmax",
                                          .check = check_softmax,
                                          .describe = describe_softmax,
                                          .cost = cost_softmax,
                                          .reference = softmax_reference,
                                          .cases = vocab_cases,
                                          .random_case = random_vocab,
                                          .build = build_softmax,
                                          .tolerance = {1e-9, 1e-6},
                                          .kernels = kSoftmaxKernels}};

constinit const Op<TopKRenormArgs> kTopKRenorm{{.name = "top_k_renorm",
                                                .check = check_top_k,
                                                .describe = describe_top_k,
                                                .cost = cost_top_k,
                                                .reference = top_k_reference,
                                                .cases = vocab_cases,
                                                .random_case = random_vocab,
                                                .build = build_top_k,
                                                .tolerance = {1e-12, 1e-6},
                                                .kernels = kTopKRenormKernels}};

constinit const Op<TopPRenormArgs> kTopPRenorm{{.name = "top_p_renorm",
                                                .check = check_top_p,
                                                .describe = describe_top_p,
                                                .cost = cost_top_p,
                                                .reference = top_p_reference,
                                                .cases = vocab_cases,
                                                .random_case = random_vocab,
                                                .build = build_top_p,
                                                .tolerance = {1e-12, 1e-6},
                                                .kernels = kTopPRenormKernels}};

constinit const Op<MinPRenormArgs> kMinPRenorm{{.name = "min_p_renorm",
                                                .check = check_min_p,
                                                .describe = describe_min_p,
                                                .cost = cost_min_p,
                                                .reference = min_p_reference,
                                                .cases = vocab_cases,
                                                .random_case = random_vocab,
                                                .build = build_min_p,
                                                .tolerance = {1e-12, 1e-6},
                                                .kernels = kMinPRenormKernels}};

constinit const Op<DrawArgs> kDraw{{.name = "draw",
                                    .check = check_draw,
                                    .describe = describe_draw,
                                    .cost = cost_draw,
                                    .reference = draw_reference,
                                    .cases = vocab_cases,
                                    .random_case = random_vocab,
                                    .build = build_draw,
                                    .tolerance = {0, 0},
                                    .kernels = kDrawKernels}};

constinit const Op<ArgmaxArgs> kArgmax{{.name = "argmax",
                                        .check = check_argmax,
                                        .describe = describe_argmax,
                                        .cost = cost_argmax,
                                        .reference = argmax_reference,
                                        .cases = vocab_cases,
                                        .random_case = random_vocab,
                                        .build = build_argmax,
                                        .tolerance = {0, 0},
                                        .kernels = kArgmaxKernels}};

constinit const Op<LogprobsArgs> kLogprobs{{.name = "logprobs",
                                            .check = check_logprobs,
                                            .describe = describe_logprobs,
                                            .cost = cost_logprobs,
                                            .reference = logprobs_reference,
                                            .cases = vocab_cases,
                                            .random_case = random_vocab,
                                            .build = build_logprobs,
                                            .tolerance = {1e-6, 1e-6},
                                            .kernels = kLogprobsKernels}};

}  // namespace moat
