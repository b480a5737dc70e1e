// SPDX-License-Identifier: Apache-2.0
#include "plan/capacity.h"

#include <algorithm>

#include "ops/kda_verify.h"

namespace moat {

int64_t block_bytes(const ModelConfig& config, int64_t block_size) {
  return config.num_mla_layers() * block_size * config.mla_row() * 4;
}

int64_t slot_bytes(const ModelConfig& config) {
  const int64_t state = config.kda_width() * config.kda_head_dim;
  const int64_t conv = 3 * (config.conv_kernel - 1) * config.kda_width();
  return config.num_kda_layers() * (state + conv) * 4;
}

int64_t draft_block_bytes(const CacheSizes& sizes) {
  return sizes.block_size * sizes.draft_layers * sizes.draft_row * 4;
}

int64_t record_bytes(const ModelConfig& config) {
  const int64_t recurrence = config.kda_num_heads * kda_record_width(config.kda_head_dim);
  return config.num_kda_layers() * (recurrence + 3 * config.kda_width()) * 4;
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

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// More checkpoints than these a sequence are not chosen without being asked for.
constexpr int64_t kMaxCheckpointsPerSequence = 4;

// What the engine keeps on the host for each block, slot and sequence: nodes of the prefix tree with their token ids,
// pools, and for a sequence its tokens (the request's, and a growing copy), the keys of its blocks and its rows of the
// block tables. Upper bounds: a sequence is counted at max_model_len.
constexpr int64_t kBlockNodeBytes = 112;
constexpr int64_t kSlotNodeBytes = 64;
constexpr int64_t kSequenceBytes = 4096;
constexpr int64_t kTokenBytes = 12;
constexpr int64_t kSequenceBlockBytes = 24;

// What one of each takes. The pools' bytes are what CacheMemory allocates, the ledger's go to host bookkeeping.
struct UnitCosts {
  int64_t block = 0, slot = 0;                              // pools
  int64_t block_ledger = 0, slot_ledger = 0, sequence = 0;  // host bookkeeping
  int64_t blocks_per_sequence = 0;

  UnitCosts(const ModelConfig& config, const CapacityOptions& o)
      : block(
            block_bytes(config, o.block_size) +
            draft_block_bytes({.block_size = o.block_size, .draft_layers = o.draft_layers, .draft_row = o.draft_row})),
        slot(slot_bytes(config)),
        block_ledger(kBlockNodeBytes + 4 * o.block_size),
        slot_ledger(kSlotNodeBytes),
        sequence(kSequenceBytes + kTokenBytes * o.max_model_len +
                 kSequenceBlockBytes * ceil_div(o.max_model_len, o.block_size)),
        blocks_per_sequence(ceil_div(o.max_model_len, o.block_size)) {}

  int64_t per_block() const { return block + block_ledger; }
  int64_t per_checkpoint() const { return slot + slot_ledger; }
  int64_t per_sequence() const { return slot + slot_ledger + sequence; }  // without its blocks
};

Status too_small(const CapacityOptions& o, const UnitCosts& unit, int64_t usable, int64_t left, int64_t fixed,
                 int64_t checkpoints) {
  const std::string also =
      checkpoints == 0 ? "" : fmt::format(" beside {} checkpoints of {}", checkpoints, format_bytes(unit.slot));
  return resource_exhausted(
      "the model does not fit: {} x {:.2f} of memory = {}, less weights {}, step temporaries {}, the process {}{} "
      "leaves {}; one sequence of {} tokens needs {} (state {} + {} blocks of {} + bookkeeping {}){}",
      format_bytes(o.memory_bytes), o.memory_fraction, format_bytes(usable), format_bytes(o.weight_bytes),
      format_bytes(o.arena_bytes), format_bytes(o.process_bytes),
      fixed > 0 ? fmt::format(" and speculation {}", format_bytes(fixed)) : "",
      format_bytes(std::max<int64_t>(left, 0)), o.max_model_len,
      format_bytes(unit.per_sequence() + unit.blocks_per_sequence * unit.per_block()), format_bytes(unit.slot),
      unit.blocks_per_sequence, format_bytes(unit.block),
      format_bytes(unit.sequence + unit.slot_ledger + unit.blocks_per_sequence * unit.block_ledger), also);
}

std::vector<Capacity::Line> capacity_lines(const Capacity& c, const CapacityOptions& o, const UnitCosts& unit,
                                           int64_t usable, int64_t records) {
  const int64_t bookkeeping =
      c.cache.num_blocks * unit.block_ledger + c.cache.num_slots * unit.slot_ledger + c.max_num_seqs * unit.sequence;
  std::vector<Capacity::Line> lines = {
      {"weights", o.weight_bytes, "mapped files and converted copies"},
      {"step temporaries", o.arena_bytes, "arena, from the dry pass"},
      {"live states", c.max_num_seqs * unit.slot,
       fmt::format("KDA and convolution: {} slots of {}", c.max_num_seqs, format_bytes(unit.slot))},
      {"checkpoints", c.num_checkpoints * unit.slot,
       fmt::format("states of cached prefixes: {} slots of {}", c.num_checkpoints, format_bytes(unit.slot))},
      {"MLA blocks", c.cache.num_blocks * unit.block,
       fmt::format(
           "{} blocks of {} tokens = {} tokens, {} B a token{}", c.cache.num_blocks, o.block_size,
           c.cache_token_capacity, unit.block / o.block_size,
           o.draft_row == 0 ? "" : fmt::format(", {} of them the drafter's", 4 * o.draft_layers * o.draft_row))},
      {"host bookkeeping", bookkeeping,
       fmt::format("ledger of blocks and slots, tokens of {} sequences, at most", c.max_num_seqs)},
      {"process", o.process_bytes, "code, vocabulary, threads: resident before the pools were made"}};
  if (o.draft_weight_bytes > 0) {
    lines.insert(lines.begin() + 1, {"draft weights", o.draft_weight_bytes, "mapped file and converted copies"});
  }
  if (records > 0) {
    lines.push_back({"verify records", records,
                     fmt::format("{} rows that drafts may stand in, {} each", o.verify_rows,
                                 format_bytes(records / o.verify_rows))});
  }
  int64_t total = 0;
  for (const Capacity::Line& line : lines) total += line.bytes;
  lines.push_back({"total", total,
                   fmt::format("of {} usable ({} x {:.2f})", format_bytes(usable), format_bytes(o.memory_bytes),
                               o.memory_fraction)});
  return lines;
}

}  // namespace

Result<Capacity> plan_capacity(const ModelConfig& config, const CapacityOptions& o) {
  if (o.max_model_len < 1 || o.max_num_seqs < 1 || o.block_size < 1 || o.checkpoint_memory_bytes < -1) {
    return invalid_argument(
        "max_model_len {}, max_num_seqs {} and block_size {} must be at least 1, checkpoint memory {} at least -1",
        o.max_model_len, o.max_num_seqs, o.block_size, o.checkpoint_memory_bytes);
  }
  const UnitCosts unit(config, o);
  const auto usable = static_cast<int64_t>(static_cast<double>(o.memory_bytes) * o.memory_fraction);
  const int64_t records = o.verify_rows * record_bytes(config);
  const int64_t speculation = o.draft_weight_bytes + records;
  const int64_t left = usable - o.weight_bytes - o.arena_bytes - o.process_bytes - speculation;
  const bool chosen_here = o.checkpoint_memory_bytes < 0;
  const int64_t one_sequence_blocks = unit.blocks_per_sequence * unit.per_block();

  Capacity c;
  c.num_checkpoints = chosen_here ? 0 : o.checkpoint_memory_bytes / std::max<int64_t>(unit.slot, 1);
  const int64_t for_sequences = left - c.num_checkpoints * unit.per_checkpoint();
  if (for_sequences < unit.per_sequence() + one_sequence_blocks) {
    return too_small(o, unit, usable, left, speculation, c.num_checkpoints);
  }
  const int64_t slots_that_fit =
      std::max<int64_t>(1, std::min(for_sequences / 2, for_sequences - one_sequence_blocks) / unit.per_sequence());
  c.max_num_seqs = std::min(o.max_num_seqs, slots_that_fit);

  int64_t rest = for_sequences - c.max_num_seqs * unit.per_sequence();
  const int64_t blocks_used_by_sequences = c.max_num_seqs * unit.blocks_per_sequence;
  if (chosen_here) {
    const int64_t share = std::max(rest / 2, rest - blocks_used_by_sequences * unit.per_block());
    c.num_checkpoints = std::min(std::min(share, rest - one_sequence_blocks) / unit.per_checkpoint(),
                                 kMaxCheckpointsPerSequence * c.max_num_seqs);
    rest -= c.num_checkpoints * unit.per_checkpoint();
  }
  const int64_t blocks_that_fit = rest / unit.per_block();
  const int64_t blocks_of_cache = unit.block == 0 ? 0 : c.num_checkpoints * unit.slot / unit.block;
  const int64_t blocks_wanted = blocks_used_by_sequences + blocks_of_cache;
  c.cache = {.block_size = o.block_size,
             .num_blocks = std::min(blocks_wanted, blocks_that_fit),
             .num_slots = c.max_num_seqs + c.num_checkpoints,
             .draft_layers = o.draft_layers,
             .draft_row = o.draft_row,
             .verify_rows = o.verify_rows};
  c.cache_token_capacity = c.cache.num_blocks * o.block_size;
  c.bound = c.max_num_seqs < o.max_num_seqs
                ? fmt::format("state slots: {} fit, {} wanted", c.max_num_seqs, o.max_num_seqs)
            : c.cache.num_blocks < blocks_used_by_sequences
                ? fmt::format("cache blocks: {} sequences of {} tokens need {}, {} fit", c.max_num_seqs,
                              o.max_model_len, blocks_used_by_sequences, c.cache.num_blocks)
                : "max_num_seqs: every sequence can be as long as the context";
  c.lines = capacity_lines(c, o, unit, usable, records);
  c.max_model_len = o.max_model_len;
  return c;
}

int64_t Capacity::num_seqs_of(int64_t tokens) const {
  return std::min(max_num_seqs, cache.num_blocks / ceil_div(std::max<int64_t>(tokens, 1), cache.block_size));
}

std::string Capacity::table() const {
  std::string text;
  for (const Line& line : lines) {
    text += fmt::format("  {:<18} {:>10}  {}\n", line.component, format_bytes(line.bytes), line.note);
  }
  text += fmt::format("  concurrency: {} sequences; bound by {}\n", max_num_seqs, bound);
  // How many sequences can really be that long at the same time.
  std::string counts;
  for (const int64_t length : {int64_t{8192}, int64_t{32768}, int64_t{131072}, int64_t{1} << 62}) {
    const int64_t tokens = std::min(length, max_model_len);
    if (num_seqs_of(tokens) < max_num_seqs) {
      counts += fmt::format("{} {} of {} tokens", counts.empty() ? "" : ",", num_seqs_of(tokens), tokens);
    }
    if (tokens == max_model_len) break;
  }
  if (!counts.empty()) text += fmt::format("  at once:{}\n", counts);
  return text;
}

}  // namespace moat
