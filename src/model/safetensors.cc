// SPDX-License-Identifier: Apache-2.0
#include "model/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <system_error>
#include <unordered_set>
#include <utility>

#include "base/json.h"

namespace moat {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr size_t kMaxNameBytes = 1024;
constexpr size_t kMaxFileNameBytes = 255;
constexpr const char* kMetadata = "__metadata__";

struct DTypeName {
  const char* name;
  DType dtype;
};
// F8_E8M0 is how newer writers name the scale bytes that the release stores as U8: the same bytes. BOOL is a byte, too.
constexpr std::array<DTypeName, 9> kDTypeNames = {{
    {"F32", DType::kF32},
    {"BF16", DType::kBF16},
    {"F16", DType::kF16},
    {"F64", DType::kF64},
    {"I32", DType::kI32},
    {"I64", DType::kI64},
    {"U8", DType::kU8},
    {"F8_E8M0", DType::kU8},
    {"BOOL", DType::kU8},
}};

std::string shown_name(std::string_view name) {
  constexpr size_t kShown = 120;
  return name.size() <= kShown ? std::string(name) : utf8_sanitize(name.substr(0, kShown)) + "...";
}

Status check_name(std::string_view name) {
  if (name.empty()) return data_loss("a tensor has an empty name, expected 1 to {} bytes", kMaxNameBytes);
  if (name.size() > kMaxNameBytes) {
    return data_loss("tensor {}: name of {} bytes, expected at most {}", shown_name(name), name.size(), kMaxNameBytes);
  }
  return {};
}

// A non-negative integer written as one: 1e3 and 2.0 are not accepted in a header.
bool read_count(const Json& value, uint64_t& result) {
  if (!value.is_integer()) return false;
  const std::optional<int64_t> number = value.as_int64();
  if (!number || *number < 0) return false;
  result = static_cast<uint64_t>(*number);
  return true;
}

Status read_dtype(const std::string& name, const Json& value, SafetensorsEntry& entry) {
  if (!value.is_string()) return data_loss("tensor {}: dtype is a {}, expected a string", name, value.type_name());
  for (const DTypeName& known : kDTypeNames) {
    if (value.as_string() == known.name) {
      entry.dtype = known.dtype;
      return {};
    }
  }
  return unsupported("tensor {}: dtype {}, expected one of F32 BF16 F16 F64 I32 I64 U8 F8_E8M0 BOOL", name,
                     shown_name(value.as_string()));
}

Status read_shape(const std::string& name, const Json& value, SafetensorsEntry& entry) {
  if (!value.is_array()) return data_loss("tensor {}: shape is a {}, expected an array", name, value.type_name());
  const Json::Array& items = value.as_array();
  if (items.size() > Dims::kMaxRank) {
    return unsupported("tensor {}: {} dimensions, expected at most {}", name, items.size(), int{Dims::kMaxRank});
  }
  std::array<int64_t, Dims::kMaxRank> dims = {};
  for (size_t i = 0; i < items.size(); ++i) {
    uint64_t dim = 0;
    if (!read_count(items[i], dim)) {
      return data_loss("tensor {}: dimension {} is {}, expected an integer of at least 0", name, i,
                       shown_name(items[i].dump()));
    }
    dims[i] = static_cast<int64_t>(dim);
  }
  // Largest first would let a zero hide an overflow, so zeros are looked at only once the product is known to fit.
  int64_t product = 1;
  for (size_t i = 0; i < items.size(); ++i) {
    if (__builtin_mul_overflow(product, std::max<int64_t>(dims[i], 1), &product) ||
        product > std::numeric_limits<int64_t>::max() / 8) {
      return data_loss("tensor {}: shape {} overflows, expected fewer than 2^60 elements", name,
                       shown_name(value.dump()));
    }
  }
  entry.dims = Dims(std::span<const int64_t>(dims.data(), items.size()));
  return {};
}

// Offsets are relative to the tensor bytes here; the caller shifts them once all are known to be in order.
Status read_offsets(const std::string& name, const Json& value, SafetensorsEntry& entry) {
  if (!value.is_array() || value.as_array().size() != 2 || !read_count(value.as_array()[0], entry.begin) ||
      !read_count(value.as_array()[1], entry.end) || entry.begin > entry.end) {
    return data_loss("tensor {}: data_offsets {}, expected [begin, end] with 0 <= begin <= end", name,
                     shown_name(value.dump()));
  }
  return {};
}

Status read_entry(const std::string& name, const Json& value, SafetensorsEntry& entry) {
  MOAT_RETURN_IF_ERROR(check_name(name));
  entry.name = name;
  if (!value.is_object()) return data_loss("tensor {}: got a {}, expected an object", name, value.type_name());
  const Json *dtype = nullptr, *shape = nullptr, *offsets = nullptr;
  for (const auto& [key, member] : value.as_object()) {
    const Json** slot = key == "dtype" ? &dtype : key == "shape" ? &shape : key == "data_offsets" ? &offsets : nullptr;
    if (slot == nullptr) {
      return data_loss("tensor {}: unknown key {}, expected dtype, shape and data_offsets", name, shown_name(key));
    }
    *slot = &member;
  }
  if (dtype == nullptr || shape == nullptr || offsets == nullptr) {
    return data_loss("tensor {}: {} is missing, expected dtype, shape and data_offsets", name,
                     dtype == nullptr   ? "dtype"
                     : shape == nullptr ? "shape"
                                        : "data_offsets");
  }
  MOAT_RETURN_IF_ERROR(read_dtype(name, *dtype, entry));
  MOAT_RETURN_IF_ERROR(read_shape(name, *shape, entry));
  MOAT_RETURN_IF_ERROR(read_offsets(name, *offsets, entry));
  const auto expected = static_cast<uint64_t>(dtype_bytes(entry.dtype, entry.dims.count()));
  if (entry.end - entry.begin != expected) {
    return data_loss("tensor {}: data_offsets span {} bytes, expected {} for {}{}", name, entry.end - entry.begin,
                     expected, dtype_name(entry.dtype), to_string(entry.dims));
  }
  return {};
}

Status check_metadata(const Json& value) {
  if (!value.is_object()) return data_loss("{}: got a {}, expected an object of strings", kMetadata, value.type_name());
  for (const auto& [key, member] : value.as_object()) {
    if (!member.is_string()) {
      return data_loss("{}: {} is a {}, expected a string", kMetadata, shown_name(key), member.type_name());
    }
  }
  return {};
}

// Entries sorted by offset must cover [0, data_bytes) without holes or overlaps.
Status check_coverage(const std::vector<SafetensorsEntry>& entries, uint64_t data_bytes) {
  uint64_t at = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.end > data_bytes) {
      return data_loss("tensor {}: ends at byte {} of the tensor data, expected at most {}: the file is truncated",
                       entry.name, entry.end, data_bytes);
    }
    if (entry.begin != at) {
      return data_loss("tensor {}: begins at byte {} of the tensor data, expected {}: {}", entry.name, entry.begin, at,
                       entry.begin > at ? "bytes before it belong to no tensor" : "it overlaps the tensor before it");
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    return data_loss("tensors end at byte {} of the tensor data, expected {}: {} trailing bytes", at, data_bytes,
                     data_bytes - at);
  }
  return {};
}

Status system_failure(const std::string& path, const char* action) {
  const int error = errno;
  return {error == ENOSPC || error == EDQUOT ? StatusCode::kResourceExhausted : StatusCode::kInvalidArgument,
          fmt::format("{}: cannot {}: {}", path, action, std::generic_category().message(error))};
}

const char* spelled(DType dtype) {
  for (const DTypeName& known : kDTypeNames) {
    if (known.dtype == dtype) return known.name;
  }
  return nullptr;
}

// The JSON header of the declared tensors, padded so that the tensor bytes begin at a multiple of 8.
Result<std::string> make_header(const std::vector<SafetensorsWriter::Declaration>& tensors, uint64_t& data_bytes) {
  Json header = Json::object();
  std::unordered_set<std::string_view> names;
  data_bytes = 0;
  for (const auto& tensor : tensors) {
    MOAT_RETURN_IF_ERROR(check_name(tensor.name));
    if (tensor.name == kMetadata || !names.insert(tensor.name).second) {
      return invalid_argument("tensor {}: declared twice or reserved", tensor.name);
    }
    const char* dtype = spelled(tensor.dtype);
    if (dtype == nullptr) {
      return invalid_argument("tensor {}: dtype {} has no name in the format", tensor.name, dtype_name(tensor.dtype));
    }
    Json shape = Json::array();
    for (const int64_t dim : tensor.dims.span()) shape.push_back(dim);
    const auto end = data_bytes + static_cast<uint64_t>(dtype_bytes(tensor.dtype, tensor.dims.count()));
    // Names are unique, so members are appended without looking for an older one.
    header.as_object().emplace_back(tensor.name, Json::object({{"dtype", dtype},
                                                               {"shape", std::move(shape)},
                                                               {"data_offsets", Json::array({data_bytes, end})}}));
    data_bytes = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeaderBytes) {
    return invalid_argument("header of {} bytes, expected at most {}", text.size(), kMaxHeaderBytes);
  }
  return text;
}

std::string partial_path(const std::string& path) { return path + ".partial"; }

}  // namespace

Result<std::vector<SafetensorsEntry>> parse_safetensors_header(std::span<const std::byte> head, uint64_t file_size) {
  if (file_size < kLengthBytes || head.size() < kLengthBytes) {
    return data_loss("file of {} bytes, expected at least {} for the header length", file_size, kLengthBytes);
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= std::to_integer<uint64_t>(head[i]) << (8 * i);
  if (length < 2 || length > kMaxHeaderBytes) {
    return data_loss("header length {}, expected 2 to {}", length, kMaxHeaderBytes);
  }
  if (length > file_size - kLengthBytes || length > head.size() - kLengthBytes) {
    return data_loss("header length {}, expected at most {}: the file has {} bytes", length, file_size - kLengthBytes,
                     file_size);
  }
  const std::string_view text(reinterpret_cast<const char*>(head.data()) + kLengthBytes, length);
  if (text.front() != '{') return data_loss("header begins with byte {}, expected {{", static_cast<uint8_t>(text[0]));
  const Result<Json> json = parse_json(text, {.max_depth = 8, .duplicate_keys = DuplicateKeys::kError});
  if (!json.ok()) return Status(StatusCode::kDataLoss, json.status().message()).with_prefix("header");

  std::vector<SafetensorsEntry> entries;
  entries.reserve(json->as_object().size());
  for (const auto& [name, value] : json->as_object()) {
    if (name == kMetadata) {
      MOAT_RETURN_IF_ERROR(check_metadata(value));
    } else {
      MOAT_RETURN_IF_ERROR(read_entry(name, value, entries.emplace_back()));
    }
  }
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  const uint64_t data_begin = kLengthBytes + length;
  MOAT_RETURN_IF_ERROR(check_coverage(entries, file_size - data_begin));
  for (SafetensorsEntry& entry : entries) {
    entry.begin += data_begin;
    entry.end += data_begin;
  }
  return entries;
}

Result<SafetensorsFile> open_safetensors(const std::string& path) {
  SafetensorsFile result;
  MOAT_ASSIGN(result.file, MappedFile::open(path));
  const std::span<const std::byte> bytes = result.file.bytes();
  auto entries = parse_safetensors_header(bytes, bytes.size());
  if (!entries.ok()) return entries.status().with_prefix(path);
  result.entries = std::move(entries).value();
  return result;
}

Result<SafetensorsWriter> SafetensorsWriter::create(const std::string& path, std::vector<Declaration> tensors) {
  SafetensorsWriter writer;
  uint64_t data_bytes = 0;
  const Result<std::string> header = make_header(tensors, data_bytes);
  if (!header.ok()) return header.status().with_prefix(path);
  writer.path_ = path;
  writer.fd_ = ::open(partial_path(path).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (writer.fd_ < 0) return system_failure(path, "create");
  std::array<std::byte, kLengthBytes> length = {};
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = static_cast<std::byte>(header->size() >> (8 * i));
  writer.remaining_ = kLengthBytes + header->size() + data_bytes;
  MOAT_RETURN_IF_ERROR(writer.append(length));
  MOAT_RETURN_IF_ERROR(writer.append(std::as_bytes(std::span(header->data(), header->size()))));
  return writer;
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept { *this = std::move(other); }

SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(remaining_, other.remaining_);
  return *this;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(partial_path(path_).c_str());
}

Status SafetensorsWriter::append(std::span<const std::byte> bytes) {
  MOAT_CHECK(fd_ >= 0, "append to a closed file");
  if (bytes.size() > remaining_) {
    return invalid_argument("{}: {} bytes more than declared", path_, bytes.size() - remaining_);
  }
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return system_failure(path_, "write");
    bytes = bytes.subspan(static_cast<size_t>(written));
    remaining_ -= static_cast<uint64_t>(written);
  }
  return {};
}

Status SafetensorsWriter::close() {
  MOAT_CHECK(fd_ >= 0, "close of a closed file");
  if (remaining_ != 0) return invalid_argument("{}: {} bytes fewer than declared", path_, remaining_);
  if (::close(std::exchange(fd_, -1)) != 0) return system_failure(path_, "close");
  if (std::rename(partial_path(path_).c_str(), path_.c_str()) != 0) return system_failure(path_, "rename");
  return {};
}

Result<CheckpointIndex> parse_checkpoint_index(std::string_view text) {
  MOAT_ASSIGN(const Json json, parse_json(text, {.max_depth = 16, .duplicate_keys = DuplicateKeys::kError}));
  if (!json.is_object()) return data_loss("got a {}, expected an object", json.type_name());
  CheckpointIndex index;
  if (const Json* metadata = json.find_set("metadata")) {
    if (!metadata->is_object()) return data_loss("metadata: got a {}, expected an object", metadata->type_name());
    if (const Json* total = metadata->find_set("total_size")) {
      const std::optional<int64_t> bytes = total->is_number() ? total->as_int64() : std::nullopt;
      if (!bytes || *bytes < 0) {
        return data_loss("metadata.total_size: got {}, expected an integer of at least 0", shown_name(total->dump()));
      }
      index.total_size = static_cast<uint64_t>(*bytes);
    }
  }
  const Json* weight_map = json.find_set("weight_map");
  if (weight_map == nullptr || !weight_map->is_object()) {
    return data_loss("weight_map: {}, expected an object of tensor name to file name",
                     weight_map == nullptr ? "missing" : weight_map->type_name());
  }
  for (const auto& [name, value] : weight_map->as_object()) {
    MOAT_RETURN_IF_ERROR(check_name(name).with_prefix("weight_map"));
    if (!value.is_string()) {
      return data_loss("weight_map: tensor {}: got a {}, expected a file name", name, value.type_name());
    }
    // A plain name: what an index says must not lead out of its directory.
    const std::string& file = value.as_string();
    if (!file.ends_with(".safetensors") || file.size() > kMaxFileNameBytes ||
        file.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      return data_loss("weight_map: tensor {}: file name {}, expected a plain name that ends with .safetensors", name,
                       shown_name(file));
    }
    index.weight_map.emplace_back(name, file);
  }
  if (index.weight_map.empty()) return data_loss("weight_map: empty, expected at least one tensor");
  return index;
}

}  // namespace moat
