// SPDX-License-Identifier: Apache-2.0
// A checkpoint of a few kilobytes that tests change before or after it is written.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "main/synthetic_values.h"
#include "model/safetensors.h"
#include "model/weight_map.h"

namespace moat {

// A directory of this test alone, removed at the end.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "moat-loader-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
// Without write_file's flush to the disk, which thousands of mutations would wait for.
inline void spill(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

struct TinyTensor {
  std::string name;
  DType dtype;
  Dims dims;
  std::string bytes;
  int shard = 0;
};

// Every switch of K3 in two layers: KDA with a dense MLP, MLA with two latent MXFP4 experts.
inline Json tiny_config() {
  return *parse_json(R"({"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear",
    "vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "rms_norm_eps": 1e-05, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "tie_word_embeddings": false, "attn_res_block_size": 2,
    "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
    "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 4, "mla_use_nope": true, "mla_use_output_gate": true,
    "intermediate_size": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 2,
    "num_experts_per_token": 1, "num_shared_experts": 1, "moe_intermediate_size": 64, "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": true, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc", "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "linear_attn_config": {"num_heads": 2, "head_dim": 4, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
      "use_full_rank_gate": true, "kda_layers": [1], "full_attn_layers": [2]},
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
      "quantization_status": "compressed", "kv_cache_scheme": null, "config_groups": {"group_0": {
        "format": "mxfp4-pack-quantized", "input_activations": null, "output_activations": null, "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": true,
          "dynamic": false, "scale_dtype": "torch.uint8", "actorder": null, "block_structure": null,
          "zp_dtype": null}}}}}})");
}

struct TinyCheckpoint {
  Json config;
  std::vector<TinyTensor> tensors;

  static constexpr const char* kShards[2] = {"model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"};

  explicit TinyCheckpoint(Json model_config = tiny_config()) : config(std::move(model_config)) {
    const ModelConfig parsed = *parse_model_config(config);
    KimiWeights weights;
    const std::vector<WeightSpec> specs = weight_table(parsed, {}, weights);
    for (size_t i = 0; i < specs.size(); ++i) {
      const WeightSpec& spec = specs[i];
      TinyTensor tensor{spec.name, spec.dtypes.front(), spec.shape, {}, i * 2 < specs.size() ? 0 : 1};
      tensor.bytes.resize(static_cast<size_t>(spec_bytes(spec)));
      fill_values(value_rule(spec), tensor.dtype, tensor_key(1, i), 0,
                  std::as_writable_bytes(std::span(tensor.bytes.data(), tensor.bytes.size())));
      tensors.push_back(std::move(tensor));
    }
  }

  Json& text() { return *config.find("text_config"); }

  // By the end of its name; there must be one.
  TinyTensor& tensor(std::string_view suffix) {
    const auto found =
        std::find_if(tensors.begin(), tensors.end(), [&](const TinyTensor& t) { return t.name.ends_with(suffix); });
    MOAT_CHECK(found != tensors.end(), "no tensor {}", suffix);
    return *found;
  }
  void erase(std::string_view suffix) { tensors.erase(tensors.begin() + (&tensor(suffix) - tensors.data())); }
  void reshape(std::string_view suffix, DType dtype, Dims dims) {
    TinyTensor& t = tensor(suffix);
    t.dtype = dtype;
    t.dims = dims;
    t.bytes.resize(static_cast<size_t>(dtype_bytes(dtype, dims.count())), '\0');
  }
  void add(std::string name, DType dtype, Dims dims) {
    tensors.push_back(
        {std::move(name), dtype, dims, std::string(static_cast<size_t>(dtype_bytes(dtype, dims.count())), '\0'), 1});
  }

  // `num_shards` 1: model.safetensors without index.
  void write(const std::string& directory, int num_shards = 2) const {
    spill(join_path(directory, "config.json"), config.dump());
    Json map = Json::object();
    for (int shard = 0; shard < num_shards; ++shard) {
      std::vector<SafetensorsWriter::Declaration> declared;
      std::vector<const TinyTensor*> members;
      for (const TinyTensor& t : tensors) {
        if (num_shards == 2 && t.shard != shard) continue;
        declared.push_back({t.name, t.dtype, t.dims});
        members.push_back(&t);
        map.set(t.name, kShards[shard]);
      }
      auto writer = SafetensorsWriter::create(
          join_path(directory, num_shards == 2 ? kShards[shard] : "model.safetensors"), declared);
      MOAT_CHECK(writer.ok(), "{}", writer.status().message());
      for (const TinyTensor* t : members) MOAT_CHECK(writer->append(std::as_bytes(std::span(t->bytes))).ok());
      const Status closed = writer->close();
      MOAT_CHECK(closed.ok(), "{}", closed.message());
    }
    if (num_shards == 2) {
      const Json index = Json::object({{"metadata", Json::object()}, {"weight_map", std::move(map)}});
      spill(join_path(directory, "model.safetensors.index.json"), index.dump());
    }
  }
};

// --- damage to written files ---

struct FileParts {
  std::string header, data;
};

inline FileParts split_file(const std::string& path) {
  const std::string bytes = slurp(path);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  return {bytes.substr(8, length), bytes.substr(8 + length)};
}

inline void join_file(const std::string& path, const FileParts& parts) {
  const uint64_t length = parts.header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  spill(path, bytes + parts.header + parts.data);
}

inline std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  MOAT_CHECK(at != std::string::npos, "no {} in {}", from, text.substr(0, 200));
  return text.replace(at, from.size(), to);
}

}  // namespace moat
