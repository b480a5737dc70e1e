// SPDX-License-Identifier: Apache-2.0
#include "engine/prefix_cache.h"

#include <algorithm>

#include "base/status.h"

namespace moat {

// The constants are of the replays in tests/prefix_replay_test.cc; the hit rate is flat around them.
double default_eviction_score(const CheckpointFacts& f) {
  // Every checkpoint frees one slot, but blocks in proportion to the tokens it saves: per block, all save the same.
  const double saved_per_freed = f.scarce == Scarce::kBlocks ? 1.0 : static_cast<double>(f.saved_tokens);
  // Where a conversation went on, the next turn restores the later checkpoint; only a branch would come back here.
  const double likely = f.below > 0 && f.hits <= 1 ? 0.05 : 1.0 + static_cast<double>(f.hits) * 0.3;
  // Pauses have a heavy tail, and the longer one lasts, the likelier is it that the conversation is over.
  const double quiet = 8.0 + static_cast<double>(f.age);
  return saved_per_freed * likely / (quiet * quiet);
}

PrefixCache::PrefixCache(const Options& options, BlockPool& blocks, BlockPool& slots)
    : options_(options),
      blocks_(blocks),
      slots_(slots),
      nodes_(static_cast<size_t>(blocks.num_blocks())),
      ids_(static_cast<size_t>(blocks.num_blocks() * options.block_size)),
      checkpoints_(static_cast<size_t>(slots.num_blocks())) {
  index_.reserve(nodes_.size());
}

std::span<int32_t> PrefixCache::ids_of(int32_t block) {
  const auto size = static_cast<size_t>(options_.block_size);
  return std::span(ids_).subspan(static_cast<size_t>(block) * size, size);
}
std::span<const int32_t> PrefixCache::ids_of(int32_t block) const {
  const auto size = static_cast<size_t>(options_.block_size);
  return std::span(ids_).subspan(static_cast<size_t>(block) * size, size);
}

PrefixCache::Match PrefixCache::find(std::span<const BlockKey> keys, std::span<const int32_t> ids) const {
  Match match;
  std::vector<int32_t> path;
  int32_t parent = -1;
  for (size_t b = 0; b < keys.size(); ++b) {
    const auto it = index_.find(keys[b]);
    if (it == index_.end()) break;
    const Node& node = node_at(it->second);
    const auto size = static_cast<size_t>(options_.block_size);
    if (node.parent != parent || !std::ranges::equal(ids_of(it->second), ids.subspan(b * size, size))) break;
    parent = it->second;
    path.push_back(parent);
    if (node.checkpoint >= 0) match = {.blocks = {}, .slot = node.checkpoint};
  }
  if (match.slot < 0) return match;
  path.resize(static_cast<size_t>(node_at(at(match.slot).node).tokens / options_.block_size));
  match.blocks = std::move(path);
  return match;
}

bool PrefixCache::has_checkpoint(const BlockKey& key) const {
  const auto it = index_.find(key);
  return it != index_.end() && node_at(it->second).checkpoint >= 0;
}

void PrefixCache::note_hit(int32_t slot) {
  ++at(slot).hits;
  note_wanted(slot);
}

void PrefixCache::note_wanted(int32_t slot) {
  at(slot).last_use = clock_;
  at(slot).inflation = inflation_;
}

int32_t PrefixCache::insert(const BlockKey& key, int32_t parent, std::span<const int32_t> ids, int32_t block) {
  const auto [it, is_new] = index_.try_emplace(key, block);
  if (!is_new) {
    const int32_t there = it->second;
    if (node_at(there).parent != parent || !std::ranges::equal(ids_of(there), ids)) return -1;
    if (there != block) {
      add_user(there);
      blocks_.release(block);
    }
    return there;
  }
  std::ranges::copy(ids, ids_of(block).begin());
  node_at(block) = {.key = key,
                    .parent = parent,
                    .tokens = (parent < 0 ? 0 : node_at(parent).tokens) + options_.block_size,
                    .is_node = true};
  blocks_.add_reference(block);
  return block;
}

void PrefixCache::add_user(int32_t block) {
  if (blocks_.ref_count(block) == 1) --num_unused_;
  blocks_.add_reference(block);
}

void PrefixCache::remove_user(int32_t block) {
  blocks_.release(block);
  if (blocks_.ref_count(block) > 1) return;
  ++num_unused_;
  if (node_at(block).checkpoint >= 0) offer(node_at(block).checkpoint, Scarce::kBlocks);
  trim(block);
}

bool PrefixCache::needed(int32_t block) const {
  const Node& node = node_at(block);
  return blocks_.ref_count(block) > 1 || node.checkpoint >= 0 || node.below > 0;
}

// Frees the node if nothing needs it, and then those above that only it needed.
void PrefixCache::trim(int32_t block) {
  while (block >= 0 && !needed(block)) {
    Node& node = node_at(block);
    index_.erase(node.key);
    const int32_t parent = node.parent;
    node = {};
    --num_unused_;
    blocks_.release(block);
    block = parent;
  }
}

int32_t PrefixCache::nearest_above(int32_t block) const {
  for (int32_t b = node_at(block).parent; b >= 0; b = node_at(b).parent) {
    if (node_at(b).checkpoint >= 0) return node_at(b).checkpoint;
  }
  return -1;
}

int64_t PrefixCache::checkpoint_above(int32_t block) const {
  for (int32_t b = block; b >= 0; b = node_at(b).parent) {
    if (node_at(b).checkpoint >= 0) return node_at(b).tokens;
  }
  return 0;
}

bool PrefixCache::attach(int32_t block, int32_t slot) {
  Node& node = node_at(block);
  if (node.checkpoint >= 0) return false;
  node.checkpoint = slot;
  at(slot) = {.node = block,
              .above = nearest_above(block),
              .index = static_cast<int32_t>(attached_.size()),
              .last_use = clock_,
              .inflation = inflation_,
              .serial = next_serial_++};
  attached_.push_back(slot);
  for (int32_t b = node.parent; b >= 0; b = node_at(b).parent) ++node_at(b).below;
  if (node.below > 0) {
    for (const int32_t other : attached_) {
      if (other != slot && at(other).above == at(slot).above) at(other).above = nearest_above(at(other).node);
    }
  }
  for (const Scarce scarce : {Scarce::kSlots, Scarce::kBlocks}) {
    offer(slot, scarce);
    if (at(slot).above >= 0) offer(at(slot).above, scarce);  // it is continued now
  }
  return true;
}

void PrefixCache::detach(int32_t slot) {
  Checkpoint& c = at(slot);
  MOAT_CHECK(c.node >= 0, "slot {} is no checkpoint", slot);
  for (const int32_t other : attached_) {
    if (at(other).above == slot) at(other).above = c.above;
  }
  attached_[static_cast<size_t>(c.index)] = attached_.back();
  at(attached_.back()).index = c.index;
  attached_.pop_back();
  const int32_t block = c.node;
  const int32_t above = c.above;
  c = {};
  node_at(block).checkpoint = -1;
  for (int32_t b = node_at(block).parent; b >= 0; b = node_at(b).parent) --node_at(b).below;
  trim(block);
  if (above >= 0) offer(above, Scarce::kBlocks);  // its blocks may be free to go now
}

void PrefixCache::evict(int32_t slot) {
  detach(slot);
  slots_.release(slot);
  ++num_evicted_;
}

double PrefixCache::score(int32_t slot, Scarce scarce) const {
  const Checkpoint& c = at(slot);
  const Node& node = node_at(c.node);
  const int64_t saved = node.tokens - (c.above < 0 ? 0 : node_at(at(c.above).node).tokens);
  return options_.score({.scarce = scarce,
                         .key = node.key,
                         .tokens = node.tokens,
                         .saved_tokens = saved,
                         .bytes = options_.slot_bytes + saved * options_.token_bytes,
                         .hits = c.hits,
                         .age = clock_ - c.last_use,
                         .below = node.below,
                         .inflation = c.inflation});
}

double PrefixCache::score_of_new(const BlockKey& key, int64_t tokens, int64_t saved) const {
  return options_.score({.key = key,
                         .tokens = tokens,
                         .saved_tokens = saved,
                         .bytes = options_.slot_bytes + saved * options_.token_bytes,
                         .inflation = inflation_});
}

// Whether evicting it frees what is scarce.
bool PrefixCache::is_candidate(int32_t slot, Scarce scarce) const {
  if (scarce == Scarce::kSlots) return true;
  const int32_t block = at(slot).node;
  return node_at(block).below == 0 && blocks_.ref_count(block) == 1;
}

// Puts the slot where its score belongs, if the list reaches that far. A list that is empty or of an earlier admission is
// made anew when it is needed.
void PrefixCache::offer(int32_t slot, Scarce scarce) {
  std::vector<Candidate>& list = candidates_[scarce == Scarce::kBlocks];
  if (list.empty() || list.front().clock != clock_ || !is_candidate(slot, scarce)) return;
  const Candidate candidate{score(slot, scarce), slot, at(slot).serial, clock_};
  if (candidate.is_before(list.front())) {
    list.insert(std::upper_bound(list.begin(), list.end(), candidate,
                                 [](const Candidate& a, const Candidate& b) { return b.is_before(a); }),
                candidate);
  }
}

// The slot with the lowest score, -1: none. Scores are compared once for many evictions: the lowest are kept in order,
// and what changes between two admissions is put in its place.
int32_t PrefixCache::cheapest(Scarce scarce) {
  std::vector<Candidate>& list = candidates_[scarce == Scarce::kBlocks];
  while (!list.empty() && list.back().clock == clock_) {
    const Candidate c = list.back();
    const bool is_there = is_attached(c.slot) && at(c.slot).serial == c.serial && is_candidate(c.slot, scarce);
    if (is_there && score(c.slot, scarce) == c.score) return c.slot;
    list.pop_back();
    if (is_there) offer(c.slot, scarce);
  }
  list.clear();
  for (const int32_t slot : attached_) {
    if (is_candidate(slot, scarce)) list.push_back({score(slot, scarce), slot, at(slot).serial, clock_});
  }
  if (list.empty()) return -1;
  constexpr size_t kKept = 64;
  const auto kept = static_cast<int64_t>(std::min(kKept, list.size()));
  std::partial_sort(list.begin(), list.begin() + kept, list.end(),
                    [](const Candidate& a, const Candidate& b) { return a.is_before(b); });
  list.resize(static_cast<size_t>(kept));
  std::reverse(list.begin(), list.end());
  return list.back().slot;
}

std::optional<int32_t> PrefixCache::victim(double limit) {
  const int32_t slot = cheapest(Scarce::kSlots);
  if (slot < 0 || !(score(slot) < limit)) return std::nullopt;
  return slot;
}

bool PrefixCache::evict_for_block() {
  const int32_t slot = cheapest(Scarce::kBlocks);
  if (slot < 0) return false;
  note_eviction(score(slot, Scarce::kBlocks));
  evict(slot);
  return true;
}

void PrefixCache::clear() {
  while (!attached_.empty()) evict(attached_.back());
}

void PrefixCache::check_invariants() const {
  int64_t nodes = 0;
  int64_t unused = 0;
  std::vector<int32_t> below(nodes_.size(), 0);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const auto block = static_cast<int32_t>(i);
    const Node& node = nodes_[i];
    if (!node.is_node) continue;
    ++nodes;
    unused += blocks_.ref_count(block) == 1;
    MOAT_CHECK(node.parent < 0 || node_at(node.parent).is_node, "P1: the parent of block {} is gone", block);
    const int64_t above = node.parent < 0 ? 0 : node_at(node.parent).tokens;
    MOAT_CHECK(node.tokens == above + options_.block_size, "P1: block {} ends at {} after {}", block, node.tokens,
               above);
    MOAT_CHECK(needed(block), "P2: nothing needs block {}", block);
    const auto it = index_.find(node.key);
    MOAT_CHECK(it != index_.end() && it->second == block, "P1: block {} is not found by its key", block);
    if (node.checkpoint < 0) continue;
    MOAT_CHECK(at(node.checkpoint).node == block, "P3: slot {} is not of block {}", node.checkpoint, block);
    for (int32_t b = node.parent; b >= 0; b = node_at(b).parent) ++below[static_cast<size_t>(b)];
  }
  MOAT_CHECK(nodes == static_cast<int64_t>(index_.size()), "P1: {} nodes, {} keys", nodes, index_.size());
  MOAT_CHECK(unused == num_unused_, "P4: {} nodes without users, {} counted", unused, num_unused_);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    MOAT_CHECK(nodes_[i].below == below[i], "P2: {} checkpoints below block {}, {} counted", below[i], i,
               nodes_[i].below);
  }
  for (size_t i = 0; i < attached_.size(); ++i) {
    const int32_t slot = attached_[i];
    MOAT_CHECK(at(slot).index == static_cast<int32_t>(i), "P3: slot {} is listed twice", slot);
    MOAT_CHECK(node_at(at(slot).node).checkpoint == slot, "P3: block {} is not of slot {}", at(slot).node, slot);
    MOAT_CHECK(slots_.ref_count(slot) == 1, "P3: slot {} has {} references", slot, slots_.ref_count(slot));
    MOAT_CHECK(at(slot).above == nearest_above(at(slot).node), "P3: the checkpoint above slot {} is not {}", slot,
               at(slot).above);
  }
}

}  // namespace moat
