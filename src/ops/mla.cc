// SPDX-License-Identifier: Apache-2.0
#include "ops/mla.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/shape.h"
#include "ops/case_data.h"
#include "ops/mla_kernels.h"

namespace moat {
namespace {

double f32_bytes(const Tensor& t) { return 4.0 * static_cast<double>(t.count()); }

// --- mla_kv_write ---

Status check_write(const MlaKvWriteArgs& a) {
  return ShapeMatcher("mla_kv_write")
      .match("cache", a.cache, {DType::kF32}, {"slots", "width"}, ShapeMatcher::Layout::kRowStrided)
      .match("rows", a.rows, {DType::kF32}, {static_cast<int64_t>(a.slot_mapping.size()), "width"},
             ShapeMatcher::Layout::kRowStrided)
      .status();
}

std::string describe_write(const MlaKvWriteArgs& a) {
  return fmt::format("rows {} slots {}", a.rows.describe(), a.cache.dim(0));
}

Cost cost_write(const MlaKvWriteArgs& a) { return {0, 2 * f32_bytes(a.rows)}; }

void reference_write(const MlaKvWriteArgs& a) {
  for (int64_t t = 0; t < a.rows.dim(0); ++t) {
    for (int64_t d = 0; d < a.rows.dim(1); ++d) {
      a.cache.row(a.slot_mapping[static_cast<size_t>(t)])[d] = a.rows.row(t)[d];
    }
  }
}

Case write_case(int64_t tokens, int64_t slots, int64_t width) {
  return {{{"tokens", tokens}, {"slots", slots}, {"width", width}}};
}

std::vector<Case> cases_write() {
  return {write_case(17, 64, 576), write_case(1, 16, 160), write_case(0, 16, 160), write_case(33, 33, 7)};
}

Case random_write(uint64_t seed) {
  Rng rng(seed);
  const int64_t tokens = rng.below(40);
  return write_case(tokens, tokens + 1 + rng.below(40), 1 + rng.below(100));
}

MlaKvWriteArgs build_write(const Case& c, CaseData& data) {
  const int64_t tokens = c["tokens"], slots = c["slots"], width = c["width"];
  std::vector<int64_t> mapping(static_cast<size_t>(slots));  // the first `tokens` of a random permutation
  for (size_t i = 0; i < mapping.size(); ++i) {
    mapping[i] = static_cast<int64_t>(i);
    std::swap(mapping[i], mapping[static_cast<size_t>(data.rng().below(static_cast<int64_t>(i) + 1))]);
  }
  mapping.resize(static_cast<size_t>(tokens));
  return {.cache = data.in_out("cache", data.normal({slots, width})),
          .rows = data.normal({tokens, width + 3}).cols(1, 1 + width),
          .slot_mapping = data.hold(std::move(mapping))};
}

constexpr Kernel<MlaKvWriteArgs> kWriteKernels[] = {
    {"mla_kv_write.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, mla_kv_write_cpu}};

// --- the attention ops ---

// `rows` of the call against its sequences, and each sequence's keys against its pages.
void match_sequences(ShapeMatcher& m, const PagedSequences& seqs, int64_t rows) {
  const int64_t n = seqs.num_seqs();
  const auto offsets = static_cast<int64_t>(seqs.cu_seqlens.size());
  m.expect(offsets == n + 1 || (n == 0 && offsets == 0), "cu_seqlens one longer than context_lens")
      .expect(seqs.num_rows() == rows, "as many rows as cu_seqlens says")
      .expect(static_cast<int64_t>(seqs.block_tables.size()) == n * seqs.max_blocks, "block_tables [seqs, max_blocks]")
      .expect(n == 0 || seqs.block_size > 0, "a positive block_size");
  if (!m.status().ok()) return;
  for (int64_t s = 0; s < n; ++s) {
    const int64_t context = seqs.context_lens[static_cast<size_t>(s)];
    const SequenceRows r = sequence_rows(seqs, s);
    m.expect(r.begin <= r.end && r.end - r.begin <= context, "rows of a sequence among its keys")
        .expect(context <= seqs.max_blocks * seqs.block_size, "keys of a sequence within its pages");
  }
}

// Pairs of (row, key it sees), and keys of all sequences.
std::pair<double, double> count_keys(const PagedSequences& seqs) {
  double pairs = 0, keys = 0;
  for (int64_t s = 0; s < seqs.num_seqs(); ++s) {
    const SequenceRows r = sequence_rows(seqs, s);
    const auto rows = static_cast<double>(r.end - r.begin);
    pairs += rows * (static_cast<double>(r.first_keys) + (rows - 1) / 2);
    if (rows > 0) keys += seqs.context_lens[static_cast<size_t>(s)];
  }
  return {pairs, keys};
}

// exp(score - largest) / sum over one row's scores.
void softmax(std::vector<double>& scores) {
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (double& s : scores) sum += s = std::exp(s - largest);
  for (double& s : scores) s /= sum;
}

// Sequence lengths of a case: up to four (rows, keys), 0 keys: no sequence. Pages are `block` long.
Case attention_case(int64_t heads, int64_t latent, int64_t nope, int64_t rope, int64_t v_dim, int64_t block,
                    std::vector<std::pair<int64_t, int64_t>> lens, int64_t f32_weight = 0) {
  lens.resize(4);
  return {{{"heads", heads},
           {"latent", latent},
           {"nope", nope},
           {"rope", rope},
           {"v_dim", v_dim},
           {"block", block},
           {"rows0", lens[0].first},
           {"keys0", lens[0].second},
           {"rows1", lens[1].first},
           {"keys1", lens[1].second},
           {"rows2", lens[2].first},
           {"keys2", lens[2].second},
           {"rows3", lens[3].first},
           {"keys3", lens[3].second},
           {"f32", f32_weight}}};
}

struct AttentionInputs {
  PagedSequences seqs;
  Tensor cache;  // [slots, latent + rope]
};

// Pages of all sequences in one shuffled order; table entries past a sequence's end are poison, and so is what lies in
// the cache past its last key.
AttentionInputs build_sequences(const Case& c, CaseData& data) {
  const std::pair<int64_t, int64_t> lens[] = {
      {c["rows0"], c["keys0"]}, {c["rows1"], c["keys1"]}, {c["rows2"], c["keys2"]}, {c["rows3"], c["keys3"]}};
  const int64_t block = c["block"];
  std::vector<int32_t> cu_seqlens = {5};  // a call may be a part of a step
  std::vector<int32_t> context_lens;
  int64_t pages = 1, max_blocks = 1;
  for (const auto& [rows, keys] : lens) {
    if (keys == 0) continue;
    cu_seqlens.push_back(cu_seqlens.back() + static_cast<int32_t>(rows));
    context_lens.push_back(static_cast<int32_t>(keys));
    pages += (keys + block - 1) / block;
    max_blocks = std::max(max_blocks, (keys + block - 1) / block + 1);
  }
  std::vector<int32_t> order(static_cast<size_t>(pages));
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int32_t>(i);
    std::swap(order[i], order[static_cast<size_t>(data.rng().below(static_cast<int64_t>(i) + 1))]);
  }
  const Tensor cache = data.normal({pages * block, c["latent"] + c["rope"]});
  std::vector<int32_t> tables(context_lens.size() * static_cast<size_t>(max_blocks), -1);
  size_t next = 0;
  for (size_t s = 0; s < context_lens.size(); ++s) {
    const int64_t used = (context_lens[s] + block - 1) / block;
    for (int64_t b = 0; b < used; ++b)
      tables[s * static_cast<size_t>(max_blocks) + static_cast<size_t>(b)] = order[next++];
    for (int64_t p = context_lens[s]; p < used * block; ++p) {
      float* row = cache.row(order[next - 1] * block + p % block);
      std::fill_n(row, cache.dim(1), std::numeric_limits<float>::quiet_NaN());
    }
  }
  return {{.cu_seqlens = data.hold(std::move(cu_seqlens)),
           .context_lens = data.hold(std::move(context_lens)),
           .block_tables = data.hold(std::move(tables)),
           .max_blocks = max_blocks,
           .block_size = block},
          cache};
}

Case random_attention(uint64_t seed) {
  Rng rng(seed);
  std::vector<std::pair<int64_t, int64_t>> lens;
  for (int64_t s = rng.below(5); s > 0; --s) {
    const int64_t rows = rng.below(2) ? rng.below(4) : rng.below(90);
    lens.push_back({rows, std::max<int64_t>(1, rows + rng.below(2) * rng.below(200))});
  }
  return attention_case(1 + rng.below(6), 1 + rng.below(70), 1 + rng.below(40), rng.below(30), 1 + rng.below(40),
                        1 + rng.below(70), lens, rng.below(2));
}

// --- mla_decode ---

Status check_decode(const MlaDecodeArgs& a) {
  ShapeMatcher m("mla_decode");
  m.match("q", a.q, {DType::kF32}, {"rows", "heads", "latent + rope"})
      .match("out", a.out, {DType::kF32}, {"rows", "heads", "latent"})
      .match("cache", a.cache, {DType::kF32}, {"slots", "latent + rope"})
      .expect(m["latent"] <= m["latent + rope"], "a cached row at least as long as its latent");
  match_sequences(m, a.seqs, m["rows"]);
  return m.status();
}

std::string describe_decode(const MlaDecodeArgs& a) {
  return fmt::format("q {} latent {} seqs {} pages of {}", a.q.describe(), a.out.dim(2), a.seqs.num_seqs(),
                     a.seqs.block_size);
}

Cost cost_decode(const MlaDecodeArgs& a) {
  const auto [pairs, keys] = count_keys(a.seqs);
  return {2.0 * pairs * static_cast<double>(a.q.dim(1) * (a.q.dim(2) + a.out.dim(2))),
          f32_bytes(a.q) + f32_bytes(a.out) + 4.0 * keys * static_cast<double>(a.cache.dim(1))};
}

void reference_decode(const MlaDecodeArgs& a) {
  const int64_t heads = a.q.dim(1), width = a.q.dim(2), latent = a.out.dim(2);
  for (int64_t s = 0; s < a.seqs.num_seqs(); ++s) {
    const SequenceRows rows = sequence_rows(a.seqs, s);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      for (int64_t h = 0; h < heads; ++h) {
        const float* q = a.q.f32() + (r * heads + h) * width;
        std::vector<double> weights(static_cast<size_t>(rows.keys_of(r)));
        for (size_t p = 0; p < weights.size(); ++p) {
          const float* row = a.cache.row(slot_of(a.seqs, s, static_cast<int64_t>(p)));
          for (int64_t d = 0; d < width; ++d) weights[p] += double{q[d]} * row[d];
          weights[p] *= a.scale;
        }
        softmax(weights);
        for (int64_t d = 0; d < latent; ++d) {
          double sum = 0;
          for (size_t p = 0; p < weights.size(); ++p) {
            sum += weights[p] * a.cache.row(slot_of(a.seqs, s, static_cast<int64_t>(p)))[d];
          }
          a.out.f32()[(r * heads + h) * latent + d] = static_cast<float>(sum);
        }
      }
    }
  }
}

std::vector<Case> cases_decode() {
  return {
      attention_case(12, 512, 128, 64, 128, 64, {{1, 300}, {1, 65}}),                // K3 at TP8
      attention_case(96, 512, 128, 64, 128, 64, {{1, 63}}),                          // K3 on one rank
      attention_case(4, 128, 32, 32, 32, 16, {{1, 1}, {3, 64}, {1, 65}, {8, 300}}),  // k3-nano, drafts to verify
      attention_case(4, 128, 32, 32, 32, 64, {{17, 17}, {1, 63}}),                   // from the first token
      attention_case(4, 128, 32, 32, 32, 16, {}),                                    // nothing to do
      attention_case(4, 128, 32, 32, 32, 16, {{0, 40}}),                             // a sequence without rows
      attention_case(1, 1, 1, 0, 1, 1, {{1, 1}, {2, 5}}),                            // smallest
      attention_case(5, 33, 7, 7, 9, 5, {{2, 130}, {0, 3}, {70, 70}}),               // odd sizes
  };
}

MlaDecodeArgs build_decode(const Case& c, CaseData& data) {
  const AttentionInputs in = build_sequences(c, data);
  const int64_t width = c["latent"] + c["rope"], rows = in.seqs.num_rows();
  return {.out = data.output("out", {rows, c["heads"], c["latent"]}),
          .q = data.normal({rows, c["heads"], width}, 3.0),
          .cache = in.cache,
          .seqs = in.seqs,
          .scale = 1.0F / std::sqrt(static_cast<float>(width))};
}

constexpr Kernel<MlaDecodeArgs> kDecodeKernels[] = {
    {"mla_decode.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, nullptr, mla_decode_hwy},
    {"mla_decode.cpu", Backend::kCpu, Tier::kPortable, nullptr, nullptr, mla_decode_cpu}};

// --- mla_prefill ---

Status check_prefill(const MlaPrefillArgs& a) {
  ShapeMatcher m("mla_prefill");
  m.match("q", a.q, {DType::kF32}, {"rows", "heads", "nope + rope"})
      .match("out", a.out, {DType::kF32}, {"rows", "heads", "v_dim"})
      .match("kv_b", a.kv_b, {DType::kBF16, DType::kF32}, {"heads * (nope + v_dim)", "latent"})
      .match("cache", a.cache, {DType::kF32}, {"slots", "latent + rope"});
  const int64_t rope = m["latent + rope"] - m["latent"];
  m.expect(rope >= 0 && rope <= m["nope + rope"], "a shared key part that fits the query")
      .expect(m["heads * (nope + v_dim)"] == m["heads"] * (m["nope + rope"] - rope + m["v_dim"]),
              "kv_b rows for every head's keys and values");
  match_sequences(m, a.seqs, m["rows"]);
  return m.status();
}

std::string describe_prefill(const MlaPrefillArgs& a) {
  return fmt::format("q {} kv_b {} seqs {} pages of {}", a.q.describe(), a.kv_b.describe(), a.seqs.num_seqs(),
                     a.seqs.block_size);
}

Cost cost_prefill(const MlaPrefillArgs& a) {
  if (a.q.dim(0) == 0) return {};
  const auto [pairs, keys] = count_keys(a.seqs);
  return {2.0 * pairs * static_cast<double>(a.q.dim(1) * (a.q.dim(2) + a.out.dim(2))) +
              2.0 * keys * static_cast<double>(a.kv_b.count()),
          f32_bytes(a.q) + f32_bytes(a.out) + 4.0 * keys * static_cast<double>(a.cache.dim(1)) +
              static_cast<double>(storage_bytes(a.kv_b.dtype, a.kv_b.dims))};
}

void reference_prefill(const MlaPrefillArgs& a) {
  const int64_t heads = a.q.dim(1), width = a.q.dim(2), v_dim = a.out.dim(2), latent = a.kv_b.dim(1);
  const int64_t nope = width - (a.cache.dim(1) - latent);
  for (int64_t s = 0; s < a.seqs.num_seqs(); ++s) {
    const SequenceRows rows = sequence_rows(a.seqs, s);
    const auto context = static_cast<size_t>(a.seqs.context_lens[static_cast<size_t>(s)]);
    for (int64_t h = 0; h < heads; ++h) {
      // Per key: its key [nope + rope], then its value [v_dim].
      std::vector<std::vector<double>> expanded(context);
      for (size_t p = 0; p < context; ++p) {
        const float* row = a.cache.row(slot_of(a.seqs, s, static_cast<int64_t>(p)));
        std::vector<double> kv;
        for (int64_t n = 0; n < nope + v_dim; ++n) {
          if (n == nope) kv.insert(kv.end(), row + latent, row + a.cache.dim(1));
          double sum = 0;
          for (int64_t d = 0; d < latent; ++d) sum += double{row[d]} * element_f32(a.kv_b, h * (nope + v_dim) + n, d);
          kv.push_back(sum);
        }
        expanded[p] = std::move(kv);
      }
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* q = a.q.f32() + (r * heads + h) * width;
        std::vector<double> weights(static_cast<size_t>(rows.keys_of(r)));
        for (size_t p = 0; p < weights.size(); ++p) {
          for (int64_t d = 0; d < width; ++d) weights[p] += q[d] * expanded[p][static_cast<size_t>(d)];
          weights[p] *= a.scale;
        }
        softmax(weights);
        for (int64_t d = 0; d < v_dim; ++d) {
          double sum = 0;
          for (size_t p = 0; p < weights.size(); ++p) sum += weights[p] * expanded[p][static_cast<size_t>(width + d)];
          a.out.f32()[(r * heads + h) * v_dim + d] = static_cast<float>(sum);
        }
      }
    }
  }
}

std::vector<Case> cases_prefill() {
  return {
      attention_case(2, 512, 128, 64, 128, 64, {{33, 100}}),                            // K3: two heads
      attention_case(12, 512, 128, 64, 128, 64, {{3, 3}}),                              // K3 at TP8
      attention_case(4, 128, 32, 32, 32, 16, {{1, 1}, {63, 63}, {64, 65}, {40, 300}}),  // k3-nano
      attention_case(4, 128, 32, 32, 32, 64, {{130, 130}, {17, 64}}, 1),                // f32 weights
      attention_case(4, 128, 32, 32, 32, 16, {}),                                       // nothing to do
      attention_case(4, 128, 32, 32, 32, 16, {{0, 40}, {1, 65}}),                       // a sequence without rows
      attention_case(1, 1, 1, 0, 1, 1, {{1, 1}, {2, 5}}),                               // smallest
      attention_case(5, 33, 7, 7, 9, 5, {{2, 130}, {0, 3}, {70, 70}}, 1),               // odd sizes
  };
}

MlaPrefillArgs build_prefill(const Case& c, CaseData& data) {
  const AttentionInputs in = build_sequences(c, data);
  const int64_t width = c["nope"] + c["rope"], rows = in.seqs.num_rows(), heads = c["heads"];
  const Tensor kv_b =
      data.normal({heads * (c["nope"] + c["v_dim"]), c["latent"]}, 1.0 / std::sqrt(static_cast<double>(c["latent"])),
                  c["f32"] ? DType::kF32 : DType::kBF16);
  return {.out = data.output("out", {rows, heads, c["v_dim"]}),
          .q = data.normal({rows, heads, width}, 3.0),
          .cache = in.cache,
          .kv_b = kv_b,
          .seqs = in.seqs,
          .scale = 1.0F / std::sqrt(static_cast<float>(width))};
}

constexpr Kernel<MlaPrefillArgs> kPrefillKernels[] = {
    {"mla_prefill.cpu.hwy", Backend::kCpu, Tier::kTuned, nullptr, mla_prefill_hwy_workspace, mla_prefill_hwy},
    {"mla_prefill.cpu", Backend::kCpu, Tier::kPortable, nullptr, mla_prefill_cpu_workspace, mla_prefill_cpu}};

}  // namespace

constinit const Op<MlaKvWriteArgs> kMlaKvWrite{{.name = "mla_kv_write",
                                                .check = check_write,
                                                .describe = describe_write,
                                                .cost = cost_write,
                                                .reference = reference_write,
                                                .cases = cases_write,
                                                .random_case = random_write,
                                                .build = build_write,
                                                .tolerance = {0, 0},
                                                .kernels = kWriteKernels}};

constinit const Op<MlaDecodeArgs> kMlaDecode{{.name = "mla_decode",
                                              .check = check_decode,
                                              .describe = describe_decode,
                                              .cost = cost_decode,
                                              .reference = reference_decode,
                                              .cases = cases_decode,
                                              .random_case = random_attention,
                                              .build = build_decode,
                                              .tolerance = {2e-5, 2e-5},
                                              .kernels = kDecodeKernels}};

constinit const Op<MlaPrefillArgs> kMlaPrefill{{.name = "mla_prefill",
                                                .check = check_prefill,
                                                .describe = describe_prefill,
                                                .cost = cost_prefill,
                                                .reference = reference_prefill,
                                                .cases = cases_prefill,
                                                .random_case = random_attention,
                                                .build = build_prefill,
                                                .tolerance = {2e-5, 2e-5},
                                                .kernels = kPrefillKernels}};

}  // namespace moat
