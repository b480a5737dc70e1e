// SPDX-License-Identifier: Apache-2.0
// Golden tensors for tests: one safetensors file, by name. Where the goldens are: MOAT_GOLDEN or tests/golden.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "base/file.h"
#include "model/safetensors.h"

namespace moat::test {

inline std::string source_dir() { return MOAT_SOURCE_DIR; }

inline std::string golden_dir() {
  const char* dir = std::getenv("MOAT_GOLDEN");
  return dir != nullptr ? dir : source_dir() + "/tests/golden";
}

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& path) {
    auto file = open_safetensors(path);
    EXPECT_TRUE(file.ok()) << path << ": " << file.status().message();
    if (file.ok()) file_ = std::move(file).value();
  }

  bool has(const std::string& name) const { return find(name) != nullptr; }

  // A view of the file; wrong names fail the test.
  Tensor tensor(const std::string& name) const {
    const SafetensorsEntry* e = find(name);
    EXPECT_NE(e, nullptr) << "no golden tensor " << name;
    if (e == nullptr) return {};
    auto* data = const_cast<std::byte*>(file_.file.bytes().data()) + e->begin;
    return make_tensor(data, e->dtype, e->dims);
  }

  // i32 or i64 values, flattened.
  std::vector<int32_t> ints(const std::string& name) const {
    const Tensor t = tensor(name);
    std::vector<int32_t> values(static_cast<size_t>(t.count()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = t.dtype == DType::kI64 ? static_cast<int32_t>(t.ptr<int64_t>()[i]) : t.i32()[i];
    }
    return values;
  }

 private:
  const SafetensorsEntry* find(const std::string& name) const {
    for (const auto& e : file_.entries) {
      if (e.name == name) return &e;
    }
    return nullptr;
  }

  SafetensorsFile file_;
};

}  // namespace moat::test
