// SPDX-License-Identifier: Apache-2.0
// Counter-based random numbers (Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
// The same (key, counter) gives the same number on any thread, in any batch and after any restart: a sampled token
// depends on its request's seed and its position alone.
#pragma once

#include <array>
#include <cstdint>

namespace moat {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ULL * counter[0];
    const uint64_t p1 = 0xCD9E8D57ULL * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

// What a number is drawn for; streams of different purposes never overlap.
enum class RandomPurpose : uint32_t { kSample = 0, kDraft = 1, kAccept = 2, kBonus = 3, kTest = 4 };

// Uniform in [0, 1) with 53 bits.
inline double random_uniform(uint64_t seed, uint64_t position, RandomPurpose purpose) {
  const auto words = philox4x32(
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), static_cast<uint32_t>(purpose), 0},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (static_cast<uint64_t>(words[0]) << 32 | words[1]) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

// The counter of draft k < 64 of the round that begins at `position`. Rounds begin at distinct positions, so nothing is
// drawn twice: a number that decided about a rejected draft must not decide about the next one at the same position.
inline uint64_t draft_counter(uint64_t position, uint64_t k) { return position << 6 | k; }

// A small sequential generator for tests and synthetic data: successive counters of one key.
class Rng {
 public:
  explicit Rng(uint64_t seed) : seed_(seed) {}
  uint64_t next() {
    const auto words = philox4x32({static_cast<uint32_t>(counter_), static_cast<uint32_t>(counter_ >> 32),
                                   static_cast<uint32_t>(RandomPurpose::kTest), 0},
                                  {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
    ++counter_;
    return static_cast<uint64_t>(words[0]) << 32 | words[1];
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }  // [0, 1)
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  int64_t below(int64_t count) { return static_cast<int64_t>(next() % static_cast<uint64_t>(count)); }
  double normal();  // mean 0, variance 1

 private:
  uint64_t seed_;
  uint64_t counter_ = 0;
};

}  // namespace moat
