// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "main/commands.h"
#include "text/tokenizer.h"

namespace moat {

Status tokenize_command(const TokenizeOptions& o) {
  MOAT_ASSIGN(const Tokenizer tokenizer, Tokenizer::load(o.model_dir));
  MOAT_ASSIGN(const std::string input, read_input("-"));
  if (o.decode) {
    Result<Json> json = parse_json(input);
    if (!json.ok()) return json.status().with_prefix("standard input");
    MOAT_ASSIGN(const std::vector<int32_t> ids, parse_token_ids(*json, tokenizer.vocab_size()));
    const std::string text = tokenizer.decode(ids);
    std::fwrite(text.data(), 1, text.size(), stdout);
    return {};
  }
  const std::vector<int32_t> ids = o.markup ? tokenizer.encode_markup(input) : tokenizer.encode_text(input);
  fmt::print("[{}]\n", fmt::join(ids, ", "));
  return {};
}

}  // namespace moat
