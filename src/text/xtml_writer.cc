// SPDX-License-Identifier: Apache-2.0
#include "text/xtml_writer.h"

namespace moat {
namespace {

std::string escape_attribute(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '&') {
      out.append("&amp;");
    } else if (c == '"') {
      out.append("&quot;");
    } else {
      out.push_back(c);
    }
  }
  return out;
}

}  // namespace

void XtmlWriter::control(std::string_view name) { segments_.push_back({std::string(name), Segment::Kind::kMarkup}); }

void XtmlWriter::text(std::string_view text) {
  if (!text.empty()) segments_.push_back({std::string(text), Segment::Kind::kText});
}

void XtmlWriter::open(std::string_view tag, const std::vector<Attribute>& attributes) {
  control("<|open|>");
  text(tag);
  for (const auto& [key, value] : attributes) {
    text(fmt::format(" {}", key));
    text("=\"");
    text(escape_attribute(value));
    text("\"");
  }
  control("<|sep|>");
}

void XtmlWriter::close(std::string_view tag) {
  control("<|close|>");
  text(tag);
  control("<|sep|>");
}

void XtmlWriter::end_message() {
  close("message");
  control("<|end_of_msg|>");
  message_ends_.push_back(segments_.size());
}

void XtmlWriter::note(std::string_view type, std::string_view body) {
  open("message", {{"role", "system"}, {"type", type}});
  text(body);
  end_message();
}

}  // namespace moat
