// SPDX-License-Identifier: Apache-2.0
#include "engine/request.h"

#include <algorithm>

namespace moat {

bool is_stop_token(const SamplingParams& params, int32_t eos_token_id, int32_t token_id) {
  if (token_id == eos_token_id && !params.ignore_eos) return true;
  return std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(), token_id) != params.stop_token_ids.end();
}

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kNone: return "none";
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength: return "length";
    case FinishReason::kCancelled: return "cancelled";
    case FinishReason::kTimeout: return "timeout";
    case FinishReason::kRejected: return "rejected";
    case FinishReason::kError: return "error";
  }
  return "?";
}

}  // namespace moat
