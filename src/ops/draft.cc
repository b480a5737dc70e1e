// SPDX-License-Identifier: Apache-2.0
#include "ops/draft.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/shape.h"
#include "ops/draft_kernels.h"
#include "ops/op_parts.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

// --- norm_rope ---

Status check_norm_rope(const NormRopeArgs& a) {
  ShapeMatcher m("norm_rope");
  m.match("x", a.x, {DType::kF32}, {static_cast<int64_t>(a.positions.size()), "heads", "dim"}, Layout::kRowStrided)
      .match("inv_freq", a.inv_freq, {DType::kF32}, {"dim / 2"})
      .match_optional("weight", a.weight, {DType::kBF16, DType::kF32}, {"dim"})
      .expect(m["dim"] == 2 * m["dim / 2"], "inv_freq half as long as a head")
      .expect(a.eps >= 0.0F, "eps >= 0");
  return m.status();
}

std::string describe_norm_rope(const NormRopeArgs& a) {
  return fmt::format("x={}{}", a.x.describe(), a.weight.is_set() ? " normed" : "");
}

Cost cost_norm_rope(const NormRopeArgs& a) {
  return {(a.weight.is_set() ? 7.0 : 3.0) * static_cast<double>(a.x.count()), 2 * bytes_of(a.x) + bytes_of(a.weight)};
}

void norm_rope_reference(const NormRopeArgs& a) {
  const int64_t dim = a.x.dim(2), half = dim / 2;
  for (int64_t r = 0; r < a.x.dim(0); ++r) {
    for (int64_t h = 0; h < a.x.dim(1); ++h) {
      float* x = a.x.f32() + r * a.x.strides[0] + h * a.x.strides[1];
      std::vector<double> y(x, x + dim);
      if (a.weight.is_set()) {
        const double square = std::inner_product(y.begin(), y.end(), y.begin(), 0.0);
        const double root = std::sqrt(square / static_cast<double>(dim) + static_cast<double>(a.eps));
        for (int64_t i = 0; i < dim; ++i) y[static_cast<size_t>(i)] *= weight_at(a.weight, i) / root;
      }
      for (int64_t i = 0; i < half; ++i) {
        const auto first = static_cast<size_t>(a.layout == RopeLayout::kHalves ? i : 2 * i);
        const auto second = static_cast<size_t>(a.layout == RopeLayout::kHalves ? i + half : 2 * i + 1);
        // The angle is an f32 product; everything after it is exact.
        const float angle = static_cast<float>(a.positions[static_cast<size_t>(r)]) * a.inv_freq.f32()[i];
        const double cos = std::cos(static_cast<double>(angle)) * static_cast<double>(a.magnitude);
        const double sin = std::sin(static_cast<double>(angle)) * static_cast<double>(a.magnitude);
        x[first] = static_cast<float>(y[first] * cos - y[second] * sin);
        x[second] = static_cast<float>(y[second] * cos + y[first] * sin);
      }
    }
  }
}

std::vector<Case> norm_rope_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][6] = {{7, 64, 64, 1, 1000000, 0}, {3, 16, 64, 1, 131072, 0}, {17, 6, 32, 1, 4096, 0},
                               {7, 64, 64, 0, 400000, 1},  {5, 1, 64, 0, 1048576, 1}, {2, 56, 128, 1, 9000, 0},
                               {0, 4, 32, 1, 10, 0},       {1, 1, 2, 1, 1, 1},        {9, 3, 6, 1, 70, 1}};
  for (const auto& [rows, heads, dim, norm, limit, pairs] : shapes) {
    for (const int64_t bf16 : {0, 1}) {
      cases.push_back({{{"rows", rows},
                        {"heads", heads},
                        {"dim", dim},
                        {"norm", norm},
                        {"limit", limit},
                        {"pairs", pairs},
                        {"bf16", bf16}}});
    }
  }
  return cases;
}

Case random_norm_rope(uint64_t seed) {
  Rng rng(seed);
  return {{{"rows", rng.below(20)},
           {"heads", 1 + rng.below(9)},
           {"dim", 2 + 2 * rng.below(40)},
           {"norm", rng.below(2)},
           {"limit", 1 + rng.below(200000)},
           {"pairs", rng.below(2)},
           {"bf16", rng.below(2)}}};
}

NormRopeArgs build_norm_rope(const Case& c, CaseData& data) {
  const int64_t rows = c["rows"], heads = c["heads"], dim = c["dim"];
  NormRopeArgs a;
  // Heads inside wider rows, as a stacked projection leaves them.
  a.x = data.in_out("x", data.normal({rows, heads * dim + 5})).cols(3, 3 + heads * dim);
  a.x.dims = {rows, heads, dim};
  a.x.strides = {heads * dim + 5, dim, 1};
  std::vector<int32_t> positions;
  for (int64_t r = 0; r < rows; ++r) positions.push_back(static_cast<int32_t>(data.rng().below(c["limit"])));
  a.positions = data.hold(std::move(positions));
  a.inv_freq = data.uniform({dim / 2}, 1e-5, 1.0);
  if (c["norm"]) a.weight = data.normal({dim}, 1.0, c["bf16"] ? DType::kBF16 : DType::kF32);
  a.eps = 1e-5F;
  a.magnitude = 1.277F;
  a.layout = c["pairs"] ? RopeLayout::kPairs : RopeLayout::kHalves;
  return a;
}

constexpr Kernel<NormRopeArgs> kNormRopeKernels[] = {
    {"norm_rope.cpu", Backend::kCpu, Tier::kTuned, nullptr, cpu::norm_rope_workspace, cpu::norm_rope}};

// --- block_attention ---

Status check_block_attention(const BlockAttentionArgs& a) {
  const int64_t seqs = a.num_seqs();
  ShapeMatcher m("block_attention");
  m.match("q", a.q, {DType::kF32}, {seqs * a.gamma, "heads", "k_dim"})
      .match("out", a.out, {DType::kF32}, {seqs * a.gamma, "heads", "v_dim"})
      .match("rows", a.rows, {DType::kF32}, {seqs * a.gamma, "width"}, Layout::kRowStrided)
      .match("cache", a.cache, {DType::kF32}, {"slots", "width"}, Layout::kRowStrided)
      .expect(a.gamma >= 1 && a.gamma <= kMaxDraftRows, "gamma from 1 to 64")
      .expect(a.num_kv_heads >= 1 && m["heads"] % a.num_kv_heads == 0, "kv heads that divide the heads")
      .expect(a.num_kv_heads * m["k_dim"] <= m["width"], "keys within a row")
      .expect(a.value_offset >= 0 && a.value_offset + a.num_kv_heads * m["v_dim"] <= m["width"], "values within a row")
      .expect(static_cast<int64_t>(a.block_tables.size()) == seqs * a.max_blocks, "block_tables [seqs, max_blocks]")
      .expect(seqs == 0 || a.block_size > 0, "a positive block_size");
  for (const int32_t length : a.context_lens) {
    m.expect(length >= 0 && length <= a.max_blocks * a.block_size, "a context within its pages");
  }
  return m.status();
}

std::string describe_block_attention(const BlockAttentionArgs& a) {
  return fmt::format("q {} values {} kv heads {} gamma {} pages of {}", a.q.describe(), a.out.dim(2), a.num_kv_heads,
                     a.gamma, a.block_size);
}

Cost cost_block_attention(const BlockAttentionArgs& a) {
  const double context = std::accumulate(a.context_lens.begin(), a.context_lens.end(), 0.0);
  const double pairs = static_cast<double>(a.gamma) * (context + static_cast<double>(a.num_seqs() * a.gamma));
  return {2.0 * pairs * static_cast<double>(a.q.dim(1) * (a.q.dim(2) + a.out.dim(2))),
          bytes_of(a.q) + bytes_of(a.out) + bytes_of(a.rows) + 4.0 * context * static_cast<double>(a.cache.dim(1))};
}

void block_attention_reference(const BlockAttentionArgs& a) {
  const int64_t heads = a.q.dim(1), k_dim = a.q.dim(2), v_dim = a.out.dim(2), group = heads / a.num_kv_heads;
  for (int64_t r = 0; r < a.q.dim(0); ++r) {
    const int64_t s = r / a.gamma;
    std::vector<const float*> rows;  // that the row sees
    for (int64_t p = 0; p < a.context_lens[static_cast<size_t>(s)]; ++p) rows.push_back(a.cache.row(a.slot_of(s, p)));
    for (int64_t j = 0; j < (a.causal ? r % a.gamma + 1 : a.gamma); ++j) rows.push_back(a.rows.row(s * a.gamma + j));
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = a.q.f32() + (r * heads + h) * k_dim;
      const int64_t key = h / group * k_dim, value = a.value_offset + h / group * v_dim;
      std::vector<double> weights;
      for (const float* row : rows) {
        weights.push_back(static_cast<double>(a.scale) * std::inner_product(q, q + k_dim, row + key, 0.0));
      }
      const double largest = *std::max_element(weights.begin(), weights.end());
      double sum = 0;
      for (double& w : weights) sum += w = std::exp(w - largest);
      for (int64_t d = 0; d < v_dim; ++d) {
        double mixed = 0;
        for (size_t j = 0; j < rows.size(); ++j) mixed += weights[j] / sum * rows[j][value + d];
        a.out.f32()[(r * heads + h) * v_dim + d] = static_cast<float>(mixed);
      }
    }
  }
}

// Up to three sequences with these context lengths; -1: none. mla: the value is the first v_dim columns of the key.
Case block_case(int64_t heads, int64_t kv_heads, int64_t k_dim, int64_t v_dim, int64_t gamma, int64_t block,
                std::vector<int64_t> contexts, int64_t causal = 0, int64_t mla = 0) {
  contexts.resize(3, -1);
  return {{{"heads", heads},
           {"kv_heads", kv_heads},
           {"k_dim", k_dim},
           {"v_dim", v_dim},
           {"gamma", gamma},
           {"block", block},
           {"context0", contexts[0]},
           {"context1", contexts[1]},
           {"context2", contexts[2]},
           {"causal", causal},
           {"mla", mla}}};
}

std::vector<Case> block_attention_cases() {
  return {
      block_case(64, 16, 64, 64, 7, 64, {300, 64}),     // RadixArk
      block_case(64, 1, 576, 512, 7, 64, {130}, 0, 1),  // Inferact, bidirectional
      block_case(96, 1, 576, 512, 5, 64, {65}, 1, 1),   // causal
      block_case(56, 8, 128, 128, 7, 16, {70}),         // novita
      block_case(6, 2, 32, 32, 7, 16, {0, 1, 129}),     // moat-nano's drafter, from the first token on
      block_case(6, 2, 32, 32, 7, 16, {0, 63, 64}, 1),  // ... causal
      block_case(6, 2, 32, 32, 7, 16, {}),              // nothing to do
      block_case(1, 1, 1, 1, 1, 1, {0, 2}),             // smallest
      block_case(15, 5, 7, 3, 9, 5, {33, 0, 66}, 1),    // odd sizes
      block_case(2, 1, 5, 4, 64, 8, {17}, 1, 1),        // the longest block
  };
}

Case random_block_attention(uint64_t seed) {
  Rng rng(seed);
  const int64_t kv_heads = 1 + rng.below(4), mla = rng.below(2), k_dim = 1 + rng.below(70);
  std::vector<int64_t> contexts;
  for (int64_t s = rng.below(4); s > 0; --s) contexts.push_back(rng.below(2) * rng.below(200));
  return block_case(kv_heads * (1 + rng.below(5)), mla ? 1 : kv_heads, k_dim, mla ? 1 + rng.below(k_dim) : k_dim,
                    1 + rng.below(12), 1 + rng.below(70), contexts, rng.below(2), mla);
}

// Pages in a shuffled order; table entries past a context's end are poison, and so is what lies in its last page there:
// the anchor's position among it.
BlockAttentionArgs build_block_attention(const Case& c, CaseData& data) {
  const int64_t block = c["block"], k_dim = c["k_dim"], v_dim = c["v_dim"], kv_heads = c["kv_heads"];
  const int64_t width = c["mla"] ? k_dim + 2 : kv_heads * (k_dim + v_dim);
  std::vector<int32_t> contexts;
  int64_t pages = 1, max_blocks = 1;
  for (const int64_t length : {c["context0"], c["context1"], c["context2"]}) {
    if (length < 0) continue;
    contexts.push_back(static_cast<int32_t>(length));
    pages += (length + block - 1) / block;
    max_blocks = std::max(max_blocks, (length + block - 1) / block + 1);
  }
  std::vector<int32_t> order(static_cast<size_t>(pages));
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int32_t>(i);
    std::swap(order[i], order[static_cast<size_t>(data.rng().below(static_cast<int64_t>(i) + 1))]);
  }
  const Tensor cache = data.normal({pages * block, width});
  std::vector<int32_t> tables(contexts.size() * static_cast<size_t>(max_blocks), -1);
  size_t next = 0;
  for (size_t s = 0; s < contexts.size(); ++s) {
    const int64_t used = (contexts[s] + block - 1) / block;
    for (int64_t b = 0; b < used; ++b) {
      tables[s * static_cast<size_t>(max_blocks) + static_cast<size_t>(b)] = order[next++];
    }
    for (int64_t p = contexts[s]; p < used * block; ++p) {
      std::fill_n(cache.row(order[next - 1] * block + p % block), width, std::numeric_limits<float>::quiet_NaN());
    }
  }
  const auto rows = static_cast<int64_t>(contexts.size()) * c["gamma"];
  return {.out = data.output("out", {rows, c["heads"], v_dim}),
          .q = data.normal({rows, c["heads"], k_dim}, 3.0),
          .cache = cache,
          .rows = data.normal({rows, width + 3}).cols(1, 1 + width),
          .context_lens = data.hold(std::move(contexts)),
          .block_tables = data.hold(std::move(tables)),
          .max_blocks = max_blocks,
          .block_size = block,
          .gamma = c["gamma"],
          .num_kv_heads = kv_heads,
          .value_offset = c["mla"] ? 0 : kv_heads * k_dim,
          .scale = 1.0F / std::sqrt(static_cast<float>(k_dim)),
          .causal = c["causal"] != 0};
}

constexpr Kernel<BlockAttentionArgs> kBlockAttentionKernels[] = {
    {"block_attention.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, simd::block_attention},
    {"block_attention.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, cpu::block_attention},
};

}  // namespace

constinit const Op<NormRopeArgs> kNormRope{{.name = "norm_rope",
                                            .check = check_norm_rope,
                                            .describe = describe_norm_rope,
                                            .cost = cost_norm_rope,
                                            .reference = norm_rope_reference,
                                            .cases = norm_rope_cases,
                                            .random_case = random_norm_rope,
                                            .build = build_norm_rope,
                                            .tolerance = {2e-6, 2e-6},
                                            .kernels = kNormRopeKernels}};

constinit const Op<BlockAttentionArgs> kBlockAttention{{.name = "block_attention",
                                                        .check = check_block_attention,
                                                        .describe = describe_block_attention,
                                                        .cost = cost_block_attention,
                                                        .reference = block_attention_reference,
                                                        .cases = block_attention_cases,
                                                        .random_case = random_block_attention,
                                                        .build = build_block_attention,
                                                        .tolerance = {1e-5, 1e-5},
                                                        .kernels = kBlockAttentionKernels}};

}  // namespace moat
