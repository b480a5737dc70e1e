// SPDX-License-Identifier: Apache-2.0
// XtmlWriter: the elements of Kimi K3's chat format as segments. Control tokens are markup, all else is text, cut the
// way the model was trained: tag name; then per attribute space and key, `="`, escaped value, `"`.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer.h"

namespace moat {

class XtmlWriter {
 public:
  using Attribute = std::pair<std::string_view, std::string_view>;

  void text(std::string_view text);  // empty text makes no segment
  void open(std::string_view tag, const std::vector<Attribute>& attributes = {});
  void close(std::string_view tag);
  void end_message();  // closes the message element and ends the message
  // A message of the system's own: <|open|>message role="system" type="TYPE"<|sep|>BODY...
  void note(std::string_view type, std::string_view body);

  std::vector<Segment> take_segments() { return std::move(segments_); }
  std::vector<size_t> take_message_ends() { return std::move(message_ends_); }

 private:
  void control(std::string_view name);

  std::vector<Segment> segments_;
  std::vector<size_t> message_ends_;
};

}  // namespace moat
