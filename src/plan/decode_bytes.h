// SPDX-License-Identifier: Apache-2.0
// The fewest bytes that one decode step must move through memory, whatever the kernels: the denominator of every "share
// of bandwidth". Weights once a step (of the routed experts the distinct ones that uniform routing is expected to
// draw), the recurrent state read and written once a sequence, the cached latents read once a sequence.
#pragma once

#include <cstdint>

#include "model/config.h"

namespace moat {

// Expected number of distinct experts of one layer for `batch` rows under uniform routing: E (1 - (1 - k / E)^batch).
double expected_distinct_experts(const ModelConfig& config, int64_t batch);

// `context` cached tokens a sequence. Weights in the stored formats: bf16 dense, experts as config declares, f32
// caches.
double decode_step_bytes(const ModelConfig& config, int64_t batch, int64_t context);

}  // namespace moat
