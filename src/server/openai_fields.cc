// SPDX-License-Identifier: Apache-2.0
#include "server/openai_fields.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "base/log.h"
#include "engine/sampling_check.h"
#include "server/random_id.h"

namespace moat {
namespace {

enum class Neutral { kNull, kFalse, kTrue, kEmpty, kAsN };

struct RefusedField {
  std::string_view name;
  Neutral neutral;  // the value, besides null, that asks for nothing
};

// Fields that would change the result and that moat does not do yet: refused rather than ignored.
constexpr std::array kRefused = {
    RefusedField{"best_of", Neutral::kAsN},
    RefusedField{"prompt_logprobs", Neutral::kNull},
    RefusedField{"thinking_token_budget", Neutral::kNull},
    RefusedField{"truncate_prompt_tokens", Neutral::kNull},
    RefusedField{"continue_final_message", Neutral::kFalse},
    RefusedField{"add_generation_prompt", Neutral::kTrue},
    RefusedField{"functions", Neutral::kEmpty},
    RefusedField{"function_call", Neutral::kNull},
    RefusedField{"grammar", Neutral::kEmpty},
    RefusedField{"regex", Neutral::kEmpty},
    RefusedField{"ebnf", Neutral::kEmpty},
    RefusedField{"structural_tag", Neutral::kEmpty},
    RefusedField{"structured_outputs", Neutral::kEmpty},
    RefusedField{"guided_json", Neutral::kEmpty},
    RefusedField{"guided_regex", Neutral::kEmpty},
    RefusedField{"guided_choice", Neutral::kEmpty},
    RefusedField{"guided_grammar", Neutral::kEmpty},
    RefusedField{"audio", Neutral::kNull},
    RefusedField{"web_search_options", Neutral::kNull},
};

constexpr std::array<std::string_view, 59> kKnown = {
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens",
    "stop", "stop_token_ids", "include_stop_str_in_output", "seed", "ignore_eos", "min_tokens", "logprobs",
    "top_logprobs", "stream", "stream_options", "reasoning_effort", "reasoning", "thinking", "chat_template_kwargs",
    "include_reasoning", "tools", "tool_choice", "parallel_tool_calls", "response_format", "return_token_ids",
    "timings", "cache_salt", "priority", "timeout", "n", "echo", "suffix", "modalities", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "speculative",
    // Without effect on the result.
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "prediction", "verbosity",
    "skip_special_tokens", "spaces_between_special_tokens", "separate_reasoning", "stream_reasoning", "request_id",
    "rid", "return_tokens_as_token_ids", "prompt_cache_retention"};

bool is_number(const Json& value, double number) { return value.is_number() && value.as_double() == number; }

bool asks_for_nothing(const Json& value, Neutral neutral, const Json* n) {
  switch (neutral) {
    case Neutral::kNull: return false;
    case Neutral::kFalse: return value.is_bool() && !value.as_bool();
    case Neutral::kTrue: return value.is_bool() && value.as_bool();
    case Neutral::kAsN: return is_number(value, n != nullptr && n->is_number() ? n->as_double() : 1);
    case Neutral::kEmpty:
      return (value.is_object() && value.as_object().empty()) || (value.is_array() && value.as_array().empty()) ||
             (value.is_string() && value.as_string().empty());
  }
  return false;
}

// A number in (0, max]. A positive one so small that it rounds to zero stays above it.
std::optional<float> positive_number(FieldReader& fields, std::string_view name, double max) {
  const std::optional<double> number = fields.number(name, 0, max);
  if (number && *number == 0) {
    fields.fail(name, fmt::format("{} is 0, expected a number above 0, at most {}", name, max));
  }
  if (!number) return std::nullopt;
  return std::max(static_cast<float>(*number), std::numeric_limits<float>::min());
}

void read_logit_bias(FieldReader& fields, const EngineInfo& info, SamplingParams& sampling) {
  const Json* biases = fields.object("logit_bias");
  if (biases == nullptr) return;
  if (biases->as_object().size() > kMaxBiases) {
    return fields.fail("logit_bias", fmt::format("logit_bias has {} members, expected at most {}",
                                                 biases->as_object().size(), kMaxBiases));
  }
  for (const auto& [key, value] : biases->as_object()) {
    int32_t id = -1;
    const auto [end, failure] = std::from_chars(key.data(), key.data() + key.size(), id);
    // One spelling an id ("05" is refused), so that distinct keys are distinct ids.
    if (failure != std::errc() || std::to_string(id) != key || id < 0 || id >= info.vocab_size) {
      return fields.fail("logit_bias", fmt::format("logit_bias has the key {}, expected token ids from \"0\" to \"{}\"",
                                                   shown(Json(key)), info.vocab_size - 1));
    }
    const double bias = value.is_number() ? value.as_double() : std::numeric_limits<double>::quiet_NaN();
    if (!(bias >= -kMaxBias && bias <= kMaxBias)) {
      return fields.fail("logit_bias", fmt::format("logit_bias of token {} is {}, expected a number from {} to {}", id,
                                                   shown(value), -kMaxBias, kMaxBias));
    }
    sampling.logit_bias.push_back({.token_id = id, .bias = static_cast<float>(bias)});
  }
}

// A word is forbidden at the start of a text and after a space, each as the tokens that the tokenizer makes of it; the
// same characters in another split are not caught.
void read_bad_words(FieldReader& fields, const Tokenizer& tokenizer, SamplingParams& sampling) {
  const Json* words = fields.array("bad_words");
  if (words == nullptr) return;
  const Json::Array& items = words->as_array();
  if (items.size() > kMaxBadWordStrings) {
    return fields.fail("bad_words",
                       fmt::format("bad_words has {} strings, expected at most {}", items.size(), kMaxBadWordStrings));
  }
  for (const Json& item : items) {
    const size_t begin = item.is_string() ? item.as_string().find_first_not_of(" \t\r\n\v\f") : std::string::npos;
    if (begin == std::string::npos) {
      return fields.fail("bad_words",
                         fmt::format("bad_words contains {}, expected strings that are not blank", shown(item)));
    }
    const std::string word = item.as_string().substr(begin);
    for (const char* before : {"", " "}) {
      std::vector<int32_t> ids = tokenizer.encode_text(before + word);
      if (ids.size() > kMaxBadWordTokens) {
        return fields.fail("bad_words", fmt::format("bad_words contains {}, which has {} tokens, expected at most {}",
                                                    shown(item), ids.size(), kMaxBadWordTokens));
      }
      sampling.bad_words.push_back(std::move(ids));
    }
  }
}

void read_max_tokens(FieldReader& fields, SamplingParams& sampling) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  const auto old_name = fields.clamped_integer("max_tokens", 1, kMax);
  const auto new_name = fields.clamped_integer("max_completion_tokens", 1, kMax);
  sampling.max_tokens = static_cast<int32_t>(new_name.value_or(old_name.value_or(kMax)));
  sampling.min_tokens = static_cast<int32_t>(fields.clamped_integer("min_tokens", 0, kMax).value_or(0));
  if ((new_name || old_name) && sampling.min_tokens > sampling.max_tokens) {
    fields.fail("min_tokens", fmt::format("min_tokens is {}, expected at most max_tokens = {}", sampling.min_tokens,
                                          sampling.max_tokens));
  }
}

}  // namespace

void read_model(FieldReader& fields, const ServedModel& model, ApiCall& call) {
  const std::string* asked = fields.string("model");
  call.model = asked == nullptr ? model.name : *asked;
  if (asked == nullptr || model.is(*asked)) return;
  fields.fail(
      ApiError{.status = 404,
               .message = fmt::format("the model \"{}\" does not exist here; served is \"{}\"", *asked, model.name),
               .param = "model",
               .code = "model_not_found"});
}

void read_sampling(FieldReader& fields, const ServingDefaults& defaults, const EngineInfo& info, ApiCall& call) {
  SamplingParams& sampling = call.sampling;
  sampling.temperature = static_cast<float>(fields.number("temperature", 0, 2).value_or(defaults.temperature));
  sampling.top_p = positive_number(fields, "top_p", 1).value_or(defaults.top_p);
  const int64_t top_k = fields.clamped_integer("top_k", -1, info.vocab_size).value_or(defaults.top_k);
  sampling.top_k = static_cast<int32_t>(std::max<int64_t>(0, top_k));  // -1 is how several clients say "off"
  sampling.min_p = static_cast<float>(fields.number("min_p", 0, 1).value_or(defaults.min_p));
  const std::optional<uint64_t> seed = fields.seed("seed");
  sampling.seed = seed ? *seed : random_u64();
  sampling.seeded = seed.has_value();
  sampling.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  read_max_tokens(fields, sampling);
  call.num_choices = static_cast<int32_t>(fields.integer("n", 1, kMaxChoices).value_or(1));
  constexpr int64_t kAnyPriority = std::numeric_limits<int32_t>::max();
  call.priority = static_cast<int32_t>(fields.integer("priority", -kAnyPriority, kAnyPriority).value_or(0));
  if (const std::string* salt = fields.string("cache_salt")) call.cache_salt = *salt;
  call.speculative = fields.boolean("speculative").value_or(true);
}

void read_logit_edits(FieldReader& fields, const EngineInfo& info, const Tokenizer& tokenizer, ApiCall& call) {
  SamplingParams& s = call.sampling;
  s.presence_penalty = static_cast<float>(fields.number("presence_penalty", -kMaxPenalty, kMaxPenalty).value_or(0));
  s.frequency_penalty = static_cast<float>(fields.number("frequency_penalty", -kMaxPenalty, kMaxPenalty).value_or(0));
  s.repetition_penalty = positive_number(fields, "repetition_penalty", kMaxRepetitionPenalty).value_or(1.0F);
  read_logit_bias(fields, info, s);
  read_bad_words(fields, tokenizer, s);
}

void read_stops(FieldReader& fields, const EngineInfo& info, ApiCall& call) {
  if (const Json* stop = fields.any("stop")) {
    const Json::Array one = stop->is_string() ? Json::Array{*stop} : Json::Array{};
    if (!stop->is_string() && !stop->is_array()) {
      return fields.fail("stop", fmt::format("stop is {}, expected a string or an array of strings", shown(*stop)));
    }
    const Json::Array& stops = stop->is_array() ? stop->as_array() : one;
    if (stops.size() > kMaxStops) {
      return fields.fail("stop", fmt::format("stop has {} strings, expected at most {}", stops.size(), kMaxStops));
    }
    for (const Json& text : stops) {
      if (!text.is_string()) {
        return fields.fail("stop", fmt::format("stop contains {}, expected only strings", shown(text)));
      }
      if (!text.as_string().empty()) call.stops.push_back(text.as_string());
    }
  }
  call.include_stop = fields.boolean("include_stop_str_in_output").value_or(false);
  const Json* ids = fields.array("stop_token_ids");
  if (ids == nullptr) return;
  for (const Json& id : ids->as_array()) {
    const auto number = id.is_number() ? id.as_int64() : std::nullopt;
    if (!number || *number < 0 || *number >= info.vocab_size) {
      return fields.fail("stop_token_ids", fmt::format("stop_token_ids contains {}, expected token ids from 0 to {}",
                                                       shown(id), info.vocab_size - 1));
    }
    call.sampling.stop_token_ids.push_back(static_cast<int32_t>(*number));
  }
}

void read_timeout(FieldReader& fields, const ServingDefaults& defaults, ApiCall& call) {
  call.timeout_seconds = defaults.timeout_seconds;
  const Json* value = fields.any("timeout");
  if (value == nullptr) return;
  const double asked = value->is_number() ? value->as_double() : std::numeric_limits<double>::quiet_NaN();
  if (!(asked > 0 && asked <= kMaxTimeoutSeconds)) {
    return fields.fail("timeout", fmt::format("timeout is {}, expected a number of seconds above 0, at most {}",
                                              shown(*value), kMaxTimeoutSeconds));
  }
  call.timeout_seconds = defaults.timeout_seconds > 0 ? std::min(asked, defaults.timeout_seconds) : asked;
}

void read_delivery(FieldReader& fields, ApiCall& call) {
  call.stream = fields.boolean("stream").value_or(false);
  if (const Json* options = fields.object("stream_options")) {
    FieldReader inner(*options, "stream_options.");
    call.include_usage = inner.boolean("include_usage").value_or(false);
    call.continuous_usage = inner.boolean("continuous_usage_stats").value_or(false);
    if (!inner.ok()) fields.fail(*inner.error());
  }
  call.return_token_ids = fields.boolean("return_token_ids").value_or(false);
  call.timings = fields.boolean("timings").value_or(false);
}

void refuse_unsupported(FieldReader& fields) {
  for (const RefusedField& refused : kRefused) {
    const Json* value = fields.any(refused.name);
    if (value == nullptr || asks_for_nothing(*value, refused.neutral, fields.any("n"))) continue;
    return fields.fail(not_supported(std::string(refused.name), fmt::format("{} is not supported yet", refused.name)));
  }
}

void log_unknown(const Json& body) {
  if (!log_enabled(LogLevel::kDebug)) return;
  for (const auto& [name, value] : body.as_object()) {
    const auto same = [&name = name](const RefusedField& field) { return field.name == name; };
    if (std::find(kKnown.begin(), kKnown.end(), name) != kKnown.end()) continue;
    if (std::find_if(kRefused.begin(), kRefused.end(), same) != kRefused.end()) continue;
    log_debug("unknown request field ignored name=\"{}\"", name);
  }
}

}  // namespace moat
