// SPDX-License-Identifier: Apache-2.0
// Memory that is resident before it is needed. The kernel gives a page when it is first written and takes it from the
// writer's node; pools that are written when tokens come would grow for hours and fail late.
#pragma once

#include <cstddef>
#include <span>

#include "base/thread_pool.h"

namespace moat {

// Fills `bytes` with zeros, every thread of the pool a part, so that each page exists from now on and pages are spread
// over the nodes that the threads run on.
void touch(ThreadPool& pool, std::span<std::byte> bytes);

}  // namespace moat
