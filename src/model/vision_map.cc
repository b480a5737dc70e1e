// SPDX-License-Identifier: Apache-2.0
#include "model/vision_map.h"

#include "model/config_fields.h"

namespace moat {

Result<std::vector<VisionTensor>> vision_table(const Json& vision_config) {
  if (!vision_config.is_object())
    return invalid_argument("vision_config: got {}, expected an object", vision_config.type_name());
  Status status;
  ConfigFields fields(vision_config, "vision_config.", status);
  constexpr int64_t kMaxWidth = 1 << 20;
  const ConfigFields::Range width(1, kMaxWidth);
  const int64_t hidden = fields.integer("vt_hidden_size", width);
  const int64_t qkv = fields.integer("qkv_hidden_size", width);
  const int64_t intermediate = fields.integer("vt_intermediate_size", width);
  const int64_t num_blocks = fields.integer("vt_num_hidden_layers", {1, 1024});
  const int64_t patch = fields.integer("patch_size", {1, 1024});
  const int64_t grid_height = fields.integer("init_pos_emb_height", {1, 4096});
  const int64_t grid_width = fields.integer("init_pos_emb_width", {1, 4096});
  const int64_t text_hidden = fields.integer("text_hidden_size", width);
  int64_t merged = fields.integer("mm_hidden_size", width);
  const Json* merge = fields.find("merge_kernel_size");
  if (merge == nullptr || !merge->is_array() || merge->as_array().size() != 2) {
    fields.fail("{}: expected a list of two integers", fields.name("merge_kernel_size"));
  } else {
    for (const Json& side : merge->as_array()) {
      const int64_t value = side.is_number() ? side.as_int64().value_or(0) : 0;
      if (value < 1 || value > 64) {
        fields.refuse("merge_kernel_size", side, "integers from 1 to 64");
      } else {
        merged *= value;
      }
    }
  }
  MOAT_RETURN_IF_ERROR(status);

  constexpr int64_t kColours = 3;
  std::vector<VisionTensor> table;
  const std::string tower = "vision_tower.";
  table.push_back({tower + "patch_embed.proj.weight", {hidden, kColours, patch, patch}});
  table.push_back({tower + "patch_embed.pos_emb.weight", {grid_height, grid_width, hidden}});
  for (int64_t i = 0; i < num_blocks; ++i) {
    const std::string block = fmt::format("{}encoder.blocks.{}.", tower, i);
    table.push_back({block + "norm0.weight", {hidden}});
    table.push_back({block + "norm1.weight", {hidden}});
    table.push_back({block + "wqkv.weight", {3 * qkv, hidden}});
    table.push_back({block + "wo.weight", {hidden, qkv}});
    table.push_back({block + "mlp.fc0.weight", {intermediate, hidden}});
    table.push_back({block + "mlp.fc1.weight", {hidden, intermediate}});
  }
  table.push_back({tower + "encoder.final_layernorm.weight", {hidden}});
  table.push_back({"mm_projector.proj.0.weight", {merged, merged}});
  table.push_back({"mm_projector.proj.2.weight", {text_hidden, merged}});
  table.push_back({"mm_projector.post_norm.weight", {text_hidden}});
  return table;
}

}  // namespace moat
