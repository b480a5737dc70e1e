// SPDX-License-Identifier: Apache-2.0
// Tokenizer: tiktoken byte-pair encoding as Kimi K3 and Kimi-Linear use it (rank file + reserved ids from
// tokenizer_config.json). Text and markup are two different calls: what users write can never become a control token.
// Immutable after load; any thread.
//
// Ids: token id = rank for the num_ranks ordinary tokens; then 256 reserved ids num_ranks .. num_ranks + 255, named by
// added_tokens_decoder, unnamed ones "<|reserved_token_ID|>".
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moat {

// A piece of a prompt, encoded on its own (concatenating before encoding gives other ids and lets users forge structure).
struct Segment {
  enum class Kind {
    kText,    // ordinary bytes
    kMarkup,  // names of reserved ids become those ids
    kMedia,   // an image block: as markup, the pad token stands for the image
  };
  std::string text;
  Kind kind = Kind::kText;
  bool operator==(const Segment&) const = default;
};

class Tokenizer {
 public:
  // Reads `directory`/tiktoken.model and tokenizer_config.json. Fails, naming file and line, on a malformed rank file, ranks
  // that are not dense, a missing single byte, or a control token that has no id.
  static Result<Tokenizer> load(const std::string& directory);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  int32_t vocab_size() const;  // num_ranks + 256
  int32_t num_ranks() const;

  // Plain mode. Invalid UTF-8 is replaced by U+FFFD first. Linear in the length, whatever the text.
  std::vector<int32_t> encode_text(std::string_view utf8) const;
  // Markup mode: names of reserved ids become their ids, leftmost first; what is between them is encoded as text.
  std::vector<int32_t> encode_markup(std::string_view utf8) const;
  std::vector<int32_t> encode(std::span<const Segment> segments) const;

  // The pre-tokenizer alone: the pieces of valid UTF-8 `text` that are merged independently.
  static std::vector<std::string_view> split(std::string_view text);

  // The bytes of one token (of a reserved id: its name); possibly part of a code point. `id` must be in [0, vocab_size).
  std::string_view token_bytes(int32_t id) const;
  std::string decode(std::span<const int32_t> ids) const;  // concatenated bytes; ids outside the vocabulary are skipped
  bool is_reserved(int32_t id) const { return id >= num_ranks() && id < vocab_size(); }
  std::optional<int32_t> reserved_id(std::string_view name) const;

  // The four ids that carry structure in XTML; absent (-1) in a tokenizer without them (Kimi-Linear).
  struct ControlIds {
    int32_t open = -1, close = -1, sep = -1, end_of_msg = -1;
  };
  const ControlIds& control() const;
  bool has_xtml() const { return control().open >= 0; }

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Bytes of successive tokens -> valid UTF-8, never half a code point. Invalid bytes become U+FFFD (one per maximal part).
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);  // what is complete now
  std::string flush();                       // an incomplete rest as U+FFFD; empties the stream

 private:
  std::string held_;
};

}  // namespace moat
