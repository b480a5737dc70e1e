// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence_logits.h"
#include "main/commands.h"
#include "model/safetensors.h"

namespace moat {

Status logits_command(const LogitsOptions& o) {
  if (o.chunk < 1) return invalid_argument("--chunk is {}, expected at least 1", o.chunk);
  MOAT_ASSIGN(const std::string text, read_input(o.ids_path));
  Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(o.ids_path);
  if (!json->is_array())
    return invalid_argument("{}: a {}, expected a list of lists of ids", o.ids_path, json->type_name());
  MOAT_ASSIGN(OpenModel open, open_model(o.model));
  const int64_t vocab = open.loaded->config.vocab_size;

  std::vector<std::vector<int32_t>> prompts;
  std::vector<SafetensorsWriter::Declaration> tensors;
  int64_t longest = 1;
  for (const Json& item : json->as_array()) {
    MOAT_ASSIGN(std::vector<int32_t> ids, parse_token_ids(item, vocab));
    const int64_t count = static_cast<int64_t>(ids.size());
    tensors.push_back({fmt::format("logits.{}", prompts.size()), DType::kF32, {count, vocab}});
    longest = std::max(longest, count);
    prompts.push_back(std::move(ids));
  }
  MOAT_ASSIGN(
      const auto runner,
      SequenceLogits::create(*open.loaded,
                             {.reference = open.reference, .max_tokens = longest, .chunk = std::min(o.chunk, longest)},
                             *open.pool));
  MOAT_ASSIGN(SafetensorsWriter writer, SafetensorsWriter::create(o.out_path, std::move(tensors)));
  for (const auto& ids : prompts) {
    Status written;
    runner->restart();
    MOAT_RETURN_IF_ERROR(runner->append(ids, o.chunk, [&](int64_t, const Tensor& logits) {
      const auto* bytes = static_cast<const std::byte*>(logits.data);
      if (written.ok()) written = writer.append({bytes, static_cast<size_t>(storage_bytes(DType::kF32, logits.dims))});
    }));
    MOAT_RETURN_IF_ERROR(written);
  }
  return writer.close();
}

}  // namespace moat
