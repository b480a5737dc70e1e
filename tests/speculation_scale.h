// SPDX-License-Identifier: Apache-2.0
// How much of the speculation tests runs. MOAT_SPECULATION=full: as much as the statistics want; else minutes become seconds.
#pragma once

#include <cstdlib>
#include <string_view>

namespace moat::test {

inline bool is_full_speculation() {
  const char* value = std::getenv("MOAT_SPECULATION");
  return value != nullptr && std::string_view(value) == "full";
}

}  // namespace moat::test
