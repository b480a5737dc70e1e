// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

namespace moat {
namespace {

Status system_error(const std::string& path, const char* action, int error) {
  const StatusCode code = error == ENOENT || error == ENOTDIR                     ? StatusCode::kNotFound
                          : error == ENOSPC || error == EDQUOT || error == ENOMEM ? StatusCode::kResourceExhausted
                                                                                  : StatusCode::kInvalidArgument;
  return {code, fmt::format("{}: cannot {}: {}", path, action, std::generic_category().message(error))};
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  int close() { return fd_ >= 0 ? ::close(std::exchange(fd_, -1)) : 0; }

 private:
  int fd_;
};

// Opens a regular file for reading and tells its size.
Status open_regular(const std::string& path, int& fd, size_t& size) {
  fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return system_error(path, "open", errno);
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return system_error(path, "stat", errno);
  if (S_ISDIR(info.st_mode)) return invalid_argument("{}: is a directory, expected a file", path);
  size = static_cast<size_t>(info.st_size);
  return {};
}

Status write_all(const std::string& path, int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return system_error(path, "write", errno);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return {};
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  int raw_fd = -1;
  size_t size = 0;
  const Status status = open_regular(path, raw_fd, size);
  const Descriptor fd(raw_fd);
  MOAT_RETURN_IF_ERROR(status);
  MappedFile file;
  file.path_ = path;
  if (size > 0) {
    void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (data == MAP_FAILED) return system_error(path, "map", errno);
    file.data_ = static_cast<const std::byte*>(data);
    file.size_ = size;
  }
  return file;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::will_need(size_t offset, size_t length) const {
  if (offset >= size_ || length == 0) return;
  length = std::min(length, size_ - offset);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t start = offset / page * page;
  // Advice only: if the kernel does not take it, reading still works.
  (void)::madvise(const_cast<std::byte*>(data_) + start, offset + length - start, MADV_WILLNEED);
}

void MappedFile::swap(MappedFile& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
}

Result<std::string> read_file(const std::string& path) {
  int raw_fd = -1;
  size_t size = 0;
  const Status status = open_regular(path, raw_fd, size);
  const Descriptor fd(raw_fd);
  MOAT_RETURN_IF_ERROR(status);
  // The size is a hint: files under /proc say 0, others may grow.
  std::string bytes;
  size_t filled = 0;
  bytes.resize(size + 1);
  while (true) {
    if (filled == bytes.size()) bytes.resize(bytes.size() * 2);
    const ssize_t got = ::read(fd.get(), bytes.data() + filled, bytes.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_error(path, "read", errno);
    if (got == 0) break;
    filled += static_cast<size_t>(got);
  }
  bytes.resize(filled);
  return bytes;
}

Status write_file(const std::string& path, std::string_view bytes) {
  static std::atomic<unsigned> counter{0};  // two threads may write the same path
  const std::string temporary = fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter.fetch_add(1));
  Status status;
  {
    Descriptor fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (fd.get() < 0) return system_error(path, "create", errno);
    status = write_all(path, fd.get(), bytes);
    if (status.ok() && ::fsync(fd.get()) != 0) status = system_error(path, "flush", errno);
    if (fd.close() != 0 && status.ok()) status = system_error(path, "close", errno);
  }
  if (status.ok() && std::rename(temporary.c_str(), path.c_str()) != 0) status = system_error(path, "replace", errno);
  if (!status.ok()) ::unlink(temporary.c_str());
  return status;
}

bool file_exists(const std::string& path) {
  struct stat info = {};
  return ::stat(path.c_str(), &info) == 0;
}

std::string join_path(std::string_view directory, std::string_view name) {
  if (directory.empty() || name.starts_with('/')) return std::string(name);
  return fmt::format("{}{}{}", directory, directory.ends_with('/') ? "" : "/", name);
}

}  // namespace moat
