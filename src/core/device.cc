// SPDX-License-Identifier: Apache-2.0
#include "core/device.h"

#include <hwy/highway.h>
#include <hwy/targets.h>

#include <algorithm>

namespace moat {
namespace {

// Highway's targets in order of preference; the name is what moat prints.
constexpr int64_t kKnownTargets[] = {HWY_AVX3_DL, HWY_AVX3, HWY_AVX2, HWY_SSE4, HWY_SSSE3};

// What this machine has and force_isa has left. hwy::SupportedTargets() sets dispatch to all that the machine has, whatever is
// disabled, so dispatch is set again.
int64_t usable_targets() {
  const int64_t supported = hwy::SupportedTargets();
  hwy::GetChosenTarget().Update(supported);
  return supported & HWY_TARGETS;
}

}  // namespace

std::vector<std::string> host_isas() {
  std::vector<std::string> names;
  const int64_t usable = usable_targets();
  for (const int64_t target : kKnownTargets) {
    if (usable & target) names.emplace_back(hwy::TargetName(target));
  }
  return names;
}

Arch host_arch() {
  Arch arch;
  const std::vector<std::string> isas = host_isas();
  arch.level = isas.empty() ? "scalar" : isas.front();
  arch.name = fmt::format("cpu[{}]", arch.level);
  arch.lanes = arch.level.starts_with("AVX3") ? 16 : arch.level == "AVX2" ? 8 : 4;
  return arch;
}

Status force_isa(std::string_view isa) {
  // Earlier restrictions are lifted first: any instruction set of this machine may follow any other.
  const int64_t before = hwy::SupportedTargets();
  hwy::DisableTargets(0);
  const std::vector<std::string> usable = host_isas();
  if (std::find(usable.begin(), usable.end(), isa) == usable.end()) {
    hwy::DisableTargets(~before);
    usable_targets();
    return invalid_argument("instruction set {} is not usable here; usable: {}", isa, fmt::join(usable, ", "));
  }
  int64_t disabled = 0;
  for (const int64_t target : kKnownTargets) {
    if (hwy::TargetName(target) == isa) break;
    disabled |= target;
  }
  hwy::DisableTargets(disabled);
  usable_targets();
  return {};
}

Tensor Arena::alloc(DType dtype, Dims dims) {
  const size_t bytes = (static_cast<size_t>(storage_bytes(dtype, dims)) + 63) / 64 * 64;
  void* data = dry_ ? nullptr : static_cast<std::byte*>(buffer_.data()) + used_;
  used_ += bytes;
  high_water_ = std::max(high_water_, used_);
  MOAT_CHECK(dry_ || used_ <= capacity_, "arena of {} bytes is too small for {} more", capacity_, bytes);
  return make_tensor(data, dtype, dims);
}

}  // namespace moat
