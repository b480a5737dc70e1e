// SPDX-License-Identifier: Apache-2.0
#include "server/request_body.h"

#include <utility>

namespace moat {

std::optional<ApiError> parse_body(std::string_view body, Json& json) {
  constexpr JsonLimits kLimits{.max_depth = 128, .duplicate_keys = DuplicateKeys::kError};
  Result<Json> parsed = parse_json(body, kLimits);
  if (!parsed.ok()) {
    return bad_field("", fmt::format("the body is not valid JSON: {}", parsed.status().message()), "invalid_json");
  }
  json = std::move(parsed).value();
  if (json.is_object()) return std::nullopt;
  return bad_field("", fmt::format("the body is of type {}, expected an object", json.type_name()), "invalid_json");
}

ApiError prepare_pool_full() {
  return {.status = 503, .message = "too many requests are being prepared", .code = "overloaded"};
}

}  // namespace moat
