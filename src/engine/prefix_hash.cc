// SPDX-License-Identifier: Apache-2.0
#include "engine/prefix_hash.h"

#include <algorithm>
#include <cstring>

namespace moat {
namespace {

// Odd constants with as many ones as zeros; any such will do.
constexpr uint64_t kSecret[4] = {0x9E3779B97F4A7C15ULL, 0xD1B54A32D192ED03ULL, 0xA0761D6478BD642FULL,
                                 0xE7037ED1A0B428DBULL};

// The two halves of the 128-bit product, folded: every input bit reaches every output bit.
uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Two lanes over the same bytes, with different constants.
BlockKey hash_bytes(const BlockKey& start, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t low = start.low ^ kSecret[0] ^ size;
  uint64_t high = start.high ^ kSecret[1];
  for (size_t i = 0; i < size; i += 16) {
    uint64_t word[2] = {0, 0};
    std::memcpy(word, bytes + i, std::min<size_t>(16, size - i));
    low = mix(word[0] ^ kSecret[2] ^ low, word[1] ^ low);
    high = mix(word[1] ^ kSecret[3] ^ high, word[0] ^ high ^ kSecret[0]);
    low += kSecret[1];  // a product that becomes zero must not stay there
    high += kSecret[2];
  }
  return {mix(low ^ kSecret[3], high ^ start.low ^ kSecret[1]), mix(high ^ kSecret[0], low ^ start.high ^ kSecret[2])};
}

}  // namespace

BlockKey root_key(uint64_t seed, uint64_t epoch, std::string_view salt) {
  const uint64_t words[2] = {seed, epoch};
  return hash_bytes(hash_bytes({}, words, sizeof words), salt.data(), salt.size());
}

BlockKey child_key(const BlockKey& parent, std::span<const int32_t> ids, uint64_t media) {
  const BlockKey key = hash_bytes(parent, ids.data(), ids.size_bytes());
  return media == 0 ? key : hash_bytes(key, &media, sizeof media);
}

void KeyChain::extend(std::span<const int32_t> ids) {
  const auto block = static_cast<size_t>(block_size_);
  while ((keys_.size() + 1) * block <= ids.size()) {
    const BlockKey& parent = keys_.empty() ? root_ : keys_.back();
    keys_.push_back(child_key(parent, ids.subspan(keys_.size() * block, block)));
  }
}

}  // namespace moat
