// SPDX-License-Identifier: Apache-2.0
// Stop strings: the text of a reply ends before the first occurrence of any of them. StopMatcher works on a stream of text
// and never lets a possible beginning of a stop string out; StopStringConstraint tells the engine to stop generating at the
// token that completes one. Both use the same search, so both agree. One thread each.
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
  const std::string& matched_stop() const { return stops_[static_cast<size_t>(matched_index_)]; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
  int matched_index_ = -1;
};

// For chat replies the content channel is searched (reasoning and tool calls are not); for plain completions all text.
std::unique_ptr<Constraint> make_chat_stop_constraint(const Tokenizer& tokenizer, ReplyParser::Options options,
                                                      std::vector<std::string> stops);
std::unique_ptr<Constraint> make_text_stop_constraint(const Tokenizer& tokenizer, std::vector<std::string> stops);

}  // namespace moat
