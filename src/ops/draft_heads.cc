// SPDX-License-Identifier: Apache-2.0
// The ops of draft.h that follow the block: Markov heads, confidence, pruned vocabularies.
#include <cmath>
#include <numeric>
#include <vector>

#include "core/shape.h"
#include "ops/draft.h"
#include "ops/draft_kernels.h"
#include "ops/op_parts.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

std::vector<Case> rank_cases() {
  std::vector<Case> cases;
  for (const auto& [rows, rank] : {std::pair{1, 256}, {8, 256}, {3, 64}, {17, 512}, {0, 64}, {1, 1}, {5, 33}}) {
    cases.push_back({{{"rows", rows}, {"rank", rank}}});
  }
  return cases;
}

Case random_rank(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(20)}, {"rank", 1 + rng.below(300)}}};
}

// --- markov_gate ---

Status check_markov_gate(const MarkovGateArgs& a) {
  return ShapeMatcher("markov_gate")
      .match("x", a.x, {DType::kF32}, {"rows", "rank"}, Layout::kRowStrided)
      .match("gate", a.gate, {DType::kF32}, {"rows", "rank"}, Layout::kRowStrided)
      .match("bias", a.bias, {DType::kF32}, {"rank"})
      .status();
}

std::string describe_markov_gate(const MarkovGateArgs& a) { return fmt::format("x={}", a.x.describe()); }

Cost cost_markov_gate(const MarkovGateArgs& a) {
  return {6.0 * static_cast<double>(a.x.count()), 2 * bytes_of(a.x) + bytes_of(a.gate) + bytes_of(a.bias)};
}

void markov_gate_reference(const MarkovGateArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t i = 0; i < a.x.dim(1); ++i) {
      const double gate = sigmoid_f64(static_cast<double>(a.gate.row(r)[i]) + a.bias.f32()[i]);
      a.x.row(r)[i] = static_cast<float>(a.x.row(r)[i] * gate);
    }
  }
}

MarkovGateArgs build_markov_gate(const Case& c, CaseData& data) {
  const int64_t rows = c["rows"], rank = c["rank"];
  return {
      .x = in_out_cols(data, "x", rows, rank, 3), .gate = data.normal({rows, rank}, 3.0), .bias = data.normal({rank})};
}

constexpr Kernel<MarkovGateArgs> kMarkovGateKernels[] = {
    {"markov_gate.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::markov_gate}};

// --- markov_cell ---

Status check_markov_cell(const MarkovCellArgs& a) {
  ShapeMatcher m("markov_cell");
  m.match("state", a.state, {DType::kF32}, {"rows", "rank"}, Layout::kRowStrided)
      .match("out", a.out, {DType::kF32}, {"rows", "rank"}, Layout::kRowStrided)
      .match("gates", a.gates, {DType::kF32}, {"rows", "3 rank"}, Layout::kRowStrided)
      .match("bias", a.bias, {DType::kF32}, {"3 rank"})
      .expect(m["3 rank"] == 3 * m["rank"], "three gates for each component of the state");
  return m.status();
}

std::string describe_markov_cell(const MarkovCellArgs& a) { return fmt::format("state={}", a.state.describe()); }

Cost cost_markov_cell(const MarkovCellArgs& a) {
  return {20.0 * static_cast<double>(a.state.count()),
          2 * bytes_of(a.state) + bytes_of(a.out) + bytes_of(a.gates) + bytes_of(a.bias)};
}

void markov_cell_reference(const MarkovCellArgs& a) {
  const int64_t rank = a.state.dim(1);
  for (int64_t r = 0; r < a.state.dim(0); ++r) {
    for (int64_t i = 0; i < rank; ++i) {
      const auto gate = [&](int64_t which) {
        return static_cast<double>(a.gates.row(r)[which * rank + i]) + a.bias.f32()[which * rank + i];
      };
      const double keep = sigmoid_f64(gate(0));
      a.state.row(r)[i] = static_cast<float>(keep * a.state.row(r)[i] + (1.0 - keep) * std::tanh(gate(1)));
      a.out.row(r)[i] = static_cast<float>(std::tanh(gate(2)));
    }
  }
}

MarkovCellArgs build_markov_cell(const Case& c, CaseData& data) {
  const int64_t rows = c["rows"], rank = c["rank"];
  return {.out = data.output("out", {rows, rank}),
          .state = in_out_cols(data, "state", rows, rank, 2),
          .gates = data.normal({rows, 3 * rank}, 2.0),
          .bias = data.normal({3 * rank})};
}

constexpr Kernel<MarkovCellArgs> kMarkovCellKernels[] = {
    {"markov_cell.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::markov_cell}};

// --- confidence ---

Status check_confidence(const ConfidenceArgs& a) {
  ShapeMatcher m("confidence");
  m.match("x", a.x, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .match_optional("y", a.y, {DType::kF32}, {"rows", "rank"}, Layout::kRowStrided)
      .match("out", a.out, {DType::kF32}, {"rows", 1}, Layout::kRowStrided)
      .match("weight", a.weight, {DType::kBF16, DType::kF32}, {1, "width + rank"})
      .match("bias", a.bias, {DType::kF32}, {1})
      .expect(m["width + rank"] == m["width"] + (a.y.is_set() ? m["rank"] : 0), "a weight for each input");
  return m.status();
}

std::string describe_confidence(const ConfidenceArgs& a) {
  return fmt::format("x={} weight={}", a.x.describe(), a.weight.describe());
}

Cost cost_confidence(const ConfidenceArgs& a) {
  return {2.0 * static_cast<double>(a.x.dim(0) * a.weight.count()),
          bytes_of(a.x) + bytes_of(a.y) + bytes_of(a.out) + bytes_of(a.weight) + bytes_of(a.bias)};
}

void confidence_reference(const ConfidenceArgs& a) {
  const int64_t width = a.x.dim(1);
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    double logit = a.bias.f32()[0];
    for (int64_t i = 0; i < a.weight.count(); ++i) {
      logit += static_cast<double>(weight_at(a.weight, i)) * (i < width ? a.x.row(r)[i] : a.y.row(r)[i - width]);
    }
    *a.out.row(r) = static_cast<float>(sigmoid_f64(logit));
  }
}

std::vector<Case> confidence_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][3] = {{1, 7168, 256}, {8, 7168, 0}, {7, 192, 64}, {0, 192, 64}, {1, 1, 0}, {5, 33, 7}};
  for (const auto& [rows, width, rank] : shapes) {
    for (const int64_t bf16 : {0, 1}) {
      cases.push_back({{{"rows", rows}, {"width", width}, {"rank", rank}, {"bf16", bf16}}});
    }
  }
  return cases;
}

Case random_confidence(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(20)}, {"width", 1 + rng.below(300)}, {"rank", rng.below(60)}, {"bf16", rng.below(2)}}};
}

ConfidenceArgs build_confidence(const Case& c, CaseData& data) {
  const int64_t rows = c["rows"], width = c["width"], rank = c["rank"];
  const double deviation = 1.0 / std::sqrt(static_cast<double>(width + rank));  // logits of about one
  return {.out = in_out_cols(data, "out", rows, 1, 3),
          .x = normal_cols(data, rows, width, 2),
          .y = rank > 0 ? normal_cols(data, rows, rank, 1) : Tensor(),
          .weight = data.normal({1, width + rank}, deviation, c["bf16"] ? DType::kBF16 : DType::kF32),
          .bias = data.normal({1})};
}

constexpr Kernel<ConfidenceArgs> kConfidenceKernels[] = {
    {"confidence.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::confidence}};

// --- scatter_probs ---

Status check_scatter_probs(const ScatterProbsArgs& a) {
  ShapeMatcher m("scatter_probs");
  m.match("x", a.x, {DType::kF32}, {"rows", static_cast<int64_t>(a.ids.size())}, Layout::kRowStrided)
      .match("out", a.out, {DType::kF32}, {"rows", "vocab"}, Layout::kRowStrided)
      .expect(static_cast<int64_t>(a.ids.size()) <= m["vocab"], "a draft vocabulary within the target's");
  return m.status();
}

std::string describe_scatter_probs(const ScatterProbsArgs& a) {
  return fmt::format("x={} out={}", a.x.describe(), a.out.describe());
}

Cost cost_scatter_probs(const ScatterProbsArgs& a) {
  return {0, bytes_of(a.x) + bytes_of(a.out) + 4.0 * static_cast<double>(a.ids.size())};
}

void scatter_probs_reference(const ScatterProbsArgs& a) {
  for (int64_t r = 0; r < a.out.dim(0); ++r) {
    for (int64_t v = 0; v < a.out.dim(1); ++v) a.out.row(r)[v] = 0.0F;
    for (size_t i = 0; i < a.ids.size(); ++i) a.out.row(r)[a.ids[i]] = a.x.row(r)[i];
  }
}

std::vector<Case> scatter_probs_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][3] = {{3, 5120, 2560}, {1, 5120, 5120}, {0, 10, 3}, {2, 1, 1}, {5, 33, 7}, {2, 4, 0}};
  for (const auto& [rows, vocab, draft_vocab] : shapes) {
    cases.push_back({{{"rows", rows}, {"vocab", vocab}, {"draft_vocab", draft_vocab}}});
  }
  return cases;
}

Case random_scatter_probs(uint64_t seed) {
  Rng rng(seed);
  const int64_t vocab = 1 + rng.below(300);
  return {{{"rows", rng.below(9)}, {"vocab", vocab}, {"draft_vocab", rng.below(vocab + 1)}}};
}

ScatterProbsArgs build_scatter_probs(const Case& c, CaseData& data) {
  std::vector<int32_t> ids(static_cast<size_t>(c["vocab"]));  // the first ones of a random permutation
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(i);
    std::swap(ids[i], ids[static_cast<size_t>(data.rng().below(static_cast<int64_t>(i) + 1))]);
  }
  ids.resize(static_cast<size_t>(c["draft_vocab"]));
  return {.out = in_out_cols(data, "out", c["rows"], c["vocab"], 2),
          .x = normal_cols(data, c["rows"], c["draft_vocab"], 1),
          .ids = data.hold(std::move(ids))};
}

constexpr Kernel<ScatterProbsArgs> kScatterProbsKernels[] = {
    {"scatter_probs.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::scatter_probs}};

}  // namespace

constinit const Op<MarkovGateArgs> kMarkovGate{{.name = "markov_gate",
                                                .check = check_markov_gate,
                                                .describe = describe_markov_gate,
                                                .cost = cost_markov_gate,
                                                .reference = markov_gate_reference,
                                                .cases = rank_cases,
                                                .random_case = random_rank,
                                                .build = build_markov_gate,
                                                .tolerance = {1e-6, 2e-6},
                                                .kernels = kMarkovGateKernels}};

constinit const Op<MarkovCellArgs> kMarkovCell{{.name = "markov_cell",
                                                .check = check_markov_cell,
                                                .describe = describe_markov_cell,
                                                .cost = cost_markov_cell,
                                                .reference = markov_cell_reference,
                                                .cases = rank_cases,
                                                .random_case = random_rank,
                                                .build = build_markov_cell,
                                                .tolerance = {1e-6, 2e-6},
                                                .kernels = kMarkovCellKernels}};

constinit const Op<ConfidenceArgs> kConfidence{{.name = "confidence",
                                                .check = check_confidence,
                                                .describe = describe_confidence,
                                                .cost = cost_confidence,
                                                .reference = confidence_reference,
                                                .cases = confidence_cases,
                                                .random_case = random_confidence,
                                                .build = build_confidence,
                                                .tolerance = {1e-6, 1e-6},
                                                .kernels = kConfidenceKernels}};

constinit const Op<ScatterProbsArgs> kScatterProbs{{.name = "scatter_probs",
                                                    .check = check_scatter_probs,
                                                    .describe = describe_scatter_probs,
                                                    .cost = cost_scatter_probs,
                                                    .reference = scatter_probs_reference,
                                                    .cases = scatter_probs_cases,
                                                    .random_case = random_scatter_probs,
                                                    .build = build_scatter_probs,
                                                    .tolerance = {0.0, 0.0},
                                                    .kernels = kScatterProbsKernels}};

}  // namespace moat
