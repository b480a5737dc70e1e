// SPDX-License-Identifier: Apache-2.0
// PrefixCache: the prefixes that can be restored instead of computed. A tree of full blocks; some nodes carry a
// *checkpoint*, the recurrent state after the node's last token, in a state slot. A prefix can be restored up to a
// checkpoint and nowhere else, so blocks that lead to no checkpoint and that no sequence uses are of no use and go at
// once; what is weighed and evicted are checkpoints. One thread.
//
// A node is its block: the tree is stored in arrays indexed by block. The node holds one reference of the block, every
// sequence that has the block in its table another.
//
// Invariants, checked by check_invariants():
//   P1  the parent of a node is a node (a prefix is there from its first token or not at all).
//   P2  a node has a user, a checkpoint, or a checkpoint below it.
//   P3  every checkpoint belongs to one node and one slot, and its node to it.
//   P4  num_unused() counts the nodes without users.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/block_pool.h"
#include "engine/prefix_hash.h"

namespace moat {

// What an eviction is for: a slot, or blocks.
enum class Scarce : uint8_t { kSlots, kBlocks };

// What is known of a checkpoint when one has to go.
struct CheckpointFacts {
  Scarce scarce = Scarce::kSlots;
  BlockKey key;              // of the prefix
  int64_t tokens = 0;        // of the prefix
  int64_t saved_tokens = 0;  // that would be computed again without it: to the checkpoint above
  int64_t bytes = 0;         // its state and the blocks of saved_tokens
  int64_t hits = 0;          // requests that restored it
  int64_t age = 0;           // admissions since it was saved, restored or wanted last
  int64_t below = 0;         // checkpoints that continue it
  double inflation = 0;      // score of the last victim at that time (GreedyDual's clock)
};
// The lowest goes first.
using EvictionScore = std::function<double(const CheckpointFacts&)>;

// Tokens expected to be saved per slot or block that goes: by what it saves, whether the conversation has moved on from
// it, and how long it has been of no use.
double default_eviction_score(const CheckpointFacts& facts);

class PrefixCache {
 public:
  struct Options {
    int64_t block_size = 64;
    int64_t token_bytes = 1;  // paged cache
    int64_t slot_bytes = 1;   // one state
    EvictionScore score = default_eviction_score;
  };
  // Both pools must outlive the cache.
  PrefixCache(const Options& options, BlockPool& blocks, BlockPool& slots);

  struct Match {
    std::vector<int32_t> blocks;  // of the restorable prefix, in order; empty: nothing
    int32_t slot = -1;            // its checkpoint
  };
  // The longest restorable prefix of `keys` (whose token ids are `ids`).
  Match find(std::span<const BlockKey> keys, std::span<const int32_t> ids) const;
  bool has_checkpoint(const BlockKey& key) const;

  // A request restores this checkpoint: it counts as used now.
  void note_hit(int32_t slot);
  // A request that waits is going to restore this checkpoint: it is not older than the request.
  void note_wanted(int32_t slot);
  void tick() { ++clock_; }  // one admission

  // Puts the sequence's `block`, whose contents are complete, under `parent` (-1: first block). Returns the block that
  // now stands for the key: `block` itself or one that was there already, which the caller uses from then on (its
  // reference moves over, `block` is released). -1: another prefix has this key; the block stays private.
  int32_t insert(const BlockKey& key, int32_t parent, std::span<const int32_t> ids, int32_t block);

  // A sequence starts or ceases to use a node's block.
  void add_user(int32_t block);
  void remove_user(int32_t block);
  bool is_node(int32_t block) const { return nodes_[static_cast<size_t>(block)].is_node; }

  // The state after `block` is in `slot`, which the cache owns from now on. False: the node has one already.
  bool attach(int32_t block, int32_t slot);
  // Forgets the checkpoint and frees its slot and what only it needed.
  void evict(int32_t slot);
  // Forgets the checkpoint, but its slot stays allocated, for the caller.
  void detach(int32_t slot);

  // Evicts the checkpoint with the lowest score of those that free at least one block; false: there is none.
  bool evict_for_block();
  // The checkpoint with the lowest score, if it is below `limit`.
  std::optional<int32_t> victim(double limit);
  // What a new checkpoint at `tokens`, `saved` tokens after the one above, would score.
  double score_of_new(const BlockKey& key, int64_t tokens, int64_t saved) const;
  void note_eviction(double score) { inflation_ = std::max(inflation_, score); }
  double score(int32_t slot, Scarce scarce = Scarce::kSlots) const;

  void clear();  // evicts every checkpoint

  int64_t num_unused() const { return num_unused_; }  // nodes that only the cache holds
  int64_t num_checkpoints() const { return static_cast<int64_t>(attached_.size()); }
  int64_t num_evicted() const { return num_evicted_; }
  // Changes whenever a checkpoint changes hands: two equal serials of one slot are the same checkpoint.
  uint64_t serial(int32_t slot) const { return checkpoints_[static_cast<size_t>(slot)].serial; }
  int64_t hits(int32_t slot) const { return checkpoints_[static_cast<size_t>(slot)].hits; }
  bool is_attached(int32_t slot) const { return checkpoints_[static_cast<size_t>(slot)].node >= 0; }
  int32_t node(int32_t slot) const { return checkpoints_[static_cast<size_t>(slot)].node; }
  // Position of the last checkpoint at or above a node (-1: none): tokens of its prefix.
  int64_t checkpoint_above(int32_t block) const;

  void check_invariants() const;

 private:
  struct Node {
    BlockKey key;
    int32_t parent = -1;      // block
    int32_t checkpoint = -1;  // slot
    int32_t below = 0;        // checkpoints at descendants
    int64_t tokens = 0;       // of the prefix that ends here
    bool is_node = false;
  };
  struct Checkpoint {
    int32_t node = -1;   // block; -1: the slot is not a checkpoint
    int32_t above = -1;  // the nearest checkpoint above, a slot
    int32_t index = -1;  // in attached_
    int64_t hits = 0;
    int64_t last_use = 0;
    double inflation = 0;
    uint64_t serial = 0;
  };

  Node& node_at(int32_t block) { return nodes_[static_cast<size_t>(block)]; }
  const Node& node_at(int32_t block) const { return nodes_[static_cast<size_t>(block)]; }
  Checkpoint& at(int32_t slot) { return checkpoints_[static_cast<size_t>(slot)]; }
  const Checkpoint& at(int32_t slot) const { return checkpoints_[static_cast<size_t>(slot)]; }
  std::span<int32_t> ids_of(int32_t block);
  std::span<const int32_t> ids_of(int32_t block) const;
  int32_t nearest_above(int32_t block) const;
  bool is_candidate(int32_t slot, Scarce scarce) const;
  void offer(int32_t slot, Scarce scarce);
  int32_t cheapest(Scarce scarce);
  bool needed(int32_t block) const;
  void trim(int32_t block);

  Options options_;
  BlockPool& blocks_;
  BlockPool& slots_;
  std::vector<Node> nodes_;              // [blocks]
  std::vector<int32_t> ids_;             // [blocks, block_size]
  std::vector<Checkpoint> checkpoints_;  // [slots]
  std::vector<int32_t> attached_;        // slots that are checkpoints
  struct Candidate {
    double score = 0;
    int32_t slot = -1;
    uint64_t serial = 0;
    int64_t clock = 0;  // of the comparison
    bool is_before(const Candidate& o) const { return score != o.score ? score < o.score : serial < o.serial; }
  };
  std::vector<Candidate> candidates_[2];  // [slots, blocks]; lowest score last
  std::unordered_map<BlockKey, int32_t, BlockKeyHash> index_;
  int64_t num_unused_ = 0;
  int64_t num_evicted_ = 0;
  int64_t clock_ = 0;
  uint64_t next_serial_ = 1;
  double inflation_ = 0;
};

}  // namespace moat
