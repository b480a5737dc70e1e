// SPDX-License-Identifier: Apache-2.0
// Comm: collectives between the ranks of one model. Every rank calls the same collectives in the same order. With one
// rank they are no-ops, so the forward pass is written once.
#pragma once

#include "core/tensor.h"

namespace moat {

class Comm {
 public:
  virtual ~Comm() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Replaces `tensor` (f32) on every rank by the sum over ranks, added in rank order.
  virtual void all_reduce_sum(const Tensor& tensor) = 0;
  // Concatenates `part` [rows, n] of every rank along columns into `whole` [rows, size * n].
  virtual void all_gather_cols(const Tensor& part, const Tensor& whole) = 0;
};

class SingleRank final : public Comm {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void all_reduce_sum(const Tensor&) override {}
  void all_gather_cols(const Tensor& part, const Tensor& whole) override {
    MOAT_CHECK(part.data == whole.data, "with one rank the part is the whole");
  }
};

}  // namespace moat
