// SPDX-License-Identifier: Apache-2.0
// Elementwise ops. Activations are f32; rows are independent.
#pragma once

#include <span>

#include "ops/op.h"
#include "ops/select.h"

namespace moat {

// out[t] = table[ids[t]] as f32; ids must be in [0, vocab).
struct EmbedArgs {
  Tensor out;                    // [tokens, hidden] f32
  Tensor table;                  // [vocab, hidden] bf16 or f32; rows may be strided
  std::span<const int32_t> ids;  // [tokens]
};
extern const Op<EmbedArgs> kEmbed;
inline void embed(Exec& exec, const char* site, const EmbedArgs& args) { exec.call(site, kEmbed, args); }

// x += y.
struct AddArgs {
  Tensor x;  // [tokens, hidden] f32, in place
  Tensor y;  // [tokens, hidden] f32
};
extern const Op<AddArgs> kAdd;
inline void add(Exec& exec, const char* site, const AddArgs& args) { exec.call(site, kAdd, args); }

// SiTU (situ_beta > 0): out = beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta); the sigmoid takes the raw g.
// linear_beta == 0: u unbounded. situ_beta == 0: SiLU, out = g sigmoid(g) * u. `out` may be `gate`.
struct GatedActArgs {
  Tensor out;   // [rows, width] f32
  Tensor gate;  // [rows, width] f32
  Tensor up;    // [rows, width] f32
  float situ_beta = 0.0F;
  float linear_beta = 0.0F;
};
extern const Op<GatedActArgs> kGatedAct;
inline void gated_act(Exec& exec, const char* site, const GatedActArgs& args) { exec.call(site, kGatedAct, args); }

// x *= sigmoid(gate).
struct SigmoidGateArgs {
  Tensor x;     // [rows, width] f32, in place
  Tensor gate;  // [rows, width] f32
};
extern const Op<SigmoidGateArgs> kSigmoidGate;
inline void sigmoid_gate(Exec& exec, const char* site, const SigmoidGateArgs& args) {
  exec.call(site, kSigmoidGate, args);
}

}  // namespace moat
