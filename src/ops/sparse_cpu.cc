// SPDX-License-Identifier: Apache-2.0
// Portable kernels of sparse.h. Top-k needs no order of the vocabulary: the k-th largest of the block maxima is a bound
// that at least k logits reach, and only blocks whose maximum passes the bound are looked at again.
#include "ops/sparse_kernels.h"

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "ops/sample_kernels.h"

namespace moat {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct LogitRow {
  const float* logits;
  int64_t vocab;
  const float* maxima;  // [num_logit_blocks(vocab)]

  // Calls visit(id, logit) in ascending order of ids for every block whose maximum passes the test.
  template <class Passes, class Visit>
  void for_each_in_blocks(const Passes& passes, const Visit& visit) const {
    for (int64_t b = 0; b < num_logit_blocks(vocab); ++b) {
      if (!passes(maxima[b])) continue;
      const int64_t end = std::min(vocab, (b + 1) * kLogitBlock);
      for (int64_t i = b * kLogitBlock; i < end; ++i) visit(i, logits[i]);
    }
  }
};

float kth_largest(std::vector<float>& values, int64_t k) {
  const auto kth = values.begin() + (k - 1);
  std::nth_element(values.begin(), kth, values.end(), std::greater<>());
  return *kth;
}

// The k-th largest logit, -inf if there are fewer finite ones. `values` is scratch.
float kth_logit(const LogitRow& row, int64_t k, std::vector<float>& values) {
  const int64_t num_blocks = num_logit_blocks(row.vocab);
  float bound = -kInfinity;  // k logits are known to be at least this
  if (k <= num_blocks) {
    // By heap: most maxima lose against its top at once.
    values.resize(static_cast<size_t>(k));
    std::partial_sort_copy(row.maxima, row.maxima + num_blocks, values.begin(), values.end(), std::greater<>());
    bound = values.back();
  }
  // Values equal to the bound cannot raise it, so flat rows cost nothing here. No more than twice k are held.
  values.clear();
  row.for_each_in_blocks([&](float largest) { return largest > bound; },
                         [&](int64_t, float logit) {
                           if (!(logit > bound)) return;
                           values.push_back(logit);
                           if (static_cast<int64_t>(values.size()) < 2 * k) return;
                           bound = kth_largest(values, k);
                           values.resize(static_cast<size_t>(k));
                         });
  return static_cast<int64_t>(values.size()) >= k ? kth_largest(values, k) : bound;
}

// Removes zeros behind a filter; returns how many entries are left.
int64_t compact(int32_t* ids, float* probs, int64_t count) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!(probs[i] > 0)) continue;
    ids[kept] = ids[i];
    probs[kept++] = probs[i];
  }
  return kept;
}

// The threshold of top-p among few probabilities. `values` is scratch.
float top_p_threshold(const float* probs, int64_t count, float p, std::vector<float>& values) {
  values.assign(probs, probs + count);
  std::sort(values.begin(), values.end());
  double sum = 0;
  for (const float value : values) {
    sum += value;
    if (p > 0.0F && static_cast<float>(sum) >= top_p_limit(p)) return value;
  }
  return values.back();
}

// Logits among the entries of a row become probabilities, filtered and renormalised; returns how many are left.
int64_t filter_survivors(const TopKProbsArgs& a, int64_t r, int64_t count, std::vector<float>& values) {
  int32_t* ids = a.out.ids.i32() + r * a.out.ids.dim(1);
  float* probs = a.out.probs.row(r);
  const auto row = static_cast<size_t>(r);
  const double largest = *std::max_element(probs, probs + count);
  const auto exponential = [&](float logit) {
    return std::exp((static_cast<double>(logit) - largest) / static_cast<double>(a.temperature[row]));
  };
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += exponential(probs[i]);
  for (int64_t i = 0; i < count; ++i) probs[i] = static_cast<float>(exponential(probs[i]) / sum);
  if (!(a.top_p[row] >= 1.0F)) {
    keep_and_renormalise(probs, count, top_p_threshold(probs, count, a.top_p[row], values));
  }
  if (a.min_p[row] > 0.0F) {
    keep_and_renormalise(probs, count, a.min_p[row] * *std::max_element(probs, probs + count));
  }
  return compact(ids, probs, count);
}

// Writes row r of the output from its block maxima.
void select_row(const TopKProbsArgs& a, int64_t r, const float* maxima, std::vector<float>& values) {
  const int64_t width = a.out.ids.dim(1);
  const LogitRow row{a.logits.row(r), a.logits.dim(1), maxima};
  int32_t* ids = a.out.ids.i32() + r * width;
  float* probs = a.out.probs.row(r);
  int64_t count = 0;
  const float* maxima_end = maxima + num_logit_blocks(row.vocab);
  if (std::none_of(maxima, maxima_end, [](float m) { return std::isnan(m); })) {
    const int64_t k = std::clamp<int64_t>(a.k[static_cast<size_t>(r)], 1, row.vocab);
    const float threshold = std::max(kth_logit(row, k, values), std::numeric_limits<float>::lowest());
    row.for_each_in_blocks([&](float largest) { return largest >= threshold && count <= width; },
                           [&](int64_t id, float logit) {
                             if (!(logit >= threshold)) return;
                             if (count < width) {
                               ids[count] = static_cast<int32_t>(id);
                               probs[count] = logit;
                             }
                             ++count;
                           });
    if (count > width) {
      count = -1;
    } else if (count > 0) {
      count = filter_survivors(a, r, count, values);
    }
  }
  std::fill(ids + std::max<int64_t>(count, 0), ids + width, -1);
  std::fill(probs + std::max<int64_t>(count, 0), probs + width, 0.0F);
  a.out.counts.i32()[r] = static_cast<int32_t>(count);
}

void block_maxima_portable(const float* logits, int64_t vocab, float* maxima, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    float largest = -kInfinity;
    bool bad = false;
    for (int64_t i = b * kLogitBlock; i < std::min(vocab, (b + 1) * kLogitBlock); ++i) {
      bad |= !(logits[i] <= std::numeric_limits<float>::max());
      largest = logits[i] > largest ? logits[i] : largest;
    }
    maxima[b] = bad ? std::numeric_limits<float>::quiet_NaN() : largest;
  }
}

}  // namespace

int64_t top_k_probs_workspace(const TopKProbsArgs& a, const Exec&) {
  return 4 * a.logits.dim(0) * num_logit_blocks(a.logits.dim(1));
}

void top_k_probs_by_blocks(Exec& exec, const TopKProbsArgs& a, BlockMaxima block_maxima) {
  const int64_t rows = a.logits.dim(0);
  const int64_t vocab = a.logits.dim(1);
  const int64_t blocks = num_logit_blocks(vocab);
  const Tensor maxima = exec.arena().alloc(DType::kF32, {rows, blocks});
  // Over blocks of all rows, so that one row keeps every thread busy.
  constexpr int64_t kGrain = 64;
  exec.pool().parallel_for(rows * blocks, kGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t r = begin / blocks;
      const int64_t row_end = std::min(end, (r + 1) * blocks);
      block_maxima(a.logits.row(r), vocab, maxima.row(r), begin - r * blocks, row_end - r * blocks);
      begin = row_end;
    }
  });
  exec.pool().parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values;
    for (int64_t r = begin; r < end; ++r) select_row(a, r, maxima.row(r), values);
  });
}

namespace cpu {

void top_k_probs(Exec& exec, const TopKProbsArgs& a) { top_k_probs_by_blocks(exec, a, block_maxima_portable); }

void draw_compact(Exec& exec, const DrawCompactArgs& a) {
  const int64_t width = a.probs.ids.dim(1);
  exec.pool().parallel_for(a.probs.ids.dim(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* probs = a.probs.probs.row(r);
      const int64_t count = a.probs.counts.i32()[r];
      double total = 0;
      for (int64_t i = 0; i < count; ++i) total += probs[i];
      const double target = a.uniform[static_cast<size_t>(r)] * total;
      int32_t id = -1;
      double sum = 0;
      for (int64_t i = 0; i < count && id < 0 && std::isfinite(total); ++i) {
        sum += probs[i];
        if (sum > target) id = a.probs.ids.i32()[r * width + i];
      }
      a.ids.i32()[r] = id;
    }
  });
}

}  // namespace cpu
}  // namespace moat
