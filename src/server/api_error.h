// SPDX-License-Identifier: Apache-2.0
// What a client sees of a failure: {"error": {"message", "type", "param", "code"}} and an HTTP status.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "server/http.h"

namespace moat {

struct ApiError {
  int status = 400;
  std::string message;
  std::string param;  // the request field at fault; empty: null
  std::string code;   // for programs; empty: null
};

ApiError bad_field(std::string param, std::string message, std::string code = "invalid_value");
ApiError not_supported(std::string param, std::string message);
// A Status of the engine or the text layer; `param` names the field it came from, if one did.
ApiError api_error(const Status& status, std::string param = "");

std::string_view error_type(int status);  // "invalid_request_error", "authentication_error", ...
Json error_json(const ApiError& error);
HttpResponse error_response(const ApiError& error);  // 503 comes with Retry-After

}  // namespace moat
