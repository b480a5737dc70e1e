// SPDX-License-Identifier: Apache-2.0
// Small random drafters as real checkpoints, in the four layouts that public drafters use, and the formulas of
// dspark.md section 1 in plain f64 over the same tensors: keys expanded, nothing cached, one row after the other.
#pragma once

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "model/dspark.h"
#include "ops/op_parts.h"
#include "tiny_checkpoint.h"

namespace moat::test {

constexpr int64_t kTinyVocab = 40;
constexpr int64_t kTinyHidden = 24;

// The parts of a config that all layouts have, with the keys of DeepSpec.
inline Json flat_draft_config() {
  return *parse_json(R"({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "vocab_size": 40,
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "attention_bias": false, "rms_norm_eps": 1e-05,
    "num_target_layers": 9, "target_layer_ids": [2, 6], "num_anchors": 512, "block_size": 4, "mask_token_id": 38,
    "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": true,
    "confidence_head_with_markov": true, "rope_parameters": {"rope_theta": 10000.0},
    "layer_types": ["full_attention", "full_attention"], "use_sliding_window": false, "tie_word_embeddings": false})");
}

// Layout of RadixArk and LithosAI: the drafter's own keys inside dflash_config, some of them twice.
inline Json nested_draft_config() {
  Json config = flat_draft_config();
  Json inner = Json::object({{"attention_mode", "gqa"}, {"projector_type", "dspark"}, {"confidence_head_alpha", 1.0}});
  for (const char* key : {"target_layer_ids", "mask_token_id", "markov_rank", "markov_head_type",
                          "enable_confidence_head", "confidence_head_with_markov"}) {
    inner.set(key, *config.find(key));
  }
  for (const char* key : {"target_layer_ids", "mask_token_id", "enable_confidence_head", "num_anchors"}) {
    config.set(key, nullptr);
  }
  config.set("architectures", Json::array({"DSparkDraftModel"}));
  config.set("dflash_config", std::move(inner));
  config.set("aux_hidden_stream", "attn_res");
  config.set("rope_parameters", *parse_json(R"({"rope_type": "yarn", "factor": 16.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 64})"));
  return config;
}

// Layout of novita: a pruned vocabulary with its own head.
inline Json pruned_draft_config(int64_t draft_vocab = kTinyVocab / 2) {
  Json config = nested_draft_config();
  config.set("draft_vocab_size", draft_vocab);
  return config;
}

// Layout of Inferact and lightseek: latent attention.
inline Json mla_draft_config() {
  Json config = flat_draft_config();
  for (const char* key : {"head_dim", "num_key_value_heads", "num_anchors"}) config.set(key, nullptr);
  config.set("architectures", Json::array({"K3DSparkModel"}));
  config.set("model_type", "k3_dspark");
  config.set("rope_parameters", nullptr);
  config.set("rope_theta", 50000.0);
  config.set("rope_scaling", *parse_json(R"({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 1.0})"));
  for (const auto& [key, value] : {std::pair{"q_lora_rank", 12},
                                   {"kv_lora_rank", 10},
                                   {"qk_nope_head_dim", 6},
                                   {"qk_rope_head_dim", 4},
                                   {"v_head_dim", 5}}) {
    config.set(key, value);
  }
  return config;
}

// `config` with another value for `key`, wherever it stands; at the top if nowhere.
inline Json with(Json config, const char* key, Json value) {
  Json* inner = config.find("dflash_config");
  const bool nested = inner != nullptr && inner->find(key) != nullptr;
  if (nested) inner->set(key, value);
  if (!nested || config.find(key) != nullptr) config.set(key, std::move(value));
  return config;
}

// Which of the optional tensors a checkpoint has.
struct TinyDraftOptions {
  bool own_embed = false, own_head = false, id_map = false;
  DType dtype = DType::kF32;
};

struct TinyDraft {
  Json config;
  std::vector<TinyTensor> tensors;

  explicit TinyDraft(Json draft_config, TinyDraftOptions options = {}, uint64_t seed = 1)
      : config(std::move(draft_config)) {
    const auto parsed = parse_dspark_config(config);
    MOAT_CHECK(parsed.ok(), "{}", parsed.status().message());
    DsparkWeights weights;
    Rng rng(seed);
    for (const DraftWeightSpec& spec : draft_weight_table(*parsed, weights)) {
      const bool map = spec.part == DraftPart::kIdMap || spec.part == DraftPart::kIgnored;
      if (spec.optional && map && !options.id_map) continue;
      if (spec.dest == &weights.embed && !options.own_embed) continue;
      if (spec.optional && spec.dest == &weights.lm_head && !options.own_head && !options.id_map) continue;
      if (map) {
        add_map(spec, *parsed);
      } else {
        add_floats(spec, options.dtype, rng);
      }
    }
  }

  TinyTensor& tensor(std::string_view name) {
    for (TinyTensor& t : tensors) {
      if (t.name == name) return t;
    }
    MOAT_CHECK(false, "no tensor {}", name);
    return tensors.front();
  }
  void erase(std::string_view name) { tensors.erase(tensors.begin() + (&tensor(name) - tensors.data())); }

  void write(const std::string& directory, int num_shards = 1) const {
    spill(join_path(directory, "config.json"), config.dump());
    Json map = Json::object();
    for (int shard = 0; shard < num_shards; ++shard) {
      const std::string file = num_shards == 1 ? "model.safetensors"
                                               : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, num_shards);
      std::vector<SafetensorsWriter::Declaration> declared;
      std::vector<const TinyTensor*> members;
      for (size_t i = 0; i < tensors.size(); ++i) {
        if (static_cast<int>(i) % num_shards != shard) continue;
        declared.push_back({tensors[i].name, tensors[i].dtype, tensors[i].dims});
        members.push_back(&tensors[i]);
        map.set(tensors[i].name, file);
      }
      auto writer = SafetensorsWriter::create(join_path(directory, file), declared);
      MOAT_CHECK(writer.ok(), "{}", writer.status().message());
      for (const TinyTensor* t : members) MOAT_CHECK(writer->append(std::as_bytes(std::span(t->bytes))).ok());
      MOAT_CHECK(writer->close().ok());
    }
    if (num_shards > 1) {
      const Json index = Json::object({{"metadata", Json::object()}, {"weight_map", std::move(map)}});
      spill(join_path(directory, "model.safetensors.index.json"), index.dump());
    }
  }

 private:
  // Matrices that keep the size of what they multiply, norms around one.
  void add_floats(const DraftWeightSpec& spec, DType dtype, Rng& rng) {
    const bool vector = spec.shape.rank() == 1;
    const double deviation = vector ? 0.2 : 1.0 / std::sqrt(static_cast<double>(spec.shape[1]));
    TinyTensor t{spec.names.front(), dtype, spec.shape, {}, 0};
    t.bytes.resize(static_cast<size_t>(dtype_bytes(dtype, spec.shape.count())));
    for (int64_t i = 0; i < spec.shape.count(); ++i) {
      const auto value = static_cast<float>((vector && spec.shape[0] > 1 ? 1.0 : 0.0) + deviation * rng.normal());
      if (dtype == DType::kF32) {
        std::memcpy(t.bytes.data() + 4 * i, &value, 4);
      } else {
        const uint16_t half = f32_to_bf16(value);
        std::memcpy(t.bytes.data() + 2 * i, &half, 2);
      }
    }
    tensors.push_back(std::move(t));
  }

  // d2t: every other id, or a permutation of all; t2d to match it.
  void add_map(const DraftWeightSpec& spec, const DsparkConfig& parsed) {
    const int64_t count = parsed.draft_vocab_size, step = kTinyVocab / count;
    std::string bytes;
    for (int64_t i = 0; i < spec.shape[0]; ++i) {
      if (spec.part == DraftPart::kIgnored) {
        bytes.push_back(static_cast<char>(i % step == step - 1));
      } else {
        const int64_t id = step > 1 ? i * step + step - 1 : (i * 7 + 3) % count;
        const int64_t offset = id - i;
        bytes.append(reinterpret_cast<const char*>(&offset), 8);
      }
    }
    tensors.push_back({spec.names.front(), spec.dtypes.front(), spec.shape, std::move(bytes), 0});
  }
};

// --- the formulas ---

using Row = std::vector<double>;

// What the reference makes of one round.
struct ReferenceRound {
  std::vector<Row> features;  // per committed token
  std::vector<Row> hidden;    // per slot, final-normed
  std::vector<Row> logits;    // per draft, with the Markov bias, [draft vocab]
  Row confidence;             // per draft
};

class DraftReference {
 public:
  // embed and lm_head are the target's; the drafter's own win.
  DraftReference(const TinyDraft& draft, const Tensor& embed, const Tensor& lm_head)
      : c_(*parse_dspark_config(draft.config)) {
    put("embed_tokens.weight", embed);
    put("lm_head.weight", lm_head);
    for (const TinyTensor& t : draft.tensors) {
      std::string name = t.name;
      for (const auto& [from, to] : {std::pair{"context_proj", "fc"},
                                     {"context_norm", "hidden_norm"},
                                     {"final_norm", "norm"},
                                     {"logit_head", "markov_head"},
                                     {"model.", ""}}) {
        if (name.starts_with(from)) name = to + name.substr(std::string(from).size());
      }
      put(name, make_tensor(const_cast<char*>(t.bytes.data()), t.dtype, t.dims));
    }
  }

  // `taps` [P][taps * hidden] of positions 0 .. P-1; `drafts` are the tokens chosen, so that step k follows k - 1 of them.
  ReferenceRound round(const std::vector<Row>& taps, int32_t anchor, const std::vector<int32_t>& drafts) const {
    ReferenceRound out;
    for (const Row& t : taps) out.features.push_back(feature(t));
    const auto context = static_cast<int64_t>(taps.size());
    std::vector<Row> u;
    for (int64_t j = 0; j < c_.block_size; ++j) {
      u.push_back(matrix("embed_tokens.weight").row(j == 0 ? anchor : c_.mask_token_id));
    }
    for (int64_t l = 0; l < c_.num_layers; ++l) layer(fmt::format("layers.{}.", l), out.features, context, u);
    for (const Row& row : u) out.hidden.push_back(norm("norm.weight", row));
    Row state(static_cast<size_t>(c_.markov_rank), 0.0);
    for (size_t k = 0; k < drafts.size(); ++k) {
      const int32_t previous = k == 0 ? anchor : drafts[k - 1];
      Row logits = product("lm_head.weight", out.hidden[k]);
      Row embedding;
      if (c_.markov != MarkovKind::kNone) {
        embedding = matrix("markov_head.markov_w1.weight").row(previous);
        const Row bias = product("markov_head.markov_w2.weight", markov(embedding, out.hidden[k], state));
        for (size_t v = 0; v < logits.size(); ++v) logits[v] += bias[v];
      }
      out.logits.push_back(logits);
      if (c_.confidence_head) {
        Row input = out.hidden[k];
        if (c_.confidence_with_markov) input.insert(input.end(), embedding.begin(), embedding.end());
        out.confidence.push_back(sigmoid_f64(product("confidence_head.proj.weight", input)[0] +
                                             matrix("confidence_head.proj.bias").values[0]));
      }
    }
    return out;
  }

 private:
  struct Matrix {
    int64_t rows = 0, cols = 0;
    Row values;
    Row row(int64_t r) const { return {values.begin() + r * cols, values.begin() + (r + 1) * cols}; }
  };

  void put(const std::string& name, const Tensor& t) {
    if (t.dtype != DType::kF32 && t.dtype != DType::kBF16) return;
    Matrix m{t.rank() == 1 ? 1 : t.dim(0), t.dim(-1), {}};
    for (int64_t i = 0; i < t.count(); ++i) m.values.push_back(weight_at(t, i));
    tensors_[name] = std::move(m);
  }
  const Matrix& matrix(const std::string& name) const { return tensors_.at(name); }

  Row product(const std::string& name, const Row& x) const {
    const Matrix& m = matrix(name);
    Row y(static_cast<size_t>(m.rows), 0.0);
    for (size_t r = 0; r < y.size(); ++r) {
      for (size_t i = 0; i < x.size(); ++i) y[r] += m.values[r * static_cast<size_t>(m.cols) + i] * x[i];
    }
    return y;
  }

  Row norm(const std::string& name, const Row& x) const {
    double square = 0;
    for (const double v : x) square += v * v;
    const double root = std::sqrt(square / static_cast<double>(x.size()) + static_cast<double>(c_.rms_norm_eps));
    Row y = x;
    for (size_t i = 0; i < y.size(); ++i) y[i] *= matrix(name).values[i] / root;
    return y;
  }

  Row rotated(Row x, int64_t position) const {
    const size_t half = x.size() / 2;
    for (size_t i = 0; i < half; ++i) {
      const size_t a = c_.rope.layout == RopeLayout::kHalves ? i : 2 * i;
      const size_t b = c_.rope.layout == RopeLayout::kHalves ? i + half : 2 * i + 1;
      const float angle = static_cast<float>(position) * c_.rope.inv_freq[i];
      const double cos = std::cos(static_cast<double>(angle)) * c_.rope.magnitude;
      const double sin = std::sin(static_cast<double>(angle)) * c_.rope.magnitude;
      const double first = x[a] * cos - x[b] * sin;
      x[b] = x[b] * cos + x[a] * sin;
      x[a] = first;
    }
    return x;
  }

  Row feature(const Row& taps) const {
    Row input = taps;
    const auto hidden = c_.hidden_size;
    for (int64_t i = 0; c_.tap_norm && i < c_.num_taps(); ++i) {
      const Row part =
          norm(fmt::format("fc_norm.{}.weight", i), {taps.begin() + i * hidden, taps.begin() + (i + 1) * hidden});
      std::copy(part.begin(), part.end(), input.begin() + i * hidden);
    }
    return norm("hidden_norm.weight", product("fc.weight", input));
  }

  struct KeyValue {
    Row key, value;
  };

  static Row part(const Row& x, int64_t begin, int64_t count) { return {x.begin() + begin, x.begin() + begin + count}; }
  static Row joined(Row a, const Row& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  // Keys and values of every head of one token.
  std::vector<KeyValue> keys(const std::string& attn, const Row& x, int64_t position) const {
    std::vector<KeyValue> heads;
    if (c_.attention == DraftAttention::kGqa) {
      const Row k = product(attn + "k_proj.weight", x), v = product(attn + "v_proj.weight", x);
      for (int64_t h = 0; h < c_.num_heads; ++h) {
        const int64_t begin = h / (c_.num_heads / c_.num_kv_heads) * c_.head_dim;
        heads.push_back({rotated(norm(attn + "k_norm.weight", part(k, begin, c_.head_dim)), position),
                         part(v, begin, c_.head_dim)});
      }
      return heads;
    }
    const Row row = product(attn + "kv_a_proj_with_mqa.weight", x);
    const Row latent = norm(attn + "kv_a_layernorm.weight", part(row, 0, c_.kv_lora_rank));
    const Row shared = rotated(part(row, c_.kv_lora_rank, c_.qk_rope_head_dim), position);
    const Row expanded = product(attn + "kv_b_proj.weight", latent);
    const int64_t nope = c_.qk_nope_head_dim, width = nope + c_.v_head_dim;
    for (int64_t h = 0; h < c_.num_heads; ++h) {
      heads.push_back(
          {joined(part(expanded, h * width, nope), shared), part(expanded, h * width + nope, c_.v_head_dim)});
    }
    return heads;
  }

  std::vector<Row> queries(const std::string& attn, const Row& x, int64_t position) const {
    const Row q = c_.q_lora_rank ? product(attn + "q_b_proj.weight",
                                           norm(attn + "q_a_layernorm.weight", product(attn + "q_a_proj.weight", x)))
                                 : product(attn + "q_proj.weight", x);
    std::vector<Row> heads;
    for (int64_t h = 0; h < c_.num_heads; ++h) {
      const Row head = part(q, h * c_.query_dim(), c_.query_dim());
      if (c_.attention == DraftAttention::kGqa) {
        heads.push_back(rotated(norm(attn + "q_norm.weight", head), position));
      } else {
        const int64_t nope = c_.qk_nope_head_dim;
        heads.push_back(joined(part(head, 0, nope), rotated(part(head, nope, c_.qk_rope_head_dim), position)));
      }
    }
    return heads;
  }

  void layer(const std::string& stem, const std::vector<Row>& features, int64_t context, std::vector<Row>& u) const {
    const std::string attn = stem + "self_attn.";
    const auto gamma = static_cast<int64_t>(u.size());
    std::vector<std::vector<KeyValue>> seen;  // [context + gamma][heads]
    for (int64_t p = 0; p < context; ++p) seen.push_back(keys(attn, features[static_cast<size_t>(p)], p));
    std::vector<Row> normed;
    for (const Row& row : u) normed.push_back(norm(stem + "input_layernorm.weight", row));
    for (int64_t j = 0; j < gamma; ++j) seen.push_back(keys(attn, normed[static_cast<size_t>(j)], context + j));
    for (int64_t j = 0; j < gamma; ++j) {
      const std::vector<Row> q = queries(attn, normed[static_cast<size_t>(j)], context + j);
      const int64_t visible = c_.causal_block ? context + j + 1 : context + gamma;
      Row o;
      for (size_t h = 0; h < q.size(); ++h) {
        Row weights, mixed(seen[0][h].value.size(), 0.0);
        double sum = 0;
        for (int64_t p = 0; p < visible; ++p) {
          const Row& key = seen[static_cast<size_t>(p)][h].key;
          double score = 0;
          for (size_t i = 0; i < key.size(); ++i) score += q[h][i] * key[i];
          sum += weights.emplace_back(std::exp(score * c_.attention_scale));
        }
        for (size_t p = 0; p < weights.size(); ++p) {
          for (size_t d = 0; d < mixed.size(); ++d) mixed[d] += weights[p] / sum * seen[p][h].value[d];
        }
        o.insert(o.end(), mixed.begin(), mixed.end());
      }
      Row& row = u[static_cast<size_t>(j)];
      const Row attention = product(attn + "o_proj.weight", o);
      for (size_t i = 0; i < row.size(); ++i) row[i] += attention[i];
      const Row y = norm(stem + "post_attention_layernorm.weight", row);
      Row gate = product(stem + "mlp.gate_proj.weight", y);
      const Row up = product(stem + "mlp.up_proj.weight", y);
      for (size_t i = 0; i < gate.size(); ++i) gate[i] *= sigmoid_f64(gate[i]) * up[i];
      const Row down = product(stem + "mlp.down_proj.weight", gate);
      for (size_t i = 0; i < row.size(); ++i) row[i] += down[i];
    }
  }

  // What W2 multiplies (dspark.md 1.6).
  Row markov(const Row& embedding, const Row& hidden, Row& state) const {
    if (c_.markov == MarkovKind::kVanilla) return embedding;
    const size_t rank = embedding.size();
    Row out = embedding;
    if (c_.markov == MarkovKind::kGated) {
      const Row gate = product("markov_head.gate_proj.weight", joined(hidden, embedding));
      for (size_t i = 0; i < rank; ++i) out[i] *= sigmoid_f64(gate[i] + matrix("markov_head.gate_proj.bias").values[i]);
      return out;
    }
    Row y = product("markov_head.joint_proj.weight", joined(joined(state, embedding), hidden));
    for (size_t i = 0; i < y.size(); ++i) y[i] += matrix("markov_head.joint_proj.bias").values[i];
    for (size_t i = 0; i < rank; ++i) {
      const double keep = sigmoid_f64(y[i]);
      state[i] = keep * state[i] + (1.0 - keep) * std::tanh(y[rank + i]);
      out[i] = std::tanh(y[2 * rank + i]);
    }
    return out;
  }

  DsparkConfig c_;
  std::map<std::string, Matrix> tensors_;
};

}  // namespace moat::test
