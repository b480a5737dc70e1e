// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <atomic>
#include <cstdio>

namespace moat {
namespace {

std::atomic<LogLevel> g_level{LogLevel::kInfo};

LogSink& sink() {
  static LogSink instance;
  return instance;
}

const char* level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarn: return "warn";
    case LogLevel::kError: return "error";
  }
  return "?";
}

}  // namespace

void set_log_sink(LogSink new_sink) { sink() = std::move(new_sink); }
void set_log_level(LogLevel level) { g_level = level; }
bool log_enabled(LogLevel level) { return level >= g_level; }

void log_line(LogLevel level, std::string_view line) {
  if (sink()) return sink()(level, line);
  std::fprintf(stderr, "[%s] %.*s\n", level_name(level), static_cast<int>(line.size()), line.data());
}

}  // namespace moat
