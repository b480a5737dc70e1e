// SPDX-License-Identifier: Apache-2.0
// FieldReader: typed reading of the members of a request object. The first mistake is kept, with what was got and what
// was expected; after it every read gives "not set". null means not set, as clients send it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "server/api_error.h"

namespace moat {

class FieldReader {
 public:
  // `object` must be an object and outlive the reader; `prefix` ("stream_options.") goes before names in messages.
  explicit FieldReader(const Json& object, std::string prefix = "") : object_(object), prefix_(std::move(prefix)) {}

  std::optional<bool> boolean(std::string_view name);
  std::optional<double> number(std::string_view name, double min, double max);
  std::optional<int64_t> integer(std::string_view name, int64_t min, int64_t max);
  // As integer(), but values above `max`, of any size, become `max`.
  std::optional<int64_t> clamped_integer(std::string_view name, int64_t min, int64_t max);
  std::optional<uint64_t> seed(std::string_view name);  // any 64-bit integer, signed or not
  const std::string* string(std::string_view name);
  const Json* object(std::string_view name);
  const Json* array(std::string_view name);
  const Json* any(std::string_view name) const { return error_ ? nullptr : object_.find_set(name); }

  void fail(std::string_view name, std::string message);
  void fail(ApiError error);
  bool ok() const { return !error_.has_value(); }
  const std::optional<ApiError>& error() const { return error_; }

 private:
  void wrong(std::string_view name, const Json& got, std::string_view expected);

  const Json& object_;
  const std::string prefix_;
  std::optional<ApiError> error_;
};

// A value for an error message: its JSON, cut to a readable length.
std::string shown(const Json& value);

}  // namespace moat
