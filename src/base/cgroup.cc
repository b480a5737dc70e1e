// SPDX-License-Identifier: Apache-2.0
#include "base/cgroup.h"

#include <algorithm>

#include "base/file.h"

namespace moat {
namespace {

void add_with_ancestors(const std::string& mount, std::string group, std::vector<std::string>& directories) {
  if (group == "/") group.clear();
  while (true) {
    directories.push_back(mount + group);
    if (group.empty()) return;
    group.resize(group.find_last_of('/'));
  }
}

bool lists(std::string_view controllers, std::string_view controller) {
  while (true) {
    const size_t comma = controllers.find(',');
    if (controllers.substr(0, comma) == controller) return true;
    if (comma == std::string_view::npos) return false;
    controllers.remove_prefix(comma + 1);
  }
}

}  // namespace

std::vector<std::string> cgroup_directories(std::string_view controller, const std::string& root) {
  std::string unified = "/";
  std::string own = "/";
  const auto text = read_file(root + "/proc/self/cgroup");
  std::string_view rest = text.ok() ? std::string_view(*text) : std::string_view();
  while (!rest.empty()) {  // lines "id:controllers:/path"; version 2 is "0::/path"
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    const size_t first = line.find(':');
    const size_t second = first == std::string_view::npos ? first : line.find(':', first + 1);
    if (second == std::string_view::npos || line.substr(second + 1, 1) != "/") continue;
    const std::string_view controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) {
      unified = line.substr(second + 1);
    } else if (lists(controllers, controller)) {
      own = line.substr(second + 1);
    }
  }
  std::vector<std::string> directories;
  add_with_ancestors(root + "/sys/fs/cgroup", std::move(unified), directories);
  add_with_ancestors(fmt::format("{}/sys/fs/cgroup/{}", root, controller), std::move(own), directories);
  return directories;
}

}  // namespace moat
