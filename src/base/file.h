// SPDX-License-Identifier: Apache-2.0
// Files: read-only mappings and whole-file reads and writes. A MappedFile owns its mapping; spans into it live as long as it.
// Any thread may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moat {

class MappedFile {
 public:
  // Fails with the path and the system's reason. An empty file maps to an empty span.
  static Result<MappedFile> open(const std::string& path);

  MappedFile() = default;
  MappedFile(MappedFile&& other) noexcept { swap(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    swap(other);
    return *this;
  }
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }
  // Tells the kernel that [offset, offset + length) will be read soon.
  void will_need(size_t offset, size_t length) const;

 private:
  void swap(MappedFile& other) noexcept;

  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

Result<std::string> read_file(const std::string& path);
Status write_file(const std::string& path, std::string_view bytes);  // atomically: a temporary file, then a rename
bool file_exists(const std::string& path);
std::string join_path(std::string_view directory, std::string_view name);

}  // namespace moat
