// SPDX-License-Identifier: Apache-2.0
#include "ops/op.h"

namespace moat {

int64_t Case::operator[](std::string_view name) const {
  for (const auto& [key, value] : dims) {
    if (name == key) return value;
  }
  MOAT_CHECK(false, "case has no {}", name);
  return 0;
}

std::string Case::describe() const {
  std::string text;
  for (const auto& [key, value] : dims) text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, value);
  return text;
}

}  // namespace moat
