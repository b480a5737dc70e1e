// SPDX-License-Identifier: Apache-2.0
#include "model/checkpoint_files.h"

#include <utility>

#include "base/file.h"
#include "base/log.h"

namespace moat {
namespace {

// What the index expects of one shard.
struct Shard {
  std::string path;
  uint64_t num_tensors = 0;
  std::string_view first_tensor;
};

// Distinct shards in the order of the index; `shard_of[i]` is that of its i-th tensor.
std::vector<Shard> list_shards(const std::string& directory, const CheckpointIndex& index,
                               std::vector<size_t>& shard_of) {
  std::vector<Shard> shards;
  std::unordered_map<std::string_view, size_t> known;
  for (const auto& [tensor, file] : index.weight_map) {
    const auto [found, is_new] = known.emplace(file, shards.size());
    if (is_new) shards.push_back({join_path(directory, file), 0, tensor});
    ++shards[found->second].num_tensors;
    shard_of.push_back(found->second);
  }
  return shards;
}

Status check_present(const std::vector<Shard>& shards) {
  std::string missing;
  uint64_t num_files = 0, num_tensors = 0;
  for (const Shard& shard : shards) {
    if (file_exists(shard.path)) continue;
    constexpr uint64_t kListed = 4;
    if (++num_files <= kListed) {
      missing += fmt::format("{}{} (with {} tensors from {} on)", missing.empty() ? "" : ", ", shard.path,
                             shard.num_tensors, shard.first_tensor);
    }
    num_tensors += shard.num_tensors;
  }
  if (num_files == 0) return {};
  return not_found("{} of {} shards missing, which hold {} tensors: {}{}", num_files, shards.size(), num_tensors,
                   missing, num_files > 4 ? ", ..." : "");
}

Status open_files(const std::vector<std::string>& paths, ThreadPool& pool, CheckpointFiles& result) {
  result.files.resize(paths.size());
  std::vector<Status> statuses(paths.size());
  pool.parallel_for(static_cast<int64_t>(paths.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      auto file = open_safetensors(paths[i]);
      if (file.ok()) {
        result.files[i] = std::move(file).value();
      } else {
        statuses[i] = file.status();
      }
    }
  });
  for (const Status& status : statuses) MOAT_RETURN_IF_ERROR(status);
  for (size_t i = 0; i < result.files.size(); ++i) {
    for (const SafetensorsEntry& entry : result.files[i].entries) {
      const auto [found, is_new] = result.tensors.emplace(entry.name, StoredTensor{&entry, i});
      if (!is_new) {
        return data_loss("{}: tensor {}: also in {}, expected once", paths[i], entry.name, paths[found->second.file]);
      }
      result.total_bytes += entry.end - entry.begin;
    }
  }
  return {};
}

// Shards hold exactly what the index says: sizes of both sets are equal and one contains the other.
Status check_against_index(const CheckpointIndex& index, const std::vector<size_t>& shard_of,
                           const std::vector<Shard>& shards, const CheckpointFiles& files) {
  std::unordered_map<std::string_view, size_t> listed;
  listed.reserve(index.weight_map.size());
  for (size_t i = 0; i < index.weight_map.size(); ++i) {
    const std::string& name = index.weight_map[i].first;
    listed.emplace(name, i);
    const auto found = files.tensors.find(name);
    if (found == files.tensors.end()) {
      return data_loss("{}: tensor {}: not in this file, expected by {}", shards[shard_of[i]].path, name,
                       kIndexFileName);
    }
    if (found->second.file != shard_of[i]) {
      return data_loss("{}: tensor {}: found in {}, but {} places it here", shards[shard_of[i]].path, name,
                       shards[found->second.file].path, kIndexFileName);
    }
  }
  for (size_t i = 0; i < files.files.size(); ++i) {
    for (const SafetensorsEntry& entry : files.files[i].entries) {
      if (listed.find(entry.name) == listed.end()) {
        return data_loss("{}: tensor {}: not listed in {}", shards[i].path, entry.name, kIndexFileName);
      }
    }
  }
  return {};
}

}  // namespace

Result<CheckpointFiles> open_checkpoint(const std::string& directory, ThreadPool& pool) {
  CheckpointFiles result;
  const std::string index_path = join_path(directory, kIndexFileName);
  const std::string single_path = join_path(directory, kSingleFileName);
  if (!file_exists(index_path)) {
    if (!file_exists(single_path)) {
      return not_found("{}: no checkpoint, expected {} or {} with its shards", directory, kSingleFileName,
                       kIndexFileName);
    }
    MOAT_RETURN_IF_ERROR(open_files({single_path}, pool, result));
    return result;
  }
  MOAT_ASSIGN(const std::string text, read_file(index_path));
  const Result<CheckpointIndex> index = parse_checkpoint_index(text);
  if (!index.ok()) return index.status().with_prefix(index_path);
  std::vector<size_t> shard_of;
  const std::vector<Shard> shards = list_shards(directory, *index, shard_of);
  MOAT_RETURN_IF_ERROR(check_present(shards));
  std::vector<std::string> paths;
  for (const Shard& shard : shards) paths.push_back(shard.path);
  MOAT_RETURN_IF_ERROR(open_files(paths, pool, result));
  MOAT_RETURN_IF_ERROR(check_against_index(*index, shard_of, shards, result));
  if (index->total_size != 0 && index->total_size != result.total_bytes) {
    // Informative only: tools count it differently, and every tensor is checked on its own.
    log_warn("{}: metadata.total_size is {}, the tensors have {} bytes", index_path, index->total_size,
             result.total_bytes);
  }
  return result;
}

}  // namespace moat
