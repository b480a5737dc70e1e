// SPDX-License-Identifier: Apache-2.0
// Portable kernels of sample.h that need no order. Threads split by rows; sums are f64 in index order.
#include <algorithm>
#include <vector>

#include "ops/sample_kernels.h"

namespace moat::cpu {
namespace {

// Index of the largest value, ties to the lowest; -1 if any is NaN or none is finite.
int32_t argmax_row(const float* row, int64_t vocab) {
  float best = -INFINITY;
  int32_t index = -1;
  bool nan = false;
  bool finite = false;
  for (int64_t i = 0; i < vocab; ++i) {
    nan |= std::isnan(row[i]);
    finite |= std::isfinite(row[i]);
    if (row[i] > best) {
      best = row[i];
      index = static_cast<int32_t>(i);
    }
  }
  return nan || !finite ? -1 : index;
}

int32_t draw_row(const float* row, int64_t vocab, double uniform) {
  double total = 0;
  for (int64_t i = 0; i < vocab; ++i) total += row[i];
  if (!(total > 0) || !std::isfinite(total)) return -1;
  const double target = uniform * total;
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) {
    sum += row[i];
    if (sum > target) return static_cast<int32_t>(i);
  }
  return -1;
}

}  // namespace

void softmax(Exec& exec, const SoftmaxArgs& a) {
  const int64_t vocab = a.logits.dim(1);
  exec.pool().parallel_for(a.logits.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* logits = a.logits.row(r);
      float* probs = a.probs.row(r);
      float largest = -INFINITY;
      bool bad = false;
      for (int64_t i = 0; i < vocab; ++i) {
        bad |= std::isnan(logits[i]);
        largest = std::max(largest, logits[i]);
      }
      if (bad || !std::isfinite(largest)) {
        std::fill(probs, probs + vocab, 0.0F);
        continue;
      }
      const double temperature = a.temperature[static_cast<size_t>(r)];
      const auto exponential = [&](float logit) {
        return std::exp((static_cast<double>(logit) - static_cast<double>(largest)) / temperature);
      };
      // Twice the exponentials rather than a row of f64: the first pass must not round.
      double sum = 0;
      for (int64_t i = 0; i < vocab; ++i) sum += exponential(logits[i]);
      for (int64_t i = 0; i < vocab; ++i) probs[i] = static_cast<float>(exponential(logits[i]) / sum);
    }
  });
}

void draw(Exec& exec, const DrawArgs& a) {
  exec.pool().parallel_for(a.probs.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      a.ids.i32()[r] = draw_row(a.probs.row(r), a.probs.dim(1), a.uniform[static_cast<size_t>(r)]);
    }
  });
}

void argmax(Exec& exec, const ArgmaxArgs& a) {
  exec.pool().parallel_for(a.logits.dim(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) a.ids.i32()[r] = argmax_row(a.logits.row(r), a.logits.dim(1));
  });
}

void logprobs(Exec& exec, const LogprobsArgs& a) {
  const int64_t vocab = a.logits.dim(1);
  const int64_t num_top = a.top_ids.is_set() ? a.top_ids.dim(1) : 0;
  exec.pool().parallel_for(a.logits.dim(0), 1, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> order(static_cast<size_t>(num_top));
    for (int64_t r = begin; r < end; ++r) {
      const float* logits = a.logits.row(r);
      const int32_t id = a.ids.i32()[r];
      MOAT_CHECK(id >= 0 && id < vocab, "logprobs: id {} of {}", id, vocab);
      const double largest = *std::max_element(logits, logits + vocab);
      double sum = 0;
      for (int64_t i = 0; i < vocab; ++i) sum += std::exp(logits[i] - largest);
      const double log_sum = largest + std::log(sum);
      a.chosen.f32()[r] = static_cast<float>(logits[id] - log_sum);
      // The best so far, in order; most logits lose against the last one at once. NaN counts as the least likely.
      const auto better = [&](int32_t x, int32_t y) {
        const float lx = std::isnan(logits[x]) ? -INFINITY : logits[x];
        const float ly = std::isnan(logits[y]) ? -INFINITY : logits[y];
        return lx > ly || (lx == ly && x < y);
      };
      int64_t held = 0;
      for (int32_t i = 0; i < vocab && num_top > 0; ++i) {
        if (held == num_top && !better(i, order[static_cast<size_t>(held - 1)])) continue;
        held = std::min(held + 1, num_top);
        int64_t at = held - 1;
        for (; at > 0 && better(i, order[static_cast<size_t>(at - 1)]); --at) {
          order[static_cast<size_t>(at)] = order[static_cast<size_t>(at - 1)];
        }
        order[static_cast<size_t>(at)] = i;
      }
      for (int64_t j = 0; j < num_top; ++j) {
        const int32_t top = order[static_cast<size_t>(j)];
        a.top_ids.i32()[r * num_top + j] = top;
        a.top_logprobs.f32()[r * num_top + j] = static_cast<float>(logits[top] - log_sum);
      }
    }
  });
}

}  // namespace moat::cpu
