// SPDX-License-Identifier: Apache-2.0
// Reading files that may be compressed, as untrusted input: output is bounded.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace moat {

constexpr uint64_t kMaxGunzipBytes = uint64_t{1} << 30;

// The bytes of a file, decompressed if its name ends with .gz. Fails on damaged data and beyond `max_bytes` of output.
Result<std::string> read_maybe_gzip(const std::string& path, uint64_t max_bytes = kMaxGunzipBytes);

}  // namespace moat
