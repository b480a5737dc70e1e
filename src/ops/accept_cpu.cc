// SPDX-License-Identifier: Apache-2.0
// Portable kernels of accept.h. A decision reads two numbers a row for as long as it can; what is summed over the
// vocabulary are the rows that decide: the row pair of the bonus, and under the block rule those whose uniform leaves
// them a chance. Sums go by chunks of fixed size, added in order, so they do not depend on who computed which.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/accept_kernels.h"

namespace moat {
namespace {

constexpr int64_t kChunk = 8192;  // entries: both rows of a chunk fit into a first-level cache

int64_t num_chunks(int64_t entries) { return (entries + kChunk - 1) / kChunk; }

// Non-negative weights over the entries of one row: scale * p, less q, never below zero.
struct Weights {
  const int32_t* ids = nullptr;  // ascending; null: entry i is id i
  const float* p = nullptr;
  int64_t count = 0;
  const float* q = nullptr;  // by id; null: nothing is taken off
  double scale = 1;
  int64_t left_out = -1;  // an entry that weighs nothing

  int32_t id(int64_t i) const { return ids != nullptr ? ids[i] : static_cast<int32_t>(i); }

  // NaN stays; q does not matter where p is zero.
  static double residual(float p, float q, double scale) {
    const double rest = scale * static_cast<double>(p) - static_cast<double>(q);
    return p == 0.0F || rest < 0 ? 0.0 : rest;
  }
  double operator[](int64_t i) const {
    if (i == left_out) return 0;
    return q != nullptr ? residual(p[i], q[id(i)], scale) : static_cast<double>(p[i]);
  }

  // Entry of an id, or -1.
  int64_t find(int32_t wanted) const {
    if (ids == nullptr) return wanted >= 0 && wanted < count ? wanted : -1;
    const int32_t* at = std::lower_bound(ids, ids + count, wanted);
    return at != ids + count && *at == wanted ? at - ids : -1;
  }
};

// Sum of entry(i) over [begin, end): eight partial sums, so that additions overlap.
template <class Entry>
double sum_entries(int64_t begin, int64_t end, const Entry& entry) {
  double sums[8] = {};
  int64_t i = begin;
  for (; i + 8 <= end; i += 8) {
    for (int64_t j = 0; j < 8; ++j) sums[j] += entry(i + j);
  }
  for (; i < end; ++i) sums[0] += entry(i);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

double sum_chunk(const Weights& w, int64_t begin, int64_t end) {
  if (w.left_out >= begin && w.left_out < end) {
    return sum_chunk(w, begin, w.left_out) + sum_chunk(w, w.left_out + 1, end);
  }
  const float* p = w.p;
  const float* q = w.q;
  if (q == nullptr) return sum_entries(begin, end, [p](int64_t i) { return static_cast<double>(p[i]); });
  if (w.ids != nullptr) return sum_entries(begin, end, [&w](int64_t i) { return w[i]; });
  const double scale = w.scale;
  return sum_entries(begin, end, [p, q, scale](int64_t i) { return Weights::residual(p[i], q[i], scale); });
}

// One sequence of a call.
class Verifier {
 public:
  // `pool` null: this already is a task of the pool. chunk_sums: [num_chunks(vocab)]; prefix_weights: [l + 1].
  Verifier(const AcceptDraftsArgs& args, size_t seq, ThreadPool* pool, double* chunk_sums, double* prefix_weights)
      : args_(args),
        seq_(seq),
        first_(args.cu_rows[seq]),
        num_drafts_(args.cu_rows[seq + 1] - args.cu_rows[seq] - 1),
        pool_(pool),
        chunk_sums_(chunk_sums),
        prefix_weights_(prefix_weights) {}

  void run() {
    int64_t accepted = 0;
    int32_t bonus = -1;
    if (args_.final_probs.is_set()) {
      std::fill(final_row(), final_row() + args_.final_probs.dim(1), 0.0F);
    }
    if (num_drafts_ >= 0) {
      accepted = args_.rules[seq_] == AcceptRule::kBlock ? accept_block() : accept_one_by_one();
      bonus = draw_bonus(accepted);
    }
    args_.accepted.i32()[seq_] = static_cast<int32_t>(accepted);
    args_.bonus.i32()[seq_] = bonus;
  }

 private:
  float* final_row() const { return args_.final_probs.row(static_cast<int64_t>(seq_)); }
  int32_t draft(int64_t k) const { return args_.drafts[static_cast<size_t>(first_ + k)]; }
  double uniform(int64_t k) const { return args_.accept_uniforms[static_cast<size_t>(first_ + k)]; }

  Weights target(int64_t k) const {
    const int64_t row = first_ + k;
    const TargetRows& t = args_.target;
    if (t.dense.is_set()) return {.p = t.dense.row(row), .count = t.dense.dim(1)};
    return {.ids = t.compact.ids.i32() + row * t.compact.ids.dim(1),
            .p = t.compact.probs.row(row),
            .count = std::max(t.compact.counts.i32()[row], 0)};
  }

  // What draft k was drawn from.
  const float* law(int64_t k) const {
    const int64_t row = first_ + k;
    return args_.q.row(args_.q_rows.empty() ? row : args_.q_rows[static_cast<size_t>(row)]);
  }

  // p and q of draft k. A draft that cannot be accepted has p = 0.
  std::pair<double, double> judge(int64_t k) const {
    const Weights p = target(k);
    const int64_t at = p.find(draft(k));
    if (at < 0 || !(p.p[at] <= std::numeric_limits<float>::max())) return {0, 0};
    if (args_.rules[seq_] == AcceptRule::kOneHot) return {p.p[at], 1};
    const float q = law(k)[draft(k)];
    if (!(q <= std::numeric_limits<float>::max())) return {0, 0};
    return {p.p[at], q};
  }

  int64_t accept_one_by_one() const {
    int64_t k = 0;
    for (; k < num_drafts_; ++k) {
      const auto [p, q] = judge(k);
      if (!(uniform(k) * q < p)) break;
    }
    return k;
  }

  // Backwards: the last success decides, so rows before it need not be summed.
  int64_t accept_block() {
    double* w = prefix_weights_;
    w[0] = 1;
    for (int64_t i = 1; i <= num_drafts_; ++i) {
      const auto [p, q] = judge(i - 1);
      const double joint = w[i - 1] * p;
      w[i] = !(joint > 0) ? 0 : joint < q ? joint / q : 1;
    }
    for (int64_t i = num_drafts_; i > 0; --i) {
      const double u = uniform(i - 1);
      if (i == num_drafts_) {
        if (u < w[i]) return i;
        continue;
      }
      // h_i <= w_i for a row that sums to one. The margin is what rounding of the row may add.
      if (!(u < w[i] + 1e-4) || w[i] == 0) continue;
      const double rest = sum(residual(i, w[i]));
      const double h = rest == 0 && w[i] == 1 ? 1 : rest / (rest + 1 - w[i]);
      if (u < h) return i;
    }
    return 0;
  }

  Weights residual(int64_t k, double scale) const {
    Weights w = target(k);
    w.q = law(k);
    w.scale = scale;
    return w;
  }

  double sum(const Weights& w) {
    const int64_t chunks = num_chunks(w.count);
    const auto body = [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        chunk_sums_[c] = sum_chunk(w, c * kChunk, std::min(w.count, (c + 1) * kChunk));
      }
    };
    if (pool_ != nullptr && chunks > 1) {
      pool_->parallel_for(chunks, 1, body);
    } else {
      body(0, chunks);
    }
    double total = 0;
    for (int64_t c = 0; c < chunks; ++c) total += chunk_sums_[c];
    return total;
  }

  int32_t draw_bonus(int64_t accepted) {
    Weights weights = target(accepted);
    if (accepted < num_drafts_) {
      if (args_.rules[seq_] == AcceptRule::kOneHot) {
        weights.left_out = weights.find(draft(accepted));
      } else {
        weights = residual(accepted, args_.rules[seq_] == AcceptRule::kBlock ? prefix_weights_[accepted] : 1.0);
      }
    }
    double total = sum(weights);
    if (total == 0) {
      weights = target(accepted);
      total = sum(weights);
    }
    if (!(total > 0) || !std::isfinite(total)) return -1;
    if (args_.final_probs.is_set()) {
      for (int64_t i = 0; i < weights.count; ++i) {
        final_row()[weights.id(i)] = static_cast<float>(weights[i] / total);
      }
    }
    return weights.id(draw(weights, args_.bonus_uniforms[seq_] * total));
  }

  // First entry whose cumulative weight exceeds `target`, with the chunk sums of `w` at hand. Where rounding leaves
  // none, the last entry that weighs anything.
  int64_t draw(const Weights& w, double target) const {
    int64_t chunk = 0;
    double before = 0;
    double sum = 0;
    for (int64_t c = 0; c < num_chunks(w.count) && !(sum > target); ++c) {
      if (!(chunk_sums_[c] > 0)) continue;
      chunk = c;
      before = sum;
      sum += chunk_sums_[c];
    }
    int64_t entry = -1;
    for (int64_t i = chunk * kChunk; i < std::min(w.count, (chunk + 1) * kChunk) && !(before > target); ++i) {
      const double weight = w[i];
      if (!(weight > 0)) continue;
      entry = i;
      before += weight;
    }
    return entry;
  }

  const AcceptDraftsArgs& args_;
  size_t seq_;
  int64_t first_;
  int64_t num_drafts_;
  ThreadPool* pool_;
  double* chunk_sums_;
  double* prefix_weights_;
};

// Chunks of a target row.
int64_t chunks_of(const AcceptDraftsArgs& a) {
  return num_chunks(a.target.dense.is_set() ? a.target.dense.dim(1) : a.target.compact.ids.dim(1));
}

}  // namespace

int64_t accept_drafts_workspace(const AcceptDraftsArgs& a, const Exec&) {
  const auto sums = static_cast<int64_t>(a.rules.size()) * chunks_of(a);
  constexpr int64_t kAlignment = 64;  // of each of the two arrays
  return 8 * (sums + static_cast<int64_t>(a.drafts.size())) + 2 * kAlignment;
}

namespace cpu {

void match_drafts(Exec&, const MatchDraftsArgs& a) {
  for (size_t s = 0; s + 1 < a.cu_rows.size(); ++s) {
    const int32_t first = a.cu_rows[s];
    const int32_t num_drafts = a.cu_rows[s + 1] - first - 1;
    const int32_t* chosen = a.chosen.i32() + first;
    const int32_t* drafts = a.drafts.data() + first;
    int32_t accepted = 0;
    while (accepted < num_drafts && chosen[accepted] >= 0 && chosen[accepted] == drafts[accepted]) ++accepted;
    a.accepted.i32()[s] = accepted;
    a.bonus.i32()[s] = num_drafts >= 0 ? chosen[accepted] : -1;
  }
}

void accept_drafts(Exec& exec, const AcceptDraftsArgs& a) {
  const auto seqs = static_cast<int64_t>(a.rules.size());
  const int64_t chunks = chunks_of(a);
  double* sums = exec.arena().alloc(DType::kF64, {seqs, chunks}).ptr<double>();
  double* prefix_weights = exec.arena().alloc(DType::kF64, {static_cast<int64_t>(a.drafts.size())}).ptr<double>();
  const auto verify = [&](int64_t s, ThreadPool* pool) {
    const auto seq = static_cast<size_t>(s);
    MOAT_CHECK(a.rules[seq] == AcceptRule::kOneHot || a.q.is_set(), "accept_drafts: sequence {} needs q", s);
    Verifier(a, seq, pool, sums + s * chunks, prefix_weights + a.cu_rows[seq]).run();
  };
  // Enough sequences keep every thread busy; fewer share the chunks of each.
  if (seqs >= 2 * exec.pool().num_threads() || chunks <= 1) {
    exec.pool().parallel_for(seqs, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) verify(s, nullptr);
    });
  } else {
    for (int64_t s = 0; s < seqs; ++s) verify(s, &exec.pool());
  }
}

}  // namespace cpu
}  // namespace moat
