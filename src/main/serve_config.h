// SPDX-License-Identifier: Apache-2.0
// What `moat serve` runs with once every default and automatic choice is made, for its log: nothing is changed in
// silence.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/local_engine.h"
#include "main/serve.h"

namespace moat {

// Every effective value as key=value, API keys only by their number. `options` have their defaults filled in.
std::string config_line(const ServeOptions& options, const SamplingParams& defaults, const EngineParts& parts);

// The drafter and how the number of drafts is chosen, or "off" and why.
std::string describe_speculation(const EngineOptions& asked, const EngineParts& parts);

// What the flags would not make one expect, one sentence each: changes from what to what, and why.
std::vector<std::string> config_warnings(const EngineOptions& asked, const EngineParts& parts, int64_t host_memory);

}  // namespace moat
