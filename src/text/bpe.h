// SPDX-License-Identifier: Apache-2.0
// BpeVocabulary: the tokens of a tiktoken rank file and the merging of one piece of text by their ranks. Immutable
// after parse; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moat {

class BpeVocabulary {
 public:
  // `text` is a rank file: lines "base64(token bytes) rank". `name` is what errors call it.
  static Result<BpeVocabulary> parse(std::string_view text, std::string_view name);

  int32_t size() const { return static_cast<int32_t>(offsets_.size()) - 1; }
  std::string_view bytes(int32_t rank) const {
    const auto i = static_cast<size_t>(rank);
    return std::string_view(arena_).substr(offsets_[i], offsets_[i + 1] - offsets_[i]);
  }
  int32_t find(std::string_view bytes) const;  // rank or -1

  // Working memory of merge, kept between calls.
  struct Scratch {
    struct Part {
      uint32_t next;      // begin of the part to the right
      uint32_t previous;  // begin of the part to the left
      int32_t rank;       // of this part joined with the next, -1 if that is no token
      int32_t id;
    };
    std::vector<Part> parts;     // indexed by the first byte; only entries of live parts count
    std::vector<uint64_t> heap;  // rank << 32 | first byte: the lowest rank first, then the leftmost
  };
  // Appends the ids of `piece`: itself if it is a token, else by repeatedly joining the neighbours of the lowest rank.
  void merge(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const;

 private:
  Status index(std::string_view name, const std::vector<uint32_t>& lines);

  std::string arena_;              // the bytes of all tokens, by rank
  std::vector<uint32_t> offsets_;  // size() + 1
  std::vector<int32_t> slots_;     // hash table with open addressing, -1 empty; a power of two
  int32_t byte_ids_[256] = {};
  size_t longest_ = 0;
};

}  // namespace moat
