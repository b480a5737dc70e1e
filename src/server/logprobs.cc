// SPDX-License-Identifier: Apache-2.0
#include "server/logprobs.h"

#include <cmath>
#include <string>
#include <string_view>
#include <utility>

namespace moat {
namespace {

Json finite(float logprob) { return std::isfinite(logprob) ? Json(static_cast<double>(logprob)) : Json(-9999.0); }

std::string_view bytes_of(const Tokenizer& tokenizer, int32_t id) {
  return id >= 0 && id < tokenizer.vocab_size() ? tokenizer.token_bytes(id) : std::string_view();
}

Json chat_entry(int32_t id, float logprob, const Tokenizer& tokenizer) {
  const std::string_view bytes = bytes_of(tokenizer, id);
  Json::Array numbers;
  for (const char byte : bytes) numbers.emplace_back(static_cast<int>(static_cast<unsigned char>(byte)));
  return Json::object({{"token", utf8_sanitize(bytes)}, {"logprob", finite(logprob)}, {"bytes", std::move(numbers)}});
}

// Object keys must differ between tokens that are different parts of a character.
std::string key_of(const Tokenizer& tokenizer, int32_t id) {
  const std::string_view bytes = bytes_of(tokenizer, id);
  if (is_valid_utf8(bytes)) return std::string(bytes);
  std::string key = "bytes:";
  for (const char byte : bytes) key += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return key;
}

int64_t num_characters(std::string_view bytes) {
  int64_t count = 0;
  for (const char byte : bytes) count += (static_cast<unsigned char>(byte) & 0xc0U) != 0x80U ? 1 : 0;
  return count;
}

}  // namespace

Json::Array chat_logprobs(std::span<const SampledToken> tokens, const Tokenizer& tokenizer) {
  Json::Array entries;
  for (const SampledToken& token : tokens) {
    Json entry = chat_entry(token.token_id, token.logprob, tokenizer);
    Json::Array top;
    for (const TokenLogprob& other : token.top) top.push_back(chat_entry(other.token_id, other.logprob, tokenizer));
    entry.set("top_logprobs", std::move(top));
    entries.push_back(std::move(entry));
  }
  return entries;
}

Json completion_logprobs(std::span<const SampledToken> tokens, const Tokenizer& tokenizer, int32_t num_logprobs,
                         int64_t& text_offset) {
  Json::Array texts;
  Json::Array logprobs;
  Json::Array tops;
  Json::Array offsets;
  for (const SampledToken& token : tokens) {
    texts.emplace_back(key_of(tokenizer, token.token_id));
    logprobs.push_back(finite(token.logprob));
    offsets.emplace_back(text_offset);
    if (!tokenizer.is_reserved(token.token_id)) text_offset += num_characters(bytes_of(tokenizer, token.token_id));
    Json top = Json::object();
    for (const TokenLogprob& other : token.top) top.set(key_of(tokenizer, other.token_id), finite(other.logprob));
    top.set(key_of(tokenizer, token.token_id), finite(token.logprob));
    tops.push_back(std::move(top));
  }
  return Json::object({{"tokens", std::move(texts)},
                       {"token_logprobs", std::move(logprobs)},
                       {"top_logprobs", num_logprobs > 0 ? Json(std::move(tops)) : Json()},
                       {"text_offset", std::move(offsets)}});
}

}  // namespace moat
