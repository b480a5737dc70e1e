// SPDX-License-Identifier: Apache-2.0
#include "engine/local_engine.h"

#include <algorithm>
#include <random>

#include "base/log.h"
#include "core/ceilings.h"
#include "engine/dspark_drafter.h"
#include "engine/ngram_drafter.h"
#include "engine/sampling_check.h"
#include "engine/step_cost_fit.h"
#include "plan/host_memory.h"

namespace moat {

namespace {

// What the process holds besides the weights, before pools and temporaries are there.
int64_t process_bytes(const LoadReport& report) {
  const ResidentMemory now = resident_memory();
  return std::max<int64_t>(0, now.anonymous_bytes - static_cast<int64_t>(report.bytes_owned)) +
         std::max<int64_t>(0, now.file_bytes - static_cast<int64_t>(report.bytes_mapped));
}

// Rows and (row, cached token) pairs of a step, drafts included.
struct StepSize {
  int64_t rows = 0, decode_rows = 0;
  bool has_drafts = false;
  double decode_pairs = 0, prefill_pairs = 0;
};
StepSize size_of(const StepPlan& plan, const StepResult& result) {
  StepSize size;
  size_t next_row = 0;
  for (size_t s = 0; s < plan.sequences.size(); ++s) {
    const int64_t drafts = plan.wants_token[s] ? result.rows[next_row++].num_drafts : 0;
    const int64_t rows = plan.num_tokens[s] + drafts;
    size.has_drafts |= drafts > 0;
    const double pairs = static_cast<double>(rows) * (plan.first_positions[s] + static_cast<double>(rows) / 2);
    const bool decodes = static_cast<int64_t>(s) < plan.num_decode_seqs;
    size.rows += rows;
    size.decode_rows += decodes ? rows : 0;
    (decodes ? size.decode_pairs : size.prefill_pairs) += pairs;
  }
  return size;
}

// The drafter that the options ask for, over shapes, and what it adds to the caches.
Status make_drafter(const LoadedModel& loaded, const EngineOptions& o, CacheSizes& sizes, EngineParts& parts) {
  const int drafters = int{o.drafter != nullptr} + int{o.ngram_drafter} + int{o.custom_drafter != nullptr};
  if (o.num_draft_tokens == 0 || drafters == 0) return {};
  if (drafters > 1) return invalid_argument("{} drafters are given, expected one", drafters);
  if (o.drafter != nullptr) {
    MOAT_RETURN_IF_ERROR(check_against_target(o.drafter->config, loaded.config));
    parts.draft_model = std::make_unique<DsparkModel>(o.drafter->config, o.drafter->weights, loaded.weights.embed,
                                                      loaded.weights.lm_head);
    sizes.draft_layers = o.drafter->config.num_layers;
    sizes.draft_row = o.drafter->config.row_width();
    parts.own_drafter = std::make_unique<DsparkDrafter>(*parts.draft_model, dry_draft_rows(sizes), sizes.block_size);
  } else if (o.ngram_drafter) {
    parts.own_drafter = std::make_unique<NgramDrafter>(
        NgramOptions{.max_drafts = o.num_draft_tokens > 0 ? o.num_draft_tokens : NgramOptions().max_drafts});
  }
  parts.drafter = o.custom_drafter != nullptr ? o.custom_drafter : parts.own_drafter.get();
  const int64_t most = parts.drafter->max_drafts();
  if (o.num_draft_tokens > most) {
    return invalid_argument("{} draft tokens a round are asked for, but the drafter gives at most {}",
                            o.num_draft_tokens, most);
  }
  parts.draft_length = DraftLength(most, std::max<int64_t>(o.num_draft_tokens, 0),
                                   o.drafter != nullptr && o.drafter->config.confidence_head);
  sizes.verify_rows = std::min(o.max_num_seqs * (1 + most), o.max_batched_tokens);
  return {};
}

}  // namespace

Result<EngineParts> make_engine_parts(const LoadedModel& loaded, const EngineOptions& o, ThreadPool& pool) {
  const ModelConfig& config = loaded.config;
  EngineParts parts;
  parts.model = std::make_unique<KimiModel>(config, loaded.weights);

  const int64_t max_len = o.max_model_len > 0 ? o.max_model_len : config.max_position_embeddings;
  if (max_len > config.max_position_embeddings) {
    return invalid_argument("max_model_len {} exceeds the model's max_position_embeddings {}", max_len,
                            config.max_position_embeddings);
  }
  RunnerOptions runner{.arch = host_arch(),
                       .reference = o.reference,
                       .max_batched_tokens = o.max_batched_tokens,
                       .max_num_seqs = o.max_num_seqs,
                       .max_model_len = max_len};
  // The arena does not depend on the pools, so a first dry pass with the smallest pools gives its size.
  CacheSizes smallest{
      .block_size = o.block_size, .num_blocks = (max_len + o.block_size - 1) / o.block_size, .num_slots = 1};
  MOAT_RETURN_IF_ERROR(make_drafter(loaded, o, smallest, parts));
  MOAT_ASSIGN(DryRun dry, dry_run(*parts.model, runner, smallest, pool, parts.drafter));
  const int64_t draft_bytes =
      o.drafter == nullptr ? 0 : static_cast<int64_t>(o.drafter->report.bytes_mapped + o.drafter->report.bytes_owned);
  CapacityOptions capacity{.memory_bytes = o.memory_bytes > 0 ? o.memory_bytes : host_memory_bytes(),
                           .memory_fraction = o.memory_fraction,
                           .weight_bytes = static_cast<int64_t>(loaded.report.bytes_mapped + loaded.report.bytes_owned),
                           .arena_bytes = dry.arena_bytes,
                           .process_bytes = std::max<int64_t>(0, process_bytes(loaded.report) - draft_bytes),
                           .draft_weight_bytes = draft_bytes,
                           .draft_layers = smallest.draft_layers,
                           .draft_row = smallest.draft_row,
                           .verify_rows = smallest.verify_rows,
                           .block_size = o.block_size,
                           .max_model_len = max_len,
                           .max_num_seqs = o.max_num_seqs,
                           .checkpoint_memory_bytes = o.prefix_cache ? o.checkpoint_memory_bytes : 0};
  MOAT_ASSIGN(parts.capacity, plan_capacity(config, capacity));
  parts.scheduler_options = {.max_num_seqs = parts.capacity.max_num_seqs,
                             .max_batched_tokens = o.max_batched_tokens,
                             .max_model_len = max_len,
                             .eos_token_id = config.eos_token_id,
                             .max_step_seconds = o.max_step_seconds,
                             .checkpoint_interval = o.checkpoint_interval,
                             .deterministic = o.deterministic};
  std::random_device entropy;
  parts.ledger_options = {.prefix_cache = o.prefix_cache,
                          .hash_seed = uint64_t{entropy()} << 32 | entropy(),
                          .token_bytes = block_bytes(config, 1) + 4 * smallest.draft_layers * smallest.draft_row,
                          .slot_bytes = slot_bytes(config)};
  parts.caches = std::make_unique<CacheMemory>(config, parts.capacity.cache);
  parts.caches->make_resident(pool);
  if (parts.draft_model != nullptr) {
    parts.own_drafter = std::make_unique<DsparkDrafter>(*parts.draft_model, parts.caches->draft_rows(), o.block_size);
    parts.drafter = parts.own_drafter.get();
  }
  parts.runner = std::make_unique<Runner>(*parts.model, *parts.caches, pool, runner, std::move(dry), parts.drafter);
  if (o.max_step_seconds > 0 || parts.drafter != nullptr) {
    parts.step_cost = StepCostTracker(
        derive_step_cost(*parts.model, {.arch = runner.arch,
                                        .max_batched_tokens = o.max_batched_tokens,
                                        .max_num_seqs = o.max_num_seqs,
                                        .block_size = o.block_size,
                                        .read_bytes_per_second = measure_read_bandwidth(pool, Effort::kQuick),
                                        .flops_per_second = measure_f32_flops(pool, Effort::kQuick)}));
  }
  parts.info = {.vocab_size = static_cast<int32_t>(config.vocab_size),
                .max_model_len = static_cast<int32_t>(max_len),
                .max_num_seqs = static_cast<int32_t>(parts.capacity.max_num_seqs),
                .max_queued = static_cast<int32_t>(o.max_queued),
                .eos_token_id = config.eos_token_id,
                .backend = o.reference ? "reference" : runner.arch.name};
  return parts;
}

void Stepper::schedule(StepPlan& plan, std::vector<SequenceEvent>& events, double now) {
  const StepCost& cost = parts_.step_cost.current();
  if (parts_.draft_length.is_on()) scheduler_.list_draft_records(records_);
  const DraftDemand drafts = parts_.draft_length.demand(records_, mean_context_, cost);
  scheduler_.schedule(plan, events, now, cost, drafts);
  if (drafts.max_drafts > 0 && !drafts.measures) plan.drafting = parts_.draft_length.policy(plan, cost);
}

void Stepper::run(const StepPlan& plan, std::vector<SequenceEvent>& events) {
  const double start = now_seconds();
  const StepResult result = parts_.runner->run(plan, scheduler_);
  parts_.runner->commit(scheduler_.advance(plan, result, events));
  const StepSize size = size_of(plan, result);
  const double seconds = now_seconds() - start - result.draft_seconds;
  if (size.decode_rows > 0) mean_context_ = size.decode_pairs / static_cast<double>(size.decode_rows);
  const double expected = parts_.step_cost.current().seconds(size.rows, size.decode_pairs, size.prefill_pairs);
  parts_.draft_length.observe(plan, result, size.rows, expected, seconds);
  // Rows of drafts cost less than those of as many sequences: their share is learnt apart.
  if (!size.has_drafts) parts_.step_cost.observe(size.rows, size.decode_pairs, size.prefill_pairs, seconds);
}

LocalEngine::LocalEngine(EngineParts parts, int64_t max_queued)
    : parts_(std::move(parts)),
      max_queued_(max_queued),
      scheduler_(parts_.scheduler_options, parts_.capacity.cache, parts_.ledger_options),
      stepper_(parts_, scheduler_) {
  stats_.blocks_total = parts_.capacity.cache.num_blocks;
  stats_.slots_total = parts_.capacity.cache.num_slots;
  thread_ = std::thread([this] { loop(); });
}

LocalEngine::~LocalEngine() {
  {
    const std::lock_guard lock(mutex_);
    draining_ = stopping_ = cancel_all_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

EngineStats LocalEngine::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

// What can never run is refused here, with the arithmetic.
Status LocalEngine::check_request(const Request& r) const {
  const EngineInfo& info = parts_.info;
  const auto prompt = static_cast<int64_t>(r.prompt_ids.size());
  if (prompt == 0) return invalid_argument("the prompt is empty");
  for (const int32_t id : r.prompt_ids) {
    if (id < 0 || id >= info.vocab_size) {
      return invalid_argument("prompt token {} is outside the vocabulary of {}", id, info.vocab_size);
    }
  }
  if (r.sampling.max_tokens < 1)
    return invalid_argument("max_tokens is {}, expected at least 1", r.sampling.max_tokens);
  if (prompt + r.sampling.max_tokens > info.max_model_len) {
    return invalid_argument("{} prompt tokens + {} to generate = {}, but the context is {}", prompt,
                            r.sampling.max_tokens, prompt + r.sampling.max_tokens, info.max_model_len);
  }
  MOAT_RETURN_IF_ERROR(check_sampling(r.sampling, info.vocab_size));
  const int64_t tokens = prompt + r.sampling.max_tokens - 1;
  const CacheSizes& sizes = parts_.capacity.cache;
  if (tokens > sizes.num_blocks * sizes.block_size) {
    return invalid_argument("the request needs a cache of {} tokens, but the pool holds {} ({} blocks of {})", tokens,
                            sizes.num_blocks * sizes.block_size, sizes.num_blocks, sizes.block_size);
  }
  return {};
}

Result<Engine::RequestHandle> LocalEngine::submit(Request request, EventSink sink) {
  MOAT_RETURN_IF_ERROR(check_request(request));
  Message message;
  message.request = std::move(request);
  message.live.sink = std::move(sink);
  message.live.submitted = Clock::now();
  {
    const std::lock_guard lock(mutex_);
    if (draining_) return unavailable("the server is shutting down");
    if (num_unstarted_ >= max_queued_) {
      return resource_exhausted("{} requests are waiting, the limit is {}", num_unstarted_, max_queued_);
    }
    message.id = next_id_++;
    ++num_live_;
    ++num_unstarted_;
    ++stats_.num_waiting;
    const SequenceId id = message.id;
    inbox_.push_back(std::move(message));
    wake_.notify_one();
    return id;
  }
}

void LocalEngine::cancel(RequestHandle handle) {
  const std::lock_guard lock(mutex_);
  Message message;
  message.id = handle;
  message.kind = Message::Kind::kCancel;
  inbox_.push_back(std::move(message));
  wake_.notify_one();
}

// The inbox keeps the order, so what is submitted later finds nothing.
void LocalEngine::flush_cache() {
  const std::lock_guard lock(mutex_);
  Message message;
  message.kind = Message::Kind::kFlush;
  inbox_.push_back(std::move(message));
  wake_.notify_one();
}

void LocalEngine::drain(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  if (drained_.wait_until(lock, deadline, [&] { return num_live_ == 0; })) return;
  cancel_all_ = true;
  wake_.notify_one();
  drained_.wait(lock, [&] { return num_live_ == 0; });
}

bool LocalEngine::take_inbox() {
  std::vector<Message> messages;
  bool cancel_all = false;
  bool stop = false;
  {
    std::unique_lock lock(mutex_);
    if (scheduler_.idle()) wake_.wait(lock, [&] { return !inbox_.empty() || stopping_ || cancel_all_; });
    messages.swap(inbox_);
    cancel_all = cancel_all_ && num_live_ > 0;
    stop = stopping_ && num_live_ == 0;
    if (cancel_all_ && !stopping_) cancel_all_ = num_live_ > 0;
  }
  for (Message& m : messages) {
    switch (m.kind) {
      case Message::Kind::kCancel: scheduler_.cancel(m.id); break;
      case Message::Kind::kFlush: {
        scheduler_.flush_cache();
        const std::lock_guard lock(mutex_);
        take_stats(num_live_);
        break;
      }
      case Message::Kind::kSubmit:
        live_.emplace(m.id, std::move(m.live));
        scheduler_.add(m.id, std::move(m.request), now());
    }
  }
  if (cancel_all) {
    for (const auto& [id, live] : live_) scheduler_.cancel(id);
  }
  return !stop;
}

void LocalEngine::loop() {
  StepPlan plan;
  std::vector<SequenceEvent> events;
  while (take_inbox()) {
    stepper_.schedule(plan, events, now());
    publish(events);
    if (plan.empty()) {
      MOAT_CHECK(scheduler_.num_running() == 0, "nothing can go on: {}", scheduler_.describe());
      continue;
    }
    note_started(plan);
    stepper_.run(plan, events);
    publish(events);
#ifndef NDEBUG
    scheduler_.check_invariants();
#endif
  }
}

void LocalEngine::note_started(const StepPlan& plan) {
  int64_t started = 0;
  for (const SequenceId id : plan.sequences) {
    Live& live = live_.at(id);
    if (live.has_started) continue;
    live.has_started = true;
    live.started = Clock::now();
    ++started;
  }
  const std::lock_guard lock(mutex_);
  num_unstarted_ -= started;
  ++stats_.steps_total;
  take_stats(num_live_);
}

double LocalEngine::now() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }

void LocalEngine::take_stats(int64_t num_live) {
  const CacheLedger& ledger = scheduler_.ledger();
  stats_.num_running = scheduler_.num_running();
  stats_.num_waiting = num_live - stats_.num_running;
  stats_.blocks_used = ledger.blocks_used();
  stats_.blocks_cached = ledger.blocks_cached();
  stats_.slots_used = ledger.slots_used();
  stats_.checkpoints = ledger.checkpoints();
  stats_.checkpoints_saved_total = ledger.saved_total();
  stats_.checkpoints_restored_total = ledger.restored_total();
  stats_.checkpoints_evicted_total = ledger.evicted_total();
  const SchedulerStats& scheduled = scheduler_.stats();
  stats_.preemptions_total = scheduled.preemptions;
  stats_.draft_rounds_total = scheduled.draft_rounds;
  stats_.drafted_tokens_total = scheduled.drafted_tokens;
  stats_.accepted_tokens_total = scheduled.accepted_tokens;
  stats_.drafted_at_total = scheduled.drafted_at;
  stats_.accepted_at_total = scheduled.accepted_at;
}

void LocalEngine::count(const TokenEvent& event) {
  stats_.generated_tokens_total += static_cast<int64_t>(event.tokens.size());
  if (event.finish == FinishReason::kNone) return;
  stats_.prompt_tokens_total += event.num_prompt_tokens;
  stats_.cached_tokens_total += event.num_cached_tokens;
  switch (event.finish) {
    case FinishReason::kStop: ++stats_.finished_stop_total; break;
    case FinishReason::kLength: ++stats_.finished_length_total; break;
    case FinishReason::kCancelled: ++stats_.cancelled_total; break;
    case FinishReason::kTimeout: ++stats_.timeouts_total; break;
    case FinishReason::kRejected: ++stats_.rejected_total; break;
    case FinishReason::kError: ++stats_.errors_total; break;
    case FinishReason::kNone: break;
  }
}

void LocalEngine::publish(std::vector<SequenceEvent>& events) {
  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  };
  const Clock::time_point now = Clock::now();
  for (SequenceEvent& e : events) {
    const auto it = live_.find(e.sequence);
    MOAT_CHECK(it != live_.end(), "an event for sequence {} that is not live", e.sequence);
    Live& live = it->second;
    if (!e.event.tokens.empty() && !live.has_token) {
      live.has_token = true;
      live.first_token = now;
    }
    RequestTimings& timings = e.event.timings;
    timings.queue_seconds = seconds(live.submitted, live.has_started ? live.started : now);
    if (live.has_started) timings.prefill_seconds = seconds(live.started, live.has_token ? live.first_token : now);
    if (live.has_token) timings.decode_seconds = seconds(live.first_token, now);
    const bool last = e.event.finish != FinishReason::kNone;
    const bool unstarted = !live.has_started;
    {
      // Numbers are right before anybody hears that the request has ended.
      const std::lock_guard lock(mutex_);
      count(e.event);
      if (last) {
        if (unstarted) --num_unstarted_;
        take_stats(num_live_ - 1);
      }
    }
    live.sink(std::move(e.event));
    if (!last) continue;
    live_.erase(it);
    const std::lock_guard lock(mutex_);
    if (--num_live_ == 0) drained_.notify_all();
  }
  events.clear();
}

}  // namespace moat
