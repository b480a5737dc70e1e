// SPDX-License-Identifier: Apache-2.0
#include "model/dspark.h"

#include <algorithm>

#include "ops/draft.h"
#include "ops/edit.h"
#include "ops/matmul.h"
#include "ops/mla.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "ops/sample.h"

namespace moat {
namespace {

// T committed tokens, S sequences, G rows of a block, R = S * G, N drafts wanted, D hidden, H heads, K kv heads.

// What all parts of a call need.
struct Context {
  Exec& exec;
  const DsparkConfig& config;
  const Tensor& inv_freq;
  const ForwardProbe& probe;

  Tensor alloc(Dims dims, DType dtype = DType::kF32) const { return exec.arena().alloc(dtype, dims); }
  void show(const char* name, int64_t layer, const Tensor& value) const {
    if (probe && !exec.dry()) probe(name, layer, value);
  }
};

// The blocks of one round and the context that they attend to.
struct Blocks {
  const DraftRoundInput& in;
  const DraftCacheView& cache;
  std::span<const int32_t> positions;  // [R]
};

// `x` [rows, heads * dim], possibly columns of wider rows, as [rows, heads, dim].
Tensor by_head(const Tensor& x, int64_t heads, int64_t dim) {
  Tensor view = x;
  view.dims = {x.dim(0), heads, dim};
  view.strides = {x.strides[0], dim, 1};
  return view;
}

// Rows k, k + n, k + 2 n, ... of `x` [count * n, width] as [count, width]: one step of all sequences.
Tensor every_nth_row(const Tensor& x, int64_t n, int64_t k) {
  Tensor view = x.rows(k, k + 1);
  view.dims[0] = x.dim(0) / n;
  view.strides[0] = n * x.strides[0];
  return view;
}

// --- keys and values ---

// The sites of finish_rows: context and blocks have different row counts.
struct RowSites {
  const char* norm;
  const char* rope;
};

// Makes cached rows of projected ones, in place: `rows` [N, row_width], columns of a stacked product. GQA: keys normed
// and rotated, values as they are. MLA: the latent normed, the shared key part rotated.
void finish_rows(const Context& c, const RowSites& sites, const DraftLayerWeights& w, const Tensor& rows,
                 std::span<const int32_t> positions) {
  const DsparkConfig& cfg = c.config;
  NormRopeArgs rope{.positions = positions,
                    .inv_freq = c.inv_freq,
                    .eps = cfg.rms_norm_eps,
                    .magnitude = cfg.rope.magnitude,
                    .layout = cfg.rope.layout};
  if (cfg.attention == DraftAttention::kGqa) {
    rope.x = by_head(rows.cols(0, cfg.num_kv_heads * cfg.head_dim), cfg.num_kv_heads, cfg.head_dim);
    rope.weight = w.k_norm;
  } else {
    const Tensor latent = rows.cols(0, cfg.kv_lora_rank);
    rms_norm(c.exec, sites.norm, {.out = latent, .x = latent, .weight = w.kv_a_norm, .eps = cfg.rms_norm_eps});
    rope.x = by_head(rows.cols(cfg.kv_lora_rank, cfg.row_width()), 1, cfg.qk_rope_head_dim);
  }
  norm_rope(c.exec, sites.rope, rope);
}

// The blocks' own rows from x [R, D] -> [R, row_width].
Tensor block_rows(const Context& c, const DraftLayerWeights& w, const Tensor& x, const Blocks& blocks) {
  const Tensor rows = c.alloc({x.dim(0), c.config.row_width()});
  matmul(c.exec, "draft.kv_proj", {.out = rows, .x = x, .weight = w.kv_proj});
  finish_rows(c, {"draft.kv_a_norm", "draft.k_rope"}, w, rows, blocks.positions);
  return rows;
}

// --- attention ---

// out [R, H, v_dim] of q [R, H, k_dim] over the context of layer `layer` and the blocks' own rows.
void attend(const Context& c, int64_t layer, const Tensor& q, const Tensor& rows, int64_t value_offset,
            const Blocks& blocks, const Tensor& out) {
  block_attention(c.exec, "draft.attention",
                  {.out = out,
                   .q = q,
                   .cache = blocks.cache.rows.at(layer),
                   .rows = rows,
                   .context_lens = blocks.in.positions,  // the context ends before the anchor
                   .block_tables = blocks.in.block_tables,
                   .max_blocks = blocks.in.max_blocks,
                   .block_size = blocks.cache.block_size,
                   .gamma = c.config.block_size,
                   .num_kv_heads = c.config.num_kv_heads,
                   .value_offset = value_offset,
                   .scale = c.config.attention_scale,
                   .causal = c.config.causal_block});
}

// Grouped-query attention with normed heads (dspark.md 1.4): x [R, D] -> out [R, D].
void gqa_layer(const Context& c, const DraftLayerWeights& w, int64_t layer, const Tensor& x, const Blocks& blocks,
               const Tensor& out) {
  const DsparkConfig& cfg = c.config;
  const Tensor q = c.alloc({x.dim(0), cfg.num_heads, cfg.head_dim});
  const Dims flat = {x.dim(0), cfg.num_heads * cfg.head_dim};
  matmul(c.exec, "draft.q_proj", {.out = q.reshape(flat), .x = x, .weight = w.q_proj});
  norm_rope(c.exec, "draft.q_rope",
            {.x = q,
             .positions = blocks.positions,
             .inv_freq = c.inv_freq,
             .weight = w.q_norm,
             .eps = cfg.rms_norm_eps,
             .magnitude = cfg.rope.magnitude,
             .layout = cfg.rope.layout});
  const Tensor rows = block_rows(c, w, x, blocks);
  const Tensor o = c.alloc(q.dims);
  attend(c, layer, q, rows, cfg.num_kv_heads * cfg.head_dim, blocks, o);
  matmul(c.exec, "draft.o_proj", {.out = out, .x = o.reshape(flat), .weight = w.o_proj});
}

// q [R, H, nope + rope] of a layer with latent attention; only the last `rope` components know their position.
Tensor mla_query(const Context& c, const DraftLayerWeights& w, const Tensor& x, const Blocks& blocks) {
  const DsparkConfig& cfg = c.config;
  const Tensor q = c.alloc({x.dim(0), cfg.num_heads, cfg.query_dim()});
  const Tensor flat = q.reshape({x.dim(0), cfg.num_heads * cfg.query_dim()});
  if (cfg.q_lora_rank) {
    const Tensor compressed = c.alloc({x.dim(0), *cfg.q_lora_rank});
    matmul(c.exec, "draft.q_a_proj", {.out = compressed, .x = x, .weight = w.q_a_proj});
    rms_norm(c.exec, "draft.q_a_norm",
             {.out = compressed, .x = compressed, .weight = w.q_a_norm, .eps = cfg.rms_norm_eps});
    matmul(c.exec, "draft.q_b_proj", {.out = flat, .x = compressed, .weight = w.q_b_proj});
  } else {
    matmul(c.exec, "draft.q_proj", {.out = flat, .x = x, .weight = w.q_proj});
  }
  norm_rope(c.exec, "draft.q_rope",
            {.x = q.cols(cfg.qk_nope_head_dim, cfg.query_dim()),
             .positions = blocks.positions,
             .inv_freq = c.inv_freq,
             .magnitude = cfg.rope.magnitude,
             .layout = cfg.rope.layout});
  return q;
}

// Latent attention in absorbed form: queries move into the latent space, values come back out of it.
// x [R, D] -> out [R, D].
void mla_layer(const Context& c, const DraftLayerWeights& w, int64_t layer, const Tensor& x, const Blocks& blocks,
               const Tensor& out) {
  const DsparkConfig& cfg = c.config;
  const int64_t rows = x.dim(0), heads = cfg.num_heads, nope = cfg.qk_nope_head_dim, latent = cfg.kv_lora_rank;
  const Tensor q = mla_query(c, w, x, blocks);
  const Tensor own = block_rows(c, w, x, blocks);
  const Tensor absorbed = c.alloc({rows, heads, cfg.row_width()});
  head_matmul(c.exec, "draft.absorb_key",
              {.out = absorbed.cols(0, latent), .x = q.cols(0, nope), .weight = w.kv_b_proj, .transposed = true});
  copy(c.exec, "draft.absorb_shared",
       {.out = absorbed.cols(latent, cfg.row_width()), .x = q.cols(nope, cfg.query_dim())});
  const Tensor mixed = c.alloc({rows, heads, latent});
  attend(c, layer, absorbed, own, 0, blocks, mixed);
  const Tensor o = c.alloc({rows, heads, cfg.v_head_dim});
  head_matmul(c.exec, "draft.absorb_value", {.out = o, .x = mixed, .weight = w.kv_b_proj, .row_offset = nope});
  matmul(c.exec, "draft.o_proj", {.out = out, .x = o.reshape({rows, heads * cfg.v_head_dim}), .weight = w.o_proj});
}

// --- the block ---

// silu(gate x) * (up x) -> down: x [R, D] -> out [R, D].
void mlp(const Context& c, const MlpWeights& w, const Tensor& x, const Tensor& out) {
  const Tensor gate = c.alloc({x.dim(0), w.gate_proj.dim(0)});  // [R, intermediate]
  const Tensor up = c.alloc(gate.dims);
  matmul(c.exec, "draft.gate_proj", {.out = gate, .x = x, .weight = w.gate_proj});
  matmul(c.exec, "draft.up_proj", {.out = up, .x = x, .weight = w.up_proj});
  gated_act(c.exec, "draft.act", {.out = gate, .gate = gate, .up = up});
  matmul(c.exec, "draft.down_proj", {.out = out, .x = gate, .weight = w.down_proj});
}

// u [R, D], embeddings of the blocks' tokens, through all layers, in place.
void run_layers(const Context& c, const DsparkWeights& weights, const Blocks& blocks, const Tensor& u) {
  const float eps = c.config.rms_norm_eps;
  const Tensor normed = c.alloc(u.dims);    // what a sublayer reads
  const Tensor sublayer = c.alloc(u.dims);  // ... and its output
  for (int64_t l = 0; l < c.config.num_layers; ++l) {
    const DraftLayerWeights& w = weights.layers[static_cast<size_t>(l)];
    const ArenaScope layer_scope(c.exec.arena());
    rms_norm(c.exec, "draft.input_norm", {.out = normed, .x = u, .weight = w.input_norm, .eps = eps});
    if (c.config.attention == DraftAttention::kGqa) {
      gqa_layer(c, w, l, normed, blocks, sublayer);
    } else {
      mla_layer(c, w, l, normed, blocks, sublayer);
    }
    add(c.exec, "draft.add_attention", {.x = u, .y = sublayer});
    rms_norm(c.exec, "draft.post_attention_norm", {.out = normed, .x = u, .weight = w.post_attention_norm, .eps = eps});
    mlp(c, w.mlp, normed, sublayer);
    add(c.exec, "draft.add_mlp", {.x = u, .y = sublayer});
    c.show("layer", l, u);
  }
}

// --- the Markov head ---

// W1[x_{k-1}] of one step after the other, and what the head makes of it (dspark.md 1.6). `rank` values a sequence.
class MarkovHead {
 public:
  MarkovHead(const Context& c, const DsparkWeights& weights, int64_t seqs) : c_(c), w_(weights) {
    const int64_t rank = c.config.markov_rank, hidden = c.config.hidden_size;
    switch (c.config.markov) {
      case MarkovKind::kNone: break;
      case MarkovKind::kVanilla: embedding_ = c.alloc({seqs, rank}); break;
      case MarkovKind::kGated:
        joint_ = c.alloc({seqs, hidden + rank});
        hidden_ = joint_.cols(0, hidden);
        embedding_ = joint_.cols(hidden, hidden + rank);
        gates_ = c.alloc({seqs, rank});
        out_ = c.alloc({seqs, rank});
        break;
      case MarkovKind::kRnn:
        joint_ = c.alloc({seqs, 2 * rank + hidden});
        state_ = joint_.cols(0, rank);
        embedding_ = joint_.cols(rank, 2 * rank);
        hidden_ = joint_.cols(2 * rank, 2 * rank + hidden);
        gates_ = c.alloc({seqs, 3 * rank});
        out_ = c.alloc({seqs, rank});
        if (!c.exec.dry()) std::fill_n(joint_.f32(), joint_.count(), 0.0F);  // s_0 = 0
        break;
    }
  }

  // W1 of the newest tokens [S, rank]; absent without a Markov head.
  const Tensor& embedding() const { return embedding_; }

  // Takes the newest tokens [S] and the final hidden states of this step [S, D]; returns what W2 multiplies [S, rank].
  Tensor step(std::span<const int32_t> previous, const Tensor& hidden) {
    embed(c_.exec, "draft.markov_in", {.out = embedding_, .table = w_.markov_in, .ids = previous});
    if (c_.config.markov == MarkovKind::kVanilla) return embedding_;
    copy(c_.exec, "draft.markov_hidden", {.out = one_head(hidden_), .x = one_head(hidden)});
    matmul(c_.exec, "draft.markov_gate", {.out = gates_, .x = joint_, .weight = w_.markov_gate});
    if (c_.config.markov == MarkovKind::kGated) {
      copy(c_.exec, "draft.markov_copy", {.out = one_head(out_), .x = one_head(embedding_)});
      markov_gate(c_.exec, "draft.markov_cell", {.x = out_, .gate = gates_, .bias = w_.markov_bias});
    } else {
      markov_cell(c_.exec, "draft.markov_cell",
                  {.out = out_, .state = state_, .gates = gates_, .bias = w_.markov_bias});
    }
    return out_;
  }

 private:
  static Tensor one_head(const Tensor& x) { return by_head(x, 1, x.dim(1)); }

  const Context& c_;
  const DsparkWeights& w_;
  Tensor joint_;                       // [S, all inputs of the gates], of which the next three are columns
  Tensor state_, embedding_, hidden_;  // [S, rank], [S, rank], [S, D]
  Tensor gates_, out_;                 // [S, rank or 3 rank], [S, rank]
};

// --- choosing tokens ---

// How each sequence of a round chooses. Dry passes walk both ways.
struct Choice {
  bool any_argmax = false, any_sampled = false;
  std::vector<float> temperature;  // [S], 1 for those that take the largest

  Choice(const Exec& exec, std::span<const float> wanted) : temperature(wanted.begin(), wanted.end()) {
    any_argmax = any_sampled = exec.dry();
    for (float& t : temperature) {
      any_sampled |= t > 0.0F;
      any_argmax |= !(t > 0.0F);
      if (!(t > 0.0F)) t = 1.0F;
    }
  }
};

}  // namespace

DsparkModel::DsparkModel(const DsparkConfig& config, const DsparkWeights& weights, const Tensor& target_embed,
                         const Tensor& target_lm_head)
    : config_(config),
      weights_(weights),
      vocab_size_(target_embed.dim(0)),
      embed_(weights.embed.is_set() ? weights.embed : target_embed),
      lm_head_(weights.lm_head.is_set() ? weights.lm_head : target_lm_head) {
  MOAT_CHECK(target_embed.dim(1) == config.hidden_size && target_lm_head.dims == target_embed.dims,
             "target embedding {} and head {} for hidden size {}", target_embed.describe(), target_lm_head.describe(),
             config.hidden_size);
  // Heads may be padded beyond the vocabulary: such rows are never computed, so their ids are never drafted.
  const int64_t outputs = weights.target_ids.empty() ? vocab_size_ : static_cast<int64_t>(weights.target_ids.size());
  for (const int32_t id : weights.target_ids) MOAT_CHECK(id < vocab_size_, "draft id {} of {}", id, vocab_size_);
  lm_head_ = lm_head_.rows(0, outputs);
  if (weights.markov_out.is_set()) markov_out_ = weights.markov_out.rows(0, outputs);
  inv_freq_ = make_tensor(const_cast<float*>(config.rope.inv_freq.data()), DType::kF32,
                          {static_cast<int64_t>(config.rope.inv_freq.size())});
}

void DsparkModel::extend_context(Exec& exec, const DraftContextInput& in, const DraftCacheView& cache) const {
  const Context c{exec, config_, inv_freq_, probe_};
  const int64_t tokens = in.taps.dim(0), hidden = config_.hidden_size, width = config_.row_width();
  const ArenaScope scope(exec.arena());

  Tensor taps = in.taps;  // [T, taps * D]
  if (config_.tap_norm) {
    taps = c.alloc(in.taps.dims);
    for (int64_t i = 0; i < config_.num_taps(); ++i) {
      rms_norm(exec, "draft.tap_norm",
               {.out = taps.cols(i * hidden, (i + 1) * hidden),
                .x = in.taps.cols(i * hidden, (i + 1) * hidden),
                .weight = weights_.tap_norms[static_cast<size_t>(i)],
                .eps = config_.rms_norm_eps});
    }
  }
  const Tensor features = c.alloc({tokens, hidden});
  matmul(exec, "draft.fc", {.out = features, .x = taps, .weight = weights_.fc});
  rms_norm(exec, "draft.context_norm",
           {.out = features, .x = features, .weight = weights_.context_norm, .eps = config_.rms_norm_eps});
  c.show("features", -1, features);

  // The same feature feeds every layer: one product for all of them.
  const Tensor rows = c.alloc({tokens, config_.num_layers * width});
  matmul(exec, "draft.context_kv", {.out = rows, .x = features, .weight = weights_.context_kv});
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    const Tensor layer_rows = rows.cols(l * width, (l + 1) * width);
    finish_rows(c, {"draft.context_kv_norm", "draft.context_rope"}, weights_.layers[static_cast<size_t>(l)], layer_rows,
                in.positions);
    mla_kv_write(exec, "draft.context_write",
                 {.cache = cache.rows.at(l), .rows = layer_rows, .slot_mapping = in.slot_mapping});
  }
  c.show("context_kv", -1, rows);
}

DraftRoundOutput DsparkModel::propose(Exec& exec, const DraftRoundInput& in, const DraftCacheView& cache) const {
  const Context c{exec, config_, inv_freq_, probe_};
  const int64_t seqs = in.num_seqs(), gamma = config_.block_size, drafts = in.num_drafts, hidden = config_.hidden_size;
  MOAT_CHECK(drafts >= 1 && drafts <= gamma, "{} drafts of a block of {}", drafts, gamma);
  MOAT_CHECK(in.positions.size() == in.anchors.size() && in.temperature.size() == in.anchors.size() &&
                 static_cast<int64_t>(in.uniforms.size()) == seqs * drafts,
             "{} anchors, {} positions, {} temperatures, {} uniforms for {} drafts", seqs, in.positions.size(),
             in.temperature.size(), in.uniforms.size(), drafts);
  const Choice choice(exec, in.temperature);
  const bool mapped = !weights_.target_ids.empty();

  DraftRoundOutput output;
  output.ids = c.alloc({seqs, drafts}, DType::kI32);
  if (choice.any_sampled) output.probs = c.alloc({seqs * drafts, vocab_size_});
  if (config_.confidence_head) output.confidence = c.alloc({seqs, drafts});
  if (seqs == 0) return output;
  const ArenaScope scope(exec.arena());

  // Blocks: the anchor at its own position, masks behind it.
  std::vector<int32_t> ids(static_cast<size_t>(seqs * gamma), config_.mask_token_id);
  std::vector<int32_t> positions(ids.size());
  for (int64_t s = 0; s < seqs; ++s) {
    const auto first = static_cast<size_t>(s * gamma);
    ids[first] = in.anchors[static_cast<size_t>(s)];
    for (size_t j = 0; j < static_cast<size_t>(gamma); ++j) {
      positions[first + j] = in.positions[static_cast<size_t>(s)] + static_cast<int32_t>(j);
    }
  }
  const Tensor u = c.alloc({seqs * gamma, hidden});
  embed(exec, "draft.embed", {.out = u, .table = embed_, .ids = ids});
  run_layers(c, weights_, {in, cache, positions}, u);

  // Slot k predicts draft k: the first rows of each block go on.
  const Tensor h = c.alloc({seqs * drafts, hidden});
  Tensor leading = by_head(u.rows(0, 1), drafts, hidden);  // [S, N, D] of [S, G, D]
  leading.dims[0] = seqs;
  leading.strides[0] = gamma * hidden;
  copy(exec, "draft.leading", {.out = h.reshape({seqs, drafts, hidden}), .x = leading});
  rms_norm(exec, "draft.final_norm", {.out = h, .x = h, .weight = weights_.final_norm, .eps = config_.rms_norm_eps});
  c.show("hidden", -1, h);

  // Base logits become probabilities in place; with the whole vocabulary they do so in the output.
  const Tensor logits =
      choice.any_sampled && !mapped ? output.probs : c.alloc({seqs * drafts, lm_head_.dim(0)});  // [S * N, draft vocab]
  matmul(exec, "draft.lm_head", {.out = logits, .x = h, .weight = lm_head_});
  c.show("base_logits", -1, logits);

  // Left to right: only the Markov head knows the draft before.
  MarkovHead markov(c, weights_, seqs);
  const Tensor bias = markov_out_.is_set() ? c.alloc({seqs, lm_head_.dim(0)}) : Tensor();
  const Tensor best = c.alloc({seqs}, DType::kI32);
  const Tensor drawn = c.alloc({seqs}, DType::kI32);
  std::vector<int32_t> previous(in.anchors.begin(), in.anchors.end());
  std::vector<double> uniforms(previous.size());
  for (int64_t k = 0; k < drafts; ++k) {
    const Tensor step_hidden = every_nth_row(h, drafts, k);  // [S, D]
    const Tensor step = every_nth_row(logits, drafts, k);    // [S, draft vocab]
    if (bias.is_set()) {
      matmul(exec, "draft.markov_out", {.out = bias, .x = markov.step(previous, step_hidden), .weight = markov_out_});
      c.show("bias", k, bias);
      add(exec, "draft.add_bias", {.x = step, .y = bias});
    }
    if (config_.confidence_head) {
      confidence(exec, "draft.confidence",
                 {.out = every_nth_row(output.confidence.reshape({seqs * drafts, 1}), drafts, k),
                  .x = step_hidden,
                  .y = config_.confidence_with_markov ? markov.embedding() : Tensor(),
                  .weight = weights_.confidence,
                  .bias = weights_.confidence_bias});
    }
    if (choice.any_argmax) argmax(exec, "draft.argmax", {.ids = best, .logits = step});
    if (choice.any_sampled) {
      for (size_t s = 0; s < uniforms.size(); ++s)
        uniforms[s] = in.uniforms[s * static_cast<size_t>(drafts) + static_cast<size_t>(k)];
      softmax(exec, "draft.softmax", {.probs = step, .logits = step, .temperature = choice.temperature});
      draw(exec, "draft.draw", {.ids = drawn, .probs = step, .uniform = uniforms});
    }
    if (choice.any_sampled && mapped) {
      scatter_probs(exec, "draft.scatter",
                    {.out = every_nth_row(output.probs, drafts, k), .x = step, .ids = weights_.target_ids});
    }
    if (exec.dry()) continue;
    for (int64_t s = 0; s < seqs; ++s) {
      const bool lost = k > 0 && output.ids.i32()[s * drafts + k - 1] < 0;
      int32_t id = in.temperature[static_cast<size_t>(s)] > 0.0F ? drawn.i32()[s] : best.i32()[s];
      if (mapped && id >= 0) id = weights_.target_ids[static_cast<size_t>(id)];
      if (lost) id = -1;
      output.ids.i32()[s * drafts + k] = id;
      previous[static_cast<size_t>(s)] = std::max(id, 0);  // of a lost sequence: any token will do
    }
  }
  return output;
}

}  // namespace moat
