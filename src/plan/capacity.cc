// SPDX-License-Identifier: Apache-2.0
#include "plan/capacity.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/file.h"

namespace moat {

int64_t block_bytes(const ModelConfig& config, int64_t block_size) {
  return config.num_mla_layers() * block_size * config.mla_row() * 4;
}

int64_t slot_bytes(const ModelConfig& config) {
  const int64_t state = config.kda_width() * config.kda_head_dim;
  const int64_t conv = 3 * (config.conv_kernel - 1) * config.kda_width();
  return config.num_kda_layers() * (state + conv) * 4;
}

std::string format_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000.0 && unit + 1 < std::size(kUnits)) {
    value /= 1000.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.{}f} {}", value, value < 10 ? 2 : 1, kUnits[unit]);
}

Result<Capacity> plan_capacity(const ModelConfig& config, const CapacityOptions& o) {
  const int64_t per_block = std::max<int64_t>(block_bytes(config, o.block_size), 1);
  const int64_t per_slot = std::max<int64_t>(slot_bytes(config), 1);
  const int64_t blocks_per_seq = (o.max_model_len + o.block_size - 1) / o.block_size;
  const auto usable = static_cast<int64_t>(static_cast<double>(o.memory_bytes) * o.memory_fraction);
  const int64_t left = usable - o.weight_bytes - o.arena_bytes;
  const int64_t one_sequence = per_slot + blocks_per_seq * per_block;
  if (left < one_sequence) {
    return resource_exhausted(
        "the model does not fit: {} x {:.2f} of memory = {}, less weights {} and step temporaries {} leaves {}; one "
        "sequence "
        "of {} tokens needs {} (state {} + {} blocks of {})",
        format_bytes(o.memory_bytes), o.memory_fraction, format_bytes(usable), format_bytes(o.weight_bytes),
        format_bytes(o.arena_bytes), format_bytes(std::max<int64_t>(left, 0)), o.max_model_len,
        format_bytes(one_sequence), format_bytes(per_slot), blocks_per_seq, format_bytes(per_block));
  }
  Capacity c;
  const int64_t slots_that_fit = std::max<int64_t>(1, left / 2 / per_slot);
  c.max_num_seqs = std::min(o.max_num_seqs, slots_that_fit);
  c.cache.block_size = o.block_size;
  c.cache.num_slots = c.max_num_seqs;
  const int64_t blocks_wanted = c.max_num_seqs * blocks_per_seq;
  const int64_t blocks_that_fit = (left - c.max_num_seqs * per_slot) / per_block;
  c.cache.num_blocks = std::min(blocks_wanted, blocks_that_fit);
  c.cache_token_capacity = c.cache.num_blocks * o.block_size;
  c.bound =
      c.max_num_seqs < o.max_num_seqs   ? fmt::format("state slots: {} fit, {} wanted", c.max_num_seqs, o.max_num_seqs)
      : blocks_that_fit < blocks_wanted ? fmt::format("cache blocks: {} sequences of {} tokens need {}, {} fit",
                                                      c.max_num_seqs, o.max_model_len, blocks_wanted, blocks_that_fit)
                                        : "max_num_seqs: every sequence can be as long as the context";
  c.lines = {{"weights", o.weight_bytes, "mapped files and converted copies"},
             {"step temporaries", o.arena_bytes, "arena, from the dry pass"},
             {"KDA and convolution state", c.cache.num_slots * per_slot,
              fmt::format("{} slots of {}", c.cache.num_slots, format_bytes(per_slot))},
             {"MLA cache", c.cache.num_blocks * per_block,
              fmt::format("{} blocks of {} tokens = {} tokens, {} B a token", c.cache.num_blocks, o.block_size,
                          c.cache_token_capacity, per_block / o.block_size)}};
  int64_t total = 0;
  for (const auto& line : c.lines) total += line.bytes;
  c.lines.push_back({"total", total,
                     fmt::format("of {} usable ({} x {:.2f})", format_bytes(usable), format_bytes(o.memory_bytes),
                                 o.memory_fraction)});
  return c;
}

std::string Capacity::table() const {
  std::string text;
  for (const Line& line : lines) {
    text += fmt::format("  {:<26} {:>10}  {}\n", line.component, format_bytes(line.bytes), line.note);
  }
  text += fmt::format("  concurrency: {} sequences; bound by {}\n", max_num_seqs, bound);
  return text;
}

int64_t host_memory_bytes() {
  const int64_t physical = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  const Result<std::string> limit = read_file("/sys/fs/cgroup/memory.max");
  if (!limit.ok()) return physical;
  const int64_t bytes = std::strtoll(limit->c_str(), nullptr, 10);  // "max" reads as 0
  return bytes > 0 ? std::min(bytes, physical) : physical;
}

}  // namespace moat
