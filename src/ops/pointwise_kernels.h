// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of pointwise.h: portable in pointwise_cpu.cc, Highway in pointwise_hwy.cc.
#pragma once

#include "ops/pointwise.h"

namespace moat {

namespace cpu {
void embed(Exec& exec, const EmbedArgs& a);
void add(Exec& exec, const AddArgs& a);
void gated_act(Exec& exec, const GatedActArgs& a);
void sigmoid_gate(Exec& exec, const SigmoidGateArgs& a);
}  // namespace cpu

namespace simd {
void gated_act(Exec& exec, const GatedActArgs& a);
void sigmoid_gate(Exec& exec, const SigmoidGateArgs& a);
}  // namespace simd

}  // namespace moat
