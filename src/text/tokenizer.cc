// SPDX-License-Identifier: Apache-2.0
#include "text/tokenizer.h"

#include <algorithm>
#include <array>
#include <functional>
#include <unordered_map>

#include "base/file.h"
#include "base/json.h"
#include "text/bpe.h"
#include "text/pretokenizer.h"

namespace moat {

constexpr int32_t kReservedIds = 256;

struct Tokenizer::Impl {
  BpeVocabulary vocabulary;
  std::vector<std::string> names;                         // of the reserved ids, by offset
  std::unordered_map<std::string_view, int32_t> by_name;  // keys point into names
  std::vector<size_t> name_lengths;                       // distinct, longest first
  std::array<bool, 256> starts_name = {};                 // first bytes of names
  ControlIds control;

  Status read_config(const Json& config);
  Status index_names();
  void append_text(std::string_view utf8, BpeVocabulary::Scratch& scratch, std::vector<int32_t>& ids) const;
  void append_markup(std::string_view utf8, BpeVocabulary::Scratch& scratch, std::vector<int32_t>& ids) const;
  // The reserved name at the beginning of `text` and its id, or -1.
  int32_t name_at(std::string_view text, size_t& length) const;
};

Status Tokenizer::Impl::read_config(const Json& config) {
  const int32_t base = vocabulary.size();
  for (int32_t i = 0; i < kReservedIds; ++i) names.push_back(fmt::format("<|reserved_token_{}|>", base + i));
  if (!config.is_object()) return data_loss("is a JSON {}, expected an object", config.type_name());
  const Json* decoder = config.find_set("added_tokens_decoder");
  if (decoder == nullptr) return {};
  if (!decoder->is_object()) {
    return data_loss("added_tokens_decoder is a JSON {}, expected an object", decoder->type_name());
  }
  for (int32_t i = 0; i < kReservedIds; ++i) {
    // Entries of other ids do not count, as in the reference: ordinary tokens have no names.
    const std::string key = fmt::format("{}", base + i);
    const Json* entry = decoder->find_set(key);
    if (entry == nullptr) continue;
    const Json* content = entry->find_set("content");
    if (content == nullptr || !content->is_string() || content->as_string().empty()) {
      return data_loss("added_tokens_decoder.{}.content is not a non-empty string", key);
    }
    names[static_cast<size_t>(i)] = content->as_string();
  }
  return {};
}

Status Tokenizer::Impl::index_names() {
  const int32_t base = vocabulary.size();
  for (int32_t i = 0; i < kReservedIds; ++i) {
    const std::string& name = names[static_cast<size_t>(i)];
    const auto [place, fresh] = by_name.emplace(name, base + i);
    if (!fresh) return data_loss("the ids {} and {} are both named {}", place->second, base + i, name);
    name_lengths.push_back(name.size());
    starts_name[static_cast<unsigned char>(name[0])] = true;
  }
  std::sort(name_lengths.begin(), name_lengths.end(), std::greater<>());
  name_lengths.erase(std::unique(name_lengths.begin(), name_lengths.end()), name_lengths.end());

  const std::pair<std::string_view, int32_t*> controls[] = {{"<|open|>", &control.open},
                                                            {"<|close|>", &control.close},
                                                            {"<|sep|>", &control.sep},
                                                            {"<|end_of_msg|>", &control.end_of_msg}};
  std::string_view missing;
  for (const auto& [name, id] : controls) {
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      missing = name;
    } else {
      *id = found->second;
    }
  }
  // A tokenizer without <|open|> is of another chat format; half of this one's tokens is a mistake.
  if (control.open < 0 && control.close < 0 && control.sep < 0) {
    control = {};
  } else if (!missing.empty()) {
    return data_loss("added_tokens_decoder gives no id to the control token {}", missing);
  }
  return {};
}

void Tokenizer::Impl::append_text(std::string_view utf8, BpeVocabulary::Scratch& scratch,
                                  std::vector<int32_t>& ids) const {
  std::string repaired;
  if (!is_valid_utf8(utf8)) {
    repaired = utf8_sanitize(utf8);
    utf8 = repaired;
  }
  for (SliceCutter cutter(utf8); !cutter.done();) {
    std::string_view slice = cutter.next();
    while (!slice.empty()) {
      const size_t length = first_piece(slice);
      vocabulary.merge(slice.substr(0, length), scratch, ids);
      slice.remove_prefix(length);
    }
  }
}

int32_t Tokenizer::Impl::name_at(std::string_view text, size_t& length) const {
  if (!starts_name[static_cast<unsigned char>(text[0])]) return -1;
  for (const size_t candidate : name_lengths) {
    if (candidate > text.size()) continue;
    const auto found = by_name.find(text.substr(0, candidate));
    if (found != by_name.end()) {
      length = candidate;
      return found->second;
    }
  }
  return -1;
}

void Tokenizer::Impl::append_markup(std::string_view utf8, BpeVocabulary::Scratch& scratch,
                                    std::vector<int32_t>& ids) const {
  size_t text_begin = 0;
  for (size_t at = 0; at < utf8.size();) {
    size_t length = 0;
    const int32_t id = name_at(utf8.substr(at), length);
    if (id < 0) {
      ++at;
      continue;
    }
    append_text(utf8.substr(text_begin, at - text_begin), scratch, ids);
    ids.push_back(id);
    at += length;
    text_begin = at;
  }
  append_text(utf8.substr(text_begin), scratch, ids);
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::load(const std::string& directory) {
  auto impl = std::make_unique<Impl>();
  const std::string rank_path = join_path(directory, "tiktoken.model");
  MOAT_ASSIGN(const std::string ranks, read_file(rank_path));
  MOAT_ASSIGN(impl->vocabulary, BpeVocabulary::parse(ranks, rank_path));
  const std::string config_path = join_path(directory, "tokenizer_config.json");
  MOAT_ASSIGN(const std::string config_text, read_file(config_path));
  const auto config = parse_json(config_text);
  if (!config.ok()) return data_loss("{}: {}", config_path, config.status().message());
  MOAT_RETURN_IF_ERROR(impl->read_config(*config).with_prefix(config_path));
  MOAT_RETURN_IF_ERROR(impl->index_names().with_prefix(config_path));
  return Tokenizer(std::move(impl));
}

int32_t Tokenizer::vocab_size() const { return num_ranks() + kReservedIds; }
int32_t Tokenizer::num_ranks() const { return impl_->vocabulary.size(); }
const Tokenizer::ControlIds& Tokenizer::control() const { return impl_->control; }

std::vector<int32_t> Tokenizer::encode_text(std::string_view utf8) const {
  BpeVocabulary::Scratch scratch;
  std::vector<int32_t> ids;
  impl_->append_text(utf8, scratch, ids);
  return ids;
}

std::vector<int32_t> Tokenizer::encode_markup(std::string_view utf8) const {
  BpeVocabulary::Scratch scratch;
  std::vector<int32_t> ids;
  impl_->append_markup(utf8, scratch, ids);
  return ids;
}

std::vector<int32_t> Tokenizer::encode(std::span<const Segment> segments) const {
  BpeVocabulary::Scratch scratch;
  std::vector<int32_t> ids;
  for (const Segment& segment : segments) {
    if (segment.kind == Segment::Kind::kText) {
      impl_->append_text(segment.text, scratch, ids);
    } else {
      impl_->append_markup(segment.text, scratch, ids);
    }
  }
  return ids;
}

std::vector<std::string_view> Tokenizer::split(std::string_view text) {
  std::vector<std::string_view> pieces;
  while (!text.empty()) {
    const size_t length = first_piece(text);
    pieces.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return pieces;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  MOAT_CHECK(id >= 0 && id < vocab_size(), "token id {}", id);
  return is_reserved(id) ? std::string_view(impl_->names[static_cast<size_t>(id - num_ranks())])
                         : impl_->vocabulary.bytes(id);
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (id >= 0 && id < vocab_size()) bytes.append(token_bytes(id));
  }
  return bytes;
}

std::optional<int32_t> Tokenizer::reserved_id(std::string_view name) const {
  const auto found = impl_->by_name.find(name);
  if (found == impl_->by_name.end()) return std::nullopt;
  return found->second;
}

std::string Utf8Stream::push(std::string_view bytes) {
  std::string joined;
  if (!held_.empty()) {
    joined = std::move(held_);
    held_.clear();
    joined.append(bytes);
    bytes = joined;
  }
  // Only the last three bytes can be an unfinished code point.
  size_t tail = bytes.size() - std::min<size_t>(bytes.size(), 3);
  while (tail < bytes.size()) {
    const auto byte = static_cast<unsigned char>(bytes[tail]);
    if (byte >= 0xC0 && utf8_step(bytes.substr(tail)).kind == Utf8Kind::kIncomplete) break;
    ++tail;
  }
  held_ = bytes.substr(tail);
  return utf8_sanitize(bytes.substr(0, tail));
}

std::string Utf8Stream::flush() {
  std::string rest = utf8_sanitize(held_);
  held_.clear();
  return rest;
}

}  // namespace moat
