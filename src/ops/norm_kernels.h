// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of norm.h: portable in norm_cpu.cc, Highway in norm_hwy.cc.
#pragma once

#include "ops/norm.h"

namespace moat {

// Candidates of attn_res_mix that kernels keep scores for (K3 has 9).
constexpr int64_t kMaxResidualCandidates = 64;

namespace cpu {
void rms_norm(Exec& exec, const RmsNormArgs& a);
void gated_rms_norm(Exec& exec, const GatedRmsNormArgs& a);
void l2_norm(Exec& exec, const L2NormArgs& a);
void attn_res_mix(Exec& exec, const AttnResMixArgs& a);
}  // namespace cpu

namespace simd {
void rms_norm(Exec& exec, const RmsNormArgs& a);
void gated_rms_norm(Exec& exec, const GatedRmsNormArgs& a);
void l2_norm(Exec& exec, const L2NormArgs& a);
void attn_res_mix(Exec& exec, const AttnResMixArgs& a);
}  // namespace simd

}  // namespace moat
