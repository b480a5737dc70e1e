// SPDX-License-Identifier: Apache-2.0
#include "model/kimi.h"

#include <algorithm>
#include <cmath>

#include "ops/edit.h"
#include "ops/kda_verify.h"
#include "ops/matmul.h"
#include "ops/mla.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/pointwise.h"

namespace moat {
namespace {

// T tokens, D hidden, H heads of this rank, W = H * head_dim.

// The rows and sequences of one form of the attention leaves. The dry pass that makes a plan walks both forms at full
// size.
struct LeafRange {
  int64_t row_begin = 0, row_end = 0;
  int64_t seq_begin = 0, seq_end = 0;
};

struct Leaves {
  LeafRange verify;   // drafts: states are only read
  LeafRange step;     // the other sequences in decode form
  LeafRange decode;   // both
  LeafRange prefill;  // the rest
};

Leaves split_leaves(const Exec& exec, const ForwardInput& in, const CacheView& caches) {
  const int64_t tokens = in.num_tokens();
  const int64_t seqs = in.num_seqs();
  const int64_t rows = in.num_decode_tokens();
  const int64_t verify_rows = in.num_verify_tokens();
  if (exec.mode() == ExecMode::kDry) {
    const LeafRange all = {0, tokens, 0, seqs};
    const int64_t records = caches.kda_records.is_set() ? caches.kda_records.dim(1) : 0;
    return {{0, std::min(tokens, records), 0, records > 0 ? seqs : 0}, all, all, all};
  }
  return {{0, verify_rows, 0, in.num_verify_seqs},
          {verify_rows, rows, in.num_verify_seqs, in.num_decode_seqs},
          {0, rows, 0, in.num_decode_seqs},
          {rows, tokens, in.num_decode_seqs, seqs}};
}

template <class T>
std::span<const T> sub(std::span<const T> all, int64_t begin, int64_t end) {
  return all.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

StateSequences state_sequences(const ForwardInput& in, const LeafRange& range) {
  return {.cu_seqlens = sub(in.cu_seqlens, range.seq_begin, range.seq_end + 1),
          .slots = sub(in.state_slots, range.seq_begin, range.seq_end),
          .first_positions = sub(in.first_positions, range.seq_begin, range.seq_end)};
}

PagedSequences paged_sequences(const ForwardInput& in, const LeafRange& range, int64_t block_size) {
  return {.cu_seqlens = sub(in.cu_seqlens, range.seq_begin, range.seq_end + 1),
          .context_lens = sub(in.context_lens, range.seq_begin, range.seq_end),
          .block_tables = sub(in.block_tables, range.seq_begin * in.max_blocks, range.seq_end * in.max_blocks),
          .max_blocks = in.max_blocks,
          .block_size = block_size};
}

// What one layer needs besides its weights.
struct Context {
  Exec& exec;
  const ModelConfig& config;
  const ForwardInput& in;
  const CacheView& caches;
  const Leaves leaves;
  const ForwardProbe& probe;

  Tensor alloc(Dims dims, DType dtype = DType::kF32) const { return exec.arena().alloc(dtype, dims); }
  void show(const char* name, int64_t layer, const Tensor& value) const {
    if (probe && !exec.dry()) probe(name, layer, value);
  }
};

// x [T, D] -> act(gate x) * (up x) -> down; `out` [T, D]. Partial over ranks.
void mlp(const Context& c, const char* const (&sites)[4], const MlpWeights& w, const Tensor& x, const Tensor& out) {
  const int64_t tokens = x.dim(0);
  const Tensor gate = c.alloc({tokens, w.gate_proj.dim(0)});  // [T, intermediate]
  const Tensor up = c.alloc(gate.dims);
  matmul(c.exec, sites[0], {.out = gate, .x = x, .weight = w.gate_proj});
  matmul(c.exec, sites[1], {.out = up, .x = x, .weight = w.up_proj});
  gated_act(c.exec, sites[2],
            {.out = gate,
             .gate = gate,
             .up = up,
             .situ_beta = c.config.hidden_act == HiddenAct::kSitu ? c.config.situ_beta : 0.0F,
             .linear_beta = c.config.situ_linear_beta.value_or(0.0F)});
  matmul(c.exec, sites[3], {.out = out, .x = gate, .weight = w.down_proj});
}

// The state tails of one of q, k, v: [slots, conv_kernel - 1, W] inside [slots, 3, conv_kernel - 1, W].
Tensor conv_tails(const Tensor& layer_tails, int64_t which) {
  const Tensor first = layer_tails.reshape({layer_tails.dim(0), 3 * layer_tails.dim(2), layer_tails.dim(3)});
  Tensor view = first;
  view.dims = {layer_tails.dim(0), layer_tails.dim(2), layer_tails.dim(3)};
  if (view.data != nullptr) view.data = view.f32() + which * layer_tails.dim(2) * layer_tails.dim(3);
  return view;
}

// The records of one of q, k, v: [rows, W] inside [rows, 3, W].
Tensor conv_record(const Tensor& layer_records, int64_t which) {
  const int64_t width = layer_records.dim(2);
  return layer_records.reshape({layer_records.dim(0), 3 * width}).cols(which * width, (which + 1) * width);
}

// KDA (k3.md 3.5): x [T, D] -> out [T, D], partial over ranks. `index` counts KDA layers.
void kda_layer(const Context& c, const KdaWeights& w, int64_t index, const Tensor& x, const Tensor& out) {
  const int64_t tokens = x.dim(0);
  const int64_t dim = c.config.kda_head_dim;
  const int64_t width = w.q_proj.dim(0);
  const int64_t heads = width / dim;
  const Dims flat = {tokens, width};
  const Dims by_head = {tokens, heads, dim};
  const LeafRange& verify = c.leaves.verify;
  const LeafRange others = {verify.row_end, tokens, verify.seq_end, c.in.num_seqs()};

  // Projections, convolution, and the normalisation of q (with its scale) and k.
  struct Stream {
    const Tensor& proj;
    const Tensor& conv;
    const char* proj_site;
    const char* conv_site;
    const char* verify_site;
  };
  const Stream streams[3] = {{w.q_proj, w.q_conv, "kda.q_proj", "kda.q_conv", "kda.q_conv_verify"},
                             {w.k_proj, w.k_conv, "kda.k_proj", "kda.k_conv", "kda.k_conv_verify"},
                             {w.v_proj, w.v_conv, "kda.v_proj", "kda.v_conv", "kda.v_conv_verify"}};
  const Tensor tails = c.caches.kda_conv.at(index);
  Tensor qkv[3];
  const Tensor raw = c.alloc(flat);  // [T, W], one projection at a time
  for (int i = 0; i < 3; ++i) {
    qkv[i] = c.alloc(by_head);
    matmul(c.exec, streams[i].proj_site, {.out = raw, .x = x, .weight = streams[i].proj});
    const auto conv_args = [&](const LeafRange& r) {
      return ShortConvArgs{.out = qkv[i].reshape(flat).rows(r.row_begin, r.row_end),
                           .x = raw.rows(r.row_begin, r.row_end),
                           .weight = streams[i].conv,
                           .tails = conv_tails(tails, i),
                           .seqs = state_sequences(c.in, r)};
    };
    if (verify.row_end > 0) {
      ShortConvArgs args = conv_args(verify);
      args.record = conv_record(c.caches.conv_records.at(index), i).rows(0, verify.row_end);
      short_conv(c.exec, streams[i].verify_site, args);
    }
    short_conv(c.exec, streams[i].conv_site, conv_args(c.exec.mode() == ExecMode::kDry ? c.leaves.step : others));
  }
  const auto& [q, k, v] = qkv;
  l2_norm(c.exec, "kda.q_norm", {.x = q, .eps = 1e-6F, .scale = 1.0F / std::sqrt(static_cast<float>(dim))});
  l2_norm(c.exec, "kda.k_norm", {.x = k, .eps = 1e-6F});

  // Per-channel log-decay and per-head beta.
  const Tensor low_rank = c.alloc({tokens, w.f_a_proj.dim(0)});
  const Tensor decay = c.alloc(by_head);  // [T, H, head_dim], <= 0
  matmul(c.exec, "kda.f_a_proj", {.out = low_rank, .x = x, .weight = w.f_a_proj});
  matmul(c.exec, "kda.f_b_proj", {.out = decay.reshape(flat), .x = low_rank, .weight = w.f_b_proj});
  kda_gate(c.exec, "kda.gate",
           {.out = decay,
            .raw = decay,
            .a_log = w.a_log,
            .dt_bias = w.dt_bias,
            .lower_bound = c.config.gate_lower_bound.value_or(0.0F)});
  const Tensor beta = c.alloc({tokens, heads});
  matmul(c.exec, "kda.b_proj", {.out = beta, .x = x, .weight = w.b_proj});

  // The delta rule: recurrent for decode rows, with the state left alone under drafts, and chunked for long runs.
  const Tensor o = c.alloc(by_head);
  const Tensor states = c.caches.kda_state.at(index);  // [slots, H, head_dim, head_dim]
  const auto leaf_args = [&](const LeafRange& r) {
    return KdaArgs{.out = o.rows(r.row_begin, r.row_end),
                   .q = q.rows(r.row_begin, r.row_end),
                   .k = k.rows(r.row_begin, r.row_end),
                   .v = v.rows(r.row_begin, r.row_end),
                   .g = decay.rows(r.row_begin, r.row_end),
                   .beta_logits = beta.rows(r.row_begin, r.row_end),
                   .states = states,
                   .seqs = state_sequences(c.in, r)};
  };
  if (verify.row_end > 0) {
    const Tensor records = c.caches.kda_records.at(index).rows(0, verify.row_end);
    kda_verify(c.exec, "kda.verify", {.rows = leaf_args(verify), .records = records});
  }
  kda_recurrent(c.exec, "kda.recurrent", leaf_args(c.leaves.step));
  kda_chunked(c.exec, "kda.chunked", leaf_args(c.leaves.prefill));

  // Output norm, then the gate, then the projection.
  const Tensor gate = c.alloc(by_head);
  if (c.config.full_rank_gate) {
    matmul(c.exec, "kda.g_proj", {.out = gate.reshape(flat), .x = x, .weight = w.g_proj});
  } else {
    matmul(c.exec, "kda.g_a_proj", {.out = low_rank, .x = x, .weight = w.g_a_proj});
    matmul(c.exec, "kda.g_b_proj", {.out = gate.reshape(flat), .x = low_rank, .weight = w.g_b_proj});
  }
  gated_rms_norm(c.exec, "kda.o_norm",
                 {.out = o, .o = o, .gate = gate, .weight = w.o_norm, .eps = c.config.rms_norm_eps});
  matmul(c.exec, "kda.o_proj", {.out = out, .x = o.reshape(flat), .weight = w.o_proj});
}

// q [T, H, nope + rope] of one MLA layer.
Tensor mla_query(const Context& c, const MlaWeights& w, const Tensor& x) {
  const int64_t tokens = x.dim(0);
  const int64_t qk = c.config.qk_head_dim();
  if (!c.config.q_lora_rank) {
    const Tensor q = c.alloc({tokens, w.q_proj.dim(0)});
    matmul(c.exec, "mla.q_proj", {.out = q, .x = x, .weight = w.q_proj});
    return q.reshape({tokens, q.dim(1) / qk, qk});
  }
  const Tensor compressed = c.alloc({tokens, *c.config.q_lora_rank});
  const Tensor q = c.alloc({tokens, w.q_b_proj.dim(0)});
  matmul(c.exec, "mla.q_a_proj", {.out = compressed, .x = x, .weight = w.q_a_proj});
  rms_norm(c.exec, "mla.q_a_norm",
           {.out = compressed, .x = compressed, .weight = w.q_a_norm, .eps = c.config.mla_norm_eps});
  matmul(c.exec, "mla.q_b_proj", {.out = q, .x = compressed, .weight = w.q_b_proj});
  return q.reshape({tokens, q.dim(1) / qk, qk});
}

// Gated MLA without positional encoding (k3.md 3.6): x [T, D] -> out [T, D], partial over ranks. `index` counts MLA
// layers.
void mla_layer(const Context& c, const MlaWeights& w, int64_t index, const Tensor& x, const Tensor& out) {
  const ModelConfig& cfg = c.config;
  const int64_t tokens = x.dim(0);
  const int64_t nope = cfg.qk_nope_head_dim;
  const int64_t latent = cfg.kv_lora_rank;
  const float scale = 1.0F / std::sqrt(static_cast<float>(cfg.qk_head_dim()));

  const Tensor q = mla_query(c, w, x);
  const int64_t heads = q.dim(1);

  // The cached row: normalised latent, then the shared key part as it is.
  const Tensor cache = c.caches.mla.at(index);  // [slots, latent + rope]
  const Tensor row = c.alloc({tokens, cfg.mla_row()});
  matmul(c.exec, "mla.kv_a_proj", {.out = row, .x = x, .weight = w.kv_a_proj});
  rms_norm(c.exec, "mla.kv_a_norm",
           {.out = row.cols(0, latent), .x = row.cols(0, latent), .weight = w.kv_a_norm, .eps = cfg.mla_norm_eps});
  mla_kv_write(c.exec, "mla.kv_write", {.cache = cache, .rows = row, .slot_mapping = c.in.slot_mapping});

  const Tensor o = c.alloc({tokens, heads, cfg.v_head_dim});
  {  // Decode form: queries move into the latent space, values come back out of it.
    const LeafRange& r = c.leaves.decode;
    const int64_t rows = r.row_end - r.row_begin;
    const Tensor q_rows = q.rows(r.row_begin, r.row_end);
    const Tensor absorbed = c.alloc({rows, heads, cfg.mla_row()});
    const Tensor mixed = c.alloc({rows, heads, latent});
    head_matmul(
        c.exec, "mla.absorb_key",
        {.out = absorbed.cols(0, latent), .x = q_rows.cols(0, nope), .weight = w.kv_b_proj, .transposed = true});
    copy(c.exec, "mla.absorb_shared",
         {.out = absorbed.cols(latent, cfg.mla_row()), .x = q_rows.cols(nope, cfg.qk_head_dim())});
    mla_decode(c.exec, "mla.decode",
               {.out = mixed,
                .q = absorbed,
                .cache = cache,
                .seqs = paged_sequences(c.in, r, c.caches.block_size),
                .scale = scale});
    head_matmul(c.exec, "mla.absorb_value",
                {.out = o.rows(r.row_begin, r.row_end), .x = mixed, .weight = w.kv_b_proj, .row_offset = nope});
  }
  {  // Prefill form: keys and values are expanded from the latents.
    const LeafRange& r = c.leaves.prefill;
    mla_prefill(c.exec, "mla.prefill",
                {.out = o.rows(r.row_begin, r.row_end),
                 .q = q.rows(r.row_begin, r.row_end),
                 .cache = cache,
                 .kv_b = w.kv_b_proj,
                 .seqs = paged_sequences(c.in, r, c.caches.block_size),
                 .scale = scale});
  }

  const Tensor flat = o.reshape({tokens, heads * cfg.v_head_dim});
  if (cfg.mla_output_gate) {
    const Tensor gate = c.alloc(flat.dims);
    matmul(c.exec, "mla.g_proj", {.out = gate, .x = x, .weight = w.g_proj});
    sigmoid_gate(c.exec, "mla.gate", {.x = flat, .gate = gate});
  }
  matmul(c.exec, "mla.o_proj", {.out = out, .x = flat, .weight = w.o_proj});
}

// The routed experts on z [T, L] -> y [T, L], partial over ranks.
void routed_experts(const Context& c, const MoeWeights& w, const Tensor& expert_ids, const Tensor& expert_weights,
                    const Tensor& z, const Tensor& y) {
  const int64_t tokens = z.dim(0);
  const int64_t pairs = expert_ids.count();
  const int64_t experts = static_cast<int64_t>(w.w1.size());
  const Tensor offsets = c.alloc({experts + 1}, DType::kI32);
  const Tensor sorted = c.alloc({pairs}, DType::kI32);
  const Tensor positions = c.alloc({tokens, expert_ids.dim(1)}, DType::kI32);
  moe_dispatch(c.exec, "moe.dispatch",
               {.offsets = offsets, .sorted_tokens = sorted, .positions = positions, .expert_ids = expert_ids});

  const Tensor gate = c.alloc({pairs, w.w1.front().dim(0)});  // [T * k, moe_intermediate]
  const Tensor up = c.alloc(gate.dims);
  const Tensor down = c.alloc({pairs, z.dim(1)});
  grouped_matmul(c.exec, "moe.w1", {.out = gate, .x = z, .rows = sorted, .offsets = offsets, .weights = w.w1});
  grouped_matmul(c.exec, "moe.w3", {.out = up, .x = z, .rows = sorted, .offsets = offsets, .weights = w.w3});
  gated_act(c.exec, "moe.act",
            {.out = gate,
             .gate = gate,
             .up = up,
             .situ_beta = c.config.hidden_act == HiddenAct::kSitu ? c.config.situ_beta : 0.0F,
             .linear_beta = c.config.situ_linear_beta.value_or(0.0F)});
  grouped_matmul(c.exec, "moe.w2", {.out = down, .x = gate, .offsets = offsets, .weights = w.w2});
  moe_combine(c.exec, "moe.combine", {.out = y, .y = down, .positions = positions, .expert_weights = expert_weights});
}

// Latent MoE (k3.md 3.7): x [T, D] -> out [T, D], complete on every rank.
void moe_layer(const Context& c, const MoeWeights& w, int64_t layer, const Tensor& x, const Tensor& out) {
  const ModelConfig& cfg = c.config;
  const int64_t tokens = x.dim(0);

  const Tensor logits = c.alloc({tokens, cfg.num_experts});
  const Tensor expert_ids = c.alloc({tokens, cfg.num_experts_per_token}, DType::kI32);
  const Tensor expert_weights = c.alloc({tokens, cfg.num_experts_per_token});
  matmul(c.exec, "moe.router", {.out = logits, .x = x, .weight = w.router});
  router_topk(c.exec, "moe.topk",
              {.expert_ids = expert_ids,
               .expert_weights = expert_weights,
               .logits = logits,
               .bias = w.router_bias,
               .renormalize = cfg.moe_renormalize,
               .scale = cfg.routed_scaling_factor});
  c.show("expert_ids", layer, expert_ids);
  c.show("expert_weights", layer, expert_weights);

  // Without a latent the experts work on x and their sum is the routed output.
  const Tensor z = cfg.latent_size ? c.alloc({tokens, *cfg.latent_size}) : x;
  if (cfg.latent_size) matmul(c.exec, "moe.latent_down", {.out = z, .x = x, .weight = w.latent_down});
  const Tensor y = cfg.latent_size ? c.alloc(z.dims) : out;
  routed_experts(c, w, expert_ids, expert_weights, z, y);
  c.exec.comm().all_reduce_sum(y);  // before the norm, which is not linear
  if (cfg.latent_size) {
    if (cfg.latent_norm) {
      rms_norm(c.exec, "moe.latent_norm", {.out = y, .x = y, .weight = w.latent_norm, .eps = cfg.rms_norm_eps});
    }
    matmul(c.exec, "moe.latent_up", {.out = out, .x = y, .weight = w.latent_up});
  }

  if (cfg.num_shared_experts == 0) return;
  const Tensor shared = c.alloc(out.dims);
  mlp(c, {"moe.shared_gate", "moe.shared_up", "moe.shared_act", "moe.shared_down"}, w.shared, x, shared);
  c.exec.comm().all_reduce_sum(shared);
  add(c.exec, "moe.add_shared", {.x = out, .y = shared});
}

// [T, D] as [T, 1, D], for copy.
Tensor one_head(const Tensor& x) {
  Tensor view = x;
  view.dims = {x.dim(0), 1, x.dim(1)};
  view.strides = {x.strides[0], x.dim(1), 1};
  return view;
}

// The residual stream. With AttnRes (k3.md 3.3) `stream` is the running sum of the current block and lives in the slab
// right after the finished blocks, so that finishing a block only moves the boundary; without, it is the ordinary sum.
class ResidualStream {
 public:
  ResidualStream(const Context& c, int64_t hidden) : c_(c) {
    const int64_t layers = c.config.num_layers;
    const int64_t capacity = c.config.attn_res_block_size
                                 ? (layers + *c.config.attn_res_block_size - 1) / *c.config.attn_res_block_size + 1
                                 : 1;
    slab_ = c.alloc({capacity, c.in.num_tokens(), hidden});
  }

  Tensor stream() const { return slab_.at(num_blocks_); }  // [T, D]

  // The mixture that a sublayer reads; `out` must not be the stream. Without blocks it is the stream itself.
  Tensor mix(const char* site, const AttnResWeights& w, const Tensor& out) const {
    if (num_blocks_ == 0) return stream();
    attn_res_mix(c_.exec, site,
                 {.out = out,
                  .blocks = slab_,
                  .prefix = stream(),
                  .norm = w.norm,
                  .proj = w.proj,
                  .num_blocks = num_blocks_,
                  .eps = c_.config.rms_norm_eps});
    return out;
  }

  // At the first layer of a block: the unmixed sum becomes a block and a new sum begins.
  void begin_block() {
    ++num_blocks_;
    empty_ = true;
  }

  // Where a sublayer may write its output so that add() of it is free.
  Tensor target(const Tensor& temporary) const { return empty_ ? stream() : temporary; }
  void add_output(const char* site, const Tensor& output) {
    if (empty_) {
      MOAT_CHECK(output.data == stream().data, "the first output of a block is written in place");
      empty_ = false;
      return;
    }
    add(c_.exec, site, {.x = stream(), .y = output});
  }

 private:
  const Context& c_;
  Tensor slab_;  // [blocks + 1, T, D]
  int64_t num_blocks_ = 0;
  bool empty_ = false;
};

}  // namespace

ForwardOutput KimiModel::forward(Exec& exec, const ForwardInput& input, const CacheView& caches) const {
  const Context c{exec, config_, input, caches, split_leaves(exec, input, caches), probe_};
  const int64_t tokens = input.num_tokens();
  const int64_t hidden = config_.hidden_size;
  const int64_t logit_rows = static_cast<int64_t>(input.logits_rows.size());
  const bool attn_res = config_.attn_res_block_size.has_value();

  ForwardOutput output;
  output.logits = c.alloc({logit_rows, config_.vocab_size});
  if (!input.tap_layers.empty()) {
    output.taps = c.alloc({tokens, static_cast<int64_t>(input.tap_layers.size()) * hidden});
  }
  // Where the tapped value after `layer` goes. [T, D]; absent if it is not tapped
  const auto tap_of = [&](int64_t layer) {
    const auto it = std::find(input.tap_layers.begin(), input.tap_layers.end(), static_cast<int32_t>(layer));
    const int64_t first = (it - input.tap_layers.begin()) * hidden;
    return it == input.tap_layers.end() ? Tensor() : output.taps.cols(first, first + hidden);
  };
  // The mixture after `layer` goes straight to its tap, if it is tapped.
  const bool taps_mixtures = attn_res && input.tap_stream == TapStream::kAttnRes;
  const auto mixture_buffer = [&](int64_t layer, const Tensor& scratch) {
    const Tensor tap = taps_mixtures ? tap_of(layer) : Tensor();
    return tap.is_set() ? tap : scratch;
  };

  const ArenaScope step_scope(exec.arena());
  ResidualStream residual(c, hidden);
  embed(exec, "embed", {.out = residual.stream(), .table = weights_.embed, .ids = input.token_ids});
  c.show("hidden", -1, residual.stream());

  const Tensor mixed = c.alloc({tokens, hidden});     // what a sublayer reads
  const Tensor normed = c.alloc({tokens, hidden});    // ... after its norm
  const Tensor sublayer = c.alloc({tokens, hidden});  // ... and its output
  int64_t kda_index = 0;
  int64_t mla_index = 0;
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    const LayerWeights& w = weights_.layers[static_cast<size_t>(l)];
    const ArenaScope layer_scope(exec.arena());

    const Tensor h = residual.mix("attn_res", w.attn_res, mixture_buffer(l - 1, mixed));
    c.show("mix", l, h);
    rms_norm(exec, "input_norm", {.out = normed, .x = h, .weight = w.input_norm, .eps = config_.rms_norm_eps});
    if (attn_res && l % *config_.attn_res_block_size == 0) residual.begin_block();
    const Tensor attention = residual.target(sublayer);
    if (w.kind == LayerKind::kKda) {
      kda_layer(c, w.kda, kda_index++, normed, attention);
    } else {
      mla_layer(c, w.mla, mla_index++, normed, attention);
    }
    exec.comm().all_reduce_sum(attention);
    residual.add_output("add_attention", attention);

    const Tensor h2 = residual.mix("mlp_res", w.mlp_res, mixed);
    rms_norm(exec, "post_attention_norm",
             {.out = normed, .x = h2, .weight = w.post_attention_norm, .eps = config_.rms_norm_eps});
    if (w.moe) {
      moe_layer(c, w.experts, l, normed, sublayer);
    } else {
      mlp(c, {"mlp.gate_proj", "mlp.up_proj", "mlp.act", "mlp.down_proj"}, w.mlp, normed, sublayer);
      exec.comm().all_reduce_sum(sublayer);
    }
    residual.add_output("add_ffn", sublayer);
    if (const Tensor tap = tap_of(l); tap.is_set() && !taps_mixtures) {
      copy(exec, "tap", {.out = one_head(tap), .x = one_head(residual.stream())});
    }
    c.show("hidden", l, residual.stream());
  }

  const Tensor last = residual.mix("output_res", weights_.output_res, mixture_buffer(config_.num_layers - 1, mixed));
  c.show("mix", config_.num_layers, last);
  const Tensor wanted = c.alloc({logit_rows, hidden});
  embed(exec, "logits_rows", {.out = wanted, .table = last, .ids = input.logits_rows});  // a gather of rows
  rms_norm(exec, "norm", {.out = wanted, .x = wanted, .weight = weights_.norm, .eps = config_.rms_norm_eps});
  matmul(exec, "lm_head", {.out = output.logits, .x = wanted, .weight = weights_.lm_head});
  return output;
}

void KimiModel::commit(Exec& exec, const CommitInput& input, const CacheView& caches) const {
  const CommitRanges ranges{.begins = input.begins, .ends = input.ends, .slots = input.slots};
  kda_commit(exec, "kda.commit", {.states = caches.kda_state, .records = caches.kda_records, .ranges = ranges});
  conv_commit(exec, "kda.conv_commit", {.tails = caches.kda_conv, .records = caches.conv_records, .ranges = ranges});
}

Status shape_weights(const ModelConfig& config, const CheckpointLayout& layout, const Parallel& parallel,
                     KimiWeights& weights) {
  for (const WeightSpec& spec : weight_table(config, layout, weights)) {
    if (spec.dest == nullptr || spec.part == WeightPart::kScales) continue;
    Dims dims = spec.shape;
    if (spec.part == WeightPart::kCodes) dims[dims.rank() - 1] *= 2;
    if (spec.transform == Transform::kLeadF32) dims = {spec.live};
    MOAT_ASSIGN(const Slice slice, shard_slice(spec.shard, dims, parallel, spec.live));
    dims[slice.dim] = slice.end - slice.begin;
    const DType dtype = spec.part == WeightPart::kCodes       ? DType::kMxfp4
                        : spec.transform == Transform::kAdopt ? spec.dtypes.front()
                                                              : DType::kF32;
    *spec.dest = make_tensor(nullptr, dtype, dims);
  }
  return {};
}

}  // namespace moat
