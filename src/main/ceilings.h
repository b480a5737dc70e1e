// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured: the ceilings that every figure of `moat bench` is a share of.
#pragma once

#include "base/thread_pool.h"

namespace moat {

// Bytes a second of all threads reading one buffer that is larger than the last-level cache; best of a few passes.
double measure_read_bandwidth(ThreadPool& pool);

// f32 fused multiply-adds in registers, all threads, 2 operations each, with the widest vectors that dispatch picks.
double measure_f32_flops(ThreadPool& pool);

}  // namespace moat
