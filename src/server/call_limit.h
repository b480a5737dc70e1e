// SPDX-License-Identifier: Apache-2.0
// Constraints that an API call puts on its replies: stop strings, and with parallel_tool_calls = false the end of
// generation once the first tool call is closed (trimming afterwards would pay for calls nobody sees).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/constraint.h"
#include "server/openai_request.h"
#include "text/tokenizer.h"

namespace moat {

// kStop at the token that closes the first named call inside the tools element.
std::unique_ptr<Constraint> make_single_call_constraint(const Tokenizer& tokenizer);

// Asks all of `parts`; any of them stops the sequence.
std::unique_ptr<Constraint> make_joint_constraint(std::vector<std::unique_ptr<Constraint>> parts);

// For one choice of `call`; null if nothing constrains it.
std::unique_ptr<Constraint> make_call_constraint(const ApiCall& call, const Tokenizer& tokenizer);

}  // namespace moat
