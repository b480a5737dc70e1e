// SPDX-License-Identifier: Apache-2.0
#include "ops/pointwise.h"

#include "core/shape.h"
#include "ops/op_parts.h"
#include "ops/pointwise_kernels.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

std::vector<Case> row_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][2] = {{1, 7168}, {17, 7168}, {3, 12288}, {33, 192}, {0, 192}, {1, 1}, {17, 7}, {5, 33}};
  for (const auto& [rows, width] : shapes) {
    for (const int64_t pad : {0, 5}) cases.push_back({{{"rows", rows}, {"width", width}, {"pad", pad}}});
  }
  return cases;
}

Case random_rows(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(40)}, {"width", 1 + rng.below(300)}, {"pad", rng.below(4)}}};
}

// --- embed ---

Status check_embed(const EmbedArgs& a) {
  return ShapeMatcher("embed")
      .match("table", a.table, {DType::kBF16, DType::kF32}, {"vocab", "hidden"}, Layout::kRowStrided)
      .match("out", a.out, {DType::kF32}, {static_cast<int64_t>(a.ids.size()), "hidden"}, Layout::kRowStrided)
      .status();
}

std::string describe_embed(const EmbedArgs& a) {
  return fmt::format("tokens={} table={}", a.ids.size(), a.table.describe());
}

Cost cost_embed(const EmbedArgs& a) {
  const auto tokens = static_cast<int64_t>(a.ids.size());
  return {0, bytes_of(a.out) + static_cast<double>(dtype_bytes(a.table.dtype, tokens * a.table.dim(1)) + 4 * tokens)};
}

void embed_reference(const EmbedArgs& a) {
  for (size_t t = 0; t < a.ids.size(); ++t) {
    for (int64_t i = 0; i < a.table.dim(1); ++i) {
      a.out.row(static_cast<int64_t>(t))[i] = element_f32(a.table, a.ids[t], i);
    }
  }
}

std::vector<Case> embed_cases() {
  return {{{{"tokens", 1}, {"vocab", 300}, {"hidden", 7168}, {"bf16", 1}, {"pad", 0}}},
          {{{"tokens", 17}, {"vocab", 300}, {"hidden", 7168}, {"bf16", 1}, {"pad", 0}}},
          {{{"tokens", 130}, {"vocab", 5120}, {"hidden", 192}, {"bf16", 1}, {"pad", 0}}},
          {{{"tokens", 9}, {"vocab", 5120}, {"hidden", 192}, {"bf16", 0}, {"pad", 0}}},
          {{{"tokens", 6}, {"vocab", 40}, {"hidden", 192}, {"bf16", 0}, {"pad", 384}}},
          {{{"tokens", 0}, {"vocab", 3}, {"hidden", 7}, {"bf16", 0}, {"pad", 0}}},
          {{{"tokens", 5}, {"vocab", 1}, {"hidden", 1}, {"bf16", 1}, {"pad", 0}}}};
}

Case random_embed(uint64_t seed) {
  Rng rng(seed);
  return {{{"tokens", rng.below(50)},
           {"vocab", 1 + rng.below(99)},
           {"hidden", 1 + rng.below(200)},
           {"bf16", rng.below(2)},
           {"pad", rng.below(4)}}};
}

EmbedArgs build_embed(const Case& c, CaseData& data) {
  EmbedArgs a;
  // A table of rows may be columns of a wider one: a layer's tap.
  a.table = data.normal({c["vocab"], c["hidden"] + c["pad"]}, 1.0, c["bf16"] ? DType::kBF16 : DType::kF32)
                .cols(c["pad"], c["pad"] + c["hidden"]);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < c["tokens"]; ++t) {
    ids.push_back(static_cast<int32_t>(t == 0 ? c["vocab"] - 1 : t == 1 ? 0 : data.rng().below(c["vocab"])));
  }
  a.ids = data.hold(std::move(ids));
  a.out = data.output("out", {c["tokens"], c["hidden"]});
  return a;
}

constexpr Kernel<EmbedArgs> kEmbedKernels[] = {
    {"embed.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::embed},
};

// --- add ---

Status check_add(const AddArgs& a) {
  return ShapeMatcher("add")
      .match("x", a.x, {DType::kF32}, {"tokens", "hidden"}, Layout::kRowStrided)
      .match("y", a.y, {DType::kF32}, {"tokens", "hidden"}, Layout::kRowStrided)
      .status();
}

std::string describe_add(const AddArgs& a) { return fmt::format("x={}", a.x.describe()); }

Cost cost_add(const AddArgs& a) { return {static_cast<double>(a.x.count()), 2 * bytes_of(a.x) + bytes_of(a.y)}; }

void add_reference(const AddArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t i = 0; i < a.x.dim(1); ++i) a.x.row(r)[i] += a.y.row(r)[i];
  }
}

AddArgs build_add(const Case& c, CaseData& data) {
  AddArgs a;
  a.x = in_out_cols(data, "x", c["rows"], c["width"], c["pad"]);
  a.y = normal_cols(data, c["rows"], c["width"], c["pad"]);
  return a;
}

constexpr Kernel<AddArgs> kAddKernels[] = {
    {"add.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::add},
};

// --- gated_act ---

Status check_gated_act(const GatedActArgs& a) {
  return ShapeMatcher("gated_act")
      .match("gate", a.gate, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .match("up", a.up, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .match("out", a.out, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .expect(a.situ_beta >= 0.0F && a.linear_beta >= 0.0F, "situ_beta >= 0 and linear_beta >= 0")
      .status();
}

std::string describe_gated_act(const GatedActArgs& a) {
  return fmt::format("gate={} {}", a.gate.describe(), a.situ_beta > 0.0F ? "situ" : "silu");
}

Cost cost_gated_act(const GatedActArgs& a) {
  return {10.0 * static_cast<double>(a.gate.count()), bytes_of(a.gate) + bytes_of(a.up) + bytes_of(a.out)};
}

void gated_act_reference(const GatedActArgs& a) {
  const double beta = a.situ_beta;
  const double linear_beta = a.linear_beta;
  for (int64_t r = 0; r < a.gate.dim(0); ++r) {
    for (int64_t i = 0; i < a.gate.dim(1); ++i) {
      const double g = a.gate.row(r)[i];
      const double u = a.up.row(r)[i];
      const double left = beta > 0 ? beta * std::tanh(g / beta) : g;
      const double right = beta > 0 && linear_beta > 0 ? linear_beta * std::tanh(u / linear_beta) : u;
      a.out.row(r)[i] = static_cast<float>(left * sigmoid_f64(g) * right);
    }
  }
}

std::vector<Case> gated_act_cases() {
  std::vector<Case> cases;
  for (int64_t mode = 0; mode < 3; ++mode) {
    for (Case c : row_cases()) {
      c.dims.insert(c.dims.end(), {{"mode", mode}, {"alias", c["rows"] % 2}});
      cases.push_back(std::move(c));
    }
  }
  return cases;
}

Case random_gated_act(uint64_t seed) {
  Rng rng(seed);
  Case c = random_rows(rng.next());
  c.dims.insert(c.dims.end(), {{"mode", rng.below(3)}, {"alias", rng.below(2)}});
  return c;
}

// mode 0: SiTU of K3, 1: SiTU without a bound on the linear factor, 2: SiLU.
GatedActArgs build_gated_act(const Case& c, CaseData& data) {
  GatedActArgs a;
  const bool alias = c["alias"] != 0;
  a.gate = alias ? in_out_cols(data, "out", c["rows"], c["width"], c["pad"], 8.0)
                 : normal_cols(data, c["rows"], c["width"], c["pad"], 8.0);
  a.up = normal_cols(data, c["rows"], c["width"], c["pad"], 20.0);
  a.out = alias ? a.gate : in_out_cols(data, "out", c["rows"], c["width"], c["pad"]);
  a.situ_beta = c["mode"] < 2 ? 4.0F : 0.0F;
  a.linear_beta = c["mode"] == 0 ? 25.0F : 0.0F;
  return a;
}

constexpr Kernel<GatedActArgs> kGatedActKernels[] = {
    {"gated_act.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, simd::gated_act},
    {"gated_act.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::gated_act},
};

// --- sigmoid_gate ---

Status check_sigmoid_gate(const SigmoidGateArgs& a) {
  return ShapeMatcher("sigmoid_gate")
      .match("x", a.x, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .match("gate", a.gate, {DType::kF32}, {"rows", "width"}, Layout::kRowStrided)
      .status();
}

std::string describe_sigmoid_gate(const SigmoidGateArgs& a) { return fmt::format("x={}", a.x.describe()); }

Cost cost_sigmoid_gate(const SigmoidGateArgs& a) {
  return {5.0 * static_cast<double>(a.x.count()), 2 * bytes_of(a.x) + bytes_of(a.gate)};
}

void sigmoid_gate_reference(const SigmoidGateArgs& a) {
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t i = 0; i < a.x.dim(1); ++i) {
      a.x.row(r)[i] = static_cast<float>(a.x.row(r)[i] * sigmoid_f64(a.gate.row(r)[i]));
    }
  }
}

SigmoidGateArgs build_sigmoid_gate(const Case& c, CaseData& data) {
  SigmoidGateArgs a;
  a.x = in_out_cols(data, "x", c["rows"], c["width"], c["pad"]);
  a.gate = normal_cols(data, c["rows"], c["width"], c["pad"], 10.0);
  return a;
}

constexpr Kernel<SigmoidGateArgs> kSigmoidGateKernels[] = {
    {"sigmoid_gate.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, simd::sigmoid_gate},
    {"sigmoid_gate.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::sigmoid_gate},
};

}  // namespace

constinit const Op<EmbedArgs> kEmbed{{.name = "embed",
                                      .check = check_embed,
                                      .describe = describe_embed,
                                      .cost = cost_embed,
                                      .reference = embed_reference,
                                      .cases = embed_cases,
                                      .random_case = random_embed,
                                      .build = build_embed,
                                      .tolerance = {0, 0},
                                      .kernels = kEmbedKernels}};

constinit const Op<AddArgs> kAdd{{.name = "add",
                                  .check = check_add,
                                  .describe = describe_add,
                                  .cost = cost_add,
                                  .reference = add_reference,
                                  .cases = row_cases,
                                  .random_case = random_rows,
                                  .build = build_add,
                                  .tolerance = {0, 0},
                                  .kernels = kAddKernels}};

constinit const Op<GatedActArgs> kGatedAct{{.name = "gated_act",
                                            .check = check_gated_act,
                                            .describe = describe_gated_act,
                                            .cost = cost_gated_act,
                                            .reference = gated_act_reference,
                                            .cases = gated_act_cases,
                                            .random_case = random_gated_act,
                                            .build = build_gated_act,
                                            .tolerance = {1e-6, 2e-6},
                                            .kernels = kGatedActKernels}};

constinit const Op<SigmoidGateArgs> kSigmoidGate{{.name = "sigmoid_gate",
                                                  .check = check_sigmoid_gate,
                                                  .describe = describe_sigmoid_gate,
                                                  .cost = cost_sigmoid_gate,
                                                  .reference = sigmoid_gate_reference,
                                                  .cases = row_cases,
                                                  .random_case = random_rows,
                                                  .build = build_sigmoid_gate,
                                                  .tolerance = {1e-6, 1e-6},
                                                  .kernels = kSigmoidGateKernels}};

}  // namespace moat
