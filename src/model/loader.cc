// SPDX-License-Identifier: Apache-2.0
// load_model in three steps: match (table against files), place (where each part lives), fill (copy, convert, check,
// touch).
#include "model/loader.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "model/checkpoint_files.h"
#include "model/weight_copy.h"

namespace moat {
namespace {

constexpr int64_t kTaskBytes = int64_t{4} << 20;     // what one thread takes at a time
constexpr int64_t kBatchBytes = int64_t{256} << 20;  // between progress reports; also how far reading ahead goes
constexpr double kReportSeconds = 0.25;
constexpr size_t kListedNames = 4;

// One tensor of the checkpoint and what this rank does with it.
struct Placement {
  const WeightSpec* spec = nullptr;
  StoredTensor stored;
  Region region;
  DType dtype = DType::kF32;   // in memory
  std::byte* owned = nullptr;  // null: used in place

  bool converts() const { return dtype != stored.entry->dtype; }
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Collects names for a message: the count and the first few.
class NameList {
 public:
  void add(std::string_view name) {
    if (++count_ <= kListedNames) text_ += fmt::format("{}{}", count_ == 1 ? "" : ", ", name);
  }
  size_t count() const { return count_; }
  std::string text() const { return text_ + (count_ > kListedNames ? ", ..." : ""); }

 private:
  size_t count_ = 0;
  std::string text_;
};

// --- match ---

Status check_tensor(const WeightSpec& spec, const SafetensorsEntry& entry) {
  if (std::find(spec.dtypes.begin(), spec.dtypes.end(), entry.dtype) == spec.dtypes.end()) {
    std::string expected;
    for (const DType dtype : spec.dtypes)
      expected += fmt::format("{}{}", expected.empty() ? "" : " or ", dtype_name(dtype));
    return data_loss("tensor {}: dtype {}, expected {}", spec.name, dtype_name(entry.dtype), expected);
  }
  if (spec.transform == Transform::kLeadF32) {
    if (entry.dims.count() >= spec.live) return {};
    return data_loss("tensor {}: shape {}, expected at least {} values", spec.name, to_string(entry.dims), spec.live);
  }
  if (entry.dims == spec.shape) return {};
  return data_loss("tensor {}: shape {}, expected {}", spec.name, to_string(entry.dims), to_string(spec.shape));
}

// Every tensor of the table is found with the right dtype and shape; every tensor of the files is in the table or
// ignored.
Status match(const std::string& directory, const std::vector<WeightSpec>& specs, const CheckpointFiles& files,
             std::vector<Placement>& placements, LoadReport& report) {
  NameList missing, unknown;
  std::unordered_set<std::string_view> known;
  known.reserve(specs.size());
  placements.reserve(specs.size());
  for (const WeightSpec& spec : specs) {
    known.insert(spec.name);
    const auto found = files.tensors.find(spec.name);
    if (found == files.tensors.end()) {
      if (!spec.optional) missing.add(spec.name);
      continue;
    }
    const StoredTensor& stored = found->second;
    if (spec.dest == nullptr) {
      ++report.num_ignored;
      continue;
    }
    MOAT_RETURN_IF_ERROR(check_tensor(spec, *stored.entry).with_prefix(files.files[stored.file].file.path()));
    placements.push_back({.spec = &spec, .stored = stored});
  }
  std::string_view unknown_file;
  for (const SafetensorsFile& file : files.files) {
    for (const SafetensorsEntry& entry : file.entries) {
      if (known.count(entry.name)) continue;
      if (is_vision_tensor(entry.name)) {
        ++report.num_vision;
      } else {
        if (unknown.count() == 0) unknown_file = file.file.path();
        unknown.add(entry.name);
      }
    }
  }
  report.num_ignored += report.num_vision;
  report.num_tensors = files.tensors.size();
  report.num_used = placements.size();
  if (missing.count() > 0) {
    return data_loss("{}: {} of {} tensors missing: {}{}", directory, missing.count(), specs.size(), missing.text(),
                     unknown.count() > 0 ? fmt::format("; {} unknown: {}", unknown.count(), unknown.text()) : "");
  }
  if (unknown.count() > 0) {
    return data_loss("{}: {} tensors that the config does not name: {}", unknown_file, unknown.count(), unknown.text());
  }
  return {};
}

Status check_padding(const Placement& placement, const CheckpointFiles& files) {
  if (placement.spec->transform != Transform::kLeadF32) return {};
  const SafetensorsEntry& entry = *placement.stored.entry;
  const MappedFile& file = files.files[placement.stored.file].file;
  const std::byte* data = file.bytes().data() + entry.begin;
  const int64_t at = find_nonzero(data, entry.dtype, placement.spec->live, entry.dims.count());
  if (at < 0) return {};
  return data_loss("{}: tensor {}: value {} is not zero, expected only zeros after the first {}", file.path(),
                   entry.name, at, placement.spec->live);
}

// --- place ---

void assign(const Placement& placement) {
  const void* data = placement.owned != nullptr ? placement.owned : placement.region.base;
  Tensor& dest = *placement.spec->dest;
  const Dims& dims = placement.region.dims;
  switch (placement.spec->part) {
    case WeightPart::kWhole: dest = make_tensor(const_cast<void*>(data), placement.dtype, dims); break;
    case WeightPart::kCodes: {
      const uint8_t* scales = dest.scales;  // either part may come first
      dest = make_mxfp4(static_cast<const uint8_t*>(data), scales, dims[0], dims[1] * 2);
      break;
    }
    case WeightPart::kScales: dest.scales = static_cast<const uint8_t*>(data); break;
  }
}

bool is_aligned(const std::byte* data, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(dtype_bytes(dtype, 1)) == 0;
}

bool owns_expert(const WeightSpec& spec, const ModelConfig& config, const Parallel& p) {
  if (spec.expert < 0 || p.ep == 1) return true;
  const int group = p.rank % p.tp / (p.tp / p.ep);
  return spec.expert / (config.num_experts / p.ep) == group;
}

// Decides where each part lives, allocates what must be owned and fills the destinations. Drops experts of other ranks.
Status place(const CheckpointFiles& files, LoadedModel& model, std::vector<Placement>& placements) {
  std::erase_if(placements, [&](const Placement& placement) {
    return !owns_expert(*placement.spec, model.config, model.parallel);
  });
  for (Placement& placement : placements) {
    const SafetensorsEntry& entry = *placement.stored.entry;
    const MappedFile& file = files.files[placement.stored.file].file;
    MOAT_RETURN_IF_ERROR(check_padding(placement, files));
    auto region = make_region(*placement.spec, entry, file.bytes(), model.parallel);
    if (!region.ok()) return region.status().with_prefix(file.path() + ": tensor " + entry.name);
    placement.region = std::move(region).value();
    placement.dtype = placement.spec->transform == Transform::kAdopt ? entry.dtype : DType::kF32;
    const int64_t bytes = dtype_bytes(placement.dtype, placement.region.dims.count());
    if (placement.converts() || !placement.region.is_contiguous() || !is_aligned(placement.region.base, entry.dtype)) {
      Buffer& buffer = model.buffers.emplace_back(static_cast<size_t>(bytes));
      placement.owned = static_cast<std::byte*>(buffer.data());
      model.report.bytes_owned += static_cast<uint64_t>(bytes);
    } else {
      model.report.bytes_mapped += static_cast<uint64_t>(bytes);
    }
    assign(placement);
  }
  return {};
}

// --- fill ---

struct Task {
  size_t placement = 0;
  int64_t row_begin = 0, row_end = 0;
  int64_t bytes = 0;
};

// The work in file order, cut into pieces that threads share.
std::vector<Task> make_tasks(std::vector<Placement>& placements, bool prefault) {
  std::sort(placements.begin(), placements.end(), [](const Placement& a, const Placement& b) {
    return std::pair(a.stored.file, a.region.base) < std::pair(b.stored.file, b.region.base);
  });
  std::vector<Task> tasks;
  for (size_t i = 0; i < placements.size(); ++i) {
    const Placement& placement = placements[i];
    const Region& region = placement.region;
    const bool checked = placement.spec->part == WeightPart::kScales;
    if (region.bytes() == 0 || (placement.owned == nullptr && !checked && !prefault)) continue;
    const int64_t step = std::max<int64_t>(1, kTaskBytes / region.row_bytes);
    for (int64_t row = 0; row < region.rows; row += step) {
      const int64_t end = std::min(region.rows, row + step);
      tasks.push_back({i, row, end, (end - row) * region.row_bytes});
    }
  }
  return tasks;
}

// The first NaN scale in file order, whichever thread finds it.
class ScaleFault {
 public:
  void add(size_t placement, int64_t index) {
    const std::lock_guard lock(mutex_);
    first_ = std::min(first_, std::pair(placement, index));
  }
  Status status(const std::vector<Placement>& placements, const CheckpointFiles& files) const {
    if (first_ == kNone) return {};
    const Placement& placement = placements[first_.first];
    const int64_t width = placement.region.dims[1];
    return data_loss("{}: tensor {}: scale [{}, {}] of this rank's part is 255 (NaN), expected 0 to 254",
                     files.files[placement.stored.file].file.path(), placement.spec->name, first_.second / width,
                     first_.second % width);
  }

 private:
  using Position = std::pair<size_t, int64_t>;
  static constexpr Position kNone{std::numeric_limits<size_t>::max(), 0};

  std::mutex mutex_;
  Position first_ = kNone;
};

void run_task(const Task& task, const Placement& placement, ScaleFault& fault) {
  const Region& region = placement.region;
  if (placement.owned == nullptr) {
    touch_rows(region, task.row_begin, task.row_end);
  } else if (placement.converts()) {
    const int64_t width = region.row_bytes / dtype_bytes(placement.stored.entry->dtype, 1);
    convert_rows_to_f32(region, placement.stored.entry->dtype, task.row_begin, task.row_end,
                        reinterpret_cast<float*>(placement.owned) + task.row_begin * width);
  } else {
    copy_rows(region, task.row_begin, task.row_end, placement.owned + task.row_begin * region.row_bytes);
  }
  if (placement.spec->part == WeightPart::kScales) {
    const int64_t index = find_nan_scale(region, task.row_begin, task.row_end);
    if (index >= 0) fault.add(task.placement, index);
  }
}

// Asks the kernel for what the tasks will read; neighbours go in one request.
void read_ahead(std::span<const Task> tasks, const std::vector<Placement>& placements, const CheckpointFiles& files) {
  constexpr size_t kMergedGap = size_t{1} << 20;
  const MappedFile* file = nullptr;
  size_t begin = 0, end = 0;
  for (const Task& task : tasks) {
    const Placement& placement = placements[task.placement];
    const MappedFile* task_file = &files.files[placement.stored.file].file;
    const auto base = static_cast<size_t>(placement.region.base - task_file->bytes().data());
    const size_t task_begin = base + static_cast<size_t>(task.row_begin * placement.region.stride_bytes);
    const size_t task_end =
        base + static_cast<size_t>((task.row_end - 1) * placement.region.stride_bytes + placement.region.row_bytes);
    if (task_file != file || task_begin > end + kMergedGap) {
      if (file != nullptr) file->will_need(begin, end - begin);
      file = task_file;
      begin = task_begin;
      end = task_end;
    }
    end = std::max(end, task_end);
  }
  if (file != nullptr) file->will_need(begin, end - begin);
}

size_t batch_end(const std::vector<Task>& tasks, size_t begin) {
  int64_t bytes = 0;
  while (begin < tasks.size() && bytes < kBatchBytes) bytes += tasks[begin++].bytes;
  return begin;
}

Status fill(const CheckpointFiles& files, std::vector<Placement>& placements, const LoadOptions& options,
            ThreadPool& pool) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Task> tasks = make_tasks(placements, options.prefault);
  LoadProgress progress;
  for (const Task& task : tasks) progress.bytes_total += static_cast<uint64_t>(task.bytes);
  double reported = -kReportSeconds;
  ScaleFault fault;
  size_t end = batch_end(tasks, 0);
  read_ahead(std::span(tasks).subspan(0, end), placements, files);
  for (size_t begin = 0; begin < tasks.size();) {
    const size_t next = batch_end(tasks, end);
    read_ahead(std::span(tasks).subspan(end, next - end), placements, files);
    pool.parallel_for(static_cast<int64_t>(end - begin), 1, [&](int64_t first, int64_t last) {
      for (auto i = begin + static_cast<size_t>(first); i < begin + static_cast<size_t>(last); ++i) {
        run_task(tasks[i], placements[tasks[i].placement], fault);
      }
    });
    for (size_t i = begin; i < end; ++i) progress.bytes_done += static_cast<uint64_t>(tasks[i].bytes);
    MOAT_RETURN_IF_ERROR(fault.status(placements, files));
    progress.seconds = seconds_since(start);
    if (options.progress && (end == tasks.size() || progress.seconds - reported >= kReportSeconds)) {
      options.progress(progress);
      reported = progress.seconds;
    }
    begin = end;
    end = next;
  }
  return {};
}

// --- the whole ---

// Heads and experts are split whole; what else a rule splits is checked tensor by tensor.
Status check_parallel(const ModelConfig& config, const Parallel& p) {
  if (p.tp < 1 || p.ep < 1 || p.kv_shards < 1 || p.rank < 0 || p.rank >= p.tp) {
    return invalid_argument("parallel split tp={} ep={} kv_shards={} rank={}, expected 0 <= rank < tp and sizes >= 1",
                            p.tp, p.ep, p.kv_shards, p.rank);
  }
  if (p.pp != 1) return unsupported("pipeline stages: got {}, expected 1", p.pp);
  if (p.tp % p.ep != 0 || p.tp % p.kv_shards != 0) {
    return invalid_argument("ep = {} and kv_shards = {} must divide tp = {}", p.ep, p.kv_shards, p.tp);
  }
  for (const auto& [what, count, parts] :
       {std::tuple{"num_attention_heads", config.num_heads, p.tp},
        std::tuple{"linear_attn_config.num_heads", config.kda_num_heads, p.tp},
        std::tuple{"vocab_size", config.vocab_size, p.tp}, std::tuple{"num_experts", config.num_experts, p.ep}}) {
    const auto part = shard_count(what, count, parts);
    if (!part.ok()) return part.status();
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<LoadedModel>> load_model(const std::string& directory, const LoadOptions& options,
                                                ThreadPool& pool) {
  const auto start = std::chrono::steady_clock::now();
  auto model = std::make_unique<LoadedModel>();
  MOAT_ASSIGN(model->config, load_model_config(directory));
  model->parallel = options.parallel;
  MOAT_RETURN_IF_ERROR(check_parallel(model->config, options.parallel).with_prefix(directory));
  MOAT_ASSIGN(CheckpointFiles files, open_checkpoint(directory, pool));
  model->layout = detect_layout(
      model->config, [&](const std::string& name) { return files.tensors.count(std::string_view(name)) > 0; });
  MOAT_RETURN_IF_ERROR(check_layout(model->config, model->layout).with_prefix(join_path(directory, "config.json")));
  const std::vector<WeightSpec> specs = weight_table(model->config, model->layout, model->weights);
  std::vector<Placement> placements;
  MOAT_RETURN_IF_ERROR(match(directory, specs, files, placements, model->report));
  MOAT_RETURN_IF_ERROR(place(files, *model, placements));
  MOAT_RETURN_IF_ERROR(fill(files, placements, options, pool));
  for (SafetensorsFile& file : files.files) model->files.push_back(std::move(file.file));
  model->report.seconds = seconds_since(start);
  if (model->report.num_vision > 0) {
    log_info("{}: skipped {} vision tensors, only the text model is served", directory, model->report.num_vision);
  }
  return model;
}

}  // namespace moat
