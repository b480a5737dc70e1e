// SPDX-License-Identifier: Apache-2.0
// POST /tokenize and /detokenize: text or messages -> token ids and back. The work is done on the prepare pool.
#pragma once

#include <string>

#include "server/exchange.h"
#include "server/generation.h"
#include "server/prepare_pool.h"

namespace moat {

void run_tokenize(const GenerationContext& context, PreparePool& pool, const Exchange& exchange, std::string body);
void run_detokenize(const GenerationContext& context, PreparePool& pool, const Exchange& exchange, std::string body);

}  // namespace moat
