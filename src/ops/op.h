// SPDX-License-Identifier: Apache-2.0
// What an op is: its contract (check, cost), its definition (reference), its test cases, and the ordered table of
// kernels that can run it. An Op is a constinit object: one without check, cost, reference or cases does not compile. A
// table row names its function, so a kernel that is not defined does not link. Rows of a backend that is not built have
// run == nullptr and stay in the table, so that selection for any device can be computed on any machine.
//
// To add an op: its Args and `extern const Op<Args>` in the family's header, everything else in the family's .cc,
// kernels in <family>_cpu.cc and <family>_gpu.cu, and one line in all_ops.cc. docs/kernels.md walks through it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "core/device.h"
#include "core/tensor.h"

namespace moat {

class Exec;
class CaseData;

// What a call must do at least: each input read once, each output written once.
struct Cost {
  double flops = 0;  // a fused multiply-add counts two
  double bytes = 0;
};

enum class Tier : uint8_t { kTuned, kPortable };

// Nothing: the row takes these arguments. Otherwise why not, in words.
using Reject = std::optional<std::string>;

template <class Args>
struct Kernel {
  const char* name;  // "<op>.<variant>", unique in the table
  Backend backend;
  Tier tier;
  Reject (*reject)(const Args&, const Arch&);      // null: takes whatever check() passes
  int64_t (*workspace)(const Args&, const Exec&);  // bytes of arena memory during the call; null: none
  void (*run)(Exec&, const Args&);                 // null: not in this build
};

// Named dims of one test case, e.g. {"tokens=17 hidden=7168", {{"tokens", 17}, {"hidden", 7168}}}.
struct Case {
  std::vector<std::pair<const char*, int64_t>> dims;
  int64_t operator[](std::string_view name) const;
  std::string describe() const;
};

// Largest accepted |out - ref| / (absolute + relative * |ref|), elementwise, with f32 accumulation.
struct Tolerance {
  double absolute = 1e-5;
  double relative = 1e-5;
};

template <class Args>
class Op {
 public:
  struct Definition {
    const char* name = nullptr;
    Status (*check)(const Args&) = nullptr;          // shapes, dtypes, layout
    std::string (*describe)(const Args&) = nullptr;  // the shapes that matter, for `moat ops explain`
    Cost (*cost)(const Args&) = nullptr;
    void (*reference)(const Args&) = nullptr;         // portable, one thread, f64 accumulation, as plain as the formula
    std::vector<Case> (*cases)() = nullptr;           // shapes of models we serve, and edges
    Case (*random_case)(uint64_t seed) = nullptr;     // any shape the op allows, small
    Args (*build)(const Case&, CaseData&) = nullptr;  // random arguments for a case; outputs registered with CaseData
    Tolerance tolerance;
    std::span<const Kernel<Args>> kernels;
  };

  consteval Op(const Definition& definition) : def_(definition) {  // NOLINT
    if (def_.name == nullptr || def_.check == nullptr || def_.describe == nullptr || def_.cost == nullptr ||
        def_.reference == nullptr || def_.cases == nullptr || def_.random_case == nullptr || def_.build == nullptr) {
      throw "an op needs name, check, describe, cost, reference, cases, random_case and build";
    }
  }

  const Definition* operator->() const { return &def_; }

 private:
  Definition def_;
};

// An op with its argument type erased, for listing, explaining, testing and benchmarking.
class AnyOp {
 public:
  virtual ~AnyOp() = default;

  struct Row {
    const char* name;
    Backend backend;
    Tier tier;
    bool built;
  };

  virtual const char* name() const = 0;
  virtual Tolerance tolerance() const = 0;
  virtual std::vector<Row> rows() const = 0;
  virtual std::vector<Case> cases() const = 0;
  virtual Case random_case(uint64_t seed) const = 0;

  // Arguments for a case, kept alive in `data`; the calls below take them back.
  virtual Status prepare(const Case& test_case, CaseData& data) const = 0;  // builds and checks
  virtual Cost cost(const CaseData& data) const = 0;
  virtual Reject reject(const CaseData& data, size_t row, const Arch& arch) const = 0;
  virtual void run_reference(const CaseData& data) const = 0;
  virtual void run_row(const CaseData& data, size_t row, Exec& exec) const = 0;
};

// Every op of moat, in alphabetical order of families.
std::span<const AnyOp* const> all_ops();

}  // namespace moat
