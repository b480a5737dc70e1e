// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/ceilings.cc"
#include <hwy/foreach_target.h>
// after foreach_target
#include <hwy/highway.h>

#include "core/ceilings.h"

HWY_BEFORE_NAMESPACE();
namespace moat::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Adds up `count` u32 words with enough loads in flight; the sum keeps the compiler from dropping them.
uint32_t read_words(const uint32_t* words, size_t count) {
  const hn::ScalableTag<uint32_t> d;
  const size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = hn::Zero(d), s2 = hn::Zero(d), s3 = hn::Zero(d);
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::LoadU(d, words + i));
    s1 = hn::Add(s1, hn::LoadU(d, words + i + lanes));
    s2 = hn::Add(s2, hn::LoadU(d, words + i + 2 * lanes));
    s3 = hn::Add(s3, hn::LoadU(d, words + i + 3 * lanes));
  }
  uint32_t sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
  for (; i < count; ++i) sum += words[i];
  return sum;
}

// `rounds` rounds of 8 independent chains; returns how many f32 operations that was and leaves a value in *sink.
double fma_rounds(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, 0.999F);
  const auto b = hn::Set(d, 0.001F);
  auto x0 = hn::Iota(d, 1.0F), x1 = hn::Iota(d, 2.0F), x2 = hn::Iota(d, 3.0F), x3 = hn::Iota(d, 4.0F);
  auto x4 = hn::Iota(d, 5.0F), x5 = hn::Iota(d, 6.0F), x6 = hn::Iota(d, 7.0F), x7 = hn::Iota(d, 8.0F);
  for (int64_t r = 0; r < rounds; ++r) {
    x0 = hn::MulAdd(x0, a, b);
    x1 = hn::MulAdd(x1, a, b);
    x2 = hn::MulAdd(x2, a, b);
    x3 = hn::MulAdd(x3, a, b);
    x4 = hn::MulAdd(x4, a, b);
    x5 = hn::MulAdd(x5, a, b);
    x6 = hn::MulAdd(x6, a, b);
    x7 = hn::MulAdd(x7, a, b);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(x0, x1), hn::Add(x2, x3)), hn::Add(hn::Add(x4, x5), hn::Add(x6, x7)));
  *sink = hn::GetLane(hn::SumOfLanes(d, sum));
  return static_cast<double>(rounds) * 8 * 2 * static_cast<double>(hn::Lanes(d));
}

}  // namespace moat::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <atomic>
#include <chrono>

#include "core/tensor.h"

namespace moat {

HWY_EXPORT(read_words);
HWY_EXPORT(fma_rounds);

namespace {

int num_passes(Effort effort) { return effort == Effort::kQuick ? 2 : 5; }

template <class Body>
double seconds_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double measure_read_bandwidth(ThreadPool& pool, Effort effort) {
  // Larger than any last-level cache of one socket today; in haste, than most.
  const size_t bytes = effort == Effort::kQuick ? size_t{1} << 27 : size_t{1} << 30;
  const Buffer buffer(bytes);
  auto* words = static_cast<uint32_t*>(buffer.data());
  const auto count = static_cast<int64_t>(bytes / 4);
  constexpr int64_t kGrain = 1 << 20;  // 4 MB a piece
  pool.parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) words[i] = static_cast<uint32_t>(i * 2654435761U);
  });
  std::atomic<uint32_t> sink{0};
  double best = 0;
  for (int pass = 0; pass < num_passes(effort); ++pass) {
    const double seconds = seconds_of([&] {
      pool.parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
        sink += HWY_DYNAMIC_DISPATCH(read_words)(words + begin, static_cast<size_t>(end - begin));
      });
    });
    best = std::max(best, static_cast<double>(bytes) / seconds);
  }
  MOAT_CHECK(sink != 1, "unlikely");  // uses the sum
  return best;
}

double measure_f32_flops(ThreadPool& pool, Effort effort) {
  double best = 0;
  for (int pass = 0; pass < num_passes(effort); ++pass) {
    std::atomic<int64_t> operations{0};
    const double seconds = seconds_of([&] {
      pool.parallel_for(pool.num_threads() * 4, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          float sink = 0;
          operations += static_cast<int64_t>(HWY_DYNAMIC_DISPATCH(fma_rounds)(2'000'000, &sink));
          MOAT_CHECK(sink == sink, "{}", sink);
        }
      });
    });
    best = std::max(best, static_cast<double>(operations) / seconds);
  }
  return best;
}

}  // namespace moat
#endif  // HWY_ONCE
