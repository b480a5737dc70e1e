// SPDX-License-Identifier: Apache-2.0
#include "text/unicode.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "base/utf8.h"

namespace moat {
namespace {

struct Range {
  uint32_t first, last;
  uint16_t classes;
};

constexpr Range kRanges[] = {
#include "text/unicode_tables.inc"
};

constexpr uint16_t search(char32_t code_point) {
  const Range* range = std::upper_bound(std::begin(kRanges), std::end(kRanges), code_point,
                                        [](char32_t value, const Range& r) { return value < r.first; });
  if (range == std::begin(kRanges)) return 0;
  --range;
  return code_point <= range->last ? range->classes : uint16_t{0};
}

// ASCII and the large blocks of European scripts without a search.
constexpr uint32_t kDirect = 0x600;
constexpr auto kDirectTable = [] {
  std::array<uint16_t, kDirect> table = {};
  for (const Range& range : kRanges) {
    for (uint32_t c = range.first; c <= range.last && c < kDirect; ++c) table[c] = range.classes;
  }
  return table;
}();

}  // namespace

uint16_t unicode_classes(char32_t code_point) {
  if (code_point < kDirect) return kDirectTable[code_point];
  // The one range that holds most of the rest of the world's text.
  if (code_point >= 0x4E00 && code_point <= 0x9FFF) return kOtherLetter | kHan;
  return search(code_point);
}

bool is_python_space(char32_t code_point) {
  return (unicode_classes(code_point) & kWhiteSpace) != 0 || (code_point >= 0x1C && code_point <= 0x1F);
}

std::string_view python_strip(std::string_view text) {
  size_t begin = 0;
  while (begin < text.size()) {
    const Utf8Step step = utf8_step(text.substr(begin));
    if (!is_python_space(step.code_point)) break;
    begin += step.length;
  }
  text.remove_prefix(begin);
  while (!text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
    if (!is_python_space(utf8_step(text.substr(last)).code_point)) break;
    text = text.substr(0, last);
  }
  return text;
}

}  // namespace moat
