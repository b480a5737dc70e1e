// SPDX-License-Identifier: Apache-2.0
#include "core/touch.h"

#include <cstring>

namespace moat {

void touch(ThreadPool& pool, std::span<std::byte> bytes) {
  constexpr int64_t kGrain = int64_t{2} << 20;  // a large page, where the kernel gives them
  pool.parallel_for(static_cast<int64_t>(bytes.size()), kGrain, [&](int64_t begin, int64_t end) {
    std::memset(bytes.data() + begin, 0, static_cast<size_t>(end - begin));
  });
}

}  // namespace moat
