// SPDX-License-Identifier: Apache-2.0
// Normalisations. Statistics in f32; rows are independent.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// out = x / sqrt(mean(x^2) + eps) * weight. `out` may be `x`. x may be row-strided (a column range of a wider tensor).
struct RmsNormArgs {
  Tensor out;     // [rows, width] f32, row-strided
  Tensor x;       // [rows, width] f32, row-strided
  Tensor weight;  // [width] bf16 or f32
  float eps = 0.0F;
};
extern const Op<RmsNormArgs> kRmsNorm;
inline void rms_norm(Exec& exec, const char* site, const RmsNormArgs& args) { exec.call(site, kRmsNorm, args); }

// Per head: out = o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate). `out` may be `o`.
struct GatedRmsNormArgs {
  Tensor out;     // [tokens, heads, dim] f32
  Tensor o;       // [tokens, heads, dim] f32
  Tensor gate;    // [tokens, heads, dim] f32
  Tensor weight;  // [dim] f32
  float eps = 0.0F;
};
extern const Op<GatedRmsNormArgs> kGatedRmsNorm;
inline void gated_rms_norm(Exec& exec, const char* site, const GatedRmsNormArgs& args) {
  exec.call(site, kGatedRmsNorm, args);
}

// Per head: x = scale * x / sqrt(sum(x^2) + eps), in place.
struct L2NormArgs {
  Tensor x;  // [tokens, heads, dim] f32
  float eps = 1e-6F;
  float scale = 1.0F;
};
extern const Op<L2NormArgs> kL2Norm;
inline void l2_norm(Exec& exec, const char* site, const L2NormArgs& args) { exec.call(site, kL2Norm, args); }

// Attention residuals (k3.md 3.3): candidates are the first num_blocks stored blocks, then prefix;
// score_j = sum_d v_j[d] / sqrt(mean(v_j^2) + eps) * norm[d] * proj[d]; out = sum_j softmax(score)_j v_j of the raw values.
struct AttnResMixArgs {
  Tensor out;     // [tokens, hidden] f32; must not overlap prefix or blocks
  Tensor blocks;  // [capacity, tokens, hidden] f32; the first num_blocks are read
  Tensor prefix;  // [tokens, hidden] f32
  Tensor norm;    // [hidden] bf16 or f32
  Tensor proj;    // [1, hidden] bf16 or f32
  int64_t num_blocks = 0;
  float eps = 0.0F;
};
extern const Op<AttnResMixArgs> kAttnResMix;
inline void attn_res_mix(Exec& exec, const char* site, const AttnResMixArgs& args) {
  exec.call(site, kAttnResMix, args);
}

}  // namespace moat
