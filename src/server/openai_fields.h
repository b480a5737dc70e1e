// SPDX-License-Identifier: Apache-2.0
// Fields that chat and completions have in common, and the list of those that are refused. Used by openai_request.cc.
#pragma once

#include "base/json.h"
#include "engine/engine.h"
#include "server/field_reader.h"
#include "server/openai_request.h"
#include "text/tokenizer.h"

namespace moat {

constexpr int64_t kMaxChoices = 128;  // of one call, over all its prompts
constexpr size_t kMaxStops = 16;
constexpr size_t kMaxBadWordStrings = 512;  // each makes two token sequences

// Each leaves its first mistake in the reader.
void read_model(FieldReader& fields, const ServedModel& model, ApiCall& call);
void read_sampling(FieldReader& fields, const ServingDefaults& defaults, const EngineInfo& info, ApiCall& call);
// Penalties, logit_bias and bad_words.
void read_logit_edits(FieldReader& fields, const EngineInfo& info, const Tokenizer& tokenizer, ApiCall& call);
void read_stops(FieldReader& fields, const EngineInfo& info, ApiCall& call);
void read_timeout(FieldReader& fields, const ServingDefaults& defaults, ApiCall& call);
void read_delivery(FieldReader& fields, ApiCall& call);  // stream and what goes into the answer
void refuse_unsupported(FieldReader& fields);
void log_unknown(const Json& body);

}  // namespace moat
