// SPDX-License-Identifier: Apache-2.0
#include "main/make_synthetic.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "main/synthetic_values.h"
#include "model/checkpoint_files.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weight_map.h"

namespace moat {
namespace {

constexpr int64_t kBufferBytes = int64_t{32} << 20;  // made by all threads, then written

// Tensors [begin, end) of the table.
struct ShardRange {
  size_t begin = 0, end = 0;
  int64_t bytes = 0;
};

std::vector<ShardRange> plan_shards(const std::vector<WeightSpec>& specs, int64_t shard_bytes) {
  std::vector<ShardRange> shards(1);
  for (size_t i = 0; i < specs.size(); ++i) {
    const int64_t bytes = spec_bytes(specs[i]);
    if (shards.back().bytes > 0 && shards.back().bytes + bytes > shard_bytes) shards.push_back({i, i, 0});
    shards.back().end = i + 1;
    shards.back().bytes += bytes;
  }
  return shards;
}

std::string shard_name(size_t shard, size_t count) {
  return fmt::format("model-{:05}-of-{:06}.safetensors", shard + 1, count);
}

// The index, written as it grows: half a million names would be large in memory.
class IndexWriter {
 public:
  IndexWriter(std::string path, int64_t total_bytes) : path_(std::move(path)), file_(path_, std::ios::binary) {
    file_ << "{\"metadata\": {\"total_size\": " << total_bytes << "}, \"weight_map\": {";
  }
  void add(const std::string& tensor, const std::string& file) {
    std::string line = is_first_ ? "\n" : ",\n";
    is_first_ = false;
    append_json_string(line, tensor);
    line += ": ";
    append_json_string(line, file);
    file_ << line;
  }
  Status close() {
    file_ << "\n}}\n";
    file_.close();
    return file_ ? Status() : resource_exhausted("{}: cannot write", path_);
  }

 private:
  std::string path_;
  std::ofstream file_;
  bool is_first_ = true;
};

// Bytes of one tensor that are made in one go.
struct Piece {
  size_t tensor = 0;
  int64_t first_byte = 0, bytes = 0;
  int64_t offset = 0;  // in the buffer
};

// Turns a range of tensors into buffers full of values.
class Generator {
 public:
  Generator(const std::vector<WeightSpec>& specs, uint64_t seed, ThreadPool& pool)
      : specs_(specs), seed_(seed), pool_(pool), buffer_(static_cast<size_t>(kBufferBytes)) {}

  Status write(const ShardRange& range, SafetensorsWriter& writer) {
    for (size_t i = range.begin; i < range.end; ++i) {
      const int64_t total = spec_bytes(specs_[i]);
      for (int64_t at = 0; at < total; at += kPieceBytes) {
        const int64_t bytes = std::min(kPieceBytes, total - at);
        if (used_ + bytes > kBufferBytes) MOAT_RETURN_IF_ERROR(flush(writer));
        pieces_.push_back({i, at, bytes, used_});
        used_ += bytes;
      }
    }
    return flush(writer);
  }

 private:
  Status flush(SafetensorsWriter& writer) {
    auto* base = static_cast<std::byte*>(buffer_.data());
    pool_.parallel_for(static_cast<int64_t>(pieces_.size()), 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Piece& piece = pieces_[static_cast<size_t>(i)];
        const WeightSpec& spec = specs_[piece.tensor];
        fill_values(value_rule(spec), spec.dtypes.front(), tensor_key(seed_, piece.tensor), piece.first_byte,
                    std::span(base + piece.offset, static_cast<size_t>(piece.bytes)));
      }
    });
    const Status status = writer.append(std::span<const std::byte>(base, static_cast<size_t>(used_)));
    pieces_.clear();
    used_ = 0;
    return status;
  }

  const std::vector<WeightSpec>& specs_;
  uint64_t seed_;
  ThreadPool& pool_;
  Buffer buffer_;
  std::vector<Piece> pieces_;
  int64_t used_ = 0;
};

Status copy_file(const std::string& from, const std::string& to) {
  MOAT_ASSIGN(const std::string bytes, read_file(from));
  return write_file(to, bytes);
}

Status prepare_directory(const MakeSyntheticOptions& options) {
  std::error_code error;
  std::filesystem::create_directories(options.out_directory, error);
  if (error) return invalid_argument("{}: cannot create: {}", options.out_directory, error.message());
  for (const char* name : {kIndexFileName, kSingleFileName}) {
    if (file_exists(join_path(options.out_directory, name))) {
      return invalid_argument("{}: already holds a checkpoint, expected an empty directory", options.out_directory);
    }
  }
  const std::string config_path = join_path(options.out_directory, "config.json");
  std::filesystem::remove(config_path, error);
  MOAT_RETURN_IF_ERROR(copy_file(options.config_path, config_path));
  if (options.tokenizer_directory.empty()) return {};
  MOAT_RETURN_IF_ERROR(copy_file(join_path(options.tokenizer_directory, "tiktoken.model"),
                                 join_path(options.out_directory, "tiktoken.model")));
  for (const char* name : {"tokenizer_config.json", "generation_config.json"}) {
    const std::string from = join_path(options.tokenizer_directory, name);
    if (file_exists(from)) MOAT_RETURN_IF_ERROR(copy_file(from, join_path(options.out_directory, name)));
  }
  return {};
}

Result<ModelConfig> read_model_config(const std::string& path) {
  MOAT_ASSIGN(const std::string text, read_file(path));
  const Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(path);
  Result<ModelConfig> config = parse_model_config(*json);
  if (!config.ok()) return config.status().with_prefix(path);
  return config;
}

// The table alone: nothing is loaded, so destinations are dropped.
std::vector<WeightSpec> make_table(const ModelConfig& config) {
  KimiWeights weights;
  std::vector<WeightSpec> specs = weight_table(config, {.mxfp4_experts = config.mxfp4_experts_declared}, weights);
  for (WeightSpec& spec : specs) spec.dest = nullptr;
  return specs;
}

}  // namespace

Status make_synthetic_command(const MakeSyntheticOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  if (options.shard_bytes < 1)
    return invalid_argument("shard size: got {}, expected at least 1 byte", options.shard_bytes);
  MOAT_ASSIGN(const ModelConfig config, read_model_config(options.config_path));
  MOAT_RETURN_IF_ERROR(prepare_directory(options));
  const std::vector<WeightSpec> specs = make_table(config);
  const std::vector<ShardRange> shards = plan_shards(specs, options.shard_bytes);
  int64_t total_bytes = 0;
  for (const ShardRange& shard : shards) total_bytes += shard.bytes;

  ThreadPool pool(options.threads > 0 ? options.threads : num_usable_cpus());
  Generator generator(specs, options.seed, pool);
  IndexWriter index(join_path(options.out_directory, kIndexFileName), total_bytes);
  for (size_t s = 0; s < shards.size(); ++s) {
    const std::string name = shard_name(s, shards.size());
    std::vector<SafetensorsWriter::Declaration> declarations;
    for (size_t i = shards[s].begin; i < shards[s].end; ++i) {
      declarations.push_back({specs[i].name, specs[i].dtypes.front(), specs[i].shape});
      index.add(specs[i].name, name);
    }
    MOAT_ASSIGN(SafetensorsWriter writer,
                SafetensorsWriter::create(join_path(options.out_directory, name), std::move(declarations)));
    MOAT_RETURN_IF_ERROR(generator.write(shards[s], writer));
    MOAT_RETURN_IF_ERROR(writer.close());
    log_info("{}: shard {} of {}, {} bytes", options.out_directory, s + 1, shards.size(), shards[s].bytes);
  }
  MOAT_RETURN_IF_ERROR(index.close());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  log_info("{}: {} tensors, {} bytes in {} shards, {:.1f} s, {:.2f} GB/s", options.out_directory, specs.size(),
           total_bytes, shards.size(), seconds, static_cast<double>(total_bytes) / 1e9 / seconds);
  return {};
}

}  // namespace moat
