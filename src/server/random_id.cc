// SPDX-License-Identifier: Apache-2.0
#include "server/random_id.h"

#include <fmt/format.h>

#include <random>

namespace moat {

uint64_t random_u64() {
  thread_local std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

std::string random_id(std::string_view prefix) {
  return fmt::format("{}{:016x}{:08x}", prefix, random_u64(), random_u64() & 0xffffffffU);
}

}  // namespace moat
