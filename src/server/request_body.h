// SPDX-License-Identifier: Apache-2.0
// What every POST route does first with its body.
#pragma once

#include <optional>
#include <string_view>

#include "base/json.h"
#include "server/api_error.h"

namespace moat {

// The body as one JSON object. Duplicate keys are refused: which of the two was meant is a guess.
std::optional<ApiError> parse_body(std::string_view body, Json& json);

ApiError prepare_pool_full();

}  // namespace moat
