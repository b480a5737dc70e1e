// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of accept.h (accept_cpu.cc).
#pragma once

#include "ops/accept.h"

namespace moat {

int64_t accept_drafts_workspace(const AcceptDraftsArgs& a, const Exec& exec);

namespace cpu {
void match_drafts(Exec& exec, const MatchDraftsArgs& a);
void accept_drafts(Exec& exec, const AcceptDraftsArgs& a);
}  // namespace cpu

}  // namespace moat
