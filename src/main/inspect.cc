// SPDX-License-Identifier: Apache-2.0
#include "main/inspect.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <unordered_set>

#include "base/file.h"
#include "main/gzip.h"
#include "model/checkpoint_files.h"
#include "model/vision_map.h"

namespace moat {
namespace {

using Names = std::unordered_set<std::string>;

Result<Json> read_config(const std::string& path) {
  MOAT_ASSIGN(const std::string text, read_file(path));
  Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(path);
  return json;
}

// The index by either name, if there is one; `path` says which.
Result<CheckpointIndex> read_index(const std::string& directory, std::string& path) {
  for (const char* suffix : {"", ".gz"}) {
    path = join_path(directory, std::string(kIndexFileName) + suffix);
    if (!file_exists(path)) continue;
    MOAT_ASSIGN(const std::string text, read_maybe_gzip(path));
    Result<CheckpointIndex> index = parse_checkpoint_index(text);
    if (!index.ok()) return index.status().with_prefix(path);
    return index;
  }
  path.clear();
  return CheckpointIndex();
}

bool any_file_present(const std::string& directory, const CheckpointIndex& index, uint64_t& num_files) {
  std::unordered_set<std::string_view> files;
  for (const auto& [tensor, file] : index.weight_map) files.insert(file);
  num_files = files.size();
  return std::any_of(files.begin(), files.end(),
                     [&](std::string_view file) { return file_exists(join_path(directory, file)); });
}

// Compares names with the table and counts. `bytes` is null when no file tells.
void count(const std::function<bool(const std::string&)>& has, const SpecBytes& bytes, Inspection& result,
           Names& expected) {
  KimiWeights weights;
  std::vector<WeightSpec> specs = weight_table(result.config, result.layout, weights);
  std::erase_if(specs, [&](const WeightSpec& spec) {
    if (has(spec.name)) return false;
    if (!spec.optional) result.missing.push_back(spec.name);
    return spec.optional;  // a table without it is complete
  });
  for (const WeightSpec& spec : specs) {
    expected.insert(spec.name);
    if (spec.dest == nullptr) result.ignored.push_back(spec.name);
  }
  result.stats = count_specs(result.config, specs, bytes);
}

// Vision from the config's dimensions, where the names confirm them.
Status count_vision_names(const Json& config, const std::function<bool(const std::string&)>& has, Inspection& result,
                          Names& expected) {
  const Json* vision_config = config.find_set("vision_config");
  if (vision_config == nullptr) return {};
  MOAT_ASSIGN(const std::vector<VisionTensor> table, vision_table(*vision_config));
  const auto present = [&](const VisionTensor& tensor) { return has(tensor.name); };
  // A text-only checkpoint made from a config with vision is complete.
  if (std::none_of(table.begin(), table.end(), present)) return {};
  for (const VisionTensor& tensor : table) {
    expected.insert(tensor.name);
    if (!present(tensor)) {
      result.missing.push_back(tensor.name);
      continue;
    }
    ++result.vision.num_tensors;
    result.vision.parameters += tensor.shape.count();
    result.vision.bytes += tensor.bytes();
  }
  return {};
}

Status inspect_files(Inspection& result) {
  ThreadPool pool(num_usable_cpus());
  MOAT_ASSIGN(const CheckpointFiles files, open_checkpoint(result.directory, pool));
  result.source = Inspection::Source::kFiles;
  result.num_files = files.files.size();
  result.num_tensors = files.tensors.size();
  const auto has = [&](const std::string& name) { return files.tensors.count(name) > 0; };
  result.layout = detect_layout(result.config, has);
  MOAT_RETURN_IF_ERROR(check_layout(result.config, result.layout).with_prefix(result.directory));
  Names expected;
  count(
      has,
      [&](const WeightSpec& spec) {
        const auto found = files.tensors.find(spec.name);
        if (found == files.tensors.end()) return int64_t{0};
        return static_cast<int64_t>(found->second.entry->end - found->second.entry->begin);
      },
      result, expected);
  for (const auto& [name, stored] : files.tensors) {
    if (is_vision_tensor(name)) {
      ++result.vision.num_tensors;
      result.vision.parameters += stored.entry->dims.count();
      result.vision.bytes += static_cast<int64_t>(stored.entry->end - stored.entry->begin);
    } else if (expected.count(std::string(name)) == 0) {
      result.unknown.emplace_back(name);
    }
  }
  return {};
}

Status inspect_names(const Json& config, const CheckpointIndex& index, Inspection& result) {
  const bool config_only = index.weight_map.empty();
  result.source = config_only ? Inspection::Source::kConfigOnly : Inspection::Source::kIndexOnly;
  std::unordered_set<std::string_view> names;
  for (const auto& [tensor, file] : index.weight_map) names.insert(tensor);
  const auto has = [&](const std::string& name) { return config_only || names.count(name) > 0; };
  if (config_only) {
    result.layout.mxfp4_experts = result.config.mxfp4_experts_declared;
  } else {
    result.layout = detect_layout(result.config, has);
  }
  MOAT_RETURN_IF_ERROR(check_layout(result.config, result.layout).with_prefix(result.directory));
  Names expected;
  count(has, spec_bytes, result, expected);
  MOAT_RETURN_IF_ERROR(count_vision_names(config, has, result, expected).with_prefix(result.directory));
  for (const auto& [tensor, file] : index.weight_map) {
    if (expected.count(tensor) == 0) result.unknown.push_back(tensor);
  }
  result.num_tensors = config_only ? static_cast<uint64_t>(result.stats.num_tensors + result.vision.num_tensors)
                                   : index.weight_map.size();
  return {};
}

}  // namespace

Result<Inspection> inspect_checkpoint(const std::string& directory) {
  Inspection result;
  result.directory = directory;
  const std::string config_path = join_path(directory, "config.json");
  MOAT_ASSIGN(const Json config, read_config(config_path));
  auto parsed = parse_model_config(config);
  if (!parsed.ok()) return parsed.status().with_prefix(config_path);
  result.config = std::move(parsed).value();

  std::string index_path;
  MOAT_ASSIGN(const CheckpointIndex index, read_index(directory, index_path));
  result.index_total_size = index.total_size;
  const bool has_single = index_path.empty() && file_exists(join_path(directory, kSingleFileName));
  if (has_single || any_file_present(directory, index, result.num_files)) {
    MOAT_RETURN_IF_ERROR(inspect_files(result));
  } else {
    MOAT_RETURN_IF_ERROR(inspect_names(config, index, result));
  }
  std::sort(result.missing.begin(), result.missing.end());
  std::sort(result.unknown.begin(), result.unknown.end());
  return result;
}

Status inspect_command(const InspectOptions& options) {
  MOAT_ASSIGN(const Inspection inspection, inspect_checkpoint(options.directory));
  const std::string text = options.json ? inspection_json(inspection) : inspection_text(inspection);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) return internal_error("cannot write to stdout");
  std::fflush(stdout);
  if (inspection.missing.empty() && inspection.unknown.empty()) return {};
  const auto& first = inspection.missing.empty() ? inspection.unknown : inspection.missing;
  return data_loss("{}: {} tensors missing, {} unknown: {}{}", options.directory, inspection.missing.size(),
                   inspection.unknown.size(), first.front(), first.size() > 1 ? ", ..." : "");
}

}  // namespace moat
