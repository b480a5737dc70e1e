// SPDX-License-Identifier: Apache-2.0
// The values of a random checkpoint: what is drawn depends on the tensor's role, so that every switch of the model
// shows in its output (norm weights differ from one, decays span their range, selections differ with and without bias).
// Value i of tensor t is a function of (seed, t, i) alone, so pieces are made in any order by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "model/config.h"
#include "model/weight_map.h"

namespace moat {

enum class Draw : uint8_t {
  kNormal,      // mean a, standard deviation b
  kUniform,     // from a to b
  kLogUniform,  // logarithm of uniform from a to b
  kCodes,       // any MXFP4 codes, in each group one of magnitude 4 or 6
  kScaleBytes,  // whole numbers from a to b
};

struct ValueRule {
  Draw draw = Draw::kNormal;
  double a = 0, b = 1;
  int64_t live = -1;  // values from here on are zero; -1: none
};

ValueRule value_rule(const WeightSpec& spec);

// Pieces of a tensor begin at multiples of this many bytes, so that groups are never cut.
constexpr int64_t kPieceBytes = 64 * 1024;

// Bytes [first_byte, first_byte + out.size()) of a tensor. `key` is tensor_key(seed, index of the tensor).
void fill_values(const ValueRule& rule, DType dtype, uint64_t key, int64_t first_byte, std::span<std::byte> out);
uint64_t tensor_key(uint64_t seed, uint64_t tensor);

}  // namespace moat
