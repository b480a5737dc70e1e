// SPDX-License-Identifier: Apache-2.0
// What fits: one pure function from (model, options, memory) to the sizes of the cache pools, and the table that shows
// the arithmetic. The engine sizes its pools with it, so a plan cannot be wrong about the engine it plans.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/config.h"

namespace moat {

struct CacheSizes {
  int64_t block_size = 64;  // tokens a block of the paged MLA cache
  int64_t num_blocks = 0;
  int64_t num_slots = 0;  // recurrent-state slots: one a running sequence, the rest hold checkpoints of prefixes
  // With a drafter that has a context of its own: its values a token are [draft_layers, draft_row], in the same blocks.
  int64_t draft_layers = 0;
  int64_t draft_row = 0;
  int64_t verify_rows =
      0;  // rows a step that drafts may stand in: records of so many are kept until they are committed
};

// Bytes of one block and of one slot, over all layers (f32); of what a drafter keeps in a block; of the records of one
// verified row.
int64_t block_bytes(const ModelConfig& config, int64_t block_size);
int64_t slot_bytes(const ModelConfig& config);
int64_t draft_block_bytes(const CacheSizes& sizes);
int64_t record_bytes(const ModelConfig& config);

struct CapacityOptions {
  int64_t memory_bytes = 0;      // that this process may use in all
  double memory_fraction = 0.9;  // of it that moat plans with
  int64_t weight_bytes = 0;
  int64_t arena_bytes = 0;    // step temporaries, from the dry pass
  int64_t process_bytes = 0;  // what the process holds besides weights, pools and arena: code, vocabulary, threads
  int64_t draft_weight_bytes = 0;
  int64_t draft_layers = 0, draft_row = 0, verify_rows = 0;  // as in CacheSizes
  int64_t block_size = 64;
  int64_t max_model_len = 0;  // tokens of one sequence
  int64_t max_num_seqs = 0;   // wanted
  // For states at the end of cached prefixes, in whole slots; -1: chosen here, 0: none (no prefix is ever restored).
  int64_t checkpoint_memory_bytes = 0;
};

struct Capacity {
  CacheSizes cache;
  int64_t max_num_seqs = 0;     // that get a slot: min(wanted, what fits)
  int64_t num_checkpoints = 0;  // slots beyond those
  int64_t cache_token_capacity = 0;
  int64_t max_model_len = 0;  // as asked
  std::string bound;          // what limits concurrency, in words
  struct Line {
    std::string component;
    int64_t bytes = 0;
    std::string note;
  };
  std::vector<Line> lines;  // the components, then their total

  // Sequences that can hold so many tokens each at the same time, when nothing is cached besides them.
  int64_t num_seqs_of(int64_t tokens) const;
  std::string table() const;  // for people
};

// Order of the claims on what weights, temporaries, process and one sequence of max_model_len leave:
//   1. checkpoints, if checkpoint_memory_bytes says how many;
//   2. a slot for each wanted sequence, but at most half, so that the sequences have tokens to hold;
//   3. checkpoints, if chosen here: half of the rest, or more where the blocks that the sequences can use need less
//      than the other half. A cached conversation holds its blocks and about two checkpoints (the end of its last turn,
//      the prefix it shares), so equal halves are right for conversations of 2 slot_bytes / bytes a token: 16,800 tokens
//      of Kimi K3. Never more than 4 checkpoints a sequence: a small model has no use for all of a large machine.
//   4. blocks: what is left, but no more than the sequences can use and, for prefixes that no sequence uses now, as many
//      bytes as the checkpoints take.
// The host's bookkeeping is part of what a slot, a block and a sequence cost. Fails with the arithmetic when not even
// one sequence of max_model_len fits beside the checkpoints that were asked for.
Result<Capacity> plan_capacity(const ModelConfig& config, const CapacityOptions& options);

std::string format_bytes(int64_t bytes);  // "1.56 TB", "434.1 MB": powers of ten, as vendors count

}  // namespace moat
