// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured: the ceilings that every figure of `moat bench` is a share of, and that
// expected step times are made from.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace moat {

enum class Effort : uint8_t {
  kThorough,  // seconds; for figures that are published
  kQuick,     // 0.3 seconds for both ceilings together; a smaller buffer, so a very large cache reads as memory
};

// Bytes a second of all threads reading one buffer that is larger than the last-level cache; best of a few passes.
double measure_read_bandwidth(ThreadPool& pool, Effort effort = Effort::kThorough);

// f32 fused multiply-adds in registers, all threads, 2 operations each, with the widest vectors that dispatch picks.
// Operations a second.
double measure_f32_flops(ThreadPool& pool, Effort effort = Effort::kThorough);

}  // namespace moat
