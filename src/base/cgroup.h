// SPDX-License-Identifier: Apache-2.0
// Control groups of this process: where the files are that may hold a limit.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moat {

// Directories, without a slash at the end, of the groups that this process is in and of their ancestors, innermost first:
// those of version 2, then those of version 1's `controller` ("memory", "cpu"). A limit may sit on any of them; many do
// not exist, e.g. inside a container that sees its own group as the root. `root` goes in front of /proc and /sys, for
// tests.
std::vector<std::string> cgroup_directories(std::string_view controller, const std::string& root = "");

}  // namespace moat
