// SPDX-License-Identifier: Apache-2.0
#include "core/shape.h"

#include <algorithm>
#include <cstring>

namespace moat {
namespace {

std::string pattern_text(std::initializer_list<Dim> dims) {
  std::string text = "[";
  for (const Dim& d : dims) {
    if (text.size() > 1) text += ", ";
    text += d.name ? d.name : std::to_string(d.value);
  }
  return text + "]";
}

std::string dtypes_text(std::initializer_list<DType> dtypes) {
  std::string text;
  for (const DType d : dtypes) text += fmt::format("{}{}", text.empty() ? "" : "|", dtype_name(d));
  return text;
}

}  // namespace

const ShapeMatcher::Binding* ShapeMatcher::find(const char* name) const {
  for (size_t i = 0; i < num_bindings_; ++i) {
    if (std::strcmp(bindings_[i].name, name) == 0) return &bindings_[i];
  }
  return nullptr;
}

ShapeMatcher& ShapeMatcher::bind(const char* name, int64_t value) {
  if (!status_.ok()) return *this;
  if (const Binding* known = find(name); known && known->value != value) {
    status_ = invalid_argument("{}: {} is {} but {} has {}", op_, name, value, known->tensor, known->value);
  } else if (!known) {
    MOAT_CHECK(num_bindings_ < bindings_.size(), "{}: too many names", op_);
    bindings_[num_bindings_++] = {name, value, "argument"};
  }
  return *this;
}

int64_t ShapeMatcher::operator[](const char* name) const {
  const Binding* known = find(name);
  return known ? known->value : -1;
}

ShapeMatcher& ShapeMatcher::match(const char* name, const Tensor& tensor, std::initializer_list<DType> dtypes,
                                  std::initializer_list<Dim> dims, Layout layout) {
  if (!status_.ok()) return *this;
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end() ||
      static_cast<size_t>(tensor.rank()) != dims.size()) {
    status_ = invalid_argument("{}: {} is {}, expected {}{}", op_, name, tensor.describe(), dtypes_text(dtypes),
                               pattern_text(dims));
    return *this;
  }
  int i = 0;
  for (const Dim& d : dims) {
    const int64_t got = tensor.dims[i++];
    const Binding* known = d.name ? find(d.name) : nullptr;
    const int64_t expected = d.name == nullptr ? d.value : known ? known->value : got;
    if (got != expected) {
      status_ =
          invalid_argument("{}: {} is {}, expected {} with {} = {}{}", op_, name, tensor.describe(), pattern_text(dims),
                           d.name ? d.name : "dim", expected, known ? fmt::format(" (from {})", known->tensor) : "");
      return *this;
    }
    if (d.name && !known) {
      MOAT_CHECK(num_bindings_ < bindings_.size(), "{}: too many names", op_);
      bindings_[num_bindings_++] = {d.name, got, name};
    }
  }
  const bool laid_out = layout == Layout::kContiguous ? tensor.is_contiguous()
                                                      : tensor.rank() == 0 || tensor.dims[tensor.rank() - 1] <= 1 ||
                                                            tensor.strides[tensor.rank() - 1] == 1;
  if (!laid_out) status_ = invalid_argument("{}: {} {} is not laid out as needed", op_, name, tensor.describe());
  return *this;
}

ShapeMatcher& ShapeMatcher::match_optional(const char* name, const Tensor& tensor, std::initializer_list<DType> dtypes,
                                           std::initializer_list<Dim> dims, Layout layout) {
  return tensor.is_set() ? match(name, tensor, dtypes, dims, layout) : *this;
}

ShapeMatcher& ShapeMatcher::expect(bool condition, const char* message) {
  if (status_.ok() && !condition) status_ = invalid_argument("{}: expected {}", op_, message);
  return *this;
}

}  // namespace moat
