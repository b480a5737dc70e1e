// SPDX-License-Identifier: Apache-2.0
#include "server/api_error.h"

#include <utility>

namespace moat {

ApiError bad_field(std::string param, std::string message, std::string code) {
  return {.status = 400, .message = std::move(message), .param = std::move(param), .code = std::move(code)};
}

ApiError not_supported(std::string param, std::string message) {
  return bad_field(std::move(param), std::move(message), "unsupported");
}

ApiError api_error(const Status& status, std::string param) {
  ApiError error{.status = 500, .message = status.message(), .param = std::move(param)};
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      error.status = 400;
      error.code = "invalid_value";
      break;
    case StatusCode::kUnsupported:
      error.status = 400;
      error.code = "unsupported";
      break;
    case StatusCode::kNotFound:
      error.status = 404;
      error.code = "not_found";
      break;
    case StatusCode::kResourceExhausted:
      error.status = 503;
      error.code = "overloaded";
      break;
    case StatusCode::kUnavailable:
      error.status = 503;
      error.code = "unavailable";
      break;
    case StatusCode::kCancelled:
      error.status = 503;
      error.code = "cancelled";
      break;
    case StatusCode::kDeadlineExceeded:
      error.status = 504;
      error.code = "timeout";
      break;
    case StatusCode::kOk:
    case StatusCode::kDataLoss:
    case StatusCode::kInternal: error.code = "internal_error"; break;
  }
  return error;
}

std::string_view error_type(int status) {
  if (status == 401) return "authentication_error";
  if (status == 503) return "service_unavailable_error";
  if (status >= 500) return "server_error";
  return "invalid_request_error";
}

Json error_json(const ApiError& error) {
  const auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  return Json::object({{"error", Json::object({{"message", utf8_sanitize(error.message)},
                                               {"type", error_type(error.status)},
                                               {"param", or_null(error.param)},
                                               {"code", or_null(error.code)}})}});
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response{.status = error.status, .body = error_json(error).dump()};
  if (error.status == 503) response.headers.emplace_back("Retry-After", "1");
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

}  // namespace moat
