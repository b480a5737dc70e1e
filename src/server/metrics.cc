// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <mutex>
#include <vector>

namespace moat {
namespace {

using prometheus::Counter;
using prometheus::Family;
using prometheus::Gauge;
using prometheus::Histogram;
using prometheus::Registry;

const Histogram::BucketBoundaries& slow_buckets() {
  static const Histogram::BucketBoundaries buckets = {0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,   2.5,
                                                      5,     10,    20,   40,    80,   160, 320,  640, 1280};
  return buckets;
}
const Histogram::BucketBoundaries& token_buckets() {
  static const Histogram::BucketBoundaries buckets = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03,
                                                      0.04,   0.05,  0.075,  0.1,   0.15, 0.2,   0.5,  1};
  return buckets;
}

Counter& counter(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
}
Gauge& gauge(Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
}
Histogram& histogram(Registry& registry, const char* name, const char* help,
                     const Histogram::BucketBoundaries& buckets) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, buckets);
}

struct EngineCounter {
  const char* name;
  const char* help;
  int64_t EngineStats::*value;
};
constexpr std::array kEngineCounters = {
    EngineCounter{"moat_prompt_tokens_total", "Prompt tokens of scheduled requests", &EngineStats::prompt_tokens_total},
    EngineCounter{"moat_cached_tokens_total", "Prompt tokens restored instead of computed",
                  &EngineStats::cached_tokens_total},
    EngineCounter{"moat_generated_tokens_total", "Generated tokens", &EngineStats::generated_tokens_total},
    EngineCounter{"moat_engine_steps_total", "Steps of the engine", &EngineStats::steps_total},
    EngineCounter{"moat_preemptions_total", "Requests put back to make room", &EngineStats::preemptions_total},
    EngineCounter{"moat_timeouts_total", "Choices whose time was over, waiting or running",
                  &EngineStats::timeouts_total},
    EngineCounter{"moat_checkpoints_saved_total", "States kept at the end of a prefix",
                  &EngineStats::checkpoints_saved_total},
    EngineCounter{"moat_checkpoints_restored_total", "States that a request went on from",
                  &EngineStats::checkpoints_restored_total},
    EngineCounter{"moat_draft_rounds_total", "Steps of a choice in which drafts were verified",
                  &EngineStats::draft_rounds_total},
    EngineCounter{"moat_drafted_tokens_total", "Drafts that were verified", &EngineStats::drafted_tokens_total},
    EngineCounter{"moat_accepted_tokens_total", "Drafts that became part of a reply",
                  &EngineStats::accepted_tokens_total},
    EngineCounter{"moat_checkpoints_evicted_total", "States given up to make room",
                  &EngineStats::checkpoints_evicted_total},
};
constexpr std::array kEngineGauges = {
    EngineCounter{"moat_requests_running", "Requests that are computed", &EngineStats::num_running},
    EngineCounter{"moat_requests_waiting", "Requests that wait for their turn", &EngineStats::num_waiting},
    EngineCounter{"moat_cache_blocks_total", "Blocks of the attention cache", &EngineStats::blocks_total},
    EngineCounter{"moat_cache_blocks_used", "Blocks of the attention cache that live requests use",
                  &EngineStats::blocks_used},
    EngineCounter{"moat_cache_blocks_cached", "Blocks kept for prefixes that no live request uses",
                  &EngineStats::blocks_cached},
    EngineCounter{"moat_state_slots_total", "Slots for recurrent states", &EngineStats::slots_total},
    EngineCounter{"moat_state_slots_used", "Slots for recurrent states that live requests use",
                  &EngineStats::slots_used},
    EngineCounter{"moat_state_checkpoints", "Slots that hold the state at the end of a cached prefix",
                  &EngineStats::checkpoints},
};

// 0 before the first prompt.
double hit_rate(const EngineStats& stats) {
  const auto prompt = static_cast<double>(stats.prompt_tokens_total);
  return prompt > 0 ? static_cast<double>(stats.cached_tokens_total) / prompt : 0;
}

// Tokens that a round with drafts gives; 0 before the first one.
double acceptance_length(const EngineStats& stats) {
  const auto rounds = static_cast<double>(stats.draft_rounds_total);
  return rounds > 0 ? 1 + static_cast<double>(stats.accepted_tokens_total) / rounds : 0;
}

void bring_up_to(Counter& counter, int64_t total) {
  const double more = static_cast<double>(total) - counter.Value();
  if (more > 0) counter.Increment(more);
}

}  // namespace

struct Metrics::Impl {
  Registry registry;
  Family<Counter>& responses =
      prometheus::BuildCounter().Name("moat_http_responses_total").Help("Answers by HTTP status").Register(registry);
  Family<Counter>& finished = prometheus::BuildCounter()
                                  .Name("moat_requests_finished_total")
                                  .Help("Choices by how they ended")
                                  .Register(registry);
  Histogram& queue = histogram(registry, "moat_queue_seconds", "From submission to the first step", slow_buckets());
  Histogram& first_token =
      histogram(registry, "moat_time_to_first_token_seconds", "From the request to its first token", slow_buckets());
  Histogram& inter_token =
      histogram(registry, "moat_inter_token_seconds", "Between tokens of one choice", token_buckets());
  Histogram& request =
      histogram(registry, "moat_request_seconds", "From the request to its last token", slow_buckets());
  Gauge& prefix_hit_rate =
      gauge(registry, "moat_prefix_hit_rate", "Of all prompt tokens since the start, the share that was restored");
  Gauge& acceptance_length =
      gauge(registry, "moat_acceptance_length", "Tokens of a round with drafts on average: accepted ones and one more");
  Family<Counter>& drafted_at = prometheus::BuildCounter()
                                    .Name("moat_drafted_at_position_total")
                                    .Help("Drafts that were verified, by their position in the round")
                                    .Register(registry);
  Family<Counter>& accepted_at = prometheus::BuildCounter()
                                     .Name("moat_accepted_at_position_total")
                                     .Help("Drafts that were accepted, by their position in the round")
                                     .Register(registry);
  std::mutex mutex;  // of render(): counters are brought up to the engine's totals
  std::vector<Counter*> engine_counters;
  std::vector<Gauge*> engine_gauges;
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {
  for (const EngineCounter& entry : kEngineCounters) {
    impl_->engine_counters.push_back(&counter(impl_->registry, entry.name, entry.help));
  }
  for (const EngineCounter& entry : kEngineGauges) {
    impl_->engine_gauges.push_back(&gauge(impl_->registry, entry.name, entry.help));
  }
}

Metrics::~Metrics() = default;

void Metrics::count_response(int status) { impl_->responses.Add({{"code", std::to_string(status)}}).Increment(); }

void Metrics::count_finished(std::string_view reason) {
  impl_->finished.Add({{"reason", std::string(reason)}}).Increment();
}

void Metrics::observe_queue(double seconds) { impl_->queue.Observe(seconds); }
void Metrics::observe_first_token(double seconds) { impl_->first_token.Observe(seconds); }
void Metrics::observe_inter_token(double seconds, size_t count) {
  for (size_t i = 0; i < count; ++i) impl_->inter_token.Observe(seconds);
}
void Metrics::observe_request(double seconds) { impl_->request.Observe(seconds); }

std::string Metrics::render(const EngineStats* stats) {
  const std::lock_guard lock(impl_->mutex);
  if (stats != nullptr) {
    for (size_t i = 0; i < kEngineCounters.size(); ++i) {
      bring_up_to(*impl_->engine_counters[i], stats->*kEngineCounters[i].value);
    }
    for (size_t i = 0; i < kEngineGauges.size(); ++i) {
      impl_->engine_gauges[i]->Set(static_cast<double>(stats->*kEngineGauges[i].value));
    }
    impl_->prefix_hit_rate.Set(hit_rate(*stats));
    impl_->acceptance_length.Set(acceptance_length(*stats));
    for (size_t k = 0; k < stats->drafted_at_total.size(); ++k) {
      const prometheus::Labels labels = {{"position", std::to_string(k + 1)}};
      bring_up_to(impl_->drafted_at.Add(labels), stats->drafted_at_total[k]);
      bring_up_to(impl_->accepted_at.Add(labels), stats->accepted_at_total[k]);
    }
  }
  return prometheus::TextSerializer().Serialize(impl_->registry.Collect());
}

}  // namespace moat
