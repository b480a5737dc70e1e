// SPDX-License-Identifier: Apache-2.0
// The pass of top_k_probs over the vocabulary in Highway: largest logit of each block, and whether a NaN or +inf is
// there.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/sparse_hwy.cc"
#include <hwy/foreach_target.h>
// foreach_target.h first.
#include <hwy/cache_control.h>
#include <limits>

#include "ops/sparse_kernels.h"
#include "ops/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// Elements; a page ahead, where hardware prefetchers stop.
constexpr int64_t kPrefetchDistance = 1024;

void FindBlockMaxima(const float* logits, int64_t vocab, float* maxima, int64_t begin, int64_t end) {
  const D d;
  const int64_t n = lanes();
  const V limit = hn::Set(d, std::numeric_limits<float>::max());
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  for (int64_t b = begin; b < end; ++b) {
    const float* block = logits + b * kLogitBlock;
    const int64_t count = std::min(kLogitBlock, vocab - b * kLogitBlock);
    V largest = hn::Set(d, -std::numeric_limits<float>::infinity());
    auto fine = hn::Eq(limit, limit);
    int64_t i = 0;
    for (; i + n <= count; i += n) {
      hwy::Prefetch(block + i + kPrefetchDistance);  // beyond the end of the memory, too: a prefetch never faults
      const V x = hn::LoadU(d, block + i);
      fine = hn::And(fine, hn::Le(x, limit));  // false for NaN
      largest = hn::Max(largest, x);
    }
    float result = hn::GetLane(hn::MaxOfLanes(d, largest));
    bool bad = !hn::AllTrue(d, fine);
    for (; i < count; ++i) {
      bad |= !(block[i] <= std::numeric_limits<float>::max());
      result = block[i] > result ? block[i] : result;
    }
    maxima[b] = bad ? kNaN : result;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(FindBlockMaxima);

namespace simd {

void top_k_probs(Exec& exec, const TopKProbsArgs& a) {
  top_k_probs_by_blocks(exec, a, [](const float* logits, int64_t vocab, float* maxima, int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(FindBlockMaxima)(logits, vocab, maxima, begin, end);
  });
}

}  // namespace simd
}  // namespace moat
#endif
