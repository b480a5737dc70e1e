// SPDX-License-Identifier: Apache-2.0
// CacheLedger: who holds which blocks of the MLA cache and which recurrent-state slots. It does the accounting and
// touches no memory (cache_memory.h has the bytes), so the scheduler that owns it can be tested by itself. One thread.
//
// Tokens are the only unit the groups share. Groups: *paged* (MLA latent rows, block_size tokens a block) and *state*
// (KDA and convolution state; one slot a live sequence, the others hold checkpoints of prefixes). admit() takes from
// both groups or from neither, and restores what both can restore.
//
// Live sequences come first: whatever only the prefix cache holds is given up for them, cheapest loss first.
//
// Invariants, checked by check_invariants() (with B of block_pool.h and P of prefix_cache.h):
//   C1  the references of a block are the tables it is in, plus one if it is a node of the prefix cache.
//   C2  a slot is free, the state of one live sequence, a checkpoint that a step is to write, or a checkpoint.
//   C3  a live sequence holds at least as many blocks as its computed tokens fill; the indexed ones form a path.
//   C4  free + used by live sequences + cached = total, in each group.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/block_pool.h"
#include "engine/prefix_cache.h"
#include "engine/prefix_hash.h"
#include "plan/capacity.h"

namespace moat {

using SequenceId = uint64_t;

// Where a block or a state lives. All are on the device today; a host or disk tier is another value here, and the
// copies of a step then say from which tier to which.
enum class MemoryTier : uint8_t { kDevice };

// One state copied from slot to slot. Copies of a step run in order: a slot may be read by one and written by a later.
struct StateCopy {
  int32_t from = -1;
  int32_t to = -1;
  MemoryTier from_tier = MemoryTier::kDevice;
  MemoryTier to_tier = MemoryTier::kDevice;
  bool operator==(const StateCopy&) const = default;
};

struct LedgerOptions {
  bool prefix_cache = true;   // false: nothing is kept and nothing restored
  uint64_t hash_seed = 0;     // of block keys; a server draws it, so that nobody can prepare colliding prompts
  int64_t token_bytes = 512;  // of the paged group, to weigh checkpoints
  int64_t slot_bytes = 1 << 20;
  EvictionScore score = default_eviction_score;
};

class CacheLedger {
 public:
  using Lease = int32_t;  // what a live sequence holds; small and reused

  CacheLedger(const CacheSizes& sizes, const LedgerOptions& options);

  // Where the keys of a new sequence start. Changes with flush().
  KeyChain new_chain(std::string_view salt) const;

  struct Admission {
    std::span<const int32_t> ids;    // all tokens that the sequence has now; blocks for them are taken at once
    std::span<const BlockKey> keys;  // of their full blocks
    bool restore = true;             // from the prefix cache
    int64_t headroom = 0;            // blocks that must be left for others
  };
  struct Admitted {
    Lease lease = -1;
    int64_t cached_tokens = 0;  // at most ids - 1: the last row is always computed
  };
  // Nothing, and nothing changed, if it does not fit now. Appends the copy that restores the state.
  std::optional<Admitted> admit(const Admission& admission, std::vector<StateCopy>& restores);

  // Blocks for `tokens` tokens in all. False: not even giving up every cached prefix was enough.
  bool extend(Lease lease, int64_t tokens);

  // How much a checkpoint is wanted.
  enum class SaveKind : uint8_t {
    kOptional,  // only into a free slot (checkpoints inside a long prompt)
    kWanted,    // instead of one that is worth less (ends of prompts and messages)
    kRolling,   // as kWanted, and it replaces the sequence's last rolling one (the end of the reply so far)
  };
  // Plans a checkpoint at `position`, a multiple of the block size that the coming step reaches: takes a slot and
  // appends the copy to run after the step. Does nothing if there is one already or it is not worth a slot.
  void plan_save(Lease lease, std::span<const BlockKey> keys, int64_t position, SaveKind kind,
                 std::vector<StateCopy>& saves);

  // The step ran: `num_computed` tokens of the sequence are in the caches. Full blocks become shareable, planned
  // checkpoints up to there are kept.
  void commit(Lease lease, std::span<const int32_t> ids, std::span<const BlockKey> keys, int64_t num_computed);

  // Ends the lease. `keep`: false also forgets every checkpoint that this sequence made (its numbers are not trusted).
  void free(Lease lease, bool keep = true);

  // Forgets all cached prefixes; chains made from now on share nothing with older ones.
  void flush();

  // A request with these tokens waits from now on: what it would restore now is worth as much as if just restored.
  void note_waiting(std::span<const int32_t> ids, std::span<const BlockKey> keys);

  // Tokens that admit() would restore.
  int64_t restorable(std::span<const int32_t> ids, std::span<const BlockKey> keys) const;

  std::span<const int32_t> block_table(Lease lease) const { return leases_[static_cast<size_t>(lease)].blocks; }
  // Changes whenever the table does; never the same for two tables.
  uint64_t table_version(Lease lease) const { return leases_[static_cast<size_t>(lease)].version; }
  int32_t state_slot(Lease lease) const { return leases_[static_cast<size_t>(lease)].slot; }
  int64_t blocks_for(int64_t tokens) const { return (tokens + sizes_.block_size - 1) / sizes_.block_size; }
  bool can_ever_fit(int64_t tokens) const { return blocks_for(tokens) <= blocks_.num_blocks(); }
  const CacheSizes& sizes() const { return sizes_; }
  bool caching() const { return options_.prefix_cache; }

  int64_t blocks_used() const { return blocks_.num_used() - prefixes_.num_unused(); }  // by live sequences
  int64_t blocks_cached() const { return prefixes_.num_unused(); }
  int64_t blocks_available() const { return blocks_.num_free() + prefixes_.num_unused(); }
  int64_t slots_used() const { return num_live_; }
  int64_t checkpoints() const { return prefixes_.num_checkpoints(); }
  int64_t saved_total() const { return saved_total_; }
  int64_t restored_total() const { return restored_total_; }
  int64_t evicted_total() const { return prefixes_.num_evicted(); }

  void check_invariants() const;

 private:
  struct PendingSave {
    int64_t position = 0;
    int32_t slot = -1;
    bool rolling = false;
  };
  struct Made {
    int32_t slot = -1;
    uint64_t serial = 0;
  };
  struct Holding {
    std::vector<int32_t> blocks;
    int64_t num_indexed = 0;  // the first ones, that are nodes
    bool shares = true;       // false: no further block becomes a node
    int32_t slot = -1;        // -1: the lease is not in use
    uint64_t epoch = 0;
    uint64_t version = 0;
    std::vector<PendingSave> pending;
    std::vector<Made> made;
    Made rolling;
  };

  Holding& at(Lease lease) { return leases_[static_cast<size_t>(lease)]; }
  PrefixCache::Match find_match(std::span<const int32_t> ids, std::span<const BlockKey> keys) const;
  bool make_free_blocks(int64_t count);
  std::optional<int32_t> take_slot_for_state(int32_t restore_from);
  std::optional<int32_t> take_slot_for_checkpoint(const BlockKey& key, int64_t tokens, int64_t saved, SaveKind kind);
  bool is_current(const Made& made) const;
  Lease new_lease();

  CacheSizes sizes_;
  LedgerOptions options_;
  BlockPool blocks_;
  BlockPool slots_;  // a slot is a block of its own group
  PrefixCache prefixes_;
  std::vector<Holding> leases_;
  std::vector<Lease> free_leases_;
  int64_t num_live_ = 0;
  uint64_t epoch_ = 0;
  uint64_t next_version_ = 1;
  int64_t saved_total_ = 0;
  int64_t restored_total_ = 0;
};

}  // namespace moat
