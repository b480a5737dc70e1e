// SPDX-License-Identifier: Apache-2.0
// Makes a StepCost without running anything: the real forward in cost mode, over null data, adds up what its ops declare;
// each call site takes the longer of its bytes over the bandwidth and its operations over the arithmetic rate. That is a
// floor, not a forecast: no kernel reaches both ceilings, and what a call costs besides its work is not in it. The shape
// of the curve is what it is good for; the engine scales it by what real steps took.
#pragma once

#include <cstdint>

#include "core/device.h"
#include "model/model.h"
#include "plan/step_cost.h"

namespace moat {

struct StepCostOptions {
  Arch arch;
  int64_t max_batched_tokens = 2048;
  int64_t max_num_seqs = 64;
  int64_t block_size = 64;
  double read_bytes_per_second = 0;  // core/ceilings.h
  double flops_per_second = 0;
};

// Rows 1, 2, 4, ... max_batched_tokens. So many rows are as many sequences that decode, up to max_num_seqs of them; the
// rows beyond are a prompt's. A step of fewer sequences costs less by the states of those that are not there (5 % for
// Kimi K3). seconds_per_prefill_pair is that of a piece of 512 rows: shorter ones cost more a pair, since keys are
// expanded once a piece. Sampling is not counted.
StepCost derive_step_cost(const Model& model, const StepCostOptions& options);

}  // namespace moat
