// SPDX-License-Identifier: Apache-2.0
#include "plan/host_memory.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "base/cgroup.h"
#include "base/file.h"

namespace moat {
namespace {

// The number that `text` begins with; -1 where there is none ("max").
int64_t leading_number(std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() ? value : -1;
}

}  // namespace

int64_t cgroup_memory_limit(const std::string& root) {
  constexpr int64_t kUnlimited = int64_t{1} << 60;  // version 1 says "none" by a number near 2^63
  int64_t limit = kUnlimited;
  for (const std::string& directory : cgroup_directories("memory", root)) {
    for (const char* name : {"/memory.max", "/memory.limit_in_bytes"}) {
      const auto text = read_file(directory + name);
      const int64_t bytes = text.ok() ? leading_number(*text) : -1;
      if (bytes > 0) limit = std::min(limit, bytes);
    }
  }
  return limit == kUnlimited ? 0 : limit;
}

int64_t host_memory_bytes() {
  const int64_t physical = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  const int64_t limit = cgroup_memory_limit();
  return limit > 0 ? std::min(limit, physical) : physical;
}

ResidentMemory resident_memory() {
  const auto text = read_file("/proc/self/statm");  // pages: size resident shared ...
  if (!text.ok()) return {};
  std::string_view rest = *text;
  int64_t pages[3] = {};
  for (int64_t& count : pages) {
    count = std::max<int64_t>(leading_number(rest), 0);
    rest.remove_prefix(std::min(rest.size(), rest.find(' ') + 1));
  }
  const int64_t page = sysconf(_SC_PAGE_SIZE);
  return {.anonymous_bytes = (pages[1] - pages[2]) * page, .file_bytes = pages[2] * page};
}

}  // namespace moat
