// SPDX-License-Identifier: Apache-2.0
// The table of a drafter's tensors, and load_dspark in three steps: match (table against files), place (where each part
// lives), fill the stack and the id map.
#include "model/dspark_weights.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "model/checkpoint_files.h"

namespace moat {
namespace {

// --- the table ---

// Appends the specs of one drafter in forward order.
class TableBuilder {
 public:
  TableBuilder(const DsparkConfig& config, DsparkWeights& weights) : c_(config), w_(weights) {}

  std::vector<DraftWeightSpec> build() {
    w_ = DsparkWeights();
    w_.tap_norms.resize(c_.tap_norm ? static_cast<size_t>(c_.num_taps()) : 0);
    w_.layers.resize(static_cast<size_t>(c_.num_layers));
    const int64_t hidden = c_.hidden_size, vocab = c_.vocab_size, draft_vocab = c_.draft_vocab_size;
    const bool mla = c_.attention == DraftAttention::kMla;
    add({"embed_tokens.weight"}, {vocab, hidden}, w_.embed).optional = true;
    for (size_t i = 0; i < w_.tap_norms.size(); ++i) {
      add({fmt::format("fc_norm.{}.weight", i)}, {hidden}, w_.tap_norms[i]);
    }
    either(mla, "context_proj.weight", "fc.weight", {hidden, c_.num_taps() * hidden}, w_.fc);
    either(mla, "context_norm.weight", "hidden_norm.weight", {hidden}, w_.context_norm);
    for (int64_t i = 0; i < c_.num_layers; ++i) add_layer(i);
    either(mla, "final_norm.weight", "norm.weight", {hidden}, w_.final_norm);
    add_id_map();
    DraftWeightSpec& head = add({"lm_head.weight"}, {draft_vocab, hidden}, w_.lm_head);
    head.optional = !c_.pruned();
    add_markov();
    if (c_.confidence_head) {
      add({"confidence_head.proj.weight"}, {1, c_.confidence_width()}, w_.confidence);
      precise({"confidence_head.proj.bias"}, {1}, w_.confidence_bias);
    }
    return std::move(specs_);
  }

 private:
  DraftWeightSpec& add(std::vector<std::string> names, Dims shape, Tensor& dest) {
    DraftWeightSpec& spec = specs_.emplace_back();
    spec.names = std::move(names);
    spec.shape = shape;
    spec.dtypes = {DType::kBF16, DType::kF32};
    spec.dest = &dest;
    return spec;
  }

  // The drafters with latent attention have their own names for what is around the layers.
  void either(bool mla, const char* mla_name, const char* gqa_name, Dims shape, Tensor& dest) {
    if (mla) {
      add({mla_name, gqa_name}, shape, dest);
    } else {
      add({gqa_name}, shape, dest);
    }
  }

  void precise(std::vector<std::string> names, Dims shape, Tensor& dest) {
    DraftWeightSpec& spec = add(std::move(names), shape, dest);
    spec.dtypes = {DType::kBF16, DType::kF32, DType::kF16};
    spec.part = DraftPart::kToF32;
  }

  // The next rows of context_kv.
  void stacked(std::string name, int64_t rows) {
    DraftWeightSpec& spec = add({std::move(name)}, {rows, c_.hidden_size}, w_.context_kv);
    spec.part = DraftPart::kStacked;
    spec.stack_row = next_row_;
    next_row_ += rows;
  }

  void add_layer(int64_t index) {
    DraftLayerWeights& dest = w_.layers[static_cast<size_t>(index)];
    const std::string stem = fmt::format("layers.{}.", index);
    const int64_t hidden = c_.hidden_size, width = c_.intermediate_size;
    add({stem + "input_layernorm.weight"}, {hidden}, dest.input_norm);
    if (c_.attention == DraftAttention::kGqa) {
      add_gqa(stem + "self_attn.", dest);
    } else {
      add_mla(stem + "self_attn.", dest);
    }
    add({stem + "post_attention_layernorm.weight"}, {hidden}, dest.post_attention_norm);
    add({stem + "mlp.gate_proj.weight"}, {width, hidden}, dest.mlp.gate_proj);
    add({stem + "mlp.up_proj.weight"}, {width, hidden}, dest.mlp.up_proj);
    add({stem + "mlp.down_proj.weight"}, {hidden, width}, dest.mlp.down_proj);
  }

  void add_gqa(const std::string& stem, DraftLayerWeights& dest) {
    const int64_t hidden = c_.hidden_size, queries = c_.num_heads * c_.head_dim, keys = c_.num_kv_heads * c_.head_dim;
    add({stem + "q_proj.weight"}, {queries, hidden}, dest.q_proj);
    stacked(stem + "k_proj.weight", keys);
    stacked(stem + "v_proj.weight", keys);
    add({stem + "q_norm.weight"}, {c_.head_dim}, dest.q_norm);
    add({stem + "k_norm.weight"}, {c_.head_dim}, dest.k_norm);
    add({stem + "o_proj.weight"}, {hidden, queries}, dest.o_proj);
  }

  void add_mla(const std::string& stem, DraftLayerWeights& dest) {
    const int64_t hidden = c_.hidden_size, queries = c_.num_heads * c_.query_dim(), latent = c_.kv_lora_rank;
    if (c_.q_lora_rank) {
      add({stem + "q_a_proj.weight"}, {*c_.q_lora_rank, hidden}, dest.q_a_proj);
      add({stem + "q_a_layernorm.weight"}, {*c_.q_lora_rank}, dest.q_a_norm);
      add({stem + "q_b_proj.weight"}, {queries, *c_.q_lora_rank}, dest.q_b_proj);
    } else {
      add({stem + "q_proj.weight"}, {queries, hidden}, dest.q_proj);
    }
    stacked(stem + "kv_a_proj_with_mqa.weight", c_.row_width());
    add({stem + "kv_a_layernorm.weight"}, {latent}, dest.kv_a_norm);
    add({stem + "kv_b_proj.weight"}, {c_.num_heads * (c_.qk_nope_head_dim + c_.v_head_dim), latent}, dest.kv_b_proj);
    add({stem + "o_proj.weight"}, {hidden, c_.num_heads * c_.v_head_dim}, dest.o_proj);
  }

  // Older releases have the Markov head's tensors under logit_head.
  void add_markov() {
    if (c_.markov == MarkovKind::kNone) return;
    const auto names = [](const char* name) {
      return std::vector{std::string("markov_head.") + name, std::string("logit_head.") + name};
    };
    const int64_t hidden = c_.hidden_size, rank = c_.markov_rank;
    add(names("markov_w1.weight"), {c_.vocab_size, rank}, w_.markov_in);
    if (c_.markov == MarkovKind::kGated) {
      add(names("gate_proj.weight"), {rank, hidden + rank}, w_.markov_gate);
      precise(names("gate_proj.bias"), {rank}, w_.markov_bias);
    } else if (c_.markov == MarkovKind::kRnn) {
      add(names("joint_proj.weight"), {3 * rank, 2 * rank + hidden}, w_.markov_gate);
      precise(names("joint_proj.bias"), {3 * rank}, w_.markov_bias);
    }
    add(names("markov_w2.weight"), {c_.draft_vocab_size, rank}, w_.markov_out);
  }

  // Needed to prune, allowed as a permutation.
  void add_id_map() {
    if (c_.draft_vocab_size > c_.vocab_size) return;
    for (const DraftPart part : {DraftPart::kIdMap, DraftPart::kIgnored}) {
      DraftWeightSpec& spec = specs_.emplace_back();
      const bool map = part == DraftPart::kIdMap;
      spec.names = {map ? "d2t" : "t2d"};
      spec.shape = {map ? c_.draft_vocab_size : c_.vocab_size};
      spec.dtypes = {map ? DType::kI64 : DType::kU8};
      spec.part = part;
      spec.optional = !map || !c_.pruned();
    }
  }

  const DsparkConfig& c_;
  DsparkWeights& w_;
  std::vector<DraftWeightSpec> specs_;
  int64_t next_row_ = 0;
};

// Sets context_kv to `data` and gives each layer its rows.
void assign_stack(const DsparkConfig& config, void* data, DType dtype, DsparkWeights& weights) {
  const int64_t rows = config.row_width();
  weights.context_kv = make_tensor(data, dtype, {config.num_layers * rows, config.hidden_size});
  for (int64_t i = 0; i < config.num_layers; ++i) {
    weights.layers[static_cast<size_t>(i)].kv_proj = weights.context_kv.rows(i * rows, (i + 1) * rows);
  }
}

// --- match ---

struct Placement {
  const DraftWeightSpec* spec = nullptr;
  const SafetensorsEntry* entry = nullptr;
  const MappedFile* file = nullptr;

  const std::byte* data() const { return file->bytes().data() + entry->begin; }
  Status error(const Status& status) const {
    return status.with_prefix(fmt::format("{}: tensor {}", file->path(), entry->name));
  }
};

Status check_entry(const DraftWeightSpec& spec, const SafetensorsEntry& entry) {
  if (std::find(spec.dtypes.begin(), spec.dtypes.end(), entry.dtype) == spec.dtypes.end()) {
    std::string expected;
    for (const DType dtype : spec.dtypes) {
      expected += fmt::format("{}{}", expected.empty() ? "" : " or ", dtype_name(dtype));
    }
    return data_loss("dtype {}, expected {}", dtype_name(entry.dtype), expected);
  }
  if (entry.dims == spec.shape) return {};
  return data_loss("shape {}, expected {}", to_string(entry.dims), to_string(spec.shape));
}

// The first of the spec's names that the files have.
const StoredTensor* find_stored(const DraftWeightSpec& spec, const CheckpointFiles& files) {
  for (const std::string& name : spec.names) {
    for (const std::string& full : {name, "model." + name}) {
      const auto found = files.tensors.find(full);
      if (found != files.tensors.end()) return &found->second;
    }
  }
  return nullptr;
}

std::string listed(const std::vector<std::string_view>& names) {
  constexpr size_t kListed = 8;
  const size_t count = std::min(names.size(), kListed);
  return fmt::format("{}{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(count), ", "),
                     names.size() > kListed ? ", ..." : "");
}

// Every tensor of the table is found with the right dtype and shape; every tensor of the files is in the table.
Status match(const std::string& directory, const std::vector<DraftWeightSpec>& specs, const CheckpointFiles& files,
             std::vector<Placement>& placements, DraftLoadReport& report) {
  std::vector<std::string_view> missing, unknown;
  std::unordered_set<std::string_view> used;
  for (const DraftWeightSpec& spec : specs) {
    const StoredTensor* stored = find_stored(spec, files);
    if (stored == nullptr) {
      if (!spec.optional) missing.push_back(spec.names.front());
      continue;
    }
    used.insert(stored->entry->name);
    const Placement placement{&spec, stored->entry, &files.files[stored->file].file};
    const Status fits = check_entry(spec, *stored->entry);
    if (!fits.ok()) return placement.error(fits);
    if (spec.part == DraftPart::kIgnored) {
      ++report.num_ignored;
    } else {
      placements.push_back(placement);
    }
  }
  std::string unknown_file;
  for (const SafetensorsFile& file : files.files) {
    for (const SafetensorsEntry& entry : file.entries) {
      if (used.count(entry.name)) continue;
      if (unknown.empty()) unknown_file = file.file.path();
      unknown.push_back(entry.name);
    }
  }
  report.num_tensors = files.tensors.size();
  report.num_used = placements.size();
  if (!missing.empty()) {
    return data_loss("{}: {} of {} tensors missing: {}{}", directory, missing.size(), specs.size(), listed(missing),
                     unknown.empty() ? "" : fmt::format("; {} unknown: {}", unknown.size(), listed(unknown)));
  }
  if (!unknown.empty()) {
    return data_loss("{}: {} tensors that the config does not name: {}", unknown_file, unknown.size(), listed(unknown));
  }
  return {};
}

// --- place and fill ---

float float_at(const std::byte* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, data + 4 * i, sizeof(value));
    return value;
  }
  uint16_t value;
  std::memcpy(&value, data + 2 * i, sizeof(value));
  return dtype == DType::kBF16 ? bf16_to_f32(value) : f16_to_f32(value);
}

// `count` values to `to`, as `dtype`: copied, or converted to f32.
void fill_values(const Placement& placement, DType dtype, int64_t count, std::byte* to) {
  if (placement.entry->dtype == dtype) {
    std::memcpy(to, placement.data(), static_cast<size_t>(dtype_bytes(dtype, count)));
    return;
  }
  auto* floats = reinterpret_cast<float*>(to);
  for (int64_t i = 0; i < count; ++i) floats[i] = float_at(placement.data(), placement.entry->dtype, i);
}

std::byte* own(LoadedDspark& model, int64_t bytes) {
  model.report.bytes_owned += static_cast<uint64_t>(bytes);
  return static_cast<std::byte*>(model.buffers.emplace_back(static_cast<size_t>(bytes)).data());
}

// In place where the bytes allow it.
void place_weight(const Placement& placement, LoadedDspark& model) {
  const SafetensorsEntry& entry = *placement.entry;
  const DType dtype = placement.spec->part == DraftPart::kToF32 ? DType::kF32 : entry.dtype;
  const auto alignment = static_cast<uintptr_t>(dtype_bytes(entry.dtype, 1));
  const bool usable = dtype == entry.dtype && reinterpret_cast<uintptr_t>(placement.data()) % alignment == 0;
  const std::byte* data = placement.data();
  if (usable) {
    model.report.bytes_mapped += entry.end - entry.begin;
    placement.file->will_need(entry.begin, entry.end - entry.begin);
  } else {
    std::byte* owned = own(model, dtype_bytes(dtype, entry.dims.count()));
    fill_values(placement, dtype, entry.dims.count(), owned);
    data = owned;
  }
  *placement.spec->dest = make_tensor(const_cast<std::byte*>(data), dtype, entry.dims);
}

// All parts in one dtype: that of the first, or f32 when they differ.
void fill_stack(const std::vector<Placement>& parts, LoadedDspark& model, ThreadPool& pool) {
  DType dtype = parts.front().entry->dtype;
  for (const Placement& part : parts) dtype = part.entry->dtype == dtype ? dtype : DType::kF32;
  const DsparkConfig& config = model.config;
  const int64_t hidden = config.hidden_size;
  std::byte* data = own(model, dtype_bytes(dtype, config.num_layers * config.row_width() * hidden));
  pool.parallel_for(static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Placement& part = parts[static_cast<size_t>(i)];
      fill_values(part, dtype, part.entry->dims.count(), data + dtype_bytes(dtype, part.spec->stack_row * hidden));
    }
  });
  assign_stack(config, data, dtype, model.weights);
}

// d2t holds offsets (dspark.md 1.8). The identity over a whole vocabulary is no map.
Status read_id_map(const Placement& placement, const DsparkConfig& config, std::vector<int32_t>& target_ids) {
  std::vector<bool> taken(static_cast<size_t>(config.vocab_size));
  bool identity = !config.pruned();
  for (int64_t i = 0; i < config.draft_vocab_size; ++i) {
    int64_t offset;
    std::memcpy(&offset, placement.data() + 8 * i, sizeof(offset));
    if (offset < -i || offset >= config.vocab_size - i) {
      return placement.error(
          data_loss("draft id {} has offset {}, expected one to an id from 0 to {}", i, offset, config.vocab_size - 1));
    }
    const int64_t id = i + offset;
    if (taken[static_cast<size_t>(id)]) {
      return placement.error(
          data_loss("draft id {} has offset {}, expected an id that no other has, got {}", i, offset, id));
    }
    taken[static_cast<size_t>(id)] = true;
    identity = identity && offset == 0;
    target_ids.push_back(static_cast<int32_t>(id));
  }
  if (identity) target_ids.clear();
  return {};
}

}  // namespace

std::vector<DraftWeightSpec> draft_weight_table(const DsparkConfig& config, DsparkWeights& weights) {
  return TableBuilder(config, weights).build();
}

DraftSize draft_size(const DsparkConfig& config, OwnVocabulary own_vocabulary) {
  DsparkWeights weights;
  DraftSize size;
  for (const DraftWeightSpec& spec : draft_weight_table(config, weights)) {
    const bool numbers = spec.part != DraftPart::kIdMap && spec.part != DraftPart::kIgnored;
    if (spec.dest == &weights.embed && own_vocabulary == OwnVocabulary::kNone) continue;
    if (spec.dest == &weights.lm_head && own_vocabulary != OwnVocabulary::kEmbedAndHead) continue;
    if (!numbers && !config.pruned()) continue;
    ++size.tensors;
    if (numbers) size.parameters += spec.shape.count();
  }
  return size;
}

void shape_draft_weights(const DsparkConfig& config, DsparkWeights& weights) {
  for (const DraftWeightSpec& spec : draft_weight_table(config, weights)) {
    if (spec.optional) continue;
    if (spec.part == DraftPart::kAdopt) *spec.dest = make_tensor(nullptr, spec.dtypes.front(), spec.shape);
    if (spec.part == DraftPart::kToF32) *spec.dest = make_tensor(nullptr, DType::kF32, spec.shape);
  }
  assign_stack(config, nullptr, DType::kBF16, weights);
  for (int64_t i = 0; config.pruned() && i < config.draft_vocab_size; ++i) {
    weights.target_ids.push_back(static_cast<int32_t>(i));
  }
}

Result<std::unique_ptr<LoadedDspark>> load_dspark(const std::string& directory, ThreadPool& pool) {
  auto model = std::make_unique<LoadedDspark>();
  MOAT_ASSIGN(model->config, load_dspark_config(directory));
  MOAT_ASSIGN(CheckpointFiles files, open_checkpoint(directory, pool));
  const std::vector<DraftWeightSpec> specs = draft_weight_table(model->config, model->weights);
  std::vector<Placement> placements, stacked;
  MOAT_RETURN_IF_ERROR(match(directory, specs, files, placements, model->report));
  for (const Placement& placement : placements) {
    switch (placement.spec->part) {
      case DraftPart::kStacked: stacked.push_back(placement); break;
      case DraftPart::kIdMap:
        MOAT_RETURN_IF_ERROR(read_id_map(placement, model->config, model->weights.target_ids));
        break;
      default: place_weight(placement, *model); break;
    }
  }
  if (!model->weights.target_ids.empty() && !model->weights.lm_head.is_set()) {
    return data_loss("{}: lm_head.weight is missing, expected it with d2t: rows in the order of draft ids", directory);
  }
  fill_stack(stacked, *model, pool);
  for (SafetensorsFile& file : files.files) model->files.push_back(std::move(file.file));
  return model;
}

}  // namespace moat
