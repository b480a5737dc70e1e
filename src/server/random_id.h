// SPDX-License-Identifier: Apache-2.0
// Identifiers that are unique and cannot be guessed: drawn from the system's random source.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moat {

uint64_t random_u64();
std::string random_id(std::string_view prefix);  // prefix and 24 hexadecimal digits

}  // namespace moat
