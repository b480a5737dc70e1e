// SPDX-License-Identifier: Apache-2.0
#include "main/serve_config.h"

#include <algorithm>

#include "core/device.h"

namespace moat {
namespace {

// The scheduler keeps states at whole blocks only.
int64_t effective_interval(int64_t asked, int64_t block_size) {
  return asked == 0 ? 0 : std::max(asked / block_size * block_size, block_size);
}

}  // namespace

std::string config_line(const ServeOptions& o, const SamplingParams& defaults, const EngineParts& parts) {
  const SchedulerOptions& scheduler = parts.scheduler_options;
  const Capacity& capacity = parts.capacity;
  const CacheSizes& cache = capacity.cache;
  std::string line;
  const auto add = [&line](std::string_view key, const auto& value) {
    line += fmt::format("{}{}={}", line.empty() ? "" : " ", key, value);
  };
  add("model", o.model.model_dir);
  add("served_model_name", o.served_name);
  add("aliases", fmt::format("[{}]", fmt::join(o.aliases, ",")));
  add("host", o.host);
  add("port", o.port);
  add("api_keys", o.api_keys.size());
  add("backend", o.model.backend);
  add("isa", host_arch().level);
  add("threads", o.model.threads);
  add("max_model_len", scheduler.max_model_len);
  add("max_num_seqs", scheduler.max_num_seqs);
  add("max_batched_tokens", scheduler.max_batched_tokens);
  add("max_queued", o.engine.max_queued);
  add("max_step_ms", scheduler.max_step_seconds * 1e3);
  add("deterministic", scheduler.deterministic);
  add("memory_bytes", o.engine.memory_bytes);
  add("memory_fraction", o.engine.memory_fraction);
  add("block_size", cache.block_size);
  add("cache_blocks", cache.num_blocks);
  add("state_slots", cache.num_slots);
  add("prefix_cache", parts.ledger_options.prefix_cache);
  add("checkpoints", capacity.num_checkpoints);
  add("checkpoint_memory_bytes", capacity.num_checkpoints * parts.ledger_options.slot_bytes);
  add("checkpoint_interval", effective_interval(scheduler.checkpoint_interval, cache.block_size));
  add("draft", o.draft.ngram ? "ngram" : o.draft.directory.empty() ? "none" : o.draft.directory);
  add("num_draft_tokens", parts.drafter == nullptr       ? "0"
                          : o.draft.num_draft_tokens < 0 ? "auto"
                                                         : std::to_string(o.draft.num_draft_tokens));
  add("request_timeout_seconds", o.request_timeout_seconds);
  add("drain_seconds", o.drain_seconds);
  add("temperature", defaults.temperature);
  add("top_p", defaults.top_p);
  add("top_k", defaults.top_k);
  add("min_p", defaults.min_p);
  return line;
}

std::string describe_speculation(const EngineOptions& asked, const EngineParts& parts) {
  if (parts.drafter == nullptr) {
    const bool has_drafter = asked.drafter != nullptr || asked.ngram_drafter;
    return has_drafter ? "off: --num-draft-tokens 0" : "off: no drafter (--draft DIR or --draft-ngram)";
  }
  return fmt::format(
      "{}; {}", parts.drafter->describe(),
      asked.num_draft_tokens > 0 ? fmt::format("always {} a round", asked.num_draft_tokens) : "as many a round as pay");
}

std::vector<std::string> config_warnings(const EngineOptions& asked, const EngineParts& parts, int64_t host_memory) {
  const Capacity& capacity = parts.capacity;
  std::vector<std::string> warnings;
  if (capacity.max_num_seqs < asked.max_num_seqs) {
    warnings.push_back(fmt::format("max_num_seqs lowered from {} to {}: {}", asked.max_num_seqs, capacity.max_num_seqs,
                                   capacity.bound));
  }
  if (asked.memory_bytes > host_memory) {
    warnings.push_back(fmt::format("max_memory {} is kept, but this process may use {}",
                                   format_bytes(asked.memory_bytes), format_bytes(host_memory)));
  }
  if (!asked.prefix_cache) return warnings;
  if (capacity.num_checkpoints == 0) {
    const std::string from = asked.checkpoint_memory_bytes < 0 ? "auto" : format_bytes(asked.checkpoint_memory_bytes);
    warnings.push_back(
        fmt::format("checkpoint_memory lowered from {} to 0: a checkpoint takes {}; no prefix is restored", from,
                    format_bytes(parts.ledger_options.slot_bytes)));
  }
  const int64_t interval = effective_interval(asked.checkpoint_interval, capacity.cache.block_size);
  if (interval != asked.checkpoint_interval) {
    warnings.push_back(fmt::format("checkpoint_interval changed from {} to {}: whole blocks of {} tokens",
                                   asked.checkpoint_interval, interval, capacity.cache.block_size));
  }
  return warnings;
}

}  // namespace moat
