// SPDX-License-Identifier: Apache-2.0
// The pre-tokenizer of Kimi K3: where text is cut before byte pairs are merged. A hand-written matcher of
//
//   1  [\p{Han}]+
//   2  [^\r\n\p{L}\p{N}]? U* L+ (?i:'s|'t|'re|'ve|'m|'ll|'d)?
//   3  [^\r\n\p{L}\p{N}]? U+ L* (?i:'s|'t|'re|'ve|'m|'ll|'d)?
//      with U = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]] and L = [\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]
//   4  \p{N}{1,3}
//   5   ?[^\s\p{L}\p{N}]+[\r\n]*
//   6  \s*[\r\n]+
//   7  \s+(?!\S)
//   8  \s+
//
// (first alternative that matches, greedy inside, Unicode 16.0). Pure functions.
#pragma once

#include <cstddef>
#include <string_view>

namespace moat {

// Bytes of the first piece of `text`, which must be valid UTF-8 and not empty. Over a whole text the work is linear.
size_t first_piece(std::string_view text);

// Bytes of the first slice that may be encoded on its own: the reference encoder cuts text after 400 000 characters,
// and within those where a run of whitespace or of other characters exceeds 25 000. The state spans one text.
class SliceCutter {
 public:
  explicit SliceCutter(std::string_view text) : rest_(text) {}  // valid UTF-8

  bool done() const { return rest_.empty(); }
  std::string_view next();

 private:
  std::string_view rest_;
  size_t block_chars_ = 0;  // characters of the current 400 000 that earlier slices took
};

}  // namespace moat
