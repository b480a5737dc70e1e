// SPDX-License-Identifier: Apache-2.0
#include "text/pretokenizer.h"

#include "base/utf8.h"
#include "text/unicode.h"

namespace moat {
namespace {

// One code point of valid UTF-8; length 0 at the end of the text.
struct Char {
  char32_t code_point = 0;
  uint32_t length = 0;
  uint16_t classes = 0;

  bool has(uint16_t any) const { return (classes & any) != 0; }
  bool is_newline() const { return code_point == '\n' || code_point == '\r'; }
};

Char char_at(std::string_view text, size_t at) {
  if (at >= text.size()) return {};
  const auto byte = static_cast<unsigned char>(text[at]);
  if (byte < 0x80) return {byte, 1, unicode_classes(byte)};
  const Utf8Step step = utf8_step(text.substr(at));
  return {step.code_point, step.length, unicode_classes(step.code_point)};
}

// The two letter classes of alternatives 2 and 3, both without Han.
constexpr uint16_t kBoth = kModifierLetter | kOtherLetter | kMark;
bool is_upper(const Char& c) { return c.has(kUppercase | kTitlecase | kBoth) && !c.has(kHan); }
bool is_lower(const Char& c) { return c.has(kLowercase | kBoth) && !c.has(kHan); }
bool is_symbol(const Char& c) { return c.length > 0 && !c.has(kWhiteSpace | kLetter | kNumber); }

template <class Predicate>
size_t skip(std::string_view text, size_t at, Predicate predicate) {
  while (true) {
    const Char c = char_at(text, at);
    if (c.length == 0 || !predicate(c)) return at;
    at += c.length;
  }
}

// Bytes of (?i:'s|'t|'re|'ve|'m|'ll|'d)? at `at`.
size_t contraction(std::string_view text, size_t at) {
  if (at + 1 >= text.size() || text[at] != '\'') return 0;
  const auto lower = [&](size_t i) { return i < text.size() ? text[i] | 0x20 : 0; };
  const int first = lower(at + 1), second = lower(at + 2);
  if (text.substr(at + 1).starts_with("\xC5\xBF")) return 3;  // U+017F folds to s
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if ((first == 'r' || first == 'v') && second == 'e') return 3;
  if (first == 'l' && second == 'l') return 3;
  return 0;
}

// What the letters of alternatives 2 and 3 can take from one starting point.
struct Word {
  size_t start;
  size_t second_end;  // end of a match of alternative 2, or start if it does not match
  size_t third_end;   // the same of alternative 3
};

Word match_word(std::string_view text, size_t start) {
  size_t end = start, last_both_end = start;
  for (Char c = char_at(text, end); c.length > 0 && is_upper(c); c = char_at(text, end)) {
    end += c.length;
    if (c.has(kBoth)) last_both_end = end;
  }
  const size_t lower_end = skip(text, end, is_lower);
  // Without a lower-case run the first class gives back down to the last character that the second one takes too.
  return {start, lower_end > end ? lower_end : last_both_end, end > start ? lower_end : start};
}

// End of a match of alternatives 2 and 3 at the beginning, or 0.
size_t word(std::string_view text, const Char& first) {
  const bool may_lead = !first.is_newline() && !first.has(kLetter | kNumber);
  const bool may_start = is_upper(first) || is_lower(first);
  const Word led = may_lead ? match_word(text, first.length) : Word{0, 0, 0};
  size_t end = led.second_end > led.start ? led.second_end : 0;
  if (end == 0 && may_start) {
    const Word plain = match_word(text, 0);
    end = plain.second_end;
    if (end == 0 && led.third_end == led.start) end = plain.third_end;
  }
  if (end == 0 && led.third_end > led.start) end = led.third_end;
  return end == 0 ? 0 : end + contraction(text, end);
}

size_t white_space(std::string_view text) {
  size_t end = 0, last_length = 0, newline_end = 0;
  for (Char c = char_at(text, 0); c.has(kWhiteSpace); c = char_at(text, end)) {
    end += c.length;
    last_length = c.length;
    if (c.is_newline()) newline_end = end;
  }
  if (newline_end > 0) return newline_end;
  if (end == text.size() || end == last_length) return end;
  return end - last_length;  // the last one belongs to what follows
}

}  // namespace

size_t first_piece(std::string_view text) {
  const Char first = char_at(text, 0);
  if (first.has(kHan)) return skip(text, 0, [](const Char& c) { return c.has(kHan); });
  if (const size_t end = word(text, first)) return end;
  if (first.has(kNumber)) {
    size_t end = first.length;
    for (int i = 1; i < 3; ++i) {
      const Char c = char_at(text, end);
      if (!c.has(kNumber)) break;
      end += c.length;
    }
    return end;
  }
  const size_t symbols = first.code_point == ' ' ? 1 : 0;
  if (const size_t end = skip(text, symbols, is_symbol); end > symbols) {
    return skip(text, end, [](const Char& c) { return c.is_newline(); });
  }
  return white_space(text);
}

std::string_view SliceCutter::next() {
  constexpr size_t kBlockChars = 400000, kRunChars = 25000;
  size_t at = 0, run = 0;
  bool run_is_space = false;
  while (at < rest_.size() && block_chars_ < kBlockChars) {
    const Char c = char_at(rest_, at);
    const bool space = is_python_space(c.code_point);
    run = run == 0 || space != run_is_space ? 1 : run + 1;
    run_is_space = space;
    if (run > kRunChars) break;
    at += c.length;
    ++block_chars_;
  }
  if (block_chars_ == kBlockChars) block_chars_ = 0;
  const std::string_view slice = rest_.substr(0, at);
  rest_.remove_prefix(at);
  return slice;
}

}  // namespace moat
