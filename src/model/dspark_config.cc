// SPDX-License-Identifier: Apache-2.0
#include "model/dspark_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>

#include "base/file.h"
#include "model/config_fields.h"

namespace moat {
namespace {

constexpr int64_t kMaxProduct = int64_t{1} << 40;  // elements of any one tensor
constexpr int64_t kMaxLayers = 256;
constexpr int64_t kMaxTaps = 64;
constexpr int64_t kMaxBlock = 64;  // rows: what one call of block_attention takes
constexpr int64_t kMaxTargetLayers = 4096;

// --- where keys stand ---

bool same_value(const Json& a, const Json& b) {
  return a == b || (a.is_number() && b.is_number() && a.as_double() == b.as_double());
}

// The keys of the config and of its nested objects in one object. A key that stands in two places must say the same.
Result<Json> flatten(const Json& config) {
  Json flat = Json::object();
  for (const auto& [key, value] : config.as_object()) {
    if (!value.is_null()) flat.set(key, value);
  }
  for (const std::string_view nested : {"dflash_config", "transformer_layer_config"}) {
    const Json* object = config.find_set(nested);
    if (object == nullptr) continue;
    if (!object->is_object())
      return invalid_argument("{}: got {}, expected an object", nested, ConfigFields::shown(*object));
    for (const auto& [key, value] : object->as_object()) {
      if (value.is_null() || key == "model_type" || key == "architectures") continue;  // of the layer's own class
      const Json* outer = flat.find(key);
      if (outer != nullptr && !same_value(*outer, value)) {
        return invalid_argument("{}.{}: got {}, expected {} as {} says outside", nested, key,
                                ConfigFields::shown(value), ConfigFields::shown(*outer), key);
      }
      if (outer == nullptr) flat.set(key, value);
    }
  }
  return flat;
}

// One of a few words; absent: `absent`.
template <class T, size_t N>
T choice(ConfigFields& fields, std::string_view key, T absent, const std::array<std::pair<const char*, T>, N>& words) {
  const Json* value = fields.find(key);
  if (value == nullptr) return absent;
  std::string expected;
  for (const auto& [word, meaning] : words) {
    if (value->is_string() && value->as_string() == word) return meaning;
    expected += fmt::format("{}\"{}\"", expected.empty() ? "" : " or ", word);
  }
  fields.fail_unsupported("{}: got {}, expected {}", fields.name(key), ConfigFields::shown(*value), expected);
  return absent;
}

float required_number(ConfigFields& fields, std::string_view key, double low, double high) {
  const auto value = fields.optional_number(key, low, high);
  if (!value) fields.fail("{}: missing, expected a number from {} to {}", fields.name(key), low, high);
  return value.value_or(static_cast<float>(low));
}

// --- the parts of a config ---

void read_architecture(ConfigFields& fields, DsparkConfig& config) {
  const Json* list = fields.find("architectures");
  if (list != nullptr && list->is_array() && list->as_array().size() == 1 && list->as_array()[0].is_string()) {
    config.architecture = list->as_array()[0].as_string();
  } else if (list != nullptr) {
    fields.refuse("architectures", *list, "a list of one name");
  } else {
    fields.fail("architectures: missing, expected a list of one name");
  }
  constexpr std::array kKnown = {"DSparkDraftModel", "Qwen3DSparkModel", "K3DSparkModel"};
  if (std::find(kKnown.begin(), kKnown.end(), config.architecture) == kKnown.end()) {
    fields.fail_unsupported("architectures: got \"{}\", expected DSparkDraftModel, Qwen3DSparkModel or K3DSparkModel",
                            config.architecture);
  }
  using Attention = std::pair<const char*, DraftAttention>;
  const DraftAttention by_type =
      choice(fields, "model_type", DraftAttention::kGqa,
             std::array{Attention{"qwen3", DraftAttention::kGqa}, Attention{"k3_dspark", DraftAttention::kMla}});
  const bool mla = by_type == DraftAttention::kMla || config.architecture == "K3DSparkModel";
  config.attention = choice(fields, "attention_mode", mla ? DraftAttention::kMla : DraftAttention::kGqa,
                            std::array{Attention{"gqa", DraftAttention::kGqa}, Attention{"mla", DraftAttention::kMla}});
  const bool wants_mla = config.attention == DraftAttention::kMla;
  if ((mla && !wants_mla) || (wants_mla && config.architecture == "Qwen3DSparkModel")) {
    fields.fail_unsupported("attention_mode: got \"{}\", expected \"{}\" for {}", wants_mla ? "mla" : "gqa",
                            wants_mla ? "gqa" : "mla", config.architecture);
  }
}

// dspark.md 1.1: what is said wins; DeepSpec's keys mean that slot 0 predicts; a speculators envelope without them
// means that it does not.
void check_anchor_first(ConfigFields& fields, const Json& flat) {
  fields.expect("projector_type", "dspark", "other block drafters are not implemented");
  const Json* said = fields.find("sample_from_anchor");
  bool shifted = false;
  if (said != nullptr) {
    shifted = !fields.boolean_or("sample_from_anchor", true);
  } else if (!fields.has("num_anchors") && !fields.has("projector_type")) {
    const Json::Object& members = flat.as_object();
    shifted = std::any_of(members.begin(), members.end(),
                          [](const Json::Member& m) { return m.first.starts_with("speculators_"); });
  }
  if (shifted) {
    fields.fail_unsupported(
        "sample_from_anchor: got {}, expected true: drafts of anchor-shifted checkpoints begin at the second row of "
        "their block, which is not implemented",
        said != nullptr ? "false" : "a speculators config that does not say it, which means false");
  }
}

void read_sizes(ConfigFields& fields, DsparkConfig& config) {
  config.vocab_size = fields.integer("vocab_size");
  config.draft_vocab_size = fields.integer_or("draft_vocab_size", config.vocab_size);
  config.hidden_size = fields.integer("hidden_size");
  config.num_layers = fields.integer("num_hidden_layers", {1, kMaxLayers});
  config.intermediate_size = fields.integer("intermediate_size");
  config.rms_norm_eps = required_number(fields, "rms_norm_eps", 1e-12, 0.1);
  config.block_size = fields.integer("block_size", {1, kMaxBlock});
  config.mask_token_id = static_cast<int32_t>(fields.integer("mask_token_id", {0, config.vocab_size - 1}));
  config.causal_block = fields.boolean_or("causal", false);
  fields.expect_absent("quantization_config", "quantized drafters are not implemented");
  fields.expect("hidden_act", "silu", "other activations are not implemented");
  fields.expect("attention_bias", false, "projection biases are not implemented");
  fields.expect("mlp_bias", false, "projection biases are not implemented");
  fields.expect("tie_word_embeddings", false, "tied embeddings are not implemented");
}

void check_full_attention(ConfigFields& fields, const DsparkConfig& config) {
  constexpr const char* kReason = "sliding windows are not implemented";
  fields.expect("use_sliding_window", false, kReason);
  if (!fields.has("use_sliding_window")) fields.expect_absent("sliding_window", kReason);
  const Json* types = fields.find("layer_types");
  if (types == nullptr) return;
  if (!types->is_array() || static_cast<int64_t>(types->as_array().size()) != config.num_layers) {
    return fields.refuse("layer_types", *types,
                         fmt::format("a list of num_hidden_layers = {} words", config.num_layers));
  }
  for (const Json& type : types->as_array()) {
    if (!(type == Json("full_attention"))) {
      fields.fail_unsupported("layer_types: got {}, expected \"full_attention\": {}", ConfigFields::shown(type),
                              kReason);
    }
  }
}

void read_attention(ConfigFields& fields, DsparkConfig& config) {
  config.num_heads = fields.integer("num_attention_heads");
  if (config.attention == DraftAttention::kGqa) {
    config.num_kv_heads = fields.integer_or("num_key_value_heads", config.num_heads);
    config.head_dim = fields.integer("head_dim");
    if (config.num_heads % config.num_kv_heads != 0) {
      fields.fail("num_key_value_heads: got {}, expected a divisor of num_attention_heads = {}", config.num_kv_heads,
                  config.num_heads);
    }
    return;
  }
  const int64_t num_kv_heads = fields.integer_or("num_key_value_heads", config.num_heads);
  if (num_kv_heads != config.num_heads) {
    fields.fail_unsupported(
        "num_key_value_heads: got {}, expected {} as num_attention_heads: latent attention has one key per head",
        num_kv_heads, config.num_heads);
  }
  config.num_kv_heads = 1;
  config.q_lora_rank = fields.optional_integer("q_lora_rank");
  config.kv_lora_rank = fields.integer("kv_lora_rank");
  config.qk_nope_head_dim = fields.integer("qk_nope_head_dim");
  config.qk_rope_head_dim = fields.integer("qk_rope_head_dim");
  config.v_head_dim = fields.integer("v_head_dim");
  fields.expect("mla_use_nope", false, "drafters without positions are not implemented");
  fields.expect("mla_use_output_gate", false, "gated drafters are not implemented");
}

// --- rope ---

double yarn_magnitude(double factor, double weight) {
  return factor <= 1.0 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0;
}

// Which components turn slower, and by how much: dspark.md 1.4. `theta` are the plain frequencies.
struct YarnRamp {
  double low, high;
  double at(size_t i) const { return std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0); }
};
YarnRamp yarn_ramp(double dim, double base, double original, double beta_fast, double beta_slow) {
  constexpr double kTwoPi = 6.283185307179586;
  const auto index = [&](double rotations) {
    return dim * std::log(original / (kTwoPi * rotations)) / (2.0 * std::log(base));
  };
  YarnRamp ramp{std::max(std::floor(index(beta_fast)), 0.0), std::min(std::ceil(index(beta_slow)), dim - 1.0)};
  if (ramp.high <= ramp.low) ramp.high = ramp.low + 0.001;
  return ramp;
}

// Reads YaRN's keys, bends `frequencies` and sets the magnitudes.
void read_yarn(ConfigFields& rope, double base, std::vector<double>& frequencies, DsparkConfig& config) {
  const double dim = 2.0 * static_cast<double>(frequencies.size());
  const double factor = static_cast<double>(required_number(rope, "factor", 1.0, 1e6));
  const int64_t original = rope.integer("original_max_position_embeddings");
  const double fast = static_cast<double>(rope.optional_number("beta_fast", 1e-3, 1e6).value_or(32.0F));
  const double slow = static_cast<double>(rope.optional_number("beta_slow", 1e-3, 1e6).value_or(1.0F));
  if (fast <= slow) rope.fail("{}: got {}, expected more than beta_slow = {}", rope.name("beta_fast"), fast, slow);
  rope.expect("truncate", true, "fractional bounds of the ramp are not implemented");
  const auto said = rope.optional_number("attention_factor", 1e-3, 1e3);
  const auto mscale = rope.optional_number("mscale", 0.0, 1e3);
  const auto mscale_all = rope.optional_number("mscale_all_dim", 0.0, 1e3);
  if (mscale.has_value() != mscale_all.has_value() || (said && mscale)) {
    rope.fail_unsupported("{}: expected mscale with mscale_all_dim, or attention_factor, or none of them",
                          rope.name("mscale"));
  }
  const YarnRamp ramp = yarn_ramp(dim, base, static_cast<double>(original), fast, slow);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = frequencies[i] * (1.0 - ramp.at(i)) + frequencies[i] / factor * ramp.at(i);
  }
  double magnitude = yarn_magnitude(factor, 1.0);
  if (said) magnitude = static_cast<double>(*said);
  if (mscale) {
    // DeepSeek's form: what all components share goes to the scores, which have the square of it.
    const double all = yarn_magnitude(factor, static_cast<double>(*mscale_all));
    magnitude = yarn_magnitude(factor, static_cast<double>(*mscale)) / all;
    if (config.attention == DraftAttention::kMla) {
      config.attention_scale = static_cast<float>(static_cast<double>(config.attention_scale) * all * all);
    }
  } else if (config.attention == DraftAttention::kMla && !said) {
    config.notes.push_back(fmt::format("{} is absent: cos and sin are multiplied with {:.6f}, scores are not",
                                       rope.name("mscale_all_dim"), magnitude));
  }
  config.rope.magnitude = static_cast<float>(magnitude);
}

void read_rope(ConfigFields& fields, Status& status, DsparkConfig& config) {
  const Json* object = fields.find("rope_parameters");
  const Json* older = fields.find("rope_scaling");
  if (object != nullptr && older != nullptr && !(*object == *older)) {
    return fields.fail("rope_scaling: got {}, expected nothing else than rope_parameters = {}",
                       ConfigFields::shown(*older), ConfigFields::shown(*object));
  }
  const std::string path = object != nullptr ? "rope_parameters." : "rope_scaling.";
  if (object == nullptr) object = older;
  if (object != nullptr && !object->is_object()) {
    return fields.refuse(path.substr(0, path.size() - 1), *object, "an object");
  }
  const Json none = Json::object();
  ConfigFields rope(object != nullptr ? *object : none, path, status);

  const auto inner = rope.optional_number("rope_theta", 1.0001, 1e12);
  const auto outer = fields.optional_number("rope_theta", 1.0001, 1e12);
  if (!inner && !outer) return fields.fail("rope_theta: missing, expected a number from 1 to 1e12");
  if (inner && outer && *inner != *outer) {
    return rope.fail("{}: got {}, expected {} as rope_theta says outside", rope.name("rope_theta"), *inner, *outer);
  }
  fields.expect("partial_rotary_factor", 1, "partly rotated heads are not implemented");
  rope.expect("partial_rotary_factor", 1, "partly rotated heads are not implemented");

  const bool mla = config.attention == DraftAttention::kMla;
  config.rope.layout = fields.boolean_or("rope_interleave", mla) ? RopeLayout::kPairs : RopeLayout::kHalves;
  config.attention_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.query_dim())));
  const int64_t dim = mla ? config.qk_rope_head_dim : config.head_dim;
  if (dim % 2 != 0)
    return fields.fail("{}: got {}, expected an even number", mla ? "qk_rope_head_dim" : "head_dim", dim);

  const double base = static_cast<double>(inner.value_or(outer.value_or(1e4F)));
  std::vector<double> frequencies;
  for (int64_t i = 0; i < dim / 2; ++i) {
    frequencies.push_back(std::pow(base, -2.0 * static_cast<double>(i) / static_cast<double>(dim)));
  }
  using Type = std::pair<const char*, bool>;
  const std::array types = {Type{"yarn", true}, Type{"default", false}};
  if (choice(rope, rope.has("rope_type") ? "rope_type" : "type", false, types)) {
    read_yarn(rope, base, frequencies, config);
  }
  config.rope.inv_freq.assign(frequencies.begin(), frequencies.end());
}

// --- taps and heads ---

// What DeepSpec takes when a config has no list: as many taps as draft layers, spread over the target.
std::vector<int32_t> default_taps(int64_t target_layers, int64_t count) {
  if (count == 1) return {static_cast<int32_t>(target_layers / 2)};
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    const double at = 1.0 + static_cast<double>(i * (target_layers - 4)) / static_cast<double>(count - 1);
    ids.push_back(static_cast<int32_t>(std::nearbyint(at)));  // halves to even, as in Python
  }
  return ids;
}

void read_taps(ConfigFields& fields, DsparkConfig& config) {
  config.num_target_layers = fields.optional_integer("num_target_layers", {1, kMaxTargetLayers});
  const int64_t last = config.num_target_layers.value_or(kMaxTargetLayers) - 1;
  for (const std::string_view key : {"aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"}) {
    fields.expect_absent(key, "its numbers are not those of target_layer_ids");
  }
  if (const Json* list = fields.find("target_layer_ids")) {
    const std::string expected = fmt::format("1 to {} strictly increasing integers from 0 to {}", kMaxTaps, last);
    if (!list->is_array() || list->as_array().empty() || list->as_array().size() > kMaxTaps) {
      return fields.refuse("target_layer_ids", *list, expected);
    }
    for (const Json& item : list->as_array()) {
      const int64_t id = item.is_number() ? item.as_int64().value_or(-1) : -1;
      const int64_t previous = config.target_layer_ids.empty() ? -1 : config.target_layer_ids.back();
      if (id <= previous || id > last) return fields.refuse("target_layer_ids", *list, expected);
      config.target_layer_ids.push_back(static_cast<int32_t>(id));
    }
  } else if (config.num_target_layers && *config.num_target_layers >= config.num_layers + 4) {
    config.target_layer_ids = default_taps(*config.num_target_layers, config.num_layers);
    config.notes.push_back(
        fmt::format("target_layer_ids is absent: taps after layers {}", fmt::join(config.target_layer_ids, ", ")));
  } else {
    return fields.fail("target_layer_ids: missing, expected a list of layer numbers");
  }
  config.tap_norm = fields.boolean_or("fc_norm", false);
  using Stream = std::pair<const char*, TapStream>;
  const bool mla = config.attention == DraftAttention::kMla;
  config.tap_stream = choice(fields, "aux_hidden_stream", mla ? TapStream::kPrefix : TapStream::kAttnRes,
                             std::array{Stream{"attn_res", TapStream::kAttnRes}, Stream{"prefix", TapStream::kPrefix}});
  if (!fields.has("aux_hidden_stream")) {
    config.notes.push_back(fmt::format("aux_hidden_stream is absent: {} for a drafter with {} attention",
                                       mla ? "prefix" : "attn_res", mla ? "latent" : "grouped-query"));
  }
}

void read_heads(ConfigFields& fields, DsparkConfig& config) {
  config.markov_rank = fields.integer_or("markov_rank", 0, {0, ConfigFields::kMaxDim});
  using Kind = std::pair<const char*, MarkovKind>;
  config.markov = choice(fields, "markov_head_type", MarkovKind::kVanilla,
                         std::array{Kind{"vanilla", MarkovKind::kVanilla}, Kind{"gated", MarkovKind::kGated},
                                    Kind{"rnn", MarkovKind::kRnn}});
  if (config.markov_rank == 0) config.markov = MarkovKind::kNone;
  config.confidence_head = fields.boolean_or("enable_confidence_head", false);
  // Without a Markov head there is nothing to add to the hidden state, whatever the config wishes.
  config.confidence_with_markov = fields.boolean_or("confidence_head_with_markov", false) && config.confidence_head &&
                                  config.markov != MarkovKind::kNone;
}

// Dimensions are at most 2^24, so products of two fit; every tensor's element count must too.
void check_products(ConfigFields& fields, const DsparkConfig& c) {
  struct Product {
    const char* what;
    int64_t a, b, most;
  };
  const int64_t values = c.attention == DraftAttention::kGqa ? c.head_dim : c.v_head_dim;
  constexpr int64_t kMaxDim = ConfigFields::kMaxDim;
  const std::array<Product, 11> products = {{
      {"num_attention_heads x head width", c.num_heads, c.query_dim() + c.v_head_dim, kMaxDim},
      {"num_key_value_heads x head_dim", c.num_kv_heads, c.head_dim, kMaxDim},
      {"target_layer_ids x hidden_size", c.num_taps(), c.hidden_size, kMaxDim},
      {"num_hidden_layers x cached row", c.num_layers, c.row_width(), kMaxDim},
      {"vocab_size x hidden_size", std::max(c.vocab_size, c.draft_vocab_size), c.hidden_size, kMaxProduct},
      {"vocab_size x markov_rank", std::max(c.vocab_size, c.draft_vocab_size), c.markov_rank, kMaxProduct},
      {"markov_rank x hidden_size", 3 * c.markov_rank, 2 * c.markov_rank + c.hidden_size, kMaxProduct},
      {"intermediate_size x hidden_size", c.intermediate_size, c.hidden_size, kMaxProduct},
      {"taps x hidden_size x hidden_size", c.num_taps() * c.hidden_size, c.hidden_size, kMaxProduct},
      {"heads x head width x hidden_size", c.num_heads * std::max(c.query_dim(), values),
       std::max(c.hidden_size, c.q_lora_rank.value_or(1)), kMaxProduct},
      {"cached rows x hidden_size", c.num_layers * c.row_width(), c.hidden_size, kMaxProduct},
  }};
  for (const Product& p : products) {
    if (p.b != 0 && p.a > p.most / p.b) {
      return fields.fail("{}: got {} x {}, expected at most {}", p.what, p.a, p.b, p.most);
    }
  }
}

}  // namespace

Result<DsparkConfig> parse_dspark_config(const Json& json) {
  if (!json.is_object()) return invalid_argument("got {}, expected an object", ConfigFields::shown(json));
  MOAT_ASSIGN(const Json flat, flatten(json));
  Status status;
  DsparkConfig config;
  ConfigFields fields(flat, "", status);
  read_architecture(fields, config);
  MOAT_RETURN_IF_ERROR(status);
  check_anchor_first(fields, flat);
  read_sizes(fields, config);
  check_full_attention(fields, config);
  read_attention(fields, config);
  MOAT_RETURN_IF_ERROR(status);
  read_rope(fields, status, config);
  read_taps(fields, config);
  read_heads(fields, config);
  if (status.ok()) check_products(fields, config);
  MOAT_RETURN_IF_ERROR(status);
  return config;
}

Result<DsparkConfig> load_dspark_config(const std::string& directory) {
  const std::string path = join_path(directory, "config.json");
  MOAT_ASSIGN(const std::string text, read_file(path));
  const Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(path);
  const Result<DsparkConfig> config = parse_dspark_config(*json);
  if (!config.ok()) return config.status().with_prefix(path);
  return config;
}

Status check_against_target(const DsparkConfig& config, const ModelConfig& target) {
  if (config.hidden_size != target.hidden_size) {
    return invalid_argument("hidden_size: got {}, expected {} as the target has", config.hidden_size,
                            target.hidden_size);
  }
  if (config.vocab_size < target.vocab_size) {
    return invalid_argument("vocab_size: got {}, expected at least {} as the target has", config.vocab_size,
                            target.vocab_size);
  }
  if (config.pruned() && config.vocab_size != target.vocab_size) {
    return invalid_argument("vocab_size: got {}, expected {} as the target has, for a pruned draft vocabulary",
                            config.vocab_size, target.vocab_size);
  }
  if (config.mask_token_id >= target.vocab_size) {
    return invalid_argument("mask_token_id: got {}, expected less than the target's vocab_size = {}",
                            config.mask_token_id, target.vocab_size);
  }
  if (config.num_target_layers.value_or(target.num_layers) != target.num_layers) {
    return invalid_argument("num_target_layers: got {}, expected {} as the target has", *config.num_target_layers,
                            target.num_layers);
  }
  if (config.target_layer_ids.back() >= target.num_layers) {
    return invalid_argument("target_layer_ids: got {}, expected less than the target's {} layers",
                            config.target_layer_ids.back(), target.num_layers);
  }
  if (config.tap_stream == TapStream::kAttnRes && !target.attn_res_block_size) {
    return invalid_argument(
        "aux_hidden_stream: got attn_res, expected prefix for a target without attention residuals");
  }
  return {};
}

}  // namespace moat
