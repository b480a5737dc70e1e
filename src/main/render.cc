// SPDX-License-Identifier: Apache-2.0
#include "main/commands.h"
#include "server/openai_request.h"
#include "text/tokenizer.h"

namespace moat {

Status render_command(const RenderOptions& o) {
  MOAT_ASSIGN(const Tokenizer tokenizer, Tokenizer::load(o.model_dir));
  MOAT_ASSIGN(const std::string input, read_input("-"));
  Result<Json> request = parse_json(input);
  if (!request.ok()) return request.status().with_prefix("standard input");
  ApiCall call;
  if (const auto error = render_prompt(*request, ServedModel{}, tokenizer, call)) {
    return invalid_argument("{}{}", error->param.empty() ? "" : error->param + ": ", error->message);
  }
  const std::vector<int32_t>& ids = call.prompts.front().ids;
  fmt::print("{}\n",
             Json::object({{"ids", Json::Array(ids.begin(), ids.end())}, {"text", tokenizer.decode(ids)}}).dump());
  return {};
}

}  // namespace moat
