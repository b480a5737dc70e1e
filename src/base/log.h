// SPDX-License-Identifier: Apache-2.0
// Levelled log lines "message key=value ...". The sink is set once by main (spdlog lives behind it); before that, lines
// go to stderr. Any thread.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string>
#include <string_view>
#include <utility>

namespace moat {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

using LogSink = std::function<void(LogLevel, std::string_view line)>;

void set_log_sink(LogSink sink);  // before other threads start
void set_log_level(LogLevel level);
bool log_enabled(LogLevel level);
void log_line(LogLevel level, std::string_view line);

template <class... A>
void log(LogLevel level, fmt::format_string<A...> format, A&&... args) {
  if (log_enabled(level)) log_line(level, fmt::format(format, std::forward<A>(args)...));
}
template <class... A>
void log_debug(fmt::format_string<A...> format, A&&... args) {
  log(LogLevel::kDebug, format, std::forward<A>(args)...);
}
template <class... A>
void log_info(fmt::format_string<A...> format, A&&... args) {
  log(LogLevel::kInfo, format, std::forward<A>(args)...);
}
template <class... A>
void log_warn(fmt::format_string<A...> format, A&&... args) {
  log(LogLevel::kWarn, format, std::forward<A>(args)...);
}
template <class... A>
void log_error(fmt::format_string<A...> format, A&&... args) {
  log(LogLevel::kError, format, std::forward<A>(args)...);
}

}  // namespace moat
