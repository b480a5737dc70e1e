// SPDX-License-Identifier: Apache-2.0
// One step of UTF-8 decoding, with the notion of "maximal invalid part" that WHATWG, Unicode and Python share.
// Everything in moat that looks at code points goes through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace moat {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

enum class Utf8Kind { kValid, kInvalid, kIncomplete };

struct Utf8Step {
  Utf8Kind kind = Utf8Kind::kInvalid;
  uint32_t length = 1;      // bytes of the code point, of the maximal invalid part, or of the unfinished rest
  char32_t code_point = 0;  // of a valid one
};

// Looks at the beginning of `bytes`, which must not be empty. kIncomplete: all of `bytes` could begin a code point.
inline Utf8Step utf8_step(std::string_view bytes) {
  const auto lead = static_cast<unsigned char>(bytes[0]);
  if (lead < 0x80) return {Utf8Kind::kValid, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Kind::kInvalid, 1, 0};
  const uint32_t wanted = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte of some leads has a narrower range: no overlong forms, no surrogates, nothing above U+10FFFF.
  unsigned char low = 0x80, high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  char32_t code_point = lead & (0xFFU >> (wanted + 1));
  for (uint32_t i = 1; i < wanted; ++i) {
    if (i >= bytes.size()) return {Utf8Kind::kIncomplete, i, 0};
    const auto byte = static_cast<unsigned char>(bytes[i]);
    if (byte < low || byte > high) return {Utf8Kind::kInvalid, i, 0};
    code_point = code_point << 6 | (byte & 0x3F);
    low = 0x80;
    high = 0xBF;
  }
  return {Utf8Kind::kValid, wanted, code_point};
}

// Replaces each maximal invalid part of `bytes` with U+FFFD (WHATWG decoding).
std::string utf8_sanitize(std::string_view bytes);
bool is_valid_utf8(std::string_view bytes);

}  // namespace moat
