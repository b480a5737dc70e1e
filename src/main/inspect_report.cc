// SPDX-License-Identifier: Apache-2.0
// An Inspection as a table for people and as JSON for programs.
#include <array>
#include <utility>

#include "base/json.h"
#include "main/inspect.h"

namespace moat {
namespace {

constexpr size_t kListedNames = 8;

// 1560860324864 -> "1,560,860,324,864"
std::string grouped(int64_t number) {
  const std::string digits = fmt::format("{}", number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

// Powers of ten, as vendors count: "2.779 T", "104.19 B".
std::string short_count(int64_t number) {
  const auto value = static_cast<double>(number);
  if (value >= 1e12) return fmt::format("{:.3f} T", value / 1e12);
  if (value >= 1e9) return fmt::format("{:.2f} B", value / 1e9);
  if (value >= 1e6) return fmt::format("{:.2f} M", value / 1e6);
  return grouped(number);
}

// Powers of two, as the size of a checkpoint is quoted: "1.4196 TiB".
std::string binary_size(int64_t bytes) {
  constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  return fmt::format("{:.4f} {}", value, kUnits[unit]);
}

std::string_view source_name(Inspection::Source source) {
  switch (source) {
    case Inspection::Source::kFiles: return "files";
    case Inspection::Source::kIndexOnly: return "index";
    case Inspection::Source::kConfigOnly: return "config";
  }
  return "?";
}

std::string source_text(const Inspection& it) {
  switch (it.source) {
    case Inspection::Source::kFiles: return fmt::format("{} file{}", it.num_files, it.num_files == 1 ? "" : "s");
    case Inspection::Source::kIndexOnly:
      return fmt::format("index that names {} files, none of them here: bytes are computed from the config",
                         it.num_files);
    case Inspection::Source::kConfigOnly: return "config.json alone: names and bytes are computed from it";
  }
  return "?";
}

// The switches in which checkpoints of the family differ.
std::vector<std::pair<std::string, Json>> switches(const Inspection& it) {
  const ModelConfig& c = it.config;
  const auto number = [](const auto& value) { return value ? Json(static_cast<double>(*value)) : Json(); };
  const auto integer = [](const std::optional<int64_t>& value) { return value ? Json(*value) : Json(); };
  return {
      {"tensor_prefix", c.tensor_prefix},
      {"gate_lower_bound", number(c.gate_lower_bound)},
      {"full_rank_gate", c.full_rank_gate},
      {"q_lora_rank", integer(c.q_lora_rank)},
      {"mla_output_gate", c.mla_output_gate},
      {"latent_size", integer(c.latent_size)},
      {"latent_norm", c.latent_norm},
      {"attn_res_block_size", integer(c.attn_res_block_size)},
      {"activation", c.hidden_act == HiddenAct::kSitu ? "situ" : "silu"},
      {"situ_linear_beta", number(c.situ_linear_beta)},
      {"expert_storage", c.num_experts == 0 ? Json() : Json(it.layout.mxfp4_experts ? "mxfp4" : "plain")},
      {"num_shared_experts", c.num_shared_experts},
      {"vision", c.has_vision},
  };
}

// One letter a layer, upper case with experts: "k K K M".
std::string layer_pattern(const ModelConfig& config) {
  std::string pattern;
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const bool kda = config.layer_kinds[static_cast<size_t>(i)] == LayerKind::kKda;
    pattern += kda ? (config.is_moe(i) ? 'K' : 'k') : (config.is_moe(i) ? 'M' : 'm');
  }
  return pattern;
}

std::string_view component_key(size_t i) {
  constexpr std::array<std::string_view, kNumComponents> kKeys = {
      "kda", "mla", "norms", "dense_mlp", "router", "latent", "shared", "routed", "embed", "head", "final", "vision"};
  return kKeys[i];
}

ComponentStats component_of(const Inspection& it, size_t i) {
  return static_cast<Component>(i) == Component::kVision ? it.vision : it.stats.components[i];
}

std::string name_list(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kListedNames; ++i) text += "\n    " + names[i];
  if (names.size() > kListedNames) text += fmt::format("\n    ... and {} more", names.size() - kListedNames);
  return text;
}

void add_line(std::string& text, std::string_view label, std::string_view value) {
  text += fmt::format("  {:<26} {}\n", label, value);
}

// What a cached prefix costs once, beside its tokens: the state at its end, as the caches of this build hold it, and how
// many tokens of latent cache the same bytes would be.
struct CheckpointCost {
  int64_t bytes = 0;
  int64_t tokens_f32 = 0, tokens_bf16 = 0;  // 0: the model has no latent cache
};

CheckpointCost checkpoint_cost(const ModelStats& stats) {
  const int64_t bytes = stats.state_bytes_per_sequence(DType::kF32, DType::kF32);
  const auto tokens = [&](DType dtype) {
    const int64_t a_token = stats.kv_bytes_per_token(dtype);
    return a_token == 0 ? 0 : (bytes + a_token / 2) / a_token;
  };
  return {.bytes = bytes, .tokens_f32 = tokens(DType::kF32), .tokens_bf16 = tokens(DType::kBF16)};
}

void add_components(std::string& text, const Inspection& it) {
  text += fmt::format("\n  {:<26} {:>9} {:>21} {:>21}\n", "component", "tensors", "parameters", "bytes");
  const auto row = [&](std::string_view name, const ComponentStats& c) {
    text += fmt::format("  {:<26} {:>9} {:>21} {:>21}\n", name, grouped(c.num_tensors), grouped(c.parameters),
                        grouped(c.bytes));
  };
  ComponentStats total;
  for (size_t i = 0; i < kNumComponents; ++i) {
    const ComponentStats component = component_of(it, i);
    if (component.num_tensors == 0) continue;
    row(component_name(static_cast<Component>(i)), component);
    total.num_tensors += component.num_tensors;
    total.parameters += component.parameters;
    total.bytes += component.bytes;
  }
  row("total", total);
}

}  // namespace

std::string inspection_text(const Inspection& it) {
  const ModelConfig& c = it.config;
  std::string text = it.directory + "\n";
  add_line(text, "source", source_text(it));
  add_line(text, "model type", c.model_type);
  add_line(text, "layers", fmt::format("{}: {} KDA, {} MLA", c.num_layers, c.num_kda_layers(), c.num_mla_layers()));
  add_line(text, "", layer_pattern(c) + "  (K KDA, M MLA; lower case: dense MLP)");
  add_line(text, "hidden, vocabulary, context",
           fmt::format("{}, {}, {}", c.hidden_size, c.vocab_size, c.max_position_embeddings));
  if (c.num_experts > 0) {
    add_line(text, "experts",
             fmt::format("{} routed, {} active, {} shared; width {}", c.num_experts, c.num_experts_per_token,
                         c.num_shared_experts, c.moe_intermediate_size));
  }
  text += "\n";
  for (const auto& [name, value] : switches(it)) {
    add_line(text, name, value.is_null() ? "off" : value.is_string() ? value.as_string() : value.dump());
  }
  text += "\n";
  add_line(text, "tensors", grouped(static_cast<int64_t>(it.num_tensors)));
  add_line(text, "text parameters",
           fmt::format("{} ({})", short_count(it.stats.parameters), grouped(it.stats.parameters)));
  add_line(text, "active per token",
           fmt::format("{} ({}), without the embedding lookup", short_count(it.stats.active_parameters),
                       grouped(it.stats.active_parameters)));
  add_line(text, "bytes", fmt::format("{} ({})", grouped(it.total_bytes()), binary_size(it.total_bytes())));
  if (it.index_total_size != 0) {
    const bool same = it.index_total_size == static_cast<uint64_t>(it.total_bytes());
    add_line(
        text, "total_size of the index",
        fmt::format("{} ({})", grouped(static_cast<int64_t>(it.index_total_size)), same ? "the same" : "DIFFERENT"));
  }
  add_line(text, "cache per token",
           fmt::format("{} bytes in f32, {} in bf16", grouped(it.stats.kv_bytes_per_token(DType::kF32)),
                       grouped(it.stats.kv_bytes_per_token(DType::kBF16))));
  add_line(text, "state per sequence",
           fmt::format("{} bytes in f32, {} with bf16 convolution history",
                       grouped(it.stats.state_bytes_per_sequence(DType::kF32, DType::kF32)),
                       grouped(it.stats.state_bytes_per_sequence(DType::kF32, DType::kBF16))));
  const CheckpointCost checkpoint = checkpoint_cost(it.stats);
  add_line(text, "checkpoint of a prefix",
           fmt::format("{} bytes: as much as {} tokens of f32 cache (this build's), {} of bf16",
                       grouped(checkpoint.bytes), grouped(checkpoint.tokens_f32), grouped(checkpoint.tokens_bf16)));
  add_components(text, it);
  const auto num_ignored = static_cast<int64_t>(it.ignored.size()) + it.vision.num_tensors;
  text += fmt::format("\n  {} tensors ignored: {} vision, {} never read{}\n", num_ignored, it.vision.num_tensors,
                      it.ignored.size(), name_list(it.ignored));
  if (!it.missing.empty()) text += fmt::format("  {} tensors MISSING{}\n", it.missing.size(), name_list(it.missing));
  if (!it.unknown.empty()) text += fmt::format("  {} tensors UNKNOWN{}\n", it.unknown.size(), name_list(it.unknown));
  return text;
}

std::string inspection_json(const Inspection& it) {
  const CheckpointCost checkpoint = checkpoint_cost(it.stats);
  const auto names = [](const std::vector<std::string>& list) {
    Json array = Json::array();
    for (const std::string& name : list) array.push_back(name);
    return array;
  };
  Json components = Json::object();
  for (size_t i = 0; i < kNumComponents; ++i) {
    const ComponentStats c = component_of(it, i);
    components.set(std::string(component_key(i)),
                   Json::object({{"tensors", c.num_tensors}, {"parameters", c.parameters}, {"bytes", c.bytes}}));
  }
  Json switch_values = Json::object();
  for (const auto& [name, value] : switches(it)) switch_values.set(name, value);
  Json layers = Json::array();
  for (const LayerKind kind : it.config.layer_kinds) layers.push_back(kind == LayerKind::kKda ? "kda" : "mla");
  const Json json = Json::object({
      {"directory", it.directory},
      {"source", source_name(it.source)},
      {"model_type", it.config.model_type},
      {"switches", std::move(switch_values)},
      {"layers", std::move(layers)},
      {"num_files", it.num_files},
      {"num_tensors", it.num_tensors},
      {"text_parameters", it.stats.parameters},
      {"active_parameters", it.stats.active_parameters},
      {"total_bytes", it.total_bytes()},
      {"index_total_size", it.index_total_size},
      {"components", std::move(components)},
      {"kv_bytes_per_token", it.stats.kv_bytes_per_token(DType::kF32)},
      {"kv_bytes_per_token_bf16", it.stats.kv_bytes_per_token(DType::kBF16)},
      {"state_bytes_per_sequence", it.stats.state_bytes_per_sequence(DType::kF32, DType::kF32)},
      {"state_bytes_per_sequence_bf16_conv", it.stats.state_bytes_per_sequence(DType::kF32, DType::kBF16)},
      {"checkpoint_bytes", checkpoint.bytes},
      {"checkpoint_kv_tokens", checkpoint.tokens_f32},
      {"checkpoint_kv_tokens_bf16", checkpoint.tokens_bf16},
      {"num_vision_tensors", it.vision.num_tensors},
      {"ignored", names(it.ignored)},
      {"missing", names(it.missing)},
      {"unknown", names(it.unknown)},
  });
  return json.dump() + "\n";
}

}  // namespace moat
