// SPDX-License-Identifier: Apache-2.0
#include "text/bpe.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>

namespace moat {
namespace {

constexpr auto kBase64Values = [] {
  std::array<int8_t, 256> values = {};
  values.fill(-1);
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (size_t i = 0; i < kDigits.size(); ++i) values[static_cast<unsigned char>(kDigits[i])] = static_cast<int8_t>(i);
  return values;
}();

// Strict: padded, no other characters, no bits lost in the last digit.
std::optional<std::string> decode_base64(std::string_view text) {
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text.substr(0, text.size() - padding)) {
    const int value = kBase64Values[static_cast<unsigned char>(c)];
    if (value < 0) return std::nullopt;
    bits = (bits << 6 | static_cast<uint32_t>(value)) & 0xFFFF;  // at most 14 bits are in use
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes.push_back(static_cast<char>(bits >> count & 0xFF));
    }
  }
  if ((bits & ((1U << count) - 1)) != 0) return std::nullopt;
  return bytes;
}

uint64_t hash_bytes(std::string_view bytes) {
  constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ULL;
  uint64_t hash = bytes.size() * kMultiplier;
  const auto mix = [&](uint64_t word) {
    hash = (hash ^ word) * kMultiplier;
    hash ^= hash >> 32;
  };
  while (bytes.size() >= 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    mix(word);
    bytes.remove_prefix(8);
  }
  uint64_t word = 0;
  for (const char c : bytes) word = word << 8 | static_cast<unsigned char>(c);
  mix(word);
  return hash;
}

struct Entry {
  std::string bytes;
  uint32_t rank = 0;
  uint32_t line = 0;
};

Result<std::vector<Entry>> parse_lines(std::string_view text, std::string_view name) {
  std::vector<Entry> entries;
  uint32_t number = 0;
  while (!text.empty()) {
    ++number;
    const size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    const size_t space = line.find(' ');
    if (space == std::string_view::npos) {
      return data_loss("{}:{}: expected \"BASE64 RANK\", got {} bytes without a space", name, number, line.size());
    }
    auto bytes = decode_base64(line.substr(0, space));
    if (!bytes || bytes->empty()) return data_loss("{}:{}: token is not valid base64", name, number);
    const std::string_view digits = line.substr(space + 1);
    uint32_t rank = 0;
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
    if (result.ec != std::errc() || result.ptr != digits.data() + digits.size()) {
      return data_loss("{}:{}: rank is not a number", name, number);
    }
    entries.push_back({std::move(*bytes), rank, number});
  }
  return entries;
}

}  // namespace

Result<BpeVocabulary> BpeVocabulary::parse(std::string_view text, std::string_view name) {
  MOAT_ASSIGN(std::vector<Entry> entries, parse_lines(text, name));
  constexpr size_t kMostTokens = 1 << 24;
  if (entries.empty()) return data_loss("{}: no tokens", name);
  if (entries.size() > kMostTokens) return data_loss("{}: {} tokens, at most {}", name, entries.size(), kMostTokens);
  std::vector<const Entry*> by_rank(entries.size());
  size_t total = 0;
  for (const Entry& entry : entries) {
    if (entry.rank >= entries.size()) {
      return data_loss("{}:{}: rank {}, but {} tokens need the ranks 0 to {}", name, entry.line, entry.rank,
                       entries.size(), entries.size() - 1);
    }
    const Entry*& place = by_rank[entry.rank];
    if (place != nullptr) {
      return data_loss("{}:{}: rank {} was given in line {} already", name, entry.line, entry.rank, place->line);
    }
    place = &entry;
    total += entry.bytes.size();
  }
  if (total > std::numeric_limits<uint32_t>::max()) return data_loss("{}: tokens of {} bytes", name, total);
  BpeVocabulary vocabulary;
  vocabulary.arena_.reserve(total);
  vocabulary.offsets_.push_back(0);
  std::vector<uint32_t> lines;
  for (const Entry* entry : by_rank) {
    vocabulary.arena_.append(entry->bytes);
    vocabulary.offsets_.push_back(static_cast<uint32_t>(vocabulary.arena_.size()));
    vocabulary.longest_ = std::max(vocabulary.longest_, entry->bytes.size());
    lines.push_back(entry->line);
  }
  MOAT_RETURN_IF_ERROR(vocabulary.index(name, lines));
  return vocabulary;
}

Status BpeVocabulary::index(std::string_view name, const std::vector<uint32_t>& lines) {
  slots_.assign(std::bit_ceil(static_cast<size_t>(size()) * 2), -1);
  const size_t mask = slots_.size() - 1;
  for (int32_t rank = 0; rank < size(); ++rank) {
    const std::string_view token = bytes(rank);
    size_t slot = hash_bytes(token) & mask;
    for (; slots_[slot] >= 0; slot = (slot + 1) & mask) {
      if (bytes(slots_[slot]) == token) {
        return data_loss("{}:{}: token was given in line {} already", name, lines[static_cast<size_t>(rank)],
                         lines[static_cast<size_t>(slots_[slot])]);
      }
    }
    slots_[slot] = rank;
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    byte_ids_[byte] = find({&c, 1});
    if (byte_ids_[byte] < 0) return data_loss("{}: no token for the single byte 0x{:02x}", name, byte);
  }
  return {};
}

int32_t BpeVocabulary::find(std::string_view token) const {
  if (token.size() > longest_) return -1;
  const size_t mask = slots_.size() - 1;
  for (size_t slot = hash_bytes(token) & mask; slots_[slot] >= 0; slot = (slot + 1) & mask) {
    if (bytes(slots_[slot]) == token) return slots_[slot];
  }
  return -1;
}

void BpeVocabulary::merge(std::string_view piece, Scratch& scratch, std::vector<int32_t>& ids) const {
  if (const int32_t whole = find(piece); whole >= 0) {
    ids.push_back(whole);
    return;
  }
  const auto size = static_cast<uint32_t>(piece.size());
  auto& parts = scratch.parts;
  auto& heap = scratch.heap;
  parts.resize(std::max(parts.size(), piece.size()));
  heap.clear();
  // What the part at `begin` and its neighbour would join to.
  const auto set_rank = [&](uint32_t begin) {
    auto& part = parts[begin];
    part.rank = -1;
    if (part.next < size) part.rank = find(piece.substr(begin, parts[part.next].next - begin));
    return part.rank >= 0 ? static_cast<uint64_t>(part.rank) << 32 | begin : UINT64_MAX;
  };
  for (uint32_t i = 0; i < size; ++i) {
    parts[i] = {i + 1, i == 0 ? size : i - 1, -1, byte_ids_[static_cast<unsigned char>(piece[i])]};
  }
  for (uint32_t i = 0; i < size; ++i) {
    if (const uint64_t entry = set_rank(i); entry != UINT64_MAX) heap.push_back(entry);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto push = [&](uint32_t begin) {
    if (const uint64_t entry = set_rank(begin); entry != UINT64_MAX) {
      heap.push_back(entry);
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  };
  while (!heap.empty()) {
    const uint64_t entry = heap.front();
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    const auto begin = static_cast<uint32_t>(entry);
    const auto rank = static_cast<int32_t>(entry >> 32);
    auto& part = parts[begin];
    if (part.rank != rank) continue;  // the part or its neighbour has changed since
    auto& absorbed = parts[part.next];
    absorbed.rank = -1;
    part.next = absorbed.next;
    part.id = rank;
    if (part.next < size) parts[part.next].previous = begin;
    push(begin);
    if (part.previous < size) push(part.previous);
  }
  for (uint32_t i = 0; i < size; i = parts[i].next) ids.push_back(parts[i].id);
}

}  // namespace moat
