// SPDX-License-Identifier: Apache-2.0
#include "engine/sim_engine.h"

#include <algorithm>
#include <utility>

#include "engine/sampling_check.h"

namespace moat {
namespace {

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// Plausible, repeatable numbers: the chosen token first, its neighbours after it, each half as likely.
SampledToken sampled(int32_t id, int32_t num_logprobs, int32_t vocab_size) {
  SampledToken token{.token_id = id};
  if (num_logprobs < 0) return token;
  token.logprob = -0.125F * static_cast<float>(1 + id % 7);
  for (int32_t i = 0; i < num_logprobs; ++i) {
    token.top.push_back({(id + i) % vocab_size, token.logprob - 0.6931472F * static_cast<float>(i)});
  }
  return token;
}

}  // namespace

struct SimEngine::Sequence {
  RequestHandle handle = 0;
  Request request;
  EventSink sink;
  Script script;
  size_t position = 0;  // in script.ids; its size is the eos after the script
  int32_t num_generated = 0;
  bool running = false;
  bool cancelled = false;
  Clock::time_point submitted, started, first_token, last_token, due;
  Clock::time_point deadline = Clock::time_point::max();

  bool is_over(Clock::time_point now) const { return cancelled || now >= deadline; }
};

struct SimEngine::Delivery {
  Sequence* sequence = nullptr;
  std::unique_ptr<Sequence> ended;  // set for the last event
  TokenEvent event;
};

SimEngine::SimEngine(Options options) : options_(std::move(options)) {
  stats_.slots_total = options_.info.max_num_seqs;
  thread_ = std::thread([this] { loop(); });
}

SimEngine::~SimEngine() {
  drain(Clock::now());
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

EngineStats SimEngine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  for (const auto& sequence : live_) ++(sequence->running ? stats.num_running : stats.num_waiting);
  stats.slots_used = stats.num_running;
  return stats;
}

Status SimEngine::check(const Request& request) const {
  const EngineInfo& info = options_.info;
  const auto prompt = static_cast<int64_t>(request.prompt_ids.size());
  if (prompt == 0) return invalid_argument("the prompt has 0 tokens, expected at least 1");
  if (prompt + 1 > info.max_model_len) {
    return invalid_argument("prompt of {} tokens + 1 to generate > context of {} tokens", prompt, info.max_model_len);
  }
  if (request.sampling.max_tokens <= 0) {
    return invalid_argument("max_tokens is {}, expected at least 1", request.sampling.max_tokens);
  }
  for (const int32_t id : request.prompt_ids) {
    if (id < 0 || id >= info.vocab_size) return invalid_argument("prompt id {} is not in [0, {})", id, info.vocab_size);
  }
  return check_sampling(request.sampling, info.vocab_size);
}

Result<Engine::RequestHandle> SimEngine::submit(Request request, EventSink sink) {
  MOAT_RETURN_IF_ERROR(check(request));
  auto sequence = std::make_unique<Sequence>();
  sequence->script = options_.script(request);
  sequence->request = std::move(request);
  sequence->sink = std::move(sink);
  sequence->submitted = Clock::now();
  if (const double limit = sequence->request.timeout_seconds; limit > 0) {
    sequence->deadline =
        sequence->submitted + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(limit));
  }
  const std::lock_guard lock(mutex_);
  if (draining_ || stopping_) return unavailable("the engine is shutting down");
  const auto limit = static_cast<size_t>(options_.info.max_num_seqs) + static_cast<size_t>(options_.info.max_queued);
  if (live_.size() >= limit) {
    return resource_exhausted("the queue is full: {} requests live, at most {} run and {} wait", live_.size(),
                              options_.info.max_num_seqs, options_.info.max_queued);
  }
  sequence->handle = next_handle_++;
  const RequestHandle handle = sequence->handle;
  const auto place = std::upper_bound(live_.begin(), live_.end(), sequence, [](const auto& a, const auto& b) {
    return a->request.priority < b->request.priority;
  });
  live_.insert(place, std::move(sequence));
  wake_.notify_all();
  return handle;
}

void SimEngine::cancel(RequestHandle handle) {
  const std::lock_guard lock(mutex_);
  for (const auto& sequence : live_) {
    if (sequence->handle == handle) sequence->cancelled = true;
  }
  wake_.notify_all();
}

// There is nothing to forget: scripts say what counts as cached.
void SimEngine::flush_cache() {
  const std::lock_guard lock(mutex_);
  ++num_flushes_;
}

int64_t SimEngine::num_flushes() const {
  const std::lock_guard lock(mutex_);
  return num_flushes_;
}

void SimEngine::drain(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  const auto empty = [this] { return live_.empty(); };
  if (idle_.wait_until(lock, deadline, empty)) return;
  for (const auto& sequence : live_) sequence->cancelled = true;
  wake_.notify_all();
  idle_.wait(lock, empty);
}

void SimEngine::loop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const Clock::time_point now = Clock::now();
    admit(now);
    std::vector<Delivery> deliveries;
    step(now, deliveries);
    if (!deliveries.empty()) {
      ++stats_.steps_total;
      lock.unlock();
      for (Delivery& delivery : deliveries) delivery.sequence->sink(std::move(delivery.event));
      deliveries.clear();  // the sinks of ended sequences go before drain() can return
      lock.lock();
      if (live_.empty()) idle_.notify_all();
      continue;
    }
    if (live_.empty()) idle_.notify_all();
    Clock::time_point next = Clock::time_point::max();
    for (const auto& sequence : live_) {
      next = std::min(next, sequence->deadline);
      if (sequence->running) next = std::min(next, sequence->due);
    }
    if (next == Clock::time_point::max()) {
      wake_.wait(lock);
    } else {
      wake_.wait_until(lock, next);
    }
  }
}

void SimEngine::admit(Clock::time_point now) {
  auto running = std::count_if(live_.begin(), live_.end(), [](const auto& sequence) { return sequence->running; });
  for (const auto& sequence : live_) {
    if (running >= options_.info.max_num_seqs) return;
    if (sequence->running || sequence->is_over(now)) continue;
    sequence->running = true;
    sequence->started = now;
    sequence->due = now + sequence->script.ttft;
    stats_.prompt_tokens_total += static_cast<int64_t>(sequence->request.prompt_ids.size());
    stats_.cached_tokens_total += sequence->script.num_cached_tokens;
    ++running;
  }
}

void SimEngine::step(Clock::time_point now, std::vector<Delivery>& deliveries) {
  for (auto& sequence : live_) {
    if (!sequence->is_over(now) && (!sequence->running || sequence->due > now)) continue;
    Delivery delivery;
    delivery.sequence = sequence.get();
    delivery.event.num_prompt_tokens = static_cast<int32_t>(sequence->request.prompt_ids.size());
    delivery.event.num_cached_tokens = sequence->script.num_cached_tokens;
    if (advance(*sequence, now, delivery.event)) {
      count_finish(delivery.event.finish);
      delivery.ended = std::move(sequence);
    }
    deliveries.push_back(std::move(delivery));
  }
  std::erase(live_, nullptr);
}

bool SimEngine::advance(Sequence& sequence, Clock::time_point now, TokenEvent& event) {
  if (sequence.cancelled) {
    event.finish = FinishReason::kCancelled;
  } else if (now >= sequence.deadline) {
    event.finish = FinishReason::kTimeout;
    event.error = deadline_exceeded("the request's {} s are over while it {}, {} tokens generated",
                                    sequence.request.timeout_seconds, sequence.running ? "runs" : "waits",
                                    sequence.num_generated);
  } else if (sequence.script.reject) {
    event.finish = FinishReason::kRejected;
    event.error = resource_exhausted("rejected by the script");
  } else {
    for (int32_t i = 0; i < std::max(1, sequence.script.tokens_per_step); ++i) {
      if (emit_token(sequence, event)) break;
    }
    if (sequence.first_token == Clock::time_point{} && !event.tokens.empty()) sequence.first_token = now;
    sequence.last_token = now;
    sequence.due = now + sequence.script.tpot;
  }
  if (event.finish == FinishReason::kNone) return false;
  const Clock::time_point started = sequence.running ? sequence.started : now;
  event.timings.queue_seconds = seconds(started - sequence.submitted);
  if (sequence.first_token != Clock::time_point{}) {
    event.timings.prefill_seconds = seconds(sequence.first_token - started);
    event.timings.decode_seconds = seconds(sequence.last_token - sequence.first_token);
  }
  return true;
}

bool SimEngine::emit_token(Sequence& sequence, TokenEvent& event) {
  const SamplingParams& sampling = sequence.request.sampling;
  if (sequence.script.fail_after >= 0 && sequence.num_generated >= sequence.script.fail_after) {
    event.finish = FinishReason::kError;
    event.error = internal_error("failed by the script after {} tokens", sequence.num_generated);
    return true;
  }
  const int32_t id = next_token(sequence);
  event.tokens.push_back(sampled(id, sampling.num_logprobs, options_.info.vocab_size));
  ++sequence.num_generated;
  ++stats_.generated_tokens_total;
  const bool constraint_stops =
      sequence.request.constraint != nullptr && sequence.request.constraint->accept(id) == ConstraintVerdict::kStop;
  const auto total = static_cast<int64_t>(sequence.request.prompt_ids.size()) + sequence.num_generated;
  if (is_stop_token(sequence.request.sampling, options_.info.eos_token_id, id)) {
    event.finish = FinishReason::kStop;
    event.stop_token_id = id;
  } else if (constraint_stops) {
    event.finish = FinishReason::kStop;
  } else if (sequence.num_generated >= sampling.max_tokens || total >= options_.info.max_model_len) {
    event.finish = FinishReason::kLength;
  }
  return event.finish != FinishReason::kNone;
}

int32_t SimEngine::next_token(Sequence& sequence) const {
  const std::vector<int32_t>& ids = sequence.script.ids;
  const int32_t eos = options_.info.eos_token_id;
  for (size_t tries = 0; tries <= ids.size(); ++tries) {
    const bool at_end = sequence.position >= ids.size();
    const int32_t id = at_end ? eos : ids[sequence.position];
    sequence.position = at_end ? 0 : sequence.position + 1;
    if (at_end && sequence.request.sampling.ignore_eos) continue;
    const bool masked = sequence.num_generated < sequence.request.sampling.min_tokens &&
                        is_stop_token(sequence.request.sampling, options_.info.eos_token_id, id);
    if (!masked) return id;
  }
  return eos == 0 ? 1 : 0;  // the script has nothing but stop ids
}

void SimEngine::count_finish(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop: ++stats_.finished_stop_total; break;
    case FinishReason::kLength: ++stats_.finished_length_total; break;
    case FinishReason::kCancelled: ++stats_.cancelled_total; break;
    case FinishReason::kTimeout: ++stats_.timeouts_total; break;
    case FinishReason::kRejected: ++stats_.rejected_total; break;
    case FinishReason::kError: ++stats_.errors_total; break;
    case FinishReason::kNone: break;
  }
}

}  // namespace moat
