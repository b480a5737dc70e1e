// SPDX-License-Identifier: Apache-2.0
// Properties of code points, Unicode 16.0, as the pre-tokenizer needs them. Constant tables; any thread.
#pragma once

#include <cstdint>
#include <string_view>

namespace moat {

// Bits of unicode_classes. A code point has at most one general category, besides White_Space and Han.
enum UnicodeClass : uint16_t {
  kUppercase = 1 << 0,       // Lu
  kTitlecase = 1 << 1,       // Lt
  kModifierLetter = 1 << 2,  // Lm
  kOtherLetter = 1 << 3,     // Lo
  kLowercase = 1 << 4,       // Ll
  kMark = 1 << 5,            // M: Mn, Mc, Me
  kNumber = 1 << 6,          // N: Nd, Nl, No
  kWhiteSpace = 1 << 7,      // the property, not a category
  kHan = 1 << 8,             // script (not Script_Extensions)
};

inline constexpr uint16_t kLetter = kUppercase | kTitlecase | kModifierLetter | kOtherLetter | kLowercase;

// The classes of `code_point`; 0 for anything else, out of range included.
uint16_t unicode_classes(char32_t code_point);

// What Python's str.isspace and str.strip take, on which the reference relies in places: White_Space and U+001C to
// U+001F.
bool is_python_space(char32_t code_point);
std::string_view python_strip(std::string_view text);  // of valid UTF-8
inline bool is_blank(std::string_view text) { return python_strip(text).empty(); }

}  // namespace moat
