// SPDX-License-Identifier: Apache-2.0
#include "main/gzip.h"

#include <zlib.h>

#include <algorithm>
#include <limits>

#include "base/file.h"

namespace moat {
namespace {

// Ends the stream however its owner is left.
class Inflater {
 public:
  Inflater() { ready_ = inflateInit2(&stream_, kGzipWindow) == Z_OK; }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;
  ~Inflater() {
    if (ready_) inflateEnd(&stream_);
  }
  bool ready() const { return ready_; }
  z_stream& stream() { return stream_; }

 private:
  static constexpr int kGzipWindow = 15 + 16;  // the largest window, with a gzip header
  z_stream stream_ = {};
  bool ready_ = false;
};

Result<std::string> gunzip(std::string_view compressed, uint64_t max_bytes) {
  Inflater inflater;
  if (!inflater.ready()) return internal_error("cannot start decompression");
  if (compressed.size() > std::numeric_limits<uInt>::max()) {
    return unsupported("{} compressed bytes, expected less than 4 GiB", compressed.size());
  }
  z_stream& stream = inflater.stream();
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(compressed.data()));
  stream.avail_in = static_cast<uInt>(compressed.size());
  std::string result;
  constexpr size_t kStep = size_t{4} << 20;
  int code = Z_OK;
  while (code == Z_OK) {
    const size_t filled = result.size();
    if (filled > max_bytes) return resource_exhausted("more than {} bytes when decompressed", max_bytes);
    result.resize(filled + kStep);
    stream.next_out = reinterpret_cast<Bytef*>(result.data() + filled);
    stream.avail_out = static_cast<uInt>(kStep);
    code = inflate(&stream, Z_NO_FLUSH);
    result.resize(result.size() - stream.avail_out);
  }
  if (result.size() > max_bytes) return resource_exhausted("more than {} bytes when decompressed", max_bytes);
  if (code != Z_STREAM_END) {
    return data_loss("damaged gzip data at byte {}: {}", compressed.size() - stream.avail_in,
                     stream.msg != nullptr ? stream.msg : "it ends too early");
  }
  if (stream.avail_in != 0) return data_loss("{} bytes after the end of the gzip data", stream.avail_in);
  return result;
}

}  // namespace

Result<std::string> read_maybe_gzip(const std::string& path, uint64_t max_bytes) {
  MOAT_ASSIGN(std::string bytes, read_file(path));
  if (!path.ends_with(".gz")) return bytes;
  Result<std::string> plain = gunzip(bytes, max_bytes);
  if (!plain.ok()) return plain.status().with_prefix(path);
  return plain;
}

}  // namespace moat
