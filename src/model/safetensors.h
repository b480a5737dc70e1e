// SPDX-License-Identifier: Apache-2.0
// The safetensors container, read as an untrusted file: 8-byte little-endian header length, a JSON header, tensor bytes.
// Nothing is believed before it is bounded: header length, offsets, overlaps, holes, dtype x shape = bytes, duplicate names.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/status.h"
#include "core/tensor.h"

namespace moat {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;  // BOOL is read as kU8; F8_E4M3 and others that moat has no use for are refused by name
  Dims dims;
  uint64_t begin = 0, end = 0;  // bytes in the file, absolute
};

// Header of one file whose total size is `file_size` and whose beginning is `head` (the whole file or at least the header).
// Errors name the tensor and, in bytes, got and expected; the caller prefixes the file.
Result<std::vector<SafetensorsEntry>> parse_safetensors_header(std::span<const std::byte> head, uint64_t file_size);

// One mapped file with its entries.
struct SafetensorsFile {
  MappedFile file;
  std::vector<SafetensorsEntry> entries;  // by offset
};
Result<SafetensorsFile> open_safetensors(const std::string& path);

// Writes tensors in order, streaming: declare all, then append each one's bytes in the declared order.
class SafetensorsWriter {
 public:
  struct Declaration {
    std::string name;
    DType dtype;
    Dims dims;
  };
  static Result<SafetensorsWriter> create(const std::string& path, std::vector<Declaration> tensors);
  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) noexcept;
  ~SafetensorsWriter();

  Status append(std::span<const std::byte> bytes);  // any pieces; the total must match
  Status close();                                   // fails if bytes are missing

 private:
  SafetensorsWriter() = default;
  int fd_ = -1;
  std::string path_;
  uint64_t remaining_ = 0;
};

// model.safetensors.index.json: tensor name -> shard file name, in file order.
struct CheckpointIndex {
  std::vector<std::pair<std::string, std::string>> weight_map;
  uint64_t total_size = 0;  // 0 if not given
};
Result<CheckpointIndex> parse_checkpoint_index(std::string_view json);

}  // namespace moat
