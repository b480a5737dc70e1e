// SPDX-License-Identifier: Apache-2.0
// Arch: plain facts about a device, which may be one that is not here (plans are computed on any machine). Arena: bump
// memory for the temporaries of one step, sized once by a dry pass and never grown while serving.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace moat {

struct Arch {
  Backend backend = Backend::kCpu;
  std::string name;   // "cpu[AVX3]", "sm90", "gfx950"
  std::string level;  // instruction set or compute capability: "AVX3_ZEN4", "90", "gfx950"
  int lanes = 16;     // f32 lanes of a vector (CPU), warp or wave width (GPU)
};

// The CPU this process runs on, with the instruction set that run-time dispatch picks.
Arch host_arch();
// Instruction sets compiled in and usable here, best first ("AVX3", "AVX2", ...).
std::vector<std::string> host_isas();
// Restricts dispatch to `isa` for the whole process; fails if it is not one of host_isas(). Before any kernel runs.
Status force_isa(std::string_view isa);

// Not thread-safe: one arena per rank. In dry mode it hands out null pointers and only counts.
class Arena {
 public:
  Arena() = default;  // dry
  explicit Arena(size_t bytes) : buffer_(bytes), capacity_(bytes), dry_(false) {}

  Tensor alloc(DType dtype, Dims dims);                            // contiguous, 64-byte aligned, uninitialised
  std::span<std::byte> memory() const { return buffer_.bytes(); }  // all of it, used or not
  bool dry() const { return dry_; }
  size_t used() const { return used_; }
  size_t high_water() const { return high_water_; }

 private:
  friend class ArenaScope;
  Buffer buffer_;
  size_t capacity_ = 0;
  size_t used_ = 0;
  size_t high_water_ = 0;
  bool dry_ = true;
};

// Gives back on destruction what was allocated since construction.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.used_) {}
  ~ArenaScope() { arena_.used_ = mark_; }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  size_t mark_;
};

}  // namespace moat
