// SPDX-License-Identifier: Apache-2.0
#include "server/tokenize_api.h"

#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "server/api_error.h"
#include "server/field_reader.h"
#include "server/request_body.h"

namespace moat {
namespace {

// Fills `answer` or says what is wrong.
using Work = std::function<std::optional<ApiError>(const Json& body, Json& answer)>;

void run(PreparePool& pool, const Exchange& exchange, std::string body, Work work) {
  const size_t bytes = body.size();
  const bool accepted = pool.submit(bytes, [exchange, body = std::move(body), work = std::move(work)] {
    Json json;
    Json answer = Json::object();
    std::optional<ApiError> error = parse_body(body, json);
    if (!error) error = work(json, answer);
    exchange.finish(error ? error_response(*error) : HttpResponse{.body = answer.dump()});
  });
  if (!accepted) exchange.finish(error_response(prepare_pool_full()));
}

std::optional<ApiError> tokenize(const GenerationContext& context, const Json& body, Json& answer) {
  FieldReader fields(body);
  std::vector<int32_t> ids;
  const std::string* text = fields.string("prompt");
  if (text == nullptr) text = fields.string("text");
  if (text != nullptr) {
    ids = context.tokenizer.encode_text(*text);
  } else if (fields.any("messages") != nullptr) {
    ApiCall call;
    if (auto error = render_prompt(body, context.model, context.tokenizer, call)) return error;
    ids = std::move(call.prompts.front().ids);
  } else {
    fields.fail("prompt", "prompt is missing, expected prompt (a string) or messages");
  }
  if (!fields.ok()) return fields.error();
  Json::Array tokens;
  tokens.reserve(ids.size());
  for (const int32_t id : ids) tokens.emplace_back(id);
  answer.set("count", static_cast<int64_t>(tokens.size()));
  answer.set("max_model_len", context.engine.info().max_model_len);
  answer.set("tokens", std::move(tokens));
  return std::nullopt;
}

std::optional<ApiError> detokenize(const GenerationContext& context, const Json& body, Json& answer) {
  FieldReader fields(body);
  const Json* tokens = fields.array("tokens");
  if (tokens == nullptr) {
    fields.fail("tokens", "tokens is missing, expected an array of token ids");
    return fields.error();
  }
  std::vector<int32_t> ids;
  for (const Json& token : tokens->as_array()) {
    const auto id = token.is_number() ? token.as_int64() : std::nullopt;
    if (!id || *id < 0 || *id >= context.tokenizer.vocab_size()) {
      return bad_field("tokens", fmt::format("tokens contains {}, expected token ids from 0 to {}", shown(token),
                                             context.tokenizer.vocab_size() - 1));
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  answer.set("prompt", utf8_sanitize(context.tokenizer.decode(ids)));
  return std::nullopt;
}

}  // namespace

void run_tokenize(const GenerationContext& context, PreparePool& pool, const Exchange& exchange, std::string body) {
  run(pool, exchange, std::move(body),
      [&context](const Json& json, Json& answer) { return tokenize(context, json, answer); });
}

void run_detokenize(const GenerationContext& context, PreparePool& pool, const Exchange& exchange, std::string body) {
  run(pool, exchange, std::move(body),
      [&context](const Json& json, Json& answer) { return detokenize(context, json, answer); });
}

}  // namespace moat
