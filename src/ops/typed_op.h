// SPDX-License-Identifier: Apache-2.0
// AnyOp over an Op<Args>: what all_ops.cc makes its list of.
#pragma once

#include "ops/case_data.h"
#include "ops/select.h"

namespace moat {

template <class Args>
class TypedOp final : public AnyOp {
 public:
  constexpr explicit TypedOp(const Op<Args>& op) : op_(op) {}

  const char* name() const override { return op_->name; }
  Tolerance tolerance() const override { return op_->tolerance; }
  std::vector<Row> rows() const override {
    std::vector<Row> rows;
    for (const Kernel<Args>& k : op_->kernels) rows.push_back({k.name, k.backend, k.tier, k.run != nullptr});
    return rows;
  }
  std::vector<Case> cases() const override { return op_->cases(); }
  Case random_case(uint64_t seed) const override { return op_->random_case(seed); }

  Status prepare(const Case& test_case, CaseData& data) const override {
    Args args = op_->build(test_case, data);
    const Status status = op_->check(args);
    data.args = std::move(args);
    return status;
  }
  Cost cost(const CaseData& data) const override { return op_->cost(args(data)); }
  Reject reject(const CaseData& data, size_t row, const Arch& arch) const override {
    const Kernel<Args>& k = op_->kernels[row];
    return k.reject == nullptr ? Reject() : k.reject(args(data), arch);
  }
  void run_reference(const CaseData& data) const override { op_->reference(args(data)); }
  void run_row(const CaseData& data, size_t row, Exec& exec) const override {
    ArenaScope scope(exec.arena());
    op_->kernels[row].run(exec, args(data));
  }

 private:
  static const Args& args(const CaseData& data) { return *std::any_cast<Args>(&data.args); }
  const Op<Args>& op_;
};

}  // namespace moat
