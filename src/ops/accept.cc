// SPDX-License-Identifier: Apache-2.0
#include "ops/accept.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/shape.h"
#include "ops/accept_kernels.h"
#include "ops/op_parts.h"

namespace moat {
namespace {

using Layout = ShapeMatcher::Layout;

// --- match_drafts ---

Status check_match_drafts(const MatchDraftsArgs& a) {
  const auto seqs = static_cast<int64_t>(a.cu_rows.size()) - 1;
  return ShapeMatcher("match_drafts")
      .expect(seqs >= 0, "cu_rows with one entry more than sequences")
      .match("accepted", a.accepted, {DType::kI32}, {seqs})
      .match("bonus", a.bonus, {DType::kI32}, {seqs})
      .match("chosen", a.chosen, {DType::kI32}, {static_cast<int64_t>(a.drafts.size())})
      .status();
}
std::string describe_match_drafts(const MatchDraftsArgs& a) {
  return fmt::format("seqs={} rows={}", a.accepted.dim(0), a.drafts.size());
}
Cost cost_match_drafts(const MatchDraftsArgs& a) {
  return {0, 2.0 * bytes_of(a.chosen) + bytes_of(a.accepted) + bytes_of(a.bonus)};
}

void match_drafts_reference(const MatchDraftsArgs& a) {
  for (int64_t s = 0; s < a.accepted.dim(0); ++s) {
    const auto first = static_cast<size_t>(a.cu_rows[static_cast<size_t>(s)]);
    const auto end = static_cast<size_t>(a.cu_rows[static_cast<size_t>(s) + 1]);
    const std::vector<int32_t> chosen(a.chosen.i32() + first, a.chosen.i32() + end);
    size_t k = 0;
    for (; k + 1 < chosen.size(); ++k) {
      if (chosen[k] == -1 || chosen[k] != a.drafts[first + k]) break;
    }
    a.accepted.i32()[s] = static_cast<int32_t>(k);
    a.bonus.i32()[s] = chosen.empty() ? -1 : chosen[k];
  }
}

// Row counts 0, 1 (no draft) and more.
std::vector<int32_t> random_cu_rows(int64_t seqs, int64_t most_drafts, Rng& rng) {
  std::vector<int32_t> cu_rows = {0};
  for (int64_t s = 0; s < seqs; ++s) {
    const int64_t rows = s % 6 == 5 ? 0 : s % 6 == 4 ? 1 : 1 + rng.below(most_drafts + 1);
    cu_rows.push_back(cu_rows.back() + static_cast<int32_t>(rows));
  }
  return cu_rows;
}

// An i32 output whose poison is not -1, which is an answer.
Tensor i32_output(CaseData& data, const char* name, int64_t count) {
  const Tensor t = data.output(name, {count}, DType::kI32);
  std::fill(t.i32(), t.i32() + count, 0x5a5a5a5a);
  return t;
}

std::vector<Case> match_cases() {
  return {{{{"seqs", 1}, {"drafts", 7}}},
          {{{"seqs", 64}, {"drafts", 7}}},
          {{{"seqs", 0}, {"drafts", 3}}},
          {{{"seqs", 9}, {"drafts", 0}}}};
}
Case random_match(uint64_t seed) {
  Rng rng(seed);
  return {{{"seqs", rng.below(30)}, {"drafts", rng.below(9)}}};
}

MatchDraftsArgs build_match_drafts(const Case& c, CaseData& data) {
  MatchDraftsArgs a;
  const int64_t seqs = c["seqs"];
  a.cu_rows = data.hold(random_cu_rows(seqs, c["drafts"], data.rng()));
  const int64_t rows = a.cu_rows.back();
  a.chosen = data.random_ints({rows}, 50);
  std::vector<int32_t> drafts(a.chosen.i32(), a.chosen.i32() + rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t kind = data.rng().below(10);
    if (kind == 0) ++drafts[static_cast<size_t>(r)];
    if (kind == 1) drafts[static_cast<size_t>(r)] = a.chosen.i32()[r] = -1;
  }
  a.drafts = data.hold(std::move(drafts));
  a.accepted = i32_output(data, "accepted", seqs);
  a.bonus = i32_output(data, "bonus", seqs);
  return a;
}

constexpr Kernel<MatchDraftsArgs> kMatchDraftsKernels[] = {
    {"match_drafts.cpu", Backend::kCpu, Tier::kTuned, nullptr, nullptr, cpu::match_drafts},
};

// --- accept_drafts ---

Status check_accept_drafts(const AcceptDraftsArgs& a) {
  const auto rows = static_cast<int64_t>(a.drafts.size());
  const auto seqs = static_cast<int64_t>(a.rules.size());
  const CompactRows& compact = a.target.compact;
  return ShapeMatcher("accept_drafts")
      .match("accepted", a.accepted, {DType::kI32}, {seqs})
      .match("bonus", a.bonus, {DType::kI32}, {seqs})
      .match_optional("target.dense", a.target.dense, {DType::kF32}, {rows, "vocab"}, Layout::kRowStrided)
      .match_optional("target.compact.ids", compact.ids, {DType::kI32}, {rows, "width"})
      .match_optional("target.compact.probs", compact.probs, {DType::kF32}, {rows, "width"})
      .match_optional("target.compact.counts", compact.counts, {DType::kI32}, {rows})
      .match_optional("q", a.q, {DType::kF32}, {"laws", "vocab"}, Layout::kRowStrided)
      .match_optional("final_probs", a.final_probs, {DType::kF32}, {seqs, "vocab"}, Layout::kRowStrided)
      .expect(a.target.dense.is_set() != compact.is_set(), "a dense or a compact target, not both")
      .expect(compact.ids.is_set() == compact.probs.is_set() && compact.ids.is_set() == compact.counts.is_set(),
              "ids, probs and counts of a compact target")
      .expect(a.q_rows.empty() ? !a.q.is_set() || a.q.dim(0) == rows : static_cast<int64_t>(a.q_rows.size()) == rows,
              "a row of q for each row")
      .expect(static_cast<int64_t>(a.cu_rows.size()) == seqs + 1, "cu_rows with one entry more than rules")
      .expect(static_cast<int64_t>(a.accept_uniforms.size()) == rows, "accept_uniforms of each row")
      .expect(static_cast<int64_t>(a.bonus_uniforms.size()) == seqs, "bonus_uniforms of each sequence")
      .status();
}

std::string describe_accept_drafts(const AcceptDraftsArgs& a) {
  return fmt::format("target={} q={} seqs={}",
                     a.target.dense.is_set() ? a.target.dense.describe() : a.target.compact.probs.describe(),
                     a.q.is_set() ? a.q.describe() : "none", a.rules.size());
}

// The one row, or row pair, that each bonus is drawn from.
Cost cost_accept_drafts(const AcceptDraftsArgs& a) {
  const Tensor& p = a.target.dense.is_set() ? a.target.dense : a.target.compact.probs;
  const double entries = static_cast<double>(a.rules.size()) * static_cast<double>(p.dim(1));
  const double bytes_an_entry = (a.target.dense.is_set() ? 4 : 8) + (a.q.is_set() ? 4 : 0);
  return {3 * entries, bytes_an_entry * entries + bytes_of(a.final_probs) + bytes_of(a.accepted) + bytes_of(a.bonus)};
}

using Row = std::vector<double>;

// Row r of the target, written out.
Row target_row(const TargetRows& target, int64_t r, int64_t vocab) {
  if (target.dense.is_set()) return {target.dense.row(r), target.dense.row(r) + vocab};
  Row row(static_cast<size_t>(vocab));
  for (int64_t i = 0; i < target.compact.counts.i32()[r]; ++i) {
    row[static_cast<size_t>(target.compact.ids.i32()[r * target.compact.ids.dim(1) + i])] =
        target.compact.probs.row(r)[i];
  }
  return row;
}

int64_t vocab_of(const AcceptDraftsArgs& a) {
  for (const Tensor& t : {a.target.dense, a.q, a.final_probs}) {
    if (t.is_set()) return t.dim(1);
  }
  const Tensor& ids = a.target.compact.ids;  // the tail of a row is -1
  return ids.count() == 0 ? 0 : 1 + *std::max_element(ids.i32(), ids.i32() + ids.count());
}

Row residual_row(const Row& p, const Row& q, double w) {
  Row rest(p.size());
  for (size_t v = 0; v < p.size(); ++v) {
    if (p[v] != 0) rest[v] = w * p[v] - q[v] < 0 ? 0 : w * p[v] - q[v];
  }
  return rest;
}

double mass(const Row& row) { return std::accumulate(row.begin(), row.end(), 0.0); }

// One sequence by the book. p has l + 1 rows, q and x have l.
struct ReferenceVerdict {
  int32_t accepted = 0;
  int32_t bonus = -1;
  Row final_probs;
};

ReferenceVerdict verify_reference(AcceptRule rule, const std::vector<Row>& p, const std::vector<Row>& q,
                                  std::span<const int32_t> x, std::span<const double> u, double bonus_u) {
  const size_t l = x.size();
  // A probability that can be compared: 0 for ids that are not there and for NaN and infinity.
  const auto at = [&](const Row& row, int32_t id) {
    const bool inside = id >= 0 && static_cast<size_t>(id) < row.size();
    return inside && std::isfinite(row[static_cast<size_t>(id)]) ? row[static_cast<size_t>(id)] : 0.0;
  };
  const auto broken = [&](size_t k) {
    return x[k] >= 0 && static_cast<size_t>(x[k]) < q[k].size() && !std::isfinite(q[k][static_cast<size_t>(x[k])]);
  };
  ReferenceVerdict out;
  size_t a = 0;
  Row weights;
  if (rule == AcceptRule::kOneHot) {
    while (a < l && u[a] < at(p[a], x[a])) ++a;
    weights = p[a];
    if (a < l && x[a] >= 0 && static_cast<size_t>(x[a]) < weights.size()) weights[static_cast<size_t>(x[a])] = 0;
  } else if (rule == AcceptRule::kToken) {
    while (a < l && !broken(a) && u[a] * at(q[a], x[a]) < at(p[a], x[a])) ++a;
    weights = a < l ? residual_row(p[a], q[a], 1) : p[a];
  } else {
    std::vector<double> w = {1.0};
    for (size_t i = 1; i <= l; ++i) {
      const double joint = broken(i - 1) ? 0 : w[i - 1] * at(p[i - 1], x[i - 1]);
      const double declared = at(q[i - 1], x[i - 1]);
      w.push_back(joint == 0 ? 0 : declared == 0 ? 1 : std::min(joint / declared, 1.0));
    }
    for (size_t i = 1; i <= l; ++i) {
      const double z = i < l ? mass(residual_row(p[i], q[i], w[i])) : 0;
      const double h = i == l ? w[l] : z == 0 && w[i] == 1 ? 1 : z / (z + 1 - w[i]);
      if (u[i - 1] < h) a = i;
    }
    weights = a < l ? residual_row(p[a], q[a], w[a]) : p[a];
  }
  if (mass(weights) == 0) weights = p[a];
  const double total = mass(weights);
  out.accepted = static_cast<int32_t>(a);
  out.final_probs.assign(p[a].size(), 0.0);
  if (!(total > 0) || !std::isfinite(total)) return out;
  double sum = 0;
  for (size_t v = 0; v < weights.size(); ++v) {
    out.final_probs[v] = weights[v] / total;
    const bool before = sum <= bonus_u * total;
    sum += weights[v];
    if (before && weights[v] > 0) out.bonus = static_cast<int32_t>(v);
  }
  return out;
}

void accept_drafts_reference(const AcceptDraftsArgs& a) {
  const int64_t vocab = vocab_of(a);
  for (size_t s = 0; s < a.rules.size(); ++s) {
    const auto first = static_cast<size_t>(a.cu_rows[s]);
    const auto end = static_cast<size_t>(a.cu_rows[s + 1]);
    ReferenceVerdict verdict;
    verdict.final_probs.assign(static_cast<size_t>(vocab), 0.0);
    if (end > first) {
      std::vector<Row> p;
      std::vector<Row> q;
      for (size_t r = first; r < end; ++r) {
        const auto row = static_cast<int64_t>(r);
        p.push_back(target_row(a.target, row, vocab));
        if (a.rules[s] == AcceptRule::kOneHot || r + 1 == end) continue;
        const float* law = a.q.row(a.q_rows.empty() ? row : a.q_rows[r]);
        q.emplace_back(law, law + vocab);
      }
      const size_t l = end - first - 1;
      verdict = verify_reference(a.rules[s], p, q, a.drafts.subspan(first, l), a.accept_uniforms.subspan(first, l),
                                 a.bonus_uniforms[s]);
    }
    a.accepted.i32()[s] = verdict.accepted;
    a.bonus.i32()[s] = verdict.bonus;
    for (int64_t v = 0; a.final_probs.is_set() && v < vocab; ++v) {
      a.final_probs.row(static_cast<int64_t>(s))[v] = static_cast<float>(verdict.final_probs[static_cast<size_t>(v)]);
    }
  }
}

std::vector<Case> accept_cases() {
  std::vector<Case> cases;
  const int64_t shapes[][3] = {{1, 7, 163840}, {2, 3, 163840}, {24, 7, 5120}, {0, 3, 100},
                               {9, 0, 33},     {13, 4, 1},     {40, 5, 9},    {6, 2, 20000}};
  for (const auto& [seqs, drafts, vocab] : shapes) {
    for (int64_t kind = 0; kind < 4; ++kind) {
      cases.push_back({{{"seqs", seqs}, {"drafts", drafts}, {"vocab", vocab}, {"kind", kind}}});
    }
  }
  return cases;
}

Case random_accept(uint64_t seed) {
  Rng rng(seed);
  return {{{"seqs", rng.below(20)}, {"drafts", rng.below(8)}, {"vocab", 1 + rng.below(600)}, {"kind", rng.below(4)}}};
}

// Target rows near a draft row, so that acceptances and rejections both happen, sparse in odd ones.
void fill_target(float* p, const float* q, int64_t vocab, bool is_sparse, Rng& rng) {
  double total = 0;
  for (int64_t v = 0; v < vocab; ++v) {
    const bool kept = !is_sparse || v == vocab - 1 || rng.below(std::max<int64_t>(vocab / 16, 2)) == 0;
    p[v] = kept ? q[v] * static_cast<float>(rng.uniform(0.2, 2.0)) : 0.0F;
    total += p[v];
  }
  for (int64_t v = 0; v < vocab; ++v) p[v] = static_cast<float>(p[v] / total);
}

void fill_law(float* q, int64_t vocab, Rng& rng) {
  double total = 0;
  for (int64_t v = 0; v < vocab; ++v) total += q[v] = static_cast<float>(std::pow(rng.uniform(0.01, 1.0), 4.0));
  for (int64_t v = 0; v < vocab; ++v) q[v] = static_cast<float>(q[v] / total);
}

int32_t draw_from(const float* row, int64_t vocab, double u) {
  double sum = 0;
  for (int64_t v = 0; v + 1 < vocab; ++v) {
    if ((sum += row[v]) > u) return static_cast<int32_t>(v);
  }
  return static_cast<int32_t>(vocab - 1);
}

// The entries of dense rows that are not zero, NaN included; rows with more than `width` get counts -1.
CompactRows compact_of(const Tensor& dense, int64_t width, CaseData& data) {
  const int64_t rows = dense.dim(0);
  CompactRows out{data.random_ints({rows, width}, 1), data.uniform({rows, width}, 0.0, 0.0),
                  data.random_ints({rows}, 1)};
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<int32_t> ids;
    for (int64_t v = 0; v < dense.dim(1); ++v) {
      if (dense.row(r)[v] != 0) ids.push_back(static_cast<int32_t>(v));
    }
    const bool fits = static_cast<int64_t>(ids.size()) <= width;
    out.counts.i32()[r] = fits ? static_cast<int32_t>(ids.size()) : -1;
    for (size_t i = 0; i < static_cast<size_t>(width); ++i) {
      const bool used = fits && i < ids.size();
      out.ids.i32()[static_cast<size_t>(r * width) + i] = used ? ids[i] : -1;
      out.probs.row(r)[i] = used ? dense.row(r)[ids[i]] : 0.0F;
    }
  }
  return out;
}

// kind 0: dense; 1: dense with damage; 2: compact with damage; 3: compact, every rule kOneHot, no q.
AcceptDraftsArgs build_accept_drafts(const Case& c, CaseData& data) {
  Rng& rng = data.rng();
  const int64_t seqs = c["seqs"];
  const int64_t vocab = c["vocab"];
  const int64_t kind = c["kind"];
  AcceptDraftsArgs a;
  a.cu_rows = data.hold(random_cu_rows(seqs, c["drafts"], rng));
  const int64_t rows = a.cu_rows.back();
  const Tensor q = data.uniform({rows, vocab + 5}, 0.0, 1.0).cols(2, 2 + vocab);
  const Tensor p = data.uniform({rows, vocab + 3}, 0.0, 1.0).cols(1, 1 + vocab);
  std::vector<int32_t> drafts, q_rows;
  std::vector<double> accept_uniforms, bonus_uniforms;
  for (int64_t r = 0; r < rows; ++r) {
    q_rows.push_back(static_cast<int32_t>(kind % 2 == 0 ? rows - 1 - r : r));
    float* law = q.row(q_rows.back());
    fill_law(law, vocab, rng);
    fill_target(p.row(r), law, vocab, kind >= 2 || r % 4 == 3, rng);
    if (rng.below(6) == 0) std::copy(law, law + vocab, p.row(r));
    drafts.push_back(draw_from(kind == 3 ? p.row(r) : law, vocab, rng.uniform()));
    accept_uniforms.push_back(rng.below(8) == 0 ? 0.0 : rng.uniform());
    if (kind == 0) continue;
    const int64_t damage = rng.below(16);
    if (damage == 0) p.row(r)[rng.below(vocab)] = NAN;
    if (damage == 1) p.row(r)[rng.below(vocab)] = INFINITY;
    if (damage == 2) std::fill(p.row(r), p.row(r) + vocab, 0.0F);
    if (damage == 3) law[rng.below(vocab)] = NAN;
    if (damage == 4) law[drafts.back()] = 0.0F;
    if (damage == 5) drafts.back() = rng.below(2) == 0 ? -1 : static_cast<int32_t>(vocab + rng.below(3));
  }
  std::vector<AcceptRule> rules;
  for (int64_t s = 0; s < seqs; ++s) {
    rules.push_back(kind == 3 ? AcceptRule::kOneHot : static_cast<AcceptRule>(s % 3));
    if (c["drafts"] == 7 && seqs == 1 && kind == 0) rules.back() = AcceptRule::kBlock;
    bonus_uniforms.push_back(s % 5 == 1 ? 0.0 : s % 5 == 2 ? 1.0 - 0x1.0p-53 : rng.uniform());
  }
  a.drafts = data.hold(std::move(drafts));
  a.rules = data.hold(std::move(rules));
  a.accept_uniforms = data.hold(std::move(accept_uniforms));
  a.bonus_uniforms = data.hold(std::move(bonus_uniforms));
  if (kind != 3) a.q = q;
  if (kind % 2 == 0) a.q_rows = data.hold(std::move(q_rows));
  if (kind < 2) {
    a.target.dense = p;
  } else {
    a.target.compact = compact_of(p, std::min<int64_t>(vocab, 40), data);
  }
  a.accepted = i32_output(data, "accepted", seqs);
  a.bonus = i32_output(data, "bonus", seqs);
  if (kind != 3) a.final_probs = data.output("final_probs", {seqs, vocab});
  return a;
}

constexpr Kernel<AcceptDraftsArgs> kAcceptDraftsKernels[] = {
    {"accept_drafts.cpu", Backend::kCpu, Tier::kTuned, nullptr, accept_drafts_workspace, cpu::accept_drafts},
};

}  // namespace

constinit const Op<MatchDraftsArgs> kMatchDrafts{{.name = "match_drafts",
                                                  .check = check_match_drafts,
                                                  .describe = describe_match_drafts,
                                                  .cost = cost_match_drafts,
                                                  .reference = match_drafts_reference,
                                                  .cases = match_cases,
                                                  .random_case = random_match,
                                                  .build = build_match_drafts,
                                                  .tolerance = {0, 0},
                                                  .kernels = kMatchDraftsKernels}};

constinit const Op<AcceptDraftsArgs> kAcceptDrafts{{.name = "accept_drafts",
                                                    .check = check_accept_drafts,
                                                    .describe = describe_accept_drafts,
                                                    .cost = cost_accept_drafts,
                                                    .reference = accept_drafts_reference,
                                                    .cases = accept_cases,
                                                    .random_case = random_accept,
                                                    .build = build_accept_drafts,
                                                    .tolerance = {1e-12, 1e-6},
                                                    .kernels = kAcceptDraftsKernels}};

}  // namespace moat
