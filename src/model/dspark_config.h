// SPDX-License-Identifier: Apache-2.0
// DsparkConfig: the numbers and switches of one DSpark drafter, from its config.json, every one checked. The public
// drafters spell them in four ways (dspark.md 1.9); keys may stand at the top level, in dflash_config or in
// transformer_layer_config, and where a key stands twice the values must agree. Immutable value.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "model/config.h"
#include "model/forward.h"
#include "ops/draft.h"

namespace moat {

enum class DraftAttention : uint8_t { kGqa, kMla };
enum class MarkovKind : uint8_t { kNone, kVanilla, kGated, kRnn };

// Rotary positions: angle of component i at position p is p * inv_freq[i], in f32.
struct DraftRope {
  RopeLayout layout = RopeLayout::kHalves;
  std::vector<float> inv_freq;  // [rotated width / 2]
  float magnitude = 1.0F;       // cos and sin are multiplied with it
};

struct DsparkConfig {
  std::string architecture;  // for messages
  DraftAttention attention = DraftAttention::kGqa;

  int64_t vocab_size = 0;        // rows of the Markov embedding and of an own token embedding
  int64_t draft_vocab_size = 0;  // rows of the output side; less than vocab_size: pruned, d2t gives the target's ids
  int64_t hidden_size = 0;       // the target's
  int64_t num_layers = 0;
  int64_t intermediate_size = 0;
  float rms_norm_eps = 1e-6F;  // of every norm, those of latents among them

  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;            // GQA; 1 for MLA, whose heads share one cached row
  int64_t head_dim = 0;                // GQA
  std::optional<int64_t> q_lora_rank;  // MLA; absent: one q_proj
  int64_t kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;  // MLA
  DraftRope rope;
  float attention_scale = 0.0F;  // of q . k

  std::optional<int64_t> num_target_layers;
  std::vector<int32_t> target_layer_ids;  // taps: 0-based completed layers, strictly increasing
  TapStream tap_stream = TapStream::kAttnRes;
  bool tap_norm = false;  // fc_norm: an RMSNorm for each tap

  int64_t block_size = 0;  // gamma: rows of a block, and drafts of a round
  bool causal_block = false;
  int32_t mask_token_id = -1;  // in the target's vocabulary

  MarkovKind markov = MarkovKind::kNone;
  int64_t markov_rank = 0;
  bool confidence_head = false;
  bool confidence_with_markov = false;

  std::vector<std::string> notes;  // what was assumed: lines for the log

  int64_t num_taps() const { return static_cast<int64_t>(target_layer_ids.size()); }
  int64_t verify_rows() const {
    return block_size + 1;
  }  // anchor and drafts; also the most tokens that a round commits
  bool pruned() const { return draft_vocab_size < vocab_size; }
  // Values cached per token and layer: keys then values of all kv heads (GQA), latent then rotated key part (MLA).
  int64_t row_width() const {
    return attention == DraftAttention::kGqa ? 2 * num_kv_heads * head_dim : kv_lora_rank + qk_rope_head_dim;
  }
  int64_t query_dim() const {  // of one head
    return attention == DraftAttention::kGqa ? head_dim : qk_nope_head_dim + qk_rope_head_dim;
  }
  int64_t confidence_width() const { return hidden_size + (confidence_with_markov ? markov_rank : 0); }
};

// Fails, naming the key with got and expected, on missing or absurd values, on conflicts, and on what is not
// implemented: anchor-shifted checkpoints (sample_from_anchor false), sliding windows, tied embeddings, projection
// biases, activations other than SiLU, rope types other than default and yarn, partly rotated heads.
Result<DsparkConfig> parse_dspark_config(const Json& config);
Result<DsparkConfig> load_dspark_config(const std::string& directory);  // directory/config.json

// Whether the drafter is one for this target; errors name the key with the drafter's value and the target's.
Status check_against_target(const DsparkConfig& config, const ModelConfig& target);

}  // namespace moat
