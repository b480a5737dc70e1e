// SPDX-License-Identifier: Apache-2.0
// The weights of a DSpark drafter: the table of its tensors, and loading it. A checkpoint tensor is used exactly once,
// listed as ignored, or the load fails. Weights are views of the mapped files; what must be aligned, converted or
// stacked is owned.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "model/dspark_config.h"
#include "model/weight_map.h"

namespace moat {

struct DraftLayerWeights {
  Tensor input_norm, post_attention_norm;  // [hidden]
  Tensor q_proj;                           // [heads * query_dim, hidden]; absent with q_lora
  Tensor q_norm, k_norm;                   // GQA: [head_dim]
  Tensor q_a_proj, q_a_norm, q_b_proj;     // MLA with q_lora: [q_lora, hidden], [q_lora], [heads * query_dim, q_lora]
  Tensor kv_a_norm;                        // MLA: [kv_lora]
  Tensor kv_b_proj;                        // MLA: [heads * (nope + v), kv_lora]: per head nope key rows, then v rows
  Tensor kv_proj;                          // [row_width, hidden]: this layer's rows of DsparkWeights::context_kv
  Tensor o_proj;                           // [hidden, heads * head_dim or v_head_dim]
  MlpWeights mlp;
};

struct DsparkWeights {
  std::vector<Tensor> tap_norms;  // per tap [hidden]; empty without fc_norm
  Tensor fc;                      // [hidden, taps * hidden]
  Tensor context_norm;            // [hidden]
  Tensor context_kv;              // [layers * row_width, hidden]: k_proj and v_proj (kv_a_proj) of all layers
  std::vector<DraftLayerWeights> layers;
  Tensor final_norm;  // [hidden]
  Tensor markov_in;   // W1 [vocab, rank]; absent without a Markov head
  Tensor markov_out;  // W2 [draft vocab, rank]
  // W_g [rank, hidden + rank] (gated) or W_j [3 rank, 2 rank + hidden] (rnn), and its bias [rank] or [3 rank] f32. No
  // public drafter has them; the names markov_head.gate_proj and .joint_proj are ours.
  Tensor markov_gate, markov_bias;
  Tensor confidence, confidence_bias;  // [1, hidden (+ rank)], [1] f32; absent without a confidence head
  Tensor embed, lm_head;               // [vocab, hidden], [draft vocab, hidden]; absent: the target's
  std::vector<int32_t> target_ids;     // [draft vocab], distinct; empty: draft ids are the target's
};

// What becomes of a checkpoint tensor.
enum class DraftPart : uint8_t {
  kAdopt,    // used as stored
  kToF32,    // converted
  kStacked,  // rows of context_kv from stack_row on
  kIdMap,    // d2t: becomes target_ids
  kIgnored,  // t2d: says what d2t says
};

struct DraftWeightSpec {
  std::vector<std::string> names;  // accepted, each also after "model."; the first is the release's
  Dims shape;
  std::vector<DType> dtypes;  // accepted; the first is the release's
  DraftPart part = DraftPart::kAdopt;
  Tensor* dest = nullptr;  // in the DsparkWeights given: of kAdopt and kToF32
  int64_t stack_row = 0;
  bool optional = false;  // may be absent
};

// Sizes `weights` for `config` and returns one spec a tensor. `weights` must outlive the table.
std::vector<DraftWeightSpec> draft_weight_table(const DsparkConfig& config, DsparkWeights& weights);

// Tensors and parameters of a drafter as the table has them; d2t and t2d are tensors without parameters.
struct DraftSize {
  int64_t tensors = 0;
  int64_t parameters = 0;
};
enum class OwnVocabulary : uint8_t { kNone, kEmbed, kEmbedAndHead };  // what a checkpoint has of its own
DraftSize draft_size(const DsparkConfig& config, OwnVocabulary own);

// Shapes without data for every weight that is not optional: enough for dry passes on a machine without checkpoint.
void shape_draft_weights(const DsparkConfig& config, DsparkWeights& weights);

struct DraftLoadReport {
  uint64_t num_tensors = 0;  // in the checkpoint
  uint64_t num_used = 0;
  uint64_t num_ignored = 0;   // t2d
  uint64_t bytes_mapped = 0;  // used in place
  uint64_t bytes_owned = 0;   // converted, aligned or stacked copies
};

// Owns everything that `weights` views. Not movable: the table points into it.
struct LoadedDspark {
  DsparkConfig config;
  DsparkWeights weights;
  DraftLoadReport report;
  std::vector<MappedFile> files;
  std::vector<Buffer> buffers;

  LoadedDspark() = default;
  LoadedDspark(const LoadedDspark&) = delete;
  LoadedDspark& operator=(const LoadedDspark&) = delete;
};

// `directory` holds config.json and either model.safetensors or shards with model.safetensors.index.json. Errors name
// file and tensor, got and expected. Whether the drafter fits a target is check_against_target().
Result<std::unique_ptr<LoadedDspark>> load_dspark(const std::string& directory, ThreadPool& pool);

}  // namespace moat
