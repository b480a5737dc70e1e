// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/grouped_matmul_hwy.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "ops/moe_kernels.h"
#include "ops/panel-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// One panel of outputs of one expert, for all its rows.
void expert_panel(const GroupedMatmulArgs& a, int64_t e, int64_t first) {
  const int64_t last = a.offsets.i32()[e + 1];
  const int64_t columns = std::min(kPanelCols, a.out.dim(1) - first);
  const int32_t* rows = a.rows.is_set() ? a.rows.i32() : nullptr;
  const float* x[kPanelRows];
  float* out[kPanelRows];
  for (int64_t begin = a.offsets.i32()[e]; begin < last; begin += kPanelRows) {
    const int64_t count = std::min(kPanelRows, last - begin);
    for (int64_t r = 0; r < count; ++r) {
      x[r] = a.x.row(rows ? rows[begin + r] : begin + r);
      out[r] = a.out.row(begin + r);
    }
    multiply_panel(x, count, a.weights[static_cast<size_t>(e)], first, columns, out);
  }
}

// Threads take (expert, panel of outputs).
void grouped_matmul_impl(Exec& exec, const GroupedMatmulArgs& a) {
  if (a.out.count() == 0) return;
  const int64_t panels = (a.out.dim(1) + kPanelCols - 1) / kPanelCols;
  int32_t* active = exec.arena().alloc(DType::kI32, {static_cast<int64_t>(a.weights.size())}).i32();
  exec.pool().parallel_for(find_active_experts(a, active) * panels, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t item = begin; item < end; ++item) expert_panel(a, active[item / panels], item % panels * kPanelCols);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(grouped_matmul_impl);

void grouped_matmul_hwy(Exec& exec, const GroupedMatmulArgs& args) {
  HWY_DYNAMIC_DISPATCH(grouped_matmul_impl)(exec, args);
}

}  // namespace moat
#endif  // HWY_ONCE
