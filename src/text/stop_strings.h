// SPDX-License-Identifier: Apache-2.0
// Stop strings: the text of a reply ends before the stop string that is the first to be complete. StopMatcher works on a stream
// of text and never lets a possible beginning of a stop string out; the constraints tell the engine to stop generating at the
// token that completes one. Both use the same search, so both agree, however the stream is cut. One thread each.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/constraint.h"
#include "text/reply_parser.h"
#include "text/tokenizer.h"

namespace moat {

class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stops);  // empty strings are ignored

  // The part of all text so far that is now known to precede any stop string and was not returned before.
  std::string push(std::string_view text);
  std::string flush();  // the rest, when the reply ended without a stop string
  bool matched() const { return matched_index_ >= 0; }
  const std::string& matched_stop() const;  // only if matched()

 private:
  // A stop string and, for each length of a matched beginning, the longest shorter one that may go on (Knuth-Morris-Pratt).
  struct Pattern {
    std::string text;
    std::vector<size_t> fallback;
  };

  std::shared_ptr<const std::vector<Pattern>> patterns_;  // shared by copies
  std::vector<size_t> progress_;                          // matched bytes of each pattern
  std::string held_;
  int matched_index_ = -1;
};

// For chat replies the content channel is searched (reasoning and tool calls are not); for plain completions the text of
// all ordinary tokens.
std::unique_ptr<Constraint> make_chat_stop_constraint(const Tokenizer& tokenizer, ReplyParser::Options options,
                                                      std::vector<std::string> stops);
std::unique_ptr<Constraint> make_text_stop_constraint(const Tokenizer& tokenizer, std::vector<std::string> stops);

}  // namespace moat
