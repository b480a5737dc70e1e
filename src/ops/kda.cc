// SPDX-License-Identifier: Apache-2.0
#include "ops/kda.h"

#include "core/shape.h"
#include "ops/kda_kernels.h"
#include "ops/kda_parts.h"
#include "ops/op_parts.h"

namespace moat {

using Layout = ShapeMatcher::Layout;

bool rows_agree(const StateSequences& seqs, const Tensor& rows) {
  return rows.data == nullptr || seqs.num_rows() == rows.dim(0);
}

bool sizes_agree(const StateSequences& seqs) {
  return seqs.first_positions.size() == seqs.slots.size() &&
         (seqs.cu_seqlens.size() == seqs.slots.size() + 1 || (seqs.slots.empty() && seqs.cu_seqlens.empty()));
}

bool slots_contiguous(const Tensor& tensor) {
  int64_t step = 1;
  for (int i = tensor.rank() - 1; i >= 1; --i) {
    if (tensor.dims[i] != 1 && tensor.strides[i] != step) return false;
    step *= tensor.dims[i];
  }
  return tensor.dims[0] <= 1 || tensor.strides[0] >= step;
}

StateSequences build_sequences(const Case& c, CaseData& data) {
  std::vector<int32_t> cu = {3};
  std::vector<int32_t> slots;
  std::vector<int32_t> firsts;
  for (int64_t s = 0; s < c["seqs"]; ++s) {
    const int64_t len = s % 4 == 0   ? c["len"]
                        : s % 4 == 1 ? 1
                        : s % 4 == 2 ? std::max<int64_t>(1, c["len"] / 2)
                                     : c["len"] + 1;
    cu.push_back(cu.back() + static_cast<int32_t>(len));
    slots.push_back(static_cast<int32_t>(c["seqs"] - s));
    firsts.push_back(static_cast<int32_t>(s % 3 == 2 ? 0 : c["first"] + 37 * s * (c["first"] != 0)));
  }
  return {data.hold(std::move(cu)), data.hold(std::move(slots)), data.hold(std::move(firsts))};
}

Tensor build_slots(const Case& c, CaseData& data, const char* name, const StateSequences& seqs, const Dims& dims) {
  const int64_t inner = dims.count() / std::max<int64_t>(dims[0], 1);
  const int64_t stride = inner + c["pad"];
  const Tensor memory = data.in_out(name, data.normal({dims[0], stride}));
  for (int64_t s = 0; s < seqs.num_seqs(); ++s) {
    const StateSequence seq = state_sequence(seqs, s);
    if (seq.first == 0) std::fill(memory.row(seq.slot), memory.row(seq.slot) + inner, NAN);
  }
  Tensor slots = make_tensor(memory.data, DType::kF32, dims);
  slots.strides[0] = stride;
  return slots;
}

void hide_nans(const Tensor& slots) {
  const int64_t count = slots.dim(0) * slots.strides[0];
  std::replace_if(
      slots.f32(), slots.f32() + count, [](float x) { return std::isnan(x); }, 1e20F);
}

Status check_kda(const char* op, const KdaArgs& a) {
  return ShapeMatcher(op)
      .match("q", a.q, {DType::kF32}, {"rows", "heads", "dim"})
      .match("k", a.k, {DType::kF32}, {"rows", "heads", "dim"})
      .match("v", a.v, {DType::kF32}, {"rows", "heads", "dim"})
      .match("g", a.g, {DType::kF32}, {"rows", "heads", "dim"})
      .match("out", a.out, {DType::kF32}, {"rows", "heads", "dim"})
      .match("beta_logits", a.beta_logits, {DType::kF32}, {"rows", "heads"})
      .match("states", a.states, {DType::kF32}, {"slots", "heads", "dim", "dim"}, Layout::kRowStrided)
      .expect(slots_contiguous(a.states), "contiguous states within a slot")
      .expect(sizes_agree(a.seqs) && rows_agree(a.seqs, a.q), "sequences that cover the rows")
      .status();
}

void kda_reference(const KdaArgs& a) {
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  std::vector<double> state(static_cast<size_t>(dim * dim));
  for (int64_t task = 0; task < a.seqs.num_seqs() * heads; ++task) {
    const StateSequence seq = state_sequence(a.seqs, task / heads);
    const int64_t h = task % heads;
    if (seq.begin == seq.end) continue;
    float* stored = a.states.f32() + seq.slot * a.states.strides[0] + h * dim * dim;
    for (size_t i = 0; i < state.size(); ++i) state[i] = seq.first == 0 ? 0.0 : stored[i];
    for (int64_t t = seq.begin; t < seq.end; ++t) {
      const int64_t at = (t * heads + h) * dim;
      const double beta = sigmoid_f64(a.beta_logits.f32()[t * heads + h]);
      std::vector<double> u(a.v.f32() + at, a.v.f32() + at + dim);
      std::vector<double> out(static_cast<size_t>(dim));
      for (int64_t d = 0; d < dim; ++d) {
        const double decay = std::exp(static_cast<double>(a.g.f32()[at + d]));
        for (int64_t j = 0; j < dim; ++j) {
          double& s = state[static_cast<size_t>(d * dim + j)];
          s *= decay;
          u[static_cast<size_t>(j)] -= s * a.k.f32()[at + d];
        }
      }
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t j = 0; j < dim; ++j) {
          double& s = state[static_cast<size_t>(d * dim + j)];
          s += a.k.f32()[at + d] * beta * u[static_cast<size_t>(j)];
          out[static_cast<size_t>(j)] += s * a.q.f32()[at + d];
        }
      }
      for (int64_t j = 0; j < dim; ++j) a.out.f32()[at + j] = static_cast<float>(out[static_cast<size_t>(j)]);
    }
    for (size_t i = 0; i < state.size(); ++i) stored[i] = static_cast<float>(state[i]);
  }
}

Case kda_case(int64_t heads, int64_t dim, int64_t seqs, int64_t len, int64_t first, int64_t decay) {
  return {{{"heads", heads},
           {"dim", dim},
           {"seqs", seqs},
           {"len", len},
           {"first", first},
           {"decay", decay},
           {"pad", decay == 0 ? 0 : 48}}};
}

Case random_kda(uint64_t seed) {
  Rng rng(seed);
  const int64_t dims[] = {16, 32, 48, 64, 128, 1 + rng.below(70)};
  return kda_case(1 + rng.below(4), dims[rng.below(6)], rng.below(5), 1 + rng.below(90), rng.below(2) * rng.below(200),
                  rng.below(5));
}

namespace {

Tensor build_decay(const Case& c, CaseData& data, const Dims& dims) {
  switch (c["decay"]) {
    case 0: return data.uniform(dims, -5.0, 0.0);
    case 1: return data.uniform(dims, -5.0, -4.9);
    case 2: return data.uniform(dims, -1e-3, 0.0);
    case 3: return data.uniform(dims, -100.0, 0.0);
    default: break;
  }
  const Tensor g = data.uniform(dims, -0.1, 0.0);
  for (int64_t i = 0; i < g.count(); ++i) {
    if (data.rng().below(4) == 0) g.f32()[i] = -1e4F;
  }
  return g;
}

void normalise_heads(const Tensor& x, double length) {
  const int64_t dim = x.dim(2);
  for (int64_t r = 0; r < x.dim(0) * x.dim(1); ++r) {
    float* row = x.f32() + r * dim;
    double sum = 1e-6;
    for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(row[i]) * row[i];
    for (int64_t i = 0; i < dim; ++i) row[i] = static_cast<float>(row[i] * length / std::sqrt(sum));
  }
}

}  // namespace

KdaArgs build_kda(const Case& c, CaseData& data) {
  KdaArgs a;
  a.seqs = build_sequences(c, data);
  const Dims dims = {a.seqs.num_rows(), c["heads"], c["dim"]};
  a.q = data.normal(dims);
  a.k = data.normal(dims);
  normalise_heads(a.q, 1.0 / std::sqrt(static_cast<double>(c["dim"])));
  normalise_heads(a.k, 1.0);
  a.v = data.normal(dims);
  a.g = build_decay(c, data, dims);
  a.beta_logits = data.normal({dims[0], dims[1]}, 2.0);
  a.states = build_slots(c, data, "states", a.seqs, {c["seqs"] + 2, c["heads"], c["dim"], c["dim"]});
  a.out = data.output("out", dims);
  return a;
}

namespace {

// --- short_conv ---

Status check_short_conv(const ShortConvArgs& a) {
  ShapeMatcher m("short_conv");
  if (a.record.is_set()) m.match("record", a.record, {DType::kF32}, {"rows", "channels"}, Layout::kRowStrided);
  return m.match("x", a.x, {DType::kF32}, {"rows", "channels"}, Layout::kRowStrided)
      .match("out", a.out, {DType::kF32}, {"rows", "channels"}, Layout::kRowStrided)
      .match("weight", a.weight, {DType::kF32}, {"channels", 1, "W"})
      .expect(a.weight.rank() == 3 && a.weight.dim(2) >= 1 && a.weight.dim(2) <= 16, "a kernel width of 1 to 16")
      .match("tails", a.tails, {DType::kF32}, {"slots", a.weight.rank() == 3 ? a.weight.dim(2) - 1 : 0, "channels"},
             Layout::kRowStrided)
      .expect(slots_contiguous(a.tails), "contiguous tails within a slot")
      .expect(!overlap(a.out, a.x), "out apart from x")
      .expect(sizes_agree(a.seqs) && rows_agree(a.seqs, a.x), "sequences that cover the rows")
      .status();
}

std::string describe_short_conv(const ShortConvArgs& a) {
  return fmt::format("x={} width={} seqs={}", a.x.describe(), a.weight.dim(2), a.seqs.num_seqs());
}

Cost cost_short_conv(const ShortConvArgs& a) {
  const double tail = 4.0 * static_cast<double>((a.weight.dim(2) - 1) * a.x.dim(1));
  return {(2.0 * static_cast<double>(a.weight.dim(2)) + 5.0) * static_cast<double>(a.x.count()),
          bytes_of(a.x) + bytes_of(a.out) + bytes_of(a.weight) + bytes_of(a.record) +
              (a.record.is_set() ? 1.0 : 2.0) * tail * static_cast<double>(a.seqs.num_seqs())};
}

void short_conv_reference(const ShortConvArgs& a) {
  const int64_t width = a.weight.dim(2);
  const int64_t channels = a.x.dim(1);
  for (int64_t s = 0; s < a.seqs.num_seqs(); ++s) {
    const StateSequence seq = state_sequence(a.seqs, s);
    if (seq.begin == seq.end) continue;
    float* tail = a.tails.f32() + seq.slot * a.tails.strides[0];
    for (int64_t c = 0; c < channels; ++c) {
      std::vector<float> inputs;  // the tail, then the rows
      for (int64_t j = 0; j < width - 1; ++j) inputs.push_back(seq.first == 0 ? 0.0F : tail[j * channels + c]);
      for (int64_t t = seq.begin; t < seq.end; ++t) inputs.push_back(a.x.row(t)[c]);
      for (int64_t t = 0; t < seq.end - seq.begin; ++t) {
        double sum = 0;
        for (int64_t j = 0; j < width; ++j) {
          sum += static_cast<double>(a.weight.f32()[c * width + j]) * inputs[static_cast<size_t>(t + j)];
        }
        a.out.row(seq.begin + t)[c] = static_cast<float>(sum * sigmoid_f64(sum));
      }
      for (int64_t j = 0; j < width - 1 && !a.record.is_set(); ++j) {
        tail[j * channels + c] = inputs[static_cast<size_t>(seq.end - seq.begin + j)];
      }
      for (int64_t t = seq.begin; t < seq.end && a.record.is_set(); ++t) a.record.row(t)[c] = a.x.row(t)[c];
    }
  }
}

std::vector<Case> short_conv_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][5] = {
      // channels, width, seqs, len, first
      {12288, 4, 1, 1, 7}, {1536, 4, 3, 17, 5}, {256, 4, 8, 1, 9}, {256, 4, 4, 2, 3}, {768, 4, 1, 130, 0},
      {33, 4, 6, 3, 1},    {7, 4, 0, 1, 0},     {1, 2, 2, 5, 0},   {7, 1, 3, 4, 2},   {300, 3, 2, 1, 0},
  };
  for (const auto& [channels, width, seqs, len, first] : shapes) {
    for (const int64_t pad : {0, 24}) {
      for (int64_t record = 0; record < 2; ++record) {
        cases.push_back({{{"channels", channels},
                          {"width", width},
                          {"seqs", seqs},
                          {"len", len},
                          {"first", first},
                          {"pad", pad},
                          {"record", record}}});
      }
    }
  }
  return cases;
}

Case random_short_conv(uint64_t seed) {
  Rng rng(seed);
  const bool usual = rng.below(2) == 0;
  return {{{"channels", usual ? 16 * (1 + rng.below(40)) : 1 + rng.below(600)},
           {"width", usual ? 4 : 1 + rng.below(6)},
           {"seqs", rng.below(6)},
           {"len", 1 + rng.below(12)},
           {"first", rng.below(3)},
           {"pad", rng.below(5)},
           {"record", rng.below(2)}}};
}

ShortConvArgs build_short_conv(const Case& c, CaseData& data) {
  ShortConvArgs a;
  a.seqs = build_sequences(c, data);
  const int64_t rows = a.seqs.num_rows();
  a.x = normal_cols(data, rows, c["channels"], c["pad"]);
  a.weight = data.normal({c["channels"], 1, c["width"]}, 0.7);
  a.tails = build_slots(c, data, "tails", a.seqs, {c["seqs"] + 2, c["width"] - 1, c["channels"]});
  a.out = data.output("out", {rows, c["channels"]});
  if (c["record"] == 0) return a;
  a.record = in_out_cols(data, "record", rows, c["channels"], c["pad"]);
  hide_nans(a.tails);
  return a;
}

Reject width_4_whole_vectors(const ShortConvArgs& a, const Arch&) {
  if (a.weight.dim(2) != 4) return fmt::format("kernel width {}, takes 4", a.weight.dim(2));
  if (a.x.dim(1) % 16 != 0) return fmt::format("channels={} not a multiple of 16", a.x.dim(1));
  return {};
}

constexpr Kernel<ShortConvArgs> kShortConvKernels[] = {
    {"short_conv.cpu.hwy", Backend::kCpu, Tier::kTuned, width_4_whole_vectors, nullptr, simd::short_conv},
    {"short_conv.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::short_conv},
};

// --- kda_gate ---

Status check_kda_gate(const KdaGateArgs& a) {
  return ShapeMatcher("kda_gate")
      .match("raw", a.raw, {DType::kF32}, {"rows", "heads", "dim"})
      .match("out", a.out, {DType::kF32}, {"rows", "heads", "dim"})
      .match("a_log", a.a_log, {DType::kF32}, {"heads"})
      .match("dt_bias", a.dt_bias, {DType::kF32}, {a.raw.rank() == 3 ? a.raw.dim(1) * a.raw.dim(2) : 0})
      .expect(a.lower_bound <= 0.0F, "lower_bound <= 0")
      .status();
}

std::string describe_kda_gate(const KdaGateArgs& a) {
  return fmt::format("raw={} lower_bound={}", a.raw.describe(), a.lower_bound);
}

Cost cost_kda_gate(const KdaGateArgs& a) {
  return {6.0 * static_cast<double>(a.raw.count()),
          bytes_of(a.raw) + bytes_of(a.out) + bytes_of(a.a_log) + bytes_of(a.dt_bias)};
}

void kda_gate_reference(const KdaGateArgs& a) {
  const int64_t heads = a.raw.dim(1);
  const int64_t dim = a.raw.dim(2);
  for (int64_t r = 0; r < a.raw.dim(0); ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      const double rate = std::exp(static_cast<double>(a.a_log.f32()[h]));
      for (int64_t d = 0; d < dim; ++d) {
        const int64_t i = (r * heads + h) * dim + d;
        const double z = static_cast<double>(a.raw.f32()[i]) + a.dt_bias.f32()[h * dim + d];
        const double softplus = std::max(z, 0.0) + std::log1p(std::exp(-std::fabs(z)));
        a.out.f32()[i] =
            static_cast<float>(a.lower_bound < 0.0F ? a.lower_bound * sigmoid_f64(rate * z) : -rate * softplus);
      }
    }
  }
}

std::vector<Case> kda_gate_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][3] = {{1, 96, 128}, {17, 12, 128}, {33, 4, 64}, {0, 4, 64}, {1, 1, 1}, {17, 3, 7}, {5, 2, 33}};
  for (const auto& [rows, heads, dim] : shapes) {
    for (int64_t bounded = 0; bounded < 2; ++bounded) {
      cases.push_back(
          {{{"rows", rows}, {"heads", heads}, {"dim", dim}, {"bounded", bounded}, {"alias", (rows + bounded) % 2}}});
    }
  }
  return cases;
}

Case random_kda_gate(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(20)},
           {"heads", 1 + rng.below(6)},
           {"dim", 1 + rng.below(140)},
           {"bounded", rng.below(2)},
           {"alias", rng.below(2)}}};
}

KdaGateArgs build_kda_gate(const Case& c, CaseData& data) {
  const Dims dims = {c["rows"], c["heads"], c["dim"]};
  KdaGateArgs a;
  a.raw = data.normal(dims, 3.0);
  a.a_log = data.uniform({c["heads"]}, -1.0, 2.1);
  a.dt_bias = data.uniform({c["heads"] * c["dim"]}, -3.0, 3.0);
  a.lower_bound = c["bounded"] ? -5.0F : 0.0F;
  a.out = c["alias"] ? data.in_out("out", a.raw) : data.output("out", dims);
  return a;
}

constexpr Kernel<KdaGateArgs> kKdaGateKernels[] = {
    {"kda_gate.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, simd::kda_gate},
    {"kda_gate.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::kda_gate},
};

// --- kda_recurrent, kda_chunked ---

Status check_kda_recurrent(const KdaArgs& a) { return check_kda("kda_recurrent", a); }
Status check_kda_chunked(const KdaArgs& a) { return check_kda("kda_chunked", a); }

std::string describe_kda(const KdaArgs& a) { return fmt::format("q={} seqs={}", a.q.describe(), a.seqs.num_seqs()); }

double kda_bytes(const KdaArgs& a) {
  const double state = 4.0 * static_cast<double>(a.states.dim(1) * a.states.dim(2) * a.states.dim(3));
  return 5.0 * bytes_of(a.q) + bytes_of(a.beta_logits) + 2.0 * state * static_cast<double>(a.seqs.num_seqs());
}

// Per row and head: decay, S^T k, the update and S^T q over [dim, dim].
Cost cost_kda_recurrent(const KdaArgs& a) {
  return {7.0 * static_cast<double>(a.q.count()) * static_cast<double>(a.q.dim(2)), kda_bytes(a)};
}

// Per row and head: three products with the state, and half a chunk of A, P, A U and P U.
Cost cost_kda_chunked(const KdaArgs& a) {
  const double per_channel = 6.0 * static_cast<double>(a.q.dim(2)) + 4.0 * kKdaChunk;
  return {per_channel * static_cast<double>(a.q.count()), kda_bytes(a)};
}

std::vector<Case> kda_recurrent_cases() {
  std::vector<Case> cases = {
      kda_case(96, 128, 1, 1, 5, 0), kda_case(12, 128, 3, 8, 100, 0), kda_case(4, 64, 8, 1, 1, 0),
      kda_case(4, 64, 5, 17, 0, 0),  kda_case(1, 1, 2, 3, 1, 0),      kda_case(3, 7, 3, 5, 0, 0),
      kda_case(2, 33, 4, 6, 2, 0),   kda_case(4, 64, 0, 1, 0, 0),     kda_case(2, 128, 1, 130, 63, 0)};
  for (int64_t decay = 1; decay < 5; ++decay) {
    cases.push_back(kda_case(2, 64, 3, 40, 9, decay));
    cases.push_back(kda_case(1, 128, 1, 17, 0, decay));
  }
  return cases;
}

std::vector<Case> kda_chunked_cases() {
  std::vector<Case> cases = {kda_case(96, 128, 1, 1, 5, 0), kda_case(12, 128, 2, 100, 64, 0),
                             kda_case(4, 64, 5, 17, 0, 0),  kda_case(1, 1, 2, 70, 1, 0),
                             kda_case(3, 7, 3, 90, 0, 0),   kda_case(2, 33, 4, 66, 2, 0),
                             kda_case(4, 64, 0, 1, 0, 0),   kda_case(2, 128, 1, 300, 0, 0)};
  for (const int64_t len : {15, 16, 17, 63, 64, 65, 130}) {
    for (const int64_t first : {0, 1, 37, 63, 101}) cases.push_back(kda_case(2, 64, 1, len, first, 0));
  }
  for (int64_t decay = 1; decay < 5; ++decay) {
    cases.push_back(kda_case(2, 64, 3, 130, 9, decay));
    cases.push_back(kda_case(1, 128, 1, 129, 0, decay));
    cases.push_back(kda_case(2, 33, 2, 65, 5, decay));
  }
  return cases;
}

Reject whole_vectors(const KdaArgs& a, const Arch&) {
  const int64_t dim = a.q.dim(2);
  if (dim % 16 != 0) return fmt::format("dim={} not a multiple of 16", dim);
  if (dim > kMaxKdaDim) return fmt::format("dim={} more than {}", dim, kMaxKdaDim);
  return {};
}

constexpr Kernel<KdaArgs> kKdaRecurrentKernels[] = {
    {"kda_recurrent.cpu.hwy", Backend::kCpu, Tier::kTuned, whole_vectors, nullptr, simd::kda_recurrent},
    {"kda_recurrent.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::kda_recurrent},
};

constexpr Kernel<KdaArgs> kKdaChunkedKernels[] = {
    {"kda_chunked.cpu.hwy", Backend::kCpu, Tier::kTuned, whole_vectors, kda_chunked_workspace, simd::kda_chunked},
    {"kda_chunked.cpu", Backend::kCpu, Tier::kPortable, nullptr, kda_chunked_workspace, cpu::kda_chunked},
};

}  // namespace

int64_t kda_chunked_workspace(const KdaArgs& args, const Exec& exec) {
  const int64_t tasks = args.seqs.num_seqs() * args.q.dim(1);
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(exec.pool().num_threads(), tasks));
  return workers * KdaChunkScratch::floats(args.q.dim(2)) * static_cast<int64_t>(sizeof(float));
}

constinit const Op<ShortConvArgs> kShortConv{{.name = "short_conv",
                                              .check = check_short_conv,
                                              .describe = describe_short_conv,
                                              .cost = cost_short_conv,
                                              .reference = short_conv_reference,
                                              .cases = short_conv_cases,
                                              .random_case = random_short_conv,
                                              .build = build_short_conv,
                                              .tolerance = {1e-6, 2e-6},
                                              .kernels = kShortConvKernels}};

constinit const Op<KdaGateArgs> kKdaGate{{.name = "kda_gate",
                                          .check = check_kda_gate,
                                          .describe = describe_kda_gate,
                                          .cost = cost_kda_gate,
                                          .reference = kda_gate_reference,
                                          .cases = kda_gate_cases,
                                          .random_case = random_kda_gate,
                                          .build = build_kda_gate,
                                          .tolerance = {5e-6, 5e-6},
                                          .kernels = kKdaGateKernels}};

constinit const Op<KdaArgs> kKdaRecurrent{{.name = "kda_recurrent",
                                           .check = check_kda_recurrent,
                                           .describe = describe_kda,
                                           .cost = cost_kda_recurrent,
                                           .reference = kda_reference,
                                           .cases = kda_recurrent_cases,
                                           .random_case = random_kda,
                                           .build = build_kda,
                                           .tolerance = {5e-6, 5e-6},
                                           .kernels = kKdaRecurrentKernels}};

constinit const Op<KdaArgs> kKdaChunked{{.name = "kda_chunked",
                                         .check = check_kda_chunked,
                                         .describe = describe_kda,
                                         .cost = cost_kda_chunked,
                                         .reference = kda_reference,
                                         .cases = kda_chunked_cases,
                                         .random_case = random_kda,
                                         .build = build_kda,
                                         .tolerance = {1e-5, 1e-5},
                                         .kernels = kKdaChunkedKernels}};

}  // namespace moat
