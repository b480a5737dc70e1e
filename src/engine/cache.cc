// SPDX-License-Identifier: Apache-2.0
#include "engine/cache.h"

#include <algorithm>
#include <limits>
#include <set>

#include "base/status.h"

namespace moat {

CacheLedger::CacheLedger(const CacheSizes& sizes, const LedgerOptions& options)
    : sizes_(sizes),
      options_(options),
      blocks_(sizes.num_blocks),
      slots_(sizes.num_slots),
      prefixes_({.block_size = sizes.block_size,
                 .token_bytes = options.token_bytes,
                 .slot_bytes = options.slot_bytes,
                 .score = options.score},
                blocks_, slots_) {
  MOAT_CHECK(sizes.block_size > 0, "block size {}", sizes.block_size);
}

KeyChain CacheLedger::new_chain(std::string_view salt) const {
  return KeyChain(root_key(options_.hash_seed, epoch_, salt), sizes_.block_size);
}

// What can be restored of a sequence, whose last row is always computed.
PrefixCache::Match CacheLedger::find_match(std::span<const int32_t> ids, std::span<const BlockKey> keys) const {
  if (!caching() || ids.empty()) return {};
  const auto most = static_cast<size_t>((static_cast<int64_t>(ids.size()) - 1) / sizes_.block_size);
  return prefixes_.find(keys.first(std::min(most, keys.size())), ids);
}

int64_t CacheLedger::restorable(std::span<const int32_t> ids, std::span<const BlockKey> keys) const {
  return static_cast<int64_t>(find_match(ids, keys).blocks.size()) * sizes_.block_size;
}

void CacheLedger::note_waiting(std::span<const int32_t> ids, std::span<const BlockKey> keys) {
  if (const int32_t slot = find_match(ids, keys).slot; slot >= 0) prefixes_.note_wanted(slot);
}

CacheLedger::Lease CacheLedger::new_lease() {
  if (free_leases_.empty()) {
    free_leases_.push_back(static_cast<Lease>(leases_.size()));
    leases_.emplace_back();
  }
  const Lease lease = free_leases_.back();
  free_leases_.pop_back();
  return lease;
}

bool CacheLedger::make_free_blocks(int64_t count) {
  while (blocks_.num_free() < count) {
    if (!prefixes_.evict_for_block()) return false;
  }
  return true;
}

// A slot for a live sequence: a free one, or that of the cheapest checkpoint. If that is the one to restore, the slot
// changes hands with its contents.
std::optional<int32_t> CacheLedger::take_slot_for_state(int32_t restore_from) {
  if (const auto slot = slots_.allocate(1)) return slot->front();
  std::optional<int32_t> victim = prefixes_.victim(std::numeric_limits<double>::infinity());
  if (!victim) return std::nullopt;
  prefixes_.note_eviction(prefixes_.score(*victim));
  if (*victim == restore_from) {
    prefixes_.detach(*victim);
    return victim;
  }
  prefixes_.evict(*victim);
  return slots_.allocate(1)->front();
}

std::optional<CacheLedger::Admitted> CacheLedger::admit(const Admission& admission, std::vector<StateCopy>& restores) {
  PrefixCache::Match match = admission.restore ? find_match(admission.ids, admission.keys) : PrefixCache::Match{};
  for (const int32_t block : match.blocks) prefixes_.add_user(block);
  const int64_t wanted = blocks_for(static_cast<int64_t>(admission.ids.size()));
  const int64_t missing = wanted - static_cast<int64_t>(match.blocks.size());
  const bool slot_is_there = slots_.num_free() > 0 || prefixes_.num_checkpoints() > 0;
  if (!slot_is_there || blocks_available() < missing + admission.headroom) {
    for (auto it = match.blocks.rbegin(); it != match.blocks.rend(); ++it) prefixes_.remove_user(*it);
    return std::nullopt;
  }
  prefixes_.tick();
  if (match.slot >= 0) prefixes_.note_hit(match.slot);
  const int32_t slot = *take_slot_for_state(match.slot);
  if (match.slot >= 0) {
    if (slot != match.slot) restores.push_back({.from = match.slot, .to = slot});
    ++restored_total_;
  }
  MOAT_CHECK(make_free_blocks(missing), "{} blocks are available, {} could not be freed", blocks_available(), missing);
  const Lease lease = new_lease();
  Holding& holding = at(lease);
  holding.blocks = std::move(match.blocks);
  holding.num_indexed = static_cast<int64_t>(holding.blocks.size());
  const std::vector<int32_t> fresh = *blocks_.allocate(missing);
  holding.blocks.insert(holding.blocks.end(), fresh.begin(), fresh.end());
  holding.slot = slot;
  holding.shares = caching();
  holding.epoch = epoch_;
  holding.version = next_version_++;
  ++num_live_;
  return Admitted{lease, holding.num_indexed * sizes_.block_size};
}

bool CacheLedger::extend(Lease lease, int64_t tokens) {
  std::vector<int32_t>& blocks = at(lease).blocks;
  const int64_t wanted = blocks_for(tokens);
  if (static_cast<int64_t>(blocks.size()) >= wanted) return true;
  at(lease).version = next_version_++;
  while (static_cast<int64_t>(blocks.size()) < wanted) {
    if (!make_free_blocks(1)) return false;
    blocks.push_back(blocks_.allocate(1)->front());
  }
  return true;
}

bool CacheLedger::is_current(const Made& made) const {
  return made.slot >= 0 && prefixes_.is_attached(made.slot) && prefixes_.serial(made.slot) == made.serial;
}

std::optional<int32_t> CacheLedger::take_slot_for_checkpoint(const BlockKey& key, int64_t tokens, int64_t saved,
                                                             SaveKind kind) {
  if (const auto slot = slots_.allocate(1)) return slot->front();
  if (kind == SaveKind::kOptional) return std::nullopt;
  const std::optional<int32_t> victim = prefixes_.victim(prefixes_.score_of_new(key, tokens, saved));
  if (!victim) return std::nullopt;
  prefixes_.note_eviction(prefixes_.score(*victim));
  prefixes_.evict(*victim);
  return slots_.allocate(1)->front();
}

void CacheLedger::plan_save(Lease lease, std::span<const BlockKey> keys, int64_t position, SaveKind kind,
                            std::vector<StateCopy>& saves) {
  Holding& holding = at(lease);
  if (!holding.shares || holding.epoch != epoch_) return;
  MOAT_CHECK(position > 0 && position % sizes_.block_size == 0, "a checkpoint at {}, blocks are of {}", position,
             sizes_.block_size);
  const BlockKey& key = keys[static_cast<size_t>(position / sizes_.block_size - 1)];
  if (prefixes_.has_checkpoint(key)) return;
  std::optional<int32_t> slot;
  if (kind == SaveKind::kRolling && is_current(holding.rolling) && prefixes_.hits(holding.rolling.slot) == 0) {
    slot = holding.rolling.slot;  // nobody came back to the shorter one
    prefixes_.detach(*slot);
  } else {
    const int64_t above =
        holding.num_indexed == 0
            ? 0
            : prefixes_.checkpoint_above(holding.blocks[static_cast<size_t>(holding.num_indexed - 1)]);
    slot = take_slot_for_checkpoint(key, position, position - above, kind);
  }
  if (!slot) return;
  holding.pending.push_back({.position = position, .slot = *slot, .rolling = kind == SaveKind::kRolling});
  saves.push_back({.from = holding.slot, .to = *slot});
}

void CacheLedger::commit(Lease lease, std::span<const int32_t> ids, std::span<const BlockKey> keys,
                         int64_t num_computed) {
  Holding& holding = at(lease);
  if (!holding.shares) return;
  const int64_t full = num_computed / sizes_.block_size;
  for (int64_t b = holding.num_indexed; b < full && holding.shares; ++b) {
    const auto i = static_cast<size_t>(b);
    const int32_t parent = b == 0 ? -1 : holding.blocks[i - 1];
    const auto first = static_cast<size_t>(b * sizes_.block_size);
    const int32_t node = prefixes_.insert(keys[i], parent, ids.subspan(first, static_cast<size_t>(sizes_.block_size)),
                                          holding.blocks[i]);
    if (node < 0) {
      holding.shares = false;
    } else {
      if (holding.blocks[i] != node) holding.version = next_version_++;
      holding.blocks[i] = node;
      holding.num_indexed = b + 1;
    }
  }
  std::erase_if(holding.pending, [&](const PendingSave& save) {
    if (save.position > num_computed) return false;  // of a later step that is already planned
    const int64_t node = save.position / sizes_.block_size - 1;
    const bool kept = holding.epoch == epoch_ && node < holding.num_indexed &&
                      prefixes_.attach(holding.blocks[static_cast<size_t>(node)], save.slot);
    if (!kept) {
      slots_.release(save.slot);
      return true;
    }
    ++saved_total_;
    const Made made{save.slot, prefixes_.serial(save.slot)};
    if (save.rolling) holding.rolling = made;
    holding.made.push_back(made);
    return true;
  });
}

void CacheLedger::free(Lease lease, bool keep) {
  Holding& holding = at(lease);
  MOAT_CHECK(holding.slot >= 0, "lease {} holds nothing", lease);
  for (const PendingSave& save : holding.pending) slots_.release(save.slot);
  if (!keep) {
    for (const Made& made : holding.made) {
      if (is_current(made)) prefixes_.evict(made.slot);
    }
  }
  for (int64_t b = static_cast<int64_t>(holding.blocks.size()) - 1; b >= 0; --b) {
    const int32_t block = holding.blocks[static_cast<size_t>(b)];
    if (b < holding.num_indexed) {
      prefixes_.remove_user(block);
    } else {
      blocks_.release(block);
    }
  }
  slots_.release(holding.slot);
  holding = {};
  free_leases_.push_back(lease);
  --num_live_;
}

void CacheLedger::flush() {
  ++epoch_;
  prefixes_.clear();
}

void CacheLedger::check_invariants() const {
  blocks_.check_invariants();
  slots_.check_invariants();
  prefixes_.check_invariants();
  std::vector<int32_t> uses(static_cast<size_t>(blocks_.num_blocks()), 0);
  std::set<int32_t> slots;
  int64_t live = 0;
  int64_t pending = 0;
  for (const Holding& holding : leases_) {
    if (holding.slot < 0) continue;
    ++live;
    for (size_t b = 0; b < holding.blocks.size(); ++b) {
      const int32_t block = holding.blocks[b];
      ++uses[static_cast<size_t>(block)];
      const bool indexed = static_cast<int64_t>(b) < holding.num_indexed;
      MOAT_CHECK(prefixes_.is_node(block) == indexed, "C3: block {} is {}a node", block, indexed ? "not " : "");
    }
    MOAT_CHECK(slots.insert(holding.slot).second, "C2: slot {} is held twice", holding.slot);
    for (const PendingSave& save : holding.pending) {
      ++pending;
      MOAT_CHECK(slots.insert(save.slot).second, "C2: slot {} is held twice", save.slot);
    }
  }
  for (int32_t b = 0; b < blocks_.num_blocks(); ++b) {
    const int32_t expected = uses[static_cast<size_t>(b)] + (prefixes_.is_node(b) ? 1 : 0);
    MOAT_CHECK(blocks_.ref_count(b) == expected, "C1: block {} has {} references, expected {}", b, blocks_.ref_count(b),
               expected);
  }
  for (const int32_t slot : slots) MOAT_CHECK(!prefixes_.is_attached(slot), "C2: slot {} is also a checkpoint", slot);
  MOAT_CHECK(live == num_live_, "C2: {} live leases, {} counted", live, num_live_);
  MOAT_CHECK(slots_.num_used() == live + pending + prefixes_.num_checkpoints(),
             "C4: {} slots used by {} sequences, {} planned and {} kept checkpoints", slots_.num_used(), live, pending,
             prefixes_.num_checkpoints());
  MOAT_CHECK(blocks_.num_free() + blocks_used() + blocks_cached() == blocks_.num_blocks(), "C4: blocks");
}

}  // namespace moat
