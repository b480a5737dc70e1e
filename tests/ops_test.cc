// SPDX-License-Identifier: Apache-2.0
// Every op: each built CPU row against the reference on each instruction set of this machine, with one thread and with
// two, over the op's cases and random ones; row invariance; golden vectors; vectors worked out by hand. Prints what was
// covered and the largest errors.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>

#include "model/safetensors.h"
#include "ops/accept.h"
#include "ops/kda.h"
#include "ops/matmul.h"
#include "ops/mla.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "ops/sample.h"
#include "ops/sparse.h"
#include "ops/typed_op.h"

namespace moat {
namespace {

constexpr int kRandomCases = 24;

// One arena and one pool of each size for all tests.
struct Machine {
  Arena arena{size_t{256} << 20};
  ThreadPool one{1};
  ThreadPool two{2};
  std::vector<std::string> isas = host_isas();

  Exec exec(ThreadPool& pool) { return Exec({.arch = host_arch(), .pool = &pool, .arena = &arena}); }
  ~Machine() { (void)force_isa(isas.front()); }
};
Machine& machine() {
  static Machine m;
  return m;
}

// --- the generic driver ---

struct RowReport {
  int cases = 0;
  double worst = 0;
  double relative_norm = 0;
};
using Reports = std::map<std::pair<std::string, std::string>, RowReport>;
Reports& reports() {
  static Reports r;
  return r;
}

class Coverage : public testing::Environment {
 public:
  void TearDown() override {
    std::printf("\n%-16s %-34s %6s %12s %14s\n", "op", "row", "cases", "worst ratio", "relative norm");
    for (const auto& [key, report] : reports()) {
      std::printf("%-16s %-34s %6d %12.3f %14.2e\n", key.first.c_str(), key.second.c_str(), report.cases, report.worst,
                  report.relative_norm);
    }
  }
};
const testing::Environment* const kCoverage = testing::AddGlobalTestEnvironment(new Coverage);

using Bytes = std::vector<std::vector<std::byte>>;

Bytes snapshot(const CaseData& data) {
  Bytes bytes;
  for (const CaseData::Output& o : data.outputs()) {
    EXPECT_TRUE(o.tensor.is_contiguous()) << o.name;
    const auto* begin = static_cast<const std::byte*>(o.tensor.data);
    bytes.emplace_back(begin, begin + storage_bytes(o.tensor.dtype, o.tensor.dims));
  }
  return bytes;
}

void restore(const CaseData& data, const Bytes& bytes) {
  for (size_t o = 0; o < bytes.size(); ++o)
    for (size_t o = 0; o < bytes.size(); ++o) {
      std::copy(bytes[o].begin(), bytes[o].end(), static_cast<std::byte*>(data.outputs()[o].tensor.data));
    }
}

// All rows of one op on one case, on the instruction set in force.
void run_case(const AnyOp& op, const Case& c, uint64_t seed, std::vector<int>& accepted) {
  CaseData want(seed);
  CaseData got(seed);
  ASSERT_TRUE(op.prepare(c, want).ok()) << op.prepare(c, want).message();
  ASSERT_TRUE(op.prepare(c, got).ok());
  const Cost cost = op.cost(got);
  EXPECT_TRUE(cost.flops >= 0 && cost.bytes >= 0 && std::isfinite(cost.flops + cost.bytes));
  const Bytes before = snapshot(got);
  op.run_reference(want);
  const auto rows = op.rows();
  for (const std::string& isa : machine().isas) {
    ASSERT_TRUE(force_isa(isa).ok());
    for (size_t r = 0; r < rows.size(); ++r) {
      if (rows[r].backend != Backend::kCpu || !rows[r].built) continue;
      if (rows[r].tier == Tier::kPortable && isa != machine().isas.front()) continue;
      if (op.reject(got, r, host_arch())) continue;
      ++accepted[r];
      Exec one = machine().exec(machine().one);
      restore(got, before);
      op.run_row(got, r, one);
      const Comparison comparison = compare_outputs(got, want, op.tolerance().absolute, op.tolerance().relative);
      EXPECT_TRUE(comparison.equal) << rows[r].name << " on " << isa << ": " << comparison.message << ", "
                                    << comparison.worst << " times the tolerance";
      RowReport& report = reports()[{op.name(), fmt::format("{}[{}]", rows[r].name, isa)}];
      ++report.cases;
      report.worst = std::max(report.worst, comparison.worst);
      report.relative_norm = std::max(report.relative_norm, comparison.relative_norm);
      const Bytes single = snapshot(got);
      Exec two = machine().exec(machine().two);
      restore(got, before);
      op.run_row(got, r, two);
      EXPECT_TRUE(single == snapshot(got)) << rows[r].name << " on " << isa << " depends on the number of threads";
    }
  }
}

class EveryOp : public testing::TestWithParam<size_t> {};

TEST_P(EveryOp, RowsAgreeWithTheReference) {
  const AnyOp& op = *all_ops()[GetParam()];
  const auto rows = op.rows();
  std::vector<int> accepted(rows.size());
  std::vector<Case> cases = op.cases();
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) cases.push_back(op.random_case(seed));
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(fmt::format("{} case {}: {}", op.name(), i, cases[i].describe()));
    run_case(op, cases[i], 1000 + i, accepted);
    if (HasFatalFailure()) return;
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].backend != Backend::kCpu || !rows[r].built) continue;
    EXPECT_GT(accepted[r], 0) << rows[r].name << " is dead";
  }
}

INSTANTIATE_TEST_SUITE_P(Ops, EveryOp, testing::Range<size_t>(0, all_ops().size()),
                         [](const auto& param_info) { return std::string(all_ops()[param_info.param]->name()); });

TEST(AllOps, NamesAreUnique) {
  std::map<std::string, int> names;
  for (const AnyOp* op : all_ops()) {
    EXPECT_EQ(names[op->name()]++, 0) << op->name();
    for (const auto& row : op->rows()) EXPECT_EQ(names[fmt::format("row {}", row.name)]++, 0) << row.name;
  }
}

// --- every path an op can take ---

// Calls body(path, run) with the reference and with each CPU row on each instruction set; run(args) is false if the row
// does not take them.
template <class Args, class Body>
void for_each_path(const Op<Args>& op, const Body& body, bool with_reference = true) {
  if (with_reference) {
    body(std::string("reference"), [&](const Args& args) {
      EXPECT_TRUE(op->check(args).ok()) << op->check(args).message();
      op->reference(args);
      return true;
    });
  }
  for (const std::string& isa : machine().isas) {
    ASSERT_TRUE(force_isa(isa).ok());
    for (const Kernel<Args>& kernel : op->kernels) {
      if (kernel.backend != Backend::kCpu || kernel.run == nullptr) continue;
      if (kernel.tier == Tier::kPortable && isa != machine().isas.front()) continue;
      body(fmt::format("{}[{}]", kernel.name, isa), [&](const Args& args) {
        EXPECT_TRUE(op->check(args).ok()) << op->check(args).message();
        Exec exec = machine().exec(machine().one);
        if (kernel.reject != nullptr && kernel.reject(args, exec.arch())) return false;
        const ArenaScope scope(machine().arena);
        kernel.run(exec, args);
        return true;
      });
    }
  }
}

std::vector<std::byte> bytes_of_tensor(const Tensor& t) {
  const auto* begin = static_cast<const std::byte*>(t.data);
  return {begin, begin + storage_bytes(t.dtype, t.dims)};
}

// Runs all rows together and then each alone into `alone`; `narrow(args, r)` makes the call of row r.
template <class Args, class Build, class Narrow, class Output>
void expect_row_invariant(const Op<Args>& op, const Build& build, const Narrow& narrow, const Output& output) {
  for_each_path(
      op,
      [&](const std::string& path, const auto& run) {
        CaseData together(7);
        CaseData alone(7);
        const Args all = build(together);
        const Args single = build(alone);
        if (!run(all)) return;
        for (int64_t r = 0; r < output(all).dim(0); ++r) ASSERT_TRUE(run(narrow(single, r)));
        EXPECT_TRUE(bytes_of_tensor(output(all)) == bytes_of_tensor(output(single))) << path;
      },
      false);
}

TEST(RowInvariance, RowsDoNotSeeEachOther) {
  const auto out = [](const auto& a) { return a.out; };
  const auto cut = [](Tensor& t, int64_t r) { t = t.rows(r, r + 1); };
  for (const int64_t width : {192, 7168, 33}) {
    expect_row_invariant(
        kRmsNorm,
        [&](CaseData& d) {
          return RmsNormArgs{d.output("out", {17, width}), d.normal({17, width}), d.normal({width}), 1e-5F};
        },
        [&](RmsNormArgs a, int64_t r) { return cut(a.out, r), cut(a.x, r), a; }, out);
    expect_row_invariant(
        kGatedAct,
        [&](CaseData& d) {
          return GatedActArgs{d.output("out", {17, width}), d.normal({17, width}), d.normal({17, width}), 4.0F, 25.0F};
        },
        [&](GatedActArgs a, int64_t r) { return cut(a.out, r), cut(a.gate, r), cut(a.up, r), a; }, out);
    expect_row_invariant(
        kMatmul,
        [&](CaseData& d) {
          return MatmulArgs{d.output("out", {17, 40}), d.normal({17, width}), d.normal({40, width}, 1, DType::kBF16)};
        },
        [&](MatmulArgs a, int64_t r) { return cut(a.out, r), cut(a.x, r), a; }, out);
  }
  // A row of the stored blocks is a column of [capacity, tokens, hidden]: one token's blocks are copied out.
  expect_row_invariant(
      kAttnResMix,
      [](CaseData& d) {
        AttnResMixArgs a{d.output("out", {5, 192}),
                         d.normal({9, 5, 192}),
                         d.normal({5, 192}),
                         d.normal({192}),
                         d.normal({1, 192}, 0.1),
                         6,
                         1e-5F};
        return a;
      },
      [&](AttnResMixArgs a, int64_t r) {
        static std::vector<float> blocks;
        blocks.clear();
        for (int64_t j = 0; j < 9; ++j) blocks.insert(blocks.end(), a.blocks.at(j).row(r), a.blocks.at(j).row(r) + 192);
        a.blocks = make_tensor(blocks.data(), DType::kF32, {9, 1, 192});
        return cut(a.out, r), cut(a.prefix, r), a;
      },
      out);
}

// Sequences of a call in which each call has only one.
KdaArgs one_sequence(KdaArgs a, int64_t begin, int64_t end, std::span<const int32_t> arrays) {
  for (Tensor* t : {&a.out, &a.q, &a.k, &a.v, &a.g, &a.beta_logits}) *t = t->rows(begin, end);
  a.seqs = {arrays.subspan(0, 2), arrays.subspan(2, 1), arrays.subspan(3, 1)};
  return a;
}

KdaArgs batch_of_three(CaseData& d, int64_t dim) {
  const Dims dims = {80 + 1 + 9, 3, dim};
  KdaArgs a;
  a.q = d.normal(dims, 1.0 / static_cast<double>(dim));
  a.k = d.normal(dims, 1.0 / std::sqrt(static_cast<double>(dim)));
  a.v = d.normal(dims);
  a.g = d.uniform(dims, -5.0, 0.0);
  a.beta_logits = d.normal({dims[0], 3});
  a.states = d.in_out("states", d.normal({4, 3, dim, dim}));
  a.out = d.output("out", dims);
  a.seqs = {d.hold(std::vector<int32_t>{0, 80, 81, 90}), d.hold(std::vector<int32_t>{2, 0, 3}),
            d.hold(std::vector<int32_t>{50, 7, 0})};
  return a;
}

TEST(RowInvariance, DeltaAttentionDoesNotSeeTheBatch) {
  const int32_t begins[] = {0, 80, 81, 90};
  for (const Op<KdaArgs>* op : {&kKdaRecurrent, &kKdaChunked}) {
    for (const int64_t dim : {64, 128, 33}) {
      for_each_path(
          *op,
          [&](const std::string& path, const auto& run) {
            CaseData together(7);
            CaseData alone(7);
            const KdaArgs all = batch_of_three(together, dim);
            const KdaArgs single = batch_of_three(alone, dim);
            if (!run(all)) return;
            for (size_t s = 0; s < 3; ++s) {
              // The recurrent form token by token, the chunked one sequence by sequence.
              const int32_t step = op == &kKdaRecurrent ? 1 : begins[s + 1] - begins[s];
              for (int32_t t = begins[s]; t < begins[s + 1]; t += step) {
                const int32_t first = all.seqs.first_positions[s] + t - begins[s];
                const int32_t arrays[] = {0, step, all.seqs.slots[s], first};
                ASSERT_TRUE(run(one_sequence(single, t, t + step, arrays)));
              }
            }
            EXPECT_TRUE(snapshot(together) == snapshot(alone)) << path << " dim " << dim;
          },
          false);
    }
  }
}

// Splitting a prompt at a multiple of the chunk gives the same bits.
TEST(RowInvariance, ChunksAreCutAtAbsolutePositions) {
  for_each_path(
      kKdaChunked,
      [&](const std::string& path, const auto& run) {
        CaseData whole(3);
        CaseData parts(3);
        const KdaArgs all = batch_of_three(whole, 64);
        const KdaArgs split = batch_of_three(parts, 64);
        const int32_t full[] = {0, 80, 2, 50};
        const int32_t head[] = {0, 14, 2, 50};
        const int32_t tail[] = {0, 66, 2, 64};
        ASSERT_TRUE(run(one_sequence(all, 0, 80, full)));
        ASSERT_TRUE(run(one_sequence(split, 0, 14, head)));
        ASSERT_TRUE(run(one_sequence(split, 14, 80, tail)));
        EXPECT_TRUE(snapshot(whole) == snapshot(parts)) << path;
      },
      false);
}

// --- golden vectors ---

class Golden : public testing::Test {
 protected:
  void SetUp() override {
    const char* root = std::getenv("MOAT_GOLDEN");
    const std::string path =
        std::string(root != nullptr ? root : MOAT_SOURCE_DIR "/tests/golden") + "/ops/ops.safetensors";
    Result<SafetensorsFile> opened = open_safetensors(path);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    file_ = std::move(opened).value();
  }

  // A private copy: ops take mutable tensors.
  Tensor get(const std::string& name) {
    for (const SafetensorsEntry& entry : file_.entries) {
      if (entry.name != name) continue;
      buffers_.emplace_back(entry.end - entry.begin);
      std::memcpy(buffers_.back().data(), file_.file.bytes().data() + entry.begin, entry.end - entry.begin);
      return make_tensor(buffers_.back().data(), entry.dtype, entry.dims);
    }
    ADD_FAILURE() << name << " is not in the golden file";
    return {};
  }
  Tensor f32(Dims dims) {
    buffers_.emplace_back(static_cast<size_t>(storage_bytes(DType::kF32, dims)));
    std::memset(buffers_.back().data(), 0xFF, buffers_.back().size());
    return make_tensor(buffers_.back().data(), DType::kF32, dims);
  }
  std::vector<std::string> names(const std::string& prefix) {
    std::vector<std::string> found;
    for (const SafetensorsEntry& e : file_.entries) {
      if (e.name.starts_with(prefix)) found.push_back(e.name);
    }
    return found;
  }

  // Largest |got - want|, noted under `prefix` and held against `limit`.
  void compare(const std::string& prefix, const std::string& path, const Tensor& got, const Tensor& want,
               double limit) {
    ASSERT_EQ(got.count(), want.count());
    double error = 0;
    for (int64_t i = 0; i < want.count(); ++i) {
      const double a = got.f32()[i];
      const double b = want.f32()[i];
      const bool same = a == b || (std::isnan(a) && std::isnan(b));
      error = std::max(error, same ? 0.0 : std::isfinite(a) && std::isfinite(b) ? std::fabs(a - b) : INFINITY);
    }
    EXPECT_LE(error, limit) << prefix << " by " << path;
    double& worst = errors_[{prefix, path}];
    worst = std::max(worst, error);
  }

  void TearDown() override {
    for (const auto& [key, error] : errors_) {
      std::printf("golden %-8s %-34s largest error %.2e\n", key.first.c_str(), key.second.c_str(), error);
    }
  }

 private:
  SafetensorsFile file_;
  std::vector<Buffer> buffers_;
  std::map<std::pair<std::string, std::string>, double> errors_;
};

TEST_F(Golden, Kda) {
  const int32_t arrays[] = {0, 100, 0, 64};
  const std::span<const int32_t> a(arrays);
  for (const Op<KdaArgs>* op : {&kKdaRecurrent, &kKdaChunked}) {
    for_each_path(*op, [&](const std::string& path, const auto& run) {
      KdaArgs args;
      args.q = get("kda.q");  // without the factor that is in kda.out
      for (int64_t i = 0; i < args.q.count(); ++i) args.q.f32()[i] *= 0.08838834764831845F;
      args.k = get("kda.k");
      args.v = get("kda.v");
      args.g = get("kda.g");
      args.beta_logits = get("kda.beta");
      for (int64_t i = 0; i < args.beta_logits.count(); ++i) {
        const double beta = args.beta_logits.f32()[i];
        args.beta_logits.f32()[i] = static_cast<float>(std::log(beta) - std::log1p(-beta));
      }
      args.states = get("kda.state_in").reshape({1, 3, 128, 128});
      args.out = f32({100, 3, 128});
      args.seqs = {a.subspan(0, 2), a.subspan(2, 1), a.subspan(3, 1)};
      if (!run(args)) return;
      const std::string name = path == "reference" ? fmt::format("{} {}", (*op)->name, path) : path;
      compare("kda", name, args.out, get("kda.out"), 1e-5);
      compare("kda", name, args.states, get("kda.state_out"), 1e-5);
    });
  }
}

TEST_F(Golden, Gate) {
  for_each_path(kKdaGate, [&](const std::string& path, const auto& run) {
    for (const bool bounded : {true, false}) {
      const KdaGateArgs args{f32({100, 3, 128}), get("gate.raw"), get("gate.a_log"), get("gate.dt_bias"),
                             bounded ? -5.0F : 0.0F};
      if (!run(args)) return;
      compare("gate", path, args.out, get(bounded ? "gate.k3" : "gate.kimi_linear"), bounded ? 5e-6 : 2e-5);
    }
  });
}

TEST_F(Golden, Conv) {
  const int32_t arrays[] = {0, 10, 0, 3};
  const std::span<const int32_t> a(arrays);
  for_each_path(kShortConv, [&](const std::string& path, const auto& run) {
    const ShortConvArgs args{f32({10, 24}),
                             get("conv.x"),
                             get("conv.weight"),
                             get("conv.tail_in").reshape({1, 3, 24}),
                             {a.subspan(0, 2), a.subspan(2, 1), a.subspan(3, 1)}};
    if (!run(args)) return;
    compare("conv", path, args.out, get("conv.out"), 1e-6);
    compare("conv", path, args.tails, get("conv.tail_out"), 0);
  });
}

TEST_F(Golden, Norms) {
  for_each_path(kRmsNorm, [&](const std::string& path, const auto& run) {
    for (const auto& [eps, name] : {std::pair{1e-5F, "rms.out_eps_1e-5"}, std::pair{1e-6F, "rms.out_eps_1e-6"}}) {
      const RmsNormArgs args{f32({4, 96}), get("rms.x"), get("rms.weight"), eps};
      if (!run(args)) return;
      compare("rms", path, args.out, get(name), 2e-6);
    }
  });
  for_each_path(kL2Norm, [&](const std::string& path, const auto& run) {
    const L2NormArgs args{get("rms.x").reshape({4, 1, 96}), 1e-6F, 1.0F};
    if (run(args)) compare("l2", path, args.x, get("l2.out"), 1e-6);
  });
}

TEST_F(Golden, Situ) {
  for_each_path(kGatedAct, [&](const std::string& path, const auto& run) {
    const GatedActArgs args{f32({1, 161}), get("situ.gate").reshape({1, 161}), get("situ.up").reshape({1, 161}), 4.0F,
                            25.0F};
    if (run(args)) compare("situ", path, args.out, get("situ.out"), 3e-5);  // up to 100
  });
}

TEST_F(Golden, AttnRes) {
  for_each_path(kAttnResMix, [&](const std::string& path, const auto& run) {
    for (const int64_t n : {0, 1, 3, 8}) {
      const AttnResMixArgs args{
          f32({3, 64}), get("attnres.blocks"), get("attnres.prefix"), get("attnres.norm"), get("attnres.proj"), n,
          1e-5F};
      if (run(args)) compare("attnres", path, args.out, get(fmt::format("attnres.out_{}", n)), 3e-6);
    }
  });
}

TEST_F(Golden, Mxfp4) {
  const Tensor weight = make_mxfp4(get("mxfp4.packed").u8(), get("mxfp4.scale").u8(), 4, 128);
  const Tensor values = f32({4, 128});
  for (int64_t i = 0; i < values.count(); ++i) values.f32()[i] = element_f32(weight, i / 128, i % 128);
  compare("mxfp4", "element_f32", values, get("mxfp4.values"), 0);
  const Tensor source = get("mxfp4.source");
  const Tensor packed = get("mxfp4.source_packed");
  const Tensor scale = get("mxfp4.source_scale");
  for (int64_t group = 0; group < 8 * 4; ++group) {
    uint8_t codes[16];
    uint8_t scale_byte = 0;
    mxfp4_encode_group(source.f32() + group * 32, codes, &scale_byte);
    EXPECT_EQ(scale_byte, scale.u8()[group]) << group;
    EXPECT_EQ(std::memcmp(codes, packed.u8() + group * 16, 16), 0) << group;
  }
}

TEST_F(Golden, Router) {
  const Tensor weight = get("router.weight");
  const Tensor x = get("router.x");
  const Tensor logits = f32({40, 16});
  const Tensor scores = f32({40, 16});
  for (int64_t i = 0; i < 40 * 16; ++i) {
    double sum = 0;
    for (int64_t j = 0; j < 32; ++j) sum += static_cast<double>(weight.row(i % 16)[j]) * x.row(i / 16)[j];
    logits.f32()[i] = static_cast<float>(sum);
    scores.f32()[i] = static_cast<float>(1.0 / (1.0 + std::exp(-sum)));
  }
  compare("router", "scores", scores, get("router.scores"), 1e-6);
  for_each_path(kRouterTopk, [&](const std::string& path, const auto& run) {
    std::vector<int32_t> ids(160, -1);
    const RouterTopkArgs args{
        make_tensor(ids.data(), DType::kI32, {40, 4}), f32({40, 4}), logits, get("router.bias"), true, 1.0F};
    if (!run(args)) return;
    const Tensor index = get("router.index");
    for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(ids[i], index.ptr<int64_t>()[i]) << path << " " << i;
    compare("router", path, args.expert_weights, get("router.out_weight"), 1e-6);
  });
}

TEST_F(Golden, Filter) {
  for_each_path(kTopKRenorm, [&](const std::string& path, const auto& run) {
    const auto found = names("filter.top_k_");
    EXPECT_EQ(found.size(), 8U);
    for (const std::string& name : found) {
      const std::vector<int32_t> k(4, std::atoi(name.c_str() + std::strlen("filter.top_k_")));
      const TopKRenormArgs args{get("filter.probs"), k};
      if (run(args)) compare("filter", path, args.probs, get(name), 2e-7);
    }
  });
  for_each_path(kTopPRenorm, [&](const std::string& path, const auto& run) {
    const auto found = names("filter.top_p_");
    EXPECT_EQ(found.size(), 10U);
    for (const std::string& name : found) {
      const std::vector<float> p(4, std::strtof(name.c_str() + std::strlen("filter.top_p_"), nullptr));
      const TopPRenormArgs args{get("filter.probs"), p};
      if (run(args)) compare("filter", path, args.probs, get(name), 2e-7);
    }
  });
  // Whole sampling chains, through eager calls and through the references.
  for (const ExecMode mode : {ExecMode::kReference, ExecMode::kEager}) {
    Exec exec({.mode = mode, .arch = host_arch(), .pool = &machine().one, .arena = &machine().arena});
    const auto chain = [&](float temperature, int32_t k, float p, const char* name) {
      const std::vector<float> temperatures(6, temperature);
      const std::vector<int32_t> ks(6, k);
      const std::vector<float> ps(6, p);
      const Tensor probs = f32({6, 200});
      softmax(exec, "softmax", {probs, get("filter.logits"), temperatures});
      top_k_renorm(exec, "top_k", {probs, ks});
      top_p_renorm(exec, "top_p", {probs, ps});
      compare("filter", mode == ExecMode::kReference ? "reference" : "chain", probs, get(name), 5e-7);
    };
    chain(0.7F, 50, 0.9F, "filter.t0.7_k50_p0.9");
    chain(1.0F, 200, 0.95F, "filter.t1.0_p0.95");
  }
}

// Target rows of the verification goldens as compact rows; entries that are zero are left out.
struct CompactGolden {
  std::vector<int32_t> ids, counts;
  std::vector<float> probs;

  explicit CompactGolden(const Tensor& dense) : ids(dense.count(), -1), probs(dense.count()) {
    for (int64_t r = 0; r < dense.dim(0); ++r) {
      size_t at = static_cast<size_t>(r * dense.dim(1));
      for (int64_t v = 0; v < dense.dim(1); ++v) {
        if (dense.row(r)[v] == 0) continue;
        ids[at] = static_cast<int32_t>(v);
        probs[at++] = dense.row(r)[v];
      }
      counts.push_back(static_cast<int32_t>(static_cast<int64_t>(at) - r * dense.dim(1)));
    }
  }
  CompactRows rows(const Tensor& dense) {
    return {.ids = make_tensor(ids.data(), DType::kI32, dense.dims),
            .probs = make_tensor(probs.data(), DType::kF32, dense.dims),
            .counts = make_tensor(counts.data(), DType::kI32, {dense.dim(0)})};
  }
};

TEST_F(Golden, Verify) {
  constexpr int64_t kCases = 64, kDrafts = 5, kVocab = 12, kRows = kCases * (kDrafts + 1);
  const Tensor p = get("verify.p").reshape({kRows, kVocab});
  // Drafts, uniforms and draft rows get the last row of each sequence, which nobody reads.
  const Tensor q = f32({kRows, kVocab});
  std::vector<int32_t> drafts(kRows, 1 << 20), cu_rows = {0};
  std::vector<double> accept_u(kRows, NAN);
  for (int64_t c = 0; c < kCases; ++c) {
    for (int64_t k = 0; k < kDrafts; ++k) {
      const int64_t from = c * kDrafts + k;
      const int64_t to = c * (kDrafts + 1) + k;
      std::copy_n(get("verify.q").f32() + from * kVocab, kVocab, q.row(to));
      drafts[static_cast<size_t>(to)] = static_cast<int32_t>(get("verify.drafts").ptr<int64_t>()[from]);
      accept_u[static_cast<size_t>(to)] = get("verify.accept_u").ptr<double>()[from];
    }
    cu_rows.push_back(static_cast<int32_t>((c + 1) * (kDrafts + 1)));
  }
  const Tensor uniforms = get("verify.bonus_u");
  const std::vector<double> bonus_u(uniforms.ptr<double>(), uniforms.ptr<double>() + kCases);
  CompactGolden compact(p);
  for_each_path(kAcceptDrafts, [&](const std::string& path, const auto& run) {
    for (const auto& [rule, name] : {std::pair{AcceptRule::kToken, "token"}, std::pair{AcceptRule::kBlock, "block"}}) {
      for (const bool is_dense : {true, false}) {
        std::vector<int32_t> accepted(kCases), bonus(kCases);
        const std::vector<AcceptRule> rules(kCases, rule);
        AcceptDraftsArgs args{.accepted = make_tensor(accepted.data(), DType::kI32, {kCases}),
                              .bonus = make_tensor(bonus.data(), DType::kI32, {kCases}),
                              .final_probs = f32({kCases, kVocab}),
                              .q = q,
                              .drafts = drafts,
                              .cu_rows = cu_rows,
                              .rules = rules,
                              .accept_uniforms = accept_u,
                              .bonus_uniforms = bonus_u};
        if (is_dense) args.target.dense = p;
        if (!is_dense) args.target.compact = compact.rows(p);
        if (!run(args)) continue;
        const Tensor want_accepted = get(fmt::format("verify.{}_accepted", name));
        const Tensor want_bonus = get(fmt::format("verify.{}_bonus", name));
        for (size_t c = 0; c < kCases; ++c) {
          EXPECT_EQ(accepted[c], want_accepted.ptr<int64_t>()[c]) << path << " " << name << " case " << c;
          EXPECT_EQ(bonus[c], want_bonus.ptr<int64_t>()[c]) << path << " " << name << " case " << c;
        }
        compare("verify", path, args.final_probs, get(fmt::format("verify.{}_final", name)), 2e-7);
      }
    }
  });
}

// --- vectors worked out in f64 from the formulas ---

Tensor view(std::vector<float>& values, Dims dims) { return make_tensor(values.data(), DType::kF32, dims); }

void expect_near(const std::vector<float>& got, const std::vector<double>& want, double limit,
                 const std::string& path) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], limit) << path << " " << i;
}

TEST(WorkedExamples, Situ) {
  for_each_path(kGatedAct, [&](const std::string& path, const auto& run) {
    std::vector<float> gate = {1, -1, 10, 0.5, -8};
    std::vector<float> up = {2, 2, -60, 0.25, 30};
    std::vector<float> out(5);
    ASSERT_TRUE(run(GatedActArgs{view(out, {1, 5}), view(gate, {1, 5}), view(up, {1, 5}), 4.0F, 25.0F}));
    expect_near(out, {1.429351132, -0.525828896, -97.046362035, 0.077402106, -0.026950951}, 1e-5, path);
  });
}

TEST(WorkedExamples, LogDecay) {
  for_each_path(kKdaGate, [&](const std::string& path, const auto& run) {
    std::vector<float> raw = {0, 1, -2, 3};
    std::vector<float> a_log = {0, 0.5, 1.2F, -1};
    std::vector<float> bias(4);
    std::vector<float> out(4);
    KdaGateArgs args{view(out, {1, 4, 1}), view(raw, {1, 4, 1}), view(a_log, {4}), view(bias, {4}), -5.0F};
    ASSERT_TRUE(run(args));
    expect_near(out, {-2.5, -4.193590758, -0.006525082, -3.754705985}, 1e-6, path);
    args.lower_bound = 0.0F;
    ASSERT_TRUE(run(args));
    expect_near(out, {-0.693147181, -2.165202478, -0.421415837, -1.121512611}, 1e-6, path);
  });
}

TEST(WorkedExamples, AttnRes) {
  for_each_path(kAttnResMix, [&](const std::string& path, const auto& run) {
    std::vector<float> blocks = {1, 2, 3, 4, 0.5, -1, 2, 0};
    std::vector<float> prefix = {2, 0, -1, 1};
    std::vector<float> norm = {1, 0.5, 2, 1};
    std::vector<float> proj = {0.1F, 0.2F, -0.3F, 0.4F};
    std::vector<float> out(4);
    ASSERT_TRUE(run(AttnResMixArgs{view(out, {1, 4}), view(blocks, {2, 1, 4}), view(prefix, {1, 4}), view(norm, {4}),
                                   view(proj, {1, 4}), 2, 1e-5F}));
    expect_near(out, {1.61828381, 0.43065423, 0.27728115, 1.68757861}, 1e-6, path);
  });
}

TEST(WorkedExamples, KdaStep) {
  const int32_t arrays[] = {0, 1, 0, 9};
  const std::span<const int32_t> a(arrays);
  for (const Op<KdaArgs>* op : {&kKdaRecurrent, &kKdaChunked}) {
    for_each_path(*op, [&](const std::string& path, const auto& run) {
      std::vector<float> state = {0.1F, 0.2F, 0.3F, 0.4F};
      std::vector<float> q = {0.42426407F, 0.56568542F};
      std::vector<float> k = {0.8F, -0.6F};
      std::vector<float> v = {1, 2};
      std::vector<float> g = {-0.5, -1};
      std::vector<float> beta = {0.84729786F};  // logit(0.7)
      std::vector<float> out(2);
      KdaArgs args{view(out, {1, 1, 2}), view(q, {1, 1, 2}), view(k, {1, 1, 2}),       view(v, {1, 1, 2}),
                   view(g, {1, 1, 2}),   view(beta, {1, 1}), view(state, {1, 1, 2, 2})};
      args.seqs = {a.subspan(0, 2), a.subspan(2, 1), a.subspan(3, 1)};
      if (!run(args)) return;
      expect_near(out, {0.08816413, 0.13470745}, 1e-6, path);
      expect_near(state, {0.63056274, 1.23640398, -0.31706842, -0.68917161}, 1e-6, path);
    });
  }
}

TEST(WorkedExamples, Mxfp4Byte) {
  std::vector<uint8_t> codes(16, 0xB7);
  const uint8_t scale = 120;
  const Tensor row = make_mxfp4(codes.data(), &scale, 1, 32);
  EXPECT_EQ(element_f32(row, 0, 0), 0.046875F);
  EXPECT_EQ(element_f32(row, 0, 1), -0.01171875F);
}

TEST(WorkedExamples, Draw) {
  for_each_path(kDraw, [&](const std::string& path, const auto& run) {
    std::vector<float> probs = {0.25, 0, 0.5, 0.25, 0, 0, 0, 0, NAN, 0, 0, 1};
    std::vector<int32_t> ids(3, 7);
    for (const auto& [u, id] : {std::pair{0.0, 0}, std::pair{0.25, 2}, std::pair{0.75, 3}, std::pair{0.999, 3}}) {
      const std::vector<double> uniform(3, u);
      ASSERT_TRUE(run(DrawArgs{make_tensor(ids.data(), DType::kI32, {3}), view(probs, {3, 4}), uniform}));
      EXPECT_EQ(ids, (std::vector<int32_t>{id, -1, -1})) << path << " " << u;
    }
  });
}

TEST(Checks, NameTheTensorAndTheShape) {
  std::vector<float> memory(64);
  const RmsNormArgs wrong{view(memory, {2, 4}), view(memory, {2, 5}), view(memory, {5}), 1e-5F};
  const Status status = kRmsNorm->check(wrong);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find("out is f32[2, 4]"), std::string::npos) << status.message();
  const AttnResMixArgs aliased{view(memory, {1, 4}),
                               view(memory, {1, 1, 4}),
                               view(memory, {1, 4}),
                               view(memory, {4}),
                               view(memory, {1, 4}),
                               1,
                               1e-5F};
  EXPECT_FALSE(kAttnResMix->check(aliased).ok());
}

TEST(Isa, AnyMayFollowAnyOther) {
  const auto isas = host_isas();
  for (const std::string& isa : isas) {
    EXPECT_TRUE(force_isa(isa).ok());
    EXPECT_EQ(host_arch().level, isa);
  }
  EXPECT_FALSE(force_isa("no such").ok());
  EXPECT_EQ(host_arch().level, isas.back());
  EXPECT_TRUE(force_isa(isas.front()).ok());
  EXPECT_EQ(host_isas(), isas);
}

// Vectors of another length add up in another order: if no bit changes, dispatch has not.
TEST(Isa, ForcingOneChangesWhatRuns) {
  std::map<int, std::vector<std::byte>> by_lanes;
  for (const std::string& isa : machine().isas) {
    ASSERT_TRUE(force_isa(isa).ok());
    CaseData data(11);
    const RmsNormArgs args{data.output("out", {64, 1000}), data.normal({64, 1000}), data.normal({1000}), 1e-5F};
    Exec exec = machine().exec(machine().one);
    exec.call("norm", kRmsNorm, args);
    by_lanes[host_arch().lanes] = bytes_of_tensor(args.out);
  }
  for (auto a = by_lanes.begin(); a != by_lanes.end(); ++a) {
    for (auto b = std::next(a); b != by_lanes.end(); ++b) EXPECT_FALSE(a->second == b->second);
  }
  EXPECT_TRUE(force_isa(machine().isas.front()).ok());
}

}  // namespace
}  // namespace moat
