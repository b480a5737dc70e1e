// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

#include <cstring>

namespace moat {
namespace {

// Length of the leading part of `bytes` that is valid.
size_t valid_prefix(std::string_view bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    // Eight ASCII bytes at a time: most text is.
    uint64_t word;
    if (at + sizeof word <= bytes.size()) {
      std::memcpy(&word, bytes.data() + at, sizeof word);
      if ((word & 0x8080808080808080ULL) == 0) {
        at += sizeof word;
        continue;
      }
    }
    const Utf8Step step = utf8_step(bytes.substr(at));
    if (step.kind != Utf8Kind::kValid) break;
    at += step.length;
  }
  return at;
}

}  // namespace

bool is_valid_utf8(std::string_view bytes) { return valid_prefix(bytes) == bytes.size(); }

std::string utf8_sanitize(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (true) {
    const size_t valid = valid_prefix(bytes);
    out.append(bytes.substr(0, valid));
    bytes.remove_prefix(valid);
    if (bytes.empty()) return out;
    out.append(kReplacementCharacter);
    bytes.remove_prefix(utf8_step(bytes).length);
  }
}

}  // namespace moat
