// SPDX-License-Identifier: Apache-2.0
#include "engine/request.h"

namespace moat {

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
