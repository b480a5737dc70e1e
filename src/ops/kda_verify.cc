// SPDX-License-Identifier: Apache-2.0
#include "ops/kda_verify.h"

#include "core/shape.h"
#include "ops/kda_parts.h"
#include "ops/kda_verify_kernels.h"
#include "ops/op_parts.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

bool ranges_agree(const CommitRanges& ranges, const Tensor& records) {
  if (ranges.begins.size() != ranges.slots.size() || ranges.ends.size() != ranges.slots.size()) return false;
  if (records.data == nullptr) return true;
  for (size_t s = 0; s < ranges.slots.size(); ++s) {
    if (ranges.begins[s] < 0 || ranges.begins[s] > ranges.ends[s] || ranges.ends[s] > records.dim(1)) return false;
  }
  return true;
}

double committed_rows(const CommitRanges& ranges) {
  double rows = 0;
  for (size_t s = 0; s < ranges.slots.size(); ++s) rows += ranges.ends[s] - ranges.begins[s];
  return rows;
}

// Contiguous within a slot; layers and slots may be apart.
bool layers_of_slots(const Tensor& tensor) { return tensor.rank() > 1 && slots_contiguous(tensor.at(0)); }

// --- kda_verify ---

Status check_kda_verify(const KdaVerifyArgs& v) {
  MOAT_RETURN_IF_ERROR(check_kda("kda_verify", v.rows));
  return ShapeMatcher("kda_verify")
      .match("records", v.records, {DType::kF32}, {v.rows.q.dim(0), v.rows.q.dim(1), kda_record_width(v.rows.q.dim(2))})
      .status();
}

std::string describe_kda_verify(const KdaVerifyArgs& v) {
  return fmt::format("q={} seqs={}", v.rows.q.describe(), v.rows.seqs.num_seqs());
}

// The states are read once and nothing of them is written.
Cost cost_kda_verify(const KdaVerifyArgs& v) {
  const KdaArgs& a = v.rows;
  const double state = 4.0 * static_cast<double>(a.states.dim(1) * a.states.dim(2) * a.states.dim(3));
  return {7.0 * static_cast<double>(a.q.count()) * static_cast<double>(a.q.dim(2)),
          5.0 * bytes_of(a.q) + bytes_of(a.beta_logits) + bytes_of(v.records) +
              state * static_cast<double>(a.seqs.num_seqs())};
}

void kda_verify_reference(const KdaVerifyArgs& v) {
  const int64_t slots = v.rows.states.dim(0);
  const int64_t inner = v.rows.states.count() / std::max<int64_t>(slots, 1);
  std::vector<float> copies(static_cast<size_t>(slots * inner));
  for (int64_t s = 0; s < slots; ++s) {
    const float* from = v.rows.states.f32() + s * v.rows.states.strides[0];
    std::copy(from, from + inner, copies.begin() + s * inner);
  }
  KdaArgs rows = v.rows;
  rows.states = make_tensor(copies.data(), DType::kF32, v.rows.states.dims);
  kda_reference(rows);
  const int64_t heads = rows.q.dim(1);
  const int64_t dim = rows.q.dim(2);
  for (int64_t r = 0; r < rows.q.dim(0) * heads; ++r) {
    float* record = v.records.f32() + r * kda_record_width(dim);
    for (int64_t d = 0; d < dim; ++d) {
      record[d] = rows.k.f32()[r * dim + d];
      record[dim + d] = rows.v.f32()[r * dim + d];
      record[2 * dim + d] = rows.g.f32()[r * dim + d];
    }
    record[3 * dim] = rows.beta_logits.f32()[r];
  }
}

std::vector<Case> kda_verify_cases() {
  std::vector<Case> cases = {kda_case(96, 128, 1, 8, 5, 0), kda_case(12, 128, 3, 8, 100, 0),
                             kda_case(4, 64, 5, 2, 0, 0),   kda_case(1, 1, 2, 3, 1, 0),
                             kda_case(3, 7, 3, 5, 0, 0),    kda_case(2, 33, 4, 6, 2, 0),
                             kda_case(4, 64, 0, 1, 0, 0)};
  for (int64_t decay = 1; decay < 5; ++decay) cases.push_back(kda_case(2, 64, 3, 16, 9, decay));
  return cases;
}

KdaVerifyArgs build_kda_verify(const Case& c, CaseData& data) {
  KdaVerifyArgs v;
  v.rows = build_kda(c, data);
  hide_nans(v.rows.states);
  v.records = data.output("records", {v.rows.q.dim(0), c["heads"], kda_record_width(c["dim"])});
  return v;
}

Reject whole_vectors(int64_t dim) {
  if (dim % 16 != 0) return fmt::format("dim={} not a multiple of 16", dim);
  if (dim > kMaxKdaDim) return fmt::format("dim={} more than {}", dim, kMaxKdaDim);
  return {};
}
Reject verify_whole_vectors(const KdaVerifyArgs& v, const Arch&) { return whole_vectors(v.rows.q.dim(2)); }

constexpr Kernel<KdaVerifyArgs> kKdaVerifyKernels[] = {
    {"kda_verify.cpu.hwy", Backend::kCpu, Tier::kTuned, verify_whole_vectors, kda_verify_workspace, simd::kda_verify},
    {"kda_verify.cpu", Backend::kCpu, Tier::kPortable, nullptr, kda_verify_workspace, cpu::kda_verify},
};

// --- kda_commit ---

Status check_kda_commit(const KdaCommitArgs& a) {
  const int64_t dim = a.states.rank() == 5 ? a.states.dim(4) : 0;
  return ShapeMatcher("kda_commit")
      .match("states", a.states, {DType::kF32}, {"layers", "slots", "heads", "dim", "dim"}, Layout::kRowStrided)
      .match("records", a.records, {DType::kF32}, {"layers", "rows", "heads", kda_record_width(dim)},
             Layout::kRowStrided)
      .expect(layers_of_slots(a.states), "contiguous states within a slot")
      .expect(ranges_agree(a.ranges, a.records), "ranges of the records, one a slot")
      .status();
}

std::string describe_kda_commit(const KdaCommitArgs& a) {
  return fmt::format("states={} seqs={}", a.states.describe(), a.ranges.num_seqs());
}

// Per row and head: decay, S^T k and the update over [dim, dim]; each state is read and written once.
Cost cost_kda_commit(const KdaCommitArgs& a) {
  const double state = static_cast<double>(a.states.dim(0) * a.states.dim(2) * a.states.dim(3) * a.states.dim(4));
  const double record = static_cast<double>(a.states.dim(0) * a.records.dim(2) * a.records.dim(3));
  const double rows = committed_rows(a.ranges);
  return {5.0 * state * rows, 8.0 * state * static_cast<double>(a.ranges.num_seqs()) + 4.0 * record * rows};
}

void kda_commit_reference(const KdaCommitArgs& a) {
  const int64_t dim = a.states.dim(4);
  std::vector<double> state(static_cast<size_t>(dim * dim));
  for (int64_t layer = 0; layer < a.states.dim(0); ++layer) {
    for (size_t s = 0; s < a.ranges.slots.size(); ++s) {
      for (int64_t h = 0; h < a.states.dim(2) && a.ranges.begins[s] < a.ranges.ends[s]; ++h) {
        float* stored = a.states.at(layer).at(a.ranges.slots[s]).at(h).f32();
        std::copy(stored, stored + dim * dim, state.begin());
        for (int64_t row = a.ranges.begins[s]; row < a.ranges.ends[s]; ++row) {
          const float* k = a.records.at(layer).at(row).row(h);
          const float* v = k + dim;
          const float* g = v + dim;
          const double beta = sigmoid_f64(g[dim]);
          std::vector<double> u(v, v + dim);
          for (int64_t d = 0; d < dim; ++d) {
            for (int64_t j = 0; j < dim; ++j) {
              double& x = state[static_cast<size_t>(d * dim + j)];
              x *= std::exp(static_cast<double>(g[d]));
              u[static_cast<size_t>(j)] -= x * k[d];
            }
          }
          for (int64_t i = 0; i < dim * dim; ++i) {
            state[static_cast<size_t>(i)] += k[i / dim] * beta * u[static_cast<size_t>(i % dim)];
          }
        }
        std::transform(state.begin(), state.end(), stored, [](double x) { return static_cast<float>(x); });
      }
    }
  }
}

Case commit_case(int64_t layers, int64_t width, int64_t seqs, int64_t rows) {
  return {{{"layers", layers}, {"width", width}, {"seqs", seqs}, {"rows", rows}}};
}

// Whole and partial ranges, and every fourth one empty, each within `rows` records of its sequence.
CommitRanges build_ranges(const Case& c, CaseData& data) {
  std::vector<int32_t> begins, ends, slots;
  for (int64_t s = 0; s < c["seqs"]; ++s) {
    const int64_t first = s * c["rows"];
    const int64_t begin = first + (s % 3 == 1 ? data.rng().below(c["rows"]) : 0);
    const int64_t rows = s % 4 == 3 ? 0 : 1 + data.rng().below(first + c["rows"] - begin);
    begins.push_back(static_cast<int32_t>(begin));
    ends.push_back(static_cast<int32_t>(begin + rows));
    slots.push_back(static_cast<int32_t>(c["seqs"] - s));
  }
  return {data.hold(std::move(begins)), data.hold(std::move(ends)), data.hold(std::move(slots))};
}

std::vector<Case> kda_commit_cases() {
  return {commit_case(1, 128, 1, 8), commit_case(3, 128, 4, 8), commit_case(2, 64, 6, 2), commit_case(2, 1, 2, 3),
          commit_case(1, 33, 5, 4),  commit_case(2, 16, 0, 4),  commit_case(1, 64, 9, 17)};
}
Case random_kda_commit(uint64_t seed) {
  Rng rng(seed);
  const int64_t dims[] = {16, 32, 64, 128, 1 + rng.below(70)};
  return commit_case(1 + rng.below(3), dims[rng.below(5)], rng.below(6), 1 + rng.below(16));
}

KdaCommitArgs build_kda_commit(const Case& c, CaseData& data) {
  constexpr int64_t kHeads = 3;
  const int64_t dim = c["width"];
  KdaCommitArgs a;
  a.ranges = build_ranges(c, data);
  a.states = data.in_out("states", data.normal({c["layers"], c["seqs"] + 2, kHeads, dim, dim}));
  a.records = data.normal({c["layers"], c["seqs"] * c["rows"], kHeads, kda_record_width(dim)});
  for (int64_t r = 0; r < a.records.count(); r += kda_record_width(dim)) {
    float* record = a.records.f32() + r;
    double square = 1e-6;
    for (int64_t d = 0; d < dim; ++d) square += static_cast<double>(record[d]) * record[d];
    for (int64_t d = 0; d < dim; ++d) {
      record[d] = static_cast<float>(record[d] / std::sqrt(square));  // keys are normalised
      record[2 * dim + d] = -std::fabs(record[2 * dim + d]);          // decays are at most 1
    }
  }
  return a;
}

Reject commit_whole_vectors(const KdaCommitArgs& a, const Arch&) { return whole_vectors(a.states.dim(4)); }

constexpr Kernel<KdaCommitArgs> kKdaCommitKernels[] = {
    {"kda_commit.cpu.hwy", Backend::kCpu, Tier::kTuned, commit_whole_vectors, nullptr, simd::kda_commit},
    {"kda_commit.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::kda_commit},
};

// --- conv_commit ---

Status check_conv_commit(const ConvCommitArgs& a) {
  return ShapeMatcher("conv_commit")
      .match("tails", a.tails, {DType::kF32}, {"layers", "slots", 3, "kept", "channels"}, Layout::kRowStrided)
      .match("records", a.records, {DType::kF32}, {"layers", "rows", 3, "channels"}, Layout::kRowStrided)
      .expect(layers_of_slots(a.tails), "contiguous tails within a slot")
      .expect(ranges_agree(a.ranges, a.records), "ranges of the records, one a slot")
      .status();
}

std::string describe_conv_commit(const ConvCommitArgs& a) {
  return fmt::format("tails={} seqs={}", a.tails.describe(), a.ranges.num_seqs());
}

Cost cost_conv_commit(const ConvCommitArgs& a) {
  const double tail = 4.0 * static_cast<double>(a.tails.dim(0) * 3 * a.tails.dim(3) * a.tails.dim(4));
  return {0, 2.0 * tail * static_cast<double>(a.ranges.num_seqs())};
}

void conv_commit_reference(const ConvCommitArgs& a) {
  const int64_t kept = a.tails.dim(3);
  for (int64_t layer = 0; layer < a.tails.dim(0); ++layer) {
    for (size_t s = 0; s < a.ranges.slots.size(); ++s) {
      for (int64_t which = 0; which < 3; ++which) {
        const Tensor tail = a.tails.at(layer).at(a.ranges.slots[s]).at(which);
        for (int64_t c = 0; c < a.tails.dim(4); ++c) {
          std::vector<float> inputs;
          for (int64_t j = 0; j < kept; ++j) inputs.push_back(tail.row(j)[c]);
          for (int64_t row = a.ranges.begins[s]; row < a.ranges.ends[s]; ++row) {
            inputs.push_back(a.records.at(layer).at(row).row(which)[c]);
          }
          for (int64_t j = 0; j < kept; ++j) {
            tail.row(j)[c] = inputs[inputs.size() - static_cast<size_t>(kept - j)];
          }
        }
      }
    }
  }
}

std::vector<Case> conv_commit_cases() {
  std::vector<Case> cases;
  for (const int64_t kept : {3, 1, 5}) {
    for (Case c : {commit_case(1, 12288, 1, 8), commit_case(3, 256, 5, 8), commit_case(2, 33, 6, 2),
                   commit_case(1, 7, 0, 3), commit_case(2, 64, 8, 1)}) {
      c.dims.emplace_back("kept", kept);
      cases.push_back(std::move(c));
    }
  }
  return cases;
}
Case random_conv_commit(uint64_t seed) {
  Rng rng(seed);
  Case c = commit_case(1 + rng.below(3), 1 + rng.below(300), rng.below(6), 1 + rng.below(9));
  c.dims.emplace_back("kept", 1 + rng.below(5));
  return c;
}

ConvCommitArgs build_conv_commit(const Case& c, CaseData& data) {
  ConvCommitArgs a;
  a.ranges = build_ranges(c, data);
  a.tails = data.in_out("tails", data.normal({c["layers"], c["seqs"] + 2, 3, c["kept"], c["width"]}));
  a.records = data.normal({c["layers"], c["seqs"] * c["rows"], 3, c["width"]});
  return a;
}

constexpr Kernel<ConvCommitArgs> kConvCommitKernels[] = {
    {"conv_commit.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::conv_commit},
};

}  // namespace

int64_t kda_verify_workspace(const KdaVerifyArgs& args, const Exec& exec) {
  const KdaArgs& a = args.rows;
  const int64_t tasks = a.seqs.num_seqs() * a.q.dim(1);
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(exec.pool().num_threads(), tasks));
  return workers * a.q.dim(2) * a.q.dim(2) * static_cast<int64_t>(sizeof(float));
}

constinit const Op<KdaVerifyArgs> kKdaVerify{{.name = "kda_verify",
                                              .check = check_kda_verify,
                                              .describe = describe_kda_verify,
                                              .cost = cost_kda_verify,
                                              .reference = kda_verify_reference,
                                              .cases = kda_verify_cases,
                                              .random_case = random_kda,
                                              .build = build_kda_verify,
                                              .tolerance = {5e-6, 5e-6},
                                              .kernels = kKdaVerifyKernels}};

constinit const Op<KdaCommitArgs> kKdaCommit{{.name = "kda_commit",
                                              .check = check_kda_commit,
                                              .describe = describe_kda_commit,
                                              .cost = cost_kda_commit,
                                              .reference = kda_commit_reference,
                                              .cases = kda_commit_cases,
                                              .random_case = random_kda_commit,
                                              .build = build_kda_commit,
                                              .tolerance = {5e-6, 5e-6},
                                              .kernels = kKdaCommitKernels}};

constinit const Op<ConvCommitArgs> kConvCommit{{.name = "conv_commit",
                                                .check = check_conv_commit,
                                                .describe = describe_conv_commit,
                                                .cost = cost_conv_commit,
                                                .reference = conv_commit_reference,
                                                .cases = conv_commit_cases,
                                                .random_case = random_conv_commit,
                                                .build = build_conv_commit,
                                                .tolerance = {0, 0},
                                                .kernels = kConvCommitKernels}};

}  // namespace moat
