// SPDX-License-Identifier: Apache-2.0
// Symbolic shape matching: the first tensor that uses a name binds it, later ones must agree, and the message says
// which tensor, which dimension, got and expected. No allocation while everything matches.
#pragma once

#include <array>
#include <initializer_list>
#include <string>

#include "base/status.h"
#include "core/tensor.h"

namespace moat {

// A dimension in a pattern: a name to bind or compare, or a number.
struct Dim {
  const char* name = nullptr;
  int64_t value = 0;
  Dim(const char* n) : name(n) {}  // NOLINT
  Dim(int64_t v) : value(v) {}     // NOLINT
  Dim(int v) : value(v) {}         // NOLINT
};

class ShapeMatcher {
 public:
  // What a pattern may additionally ask.
  enum class Layout { kContiguous, kRowStrided };  // kRowStrided: only the last dimension must be contiguous

  explicit ShapeMatcher(const char* op) : op_(op) {}

  ShapeMatcher& match(const char* name, const Tensor& tensor, std::initializer_list<DType> dtypes,
                      std::initializer_list<Dim> dims, Layout layout = Layout::kContiguous);
  // As match, but an absent tensor passes.
  ShapeMatcher& match_optional(const char* name, const Tensor& tensor, std::initializer_list<DType> dtypes,
                               std::initializer_list<Dim> dims, Layout layout = Layout::kContiguous);
  // Any other condition; `message` says what was expected.
  ShapeMatcher& expect(bool condition, const char* message);
  ShapeMatcher& bind(const char* name, int64_t value);
  int64_t operator[](const char* name) const;  // -1 if not bound

  Status status() const { return status_; }

 private:
  struct Binding {
    const char* name;
    int64_t value;
    const char* tensor;  // that bound it
  };
  const Binding* find(const char* name) const;

  const char* op_;
  std::array<Binding, 16> bindings_;
  size_t num_bindings_ = 0;
  Status status_;
};

}  // namespace moat
