// SPDX-License-Identifier: Apache-2.0
// Memory of this machine as this process sees it: what it may use and what it holds.
#pragma once

#include <cstdint>
#include <string>

namespace moat {

// Bytes this process may use: the smallest limit of its control groups where there is one, else physical memory.
int64_t host_memory_bytes();

// The smallest memory limit of the process's control groups and their ancestors (version 2 memory.max, version 1
// memory.limit_in_bytes), in bytes; 0: none. `root` goes in front of /proc and /sys, for tests.
int64_t cgroup_memory_limit(const std::string& root = "");

// What is in memory now. Mapped weights are file pages: they count once they have been touched, and the kernel may take
// them back under pressure. Pools, temporaries and everything else are anonymous. Counted by the kernel in pages, a
// little late on machines with many threads (up to 256 kB a thread).
struct ResidentMemory {
  int64_t anonymous_bytes = 0;
  int64_t file_bytes = 0;  // mapped files, the program among them
  int64_t total_bytes() const { return anonymous_bytes + file_bytes; }
};
ResidentMemory resident_memory();  // zeros where the system does not tell

}  // namespace moat
