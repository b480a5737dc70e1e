// SPDX-License-Identifier: Apache-2.0
#include "server/generation.h"

#include <cmath>
#include <utility>

#include "base/log.h"
#include "server/api_error.h"
#include "server/random_id.h"
#include "server/request_body.h"

namespace moat {
namespace {

double seconds(std::chrono::steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

int64_t unix_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

const char* failure_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kCancelled: return "cancelled";
    case FinishReason::kTimeout: return "timeout";
    case FinishReason::kRejected: return "rejected";
    default: return "error";
  }
}

// For the access line of a call that ended before the engine had a say.
const char* refusal_name(int status) {
  if (status < 500) return "refused";
  return status == 503 ? "rejected" : status == 504 ? "timeout" : "error";
}

ApiError failure(FinishReason reason, const Status& status) {
  if (reason == FinishReason::kCancelled) {
    return {.status = 503, .message = "the request was cancelled: the server is shutting down", .code = "cancelled"};
  }
  if (status.ok()) return {.status = 500, .message = "the request failed", .code = "internal_error"};
  return api_error(status);
}

}  // namespace

void LiveCount::add() {
  const std::lock_guard lock(mutex_);
  ++count_;
}

void LiveCount::remove() {
  const std::lock_guard lock(mutex_);
  if (--count_ == 0) zero_.notify_all();
}

bool LiveCount::wait_for_zero(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return zero_.wait_for(lock, limit, [this] { return count_ == 0; });
}

Generation::Generation(const GenerationContext& context, Exchange exchange)
    : context_(context),
      exchange_(std::move(exchange)),
      id_(random_id(exchange_.path == "/v1/completions" ? "cmpl-" : "chatcmpl-")) {
  context_.live.add();
}

Generation::~Generation() { context_.live.remove(); }

void Generation::begin(const GenerationContext& context, PreparePool& pool, Exchange exchange, std::string body,
                       bool chat) {
  // Shared by the prepare job, the engine's sinks and the hang-up callback, whichever ends last.
  const auto self = std::make_shared<Generation>(context, std::move(exchange));
  self->exchange_.responder->on_hangup([weak = std::weak_ptr(self)] {
    if (const auto strong = weak.lock()) strong->on_hangup();
  });
  const size_t bytes = body.size();
  if (pool.submit(bytes, [self, body = std::move(body), chat]() mutable { self->prepare(std::move(body), chat); }))
    return;
  self->fail(prepare_pool_full());
  self->complete();
}

void Generation::prepare(std::string body, bool chat) {
  const EngineInfo& info = context_.engine.info();
  std::optional<ApiError> error;
  std::vector<Request> requests;
  const EngineStats stats = context_.engine.stats();
  Json json;
  if (stats.num_waiting >= info.max_queued && stats.num_running >= info.max_num_seqs) {
    // No use in tokenizing what will be refused.
    error = ApiError{
        .status = 503,
        .message = fmt::format("the queue is full: {} requests run, {} wait", stats.num_running, stats.num_waiting),
        .code = "overloaded"};
  } else {
    error = parse_body(body, json);
  }
  if (!error) {
    error = chat ? parse_chat_call(json, context_.model, info, context_.tokenizer, call_)
                 : parse_completion_call(json, context_.model, info, context_.tokenizer, call_);
  }
  if (!error) requests = make_engine_requests(call_, id_, info, context_.tokenizer);
  // std::function wants copyable captures; a Request is not.
  auto shared = std::make_shared<std::vector<Request>>(std::move(requests));
  exchange_.responder->post([self = shared_from_this(), error, shared] {
    if (!error) return self->launch(std::move(*shared));
    self->fail(*error);
    self->complete();
  });
}

void Generation::launch(std::vector<Request> requests) {
  if (gone_) return complete();
  if (call_.timeout_seconds > 0) {
    // The client counts from its call; the engine gets what waiting and tokenizing left, in whole milliseconds.
    const double left = call_.timeout_seconds - exchange_.seconds();
    if (left <= 0) {
      fail(api_error(deadline_exceeded("the request's {} s were over before it was tokenized", call_.timeout_seconds)));
      return complete();
    }
    for (Request& request : requests) request.timeout_seconds = std::ceil(left * 1e3) / 1e3;
  }
  choices_.reserve(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) choices_.emplace_back(ReplyStream(call_, context_.tokenizer));
  ResponseHead head{.id = id_,
                    .created = unix_seconds(),
                    .fingerprint = context_.fingerprint,
                    .reasoning_field = context_.reasoning_field};
  if (call_.stream) {
    chunks_.emplace(call_, context_.tokenizer, std::move(head));
  } else {
    whole_.emplace(call_, context_.tokenizer, std::move(head));
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    Result<Engine::RequestHandle> handle = context_.engine.submit(
        std::move(requests[i]),
        [self = shared_from_this(), index](TokenEvent event) { self->post_event(index, std::move(event)); });
    if (!handle.ok()) {
      fail(api_error(handle.status()));
      break;
    }
    choices_[i].handle = *handle;
    ++num_open_;
  }
  if (num_open_ == 0) return complete();
  if (failed_ || !call_.stream) return;
  stream_started_ = true;
  exchange_.responder->start_stream(
      {.content_type = "text/event-stream; charset=utf-8",
       .headers = {
           {"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}, {"X-Request-Id", exchange_.request_id}}});
}

// One task takes all events that are there: an engine that is faster than the server fills a list, not the strand, and
// what the events say is written as one piece.
void Generation::post_event(int32_t index, TokenEvent event) {
  {
    const std::lock_guard lock(events_mutex_);
    events_.emplace_back(index, std::move(event));
    if (events_.size() > 1) return;  // the task that takes them is posted
  }
  exchange_.responder->post([self = shared_from_this()] { self->take_events(); });
}

void Generation::take_events() {
  std::vector<std::pair<int32_t, TokenEvent>> events;
  {
    const std::lock_guard lock(events_mutex_);
    events.swap(events_);
  }
  for (auto& [index, event] : events) on_event(index, std::move(event));
  flush();
}

void Generation::on_event(int32_t index, TokenEvent event) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  const FinishReason reason = event.finish;
  if (gone_ && reason == FinishReason::kNone) return;  // what was under way when the peer left
  const Status error = event.error;
  if (!event.tokens.empty()) observe_tokens(choice, event.tokens.size());
  if (reason != FinishReason::kNone) choice.timings = event.timings;
  choice.accepted_drafts += event.num_accepted_drafts;
  choice.rejected_drafts += event.num_drafted_tokens - event.num_accepted_drafts;
  ReplyStream::Update update = choice.stream.feed(std::move(event));
  if (reason != FinishReason::kNone) {
    const std::string name = update.finish_reason.empty() ? failure_name(reason) : update.finish_reason;
    context_.metrics.count_finished(name);
    context_.metrics.observe_queue(choice.timings.queue_seconds);
    if (finish_.empty()) finish_ = name;
    --num_open_;
  }
  if (choice.stream.ended() && update.finish_reason.empty()) {
    fail(failure(reason, error));
  } else if (!failed_ && !gone_) {
    deliver(index, std::move(update));
  }
  if (num_open_ == 0) complete();
}

void Generation::observe_tokens(Choice& choice, size_t count) {
  const Clock::time_point now = Clock::now();
  if (choice.last_token == Clock::time_point{}) {
    const double ttft = seconds(now - exchange_.received);
    if (!ttft_) ttft_ = ttft;
    context_.metrics.observe_first_token(ttft);
    --count;  // tokens that came with the first have no interval of their own
    if (count > 0) context_.metrics.observe_inter_token(0, count);
  } else {
    context_.metrics.observe_inter_token(seconds(now - choice.last_token) / static_cast<double>(count), count);
  }
  choice.last_token = now;
}

void Generation::deliver(int32_t index, ReplyStream::Update update) {
  if (chunks_) {
    unwritten_ += chunks_->write(index, update, usage());
    return;
  }
  whole_->add(index, std::move(update));
}

void Generation::flush() {
  if (!unwritten_.empty()) exchange_.responder->write(std::exchange(unwritten_, {}));
}

void Generation::on_hangup() {
  gone_ = true;
  cancel_all();
}

void Generation::fail(const ApiError& error) {
  if (failed_ || gone_) return;
  failed_ = true;
  status_ = error.status;
  if (finish_.empty()) finish_ = refusal_name(error.status);
  cancel_all();
  if (stream_started_) {
    unwritten_ += sse_event(error_json(error));
    flush();
    exchange_.responder->end();
  } else {
    exchange_.send(error_response(error));
  }
}

void Generation::cancel_all() {
  for (const Choice& choice : choices_) {
    if (choice.handle && !choice.stream.ended()) context_.engine.cancel(*choice.handle);
  }
}

void Generation::complete() {
  if (!failed_ && !gone_) {
    const Json times = call_.timings ? timings() : Json();
    const Json* shown_times = call_.timings ? &times : nullptr;
    if (chunks_) {
      unwritten_ += chunks_->usage_chunk(usage(), shown_times) + kSseDone;
      flush();
      exchange_.responder->end();
    } else {
      exchange_.send({.body = whole_->finish(usage(), shown_times).dump()});
    }
    context_.metrics.observe_request(exchange_.seconds());
  }
  log_access();
}

void Generation::log_access() const {
  const Usage used = usage();
  RequestTimings times;
  if (!choices_.empty()) times = choices_.front().timings;
  const int64_t intervals = choices_.empty() ? 0 : choices_.front().stream.counts().completion - 1;
  log_info(
      "request id={} method={} path={} status={} completion_id={} stream={} prompt={} cached={} completion={} "
      "reasoning={} "
      "queue_ms={:.1f} ttft_ms={:.1f} tpot_ms={:.2f} ms={:.1f} finish={}",
      exchange_.request_id, exchange_.method, exchange_.path, gone_ && !failed_ ? 499 : status_, id_, call_.stream,
      used.prompt, used.cached, used.completion, used.reasoning, times.queue_seconds * 1e3, ttft_.value_or(0) * 1e3,
      intervals > 0 ? times.decode_seconds * 1e3 / static_cast<double>(intervals) : 0.0, exchange_.seconds() * 1e3,
      gone_ ? "cancelled" : finish_);
}

Usage Generation::usage() const {
  Usage usage;
  for (const PreparedPrompt& prompt : call_.prompts) usage.prompt += static_cast<int64_t>(prompt.ids.size());
  for (size_t i = 0; i < choices_.size(); ++i) {
    const ReplyStream::Counts& counts = choices_[i].stream.counts();
    // Choices of one prompt share it: it is counted once.
    if (i % static_cast<size_t>(call_.num_choices) == 0) usage.cached += counts.cached;
    usage.completion += counts.completion;
    usage.reasoning += counts.reasoning;
    usage.accepted_drafts += choices_[i].accepted_drafts;
    usage.rejected_drafts += choices_[i].rejected_drafts;
  }
  return usage;
}

Json Generation::timings() const {
  const Choice& choice = choices_.front();
  const RequestTimings& times = choice.timings;
  const int32_t count = choice.stream.counts().completion;
  const double rate = times.decode_seconds > 0 ? static_cast<double>(count - 1) / times.decode_seconds : 0;
  return Json::object({{"queue_ms", times.queue_seconds * 1e3},
                       {"prompt_n", static_cast<int64_t>(call_.prompts.front().ids.size())},
                       {"cache_n", choice.stream.counts().cached},
                       {"prompt_ms", times.prefill_seconds * 1e3},
                       {"predicted_n", count},
                       {"predicted_ms", times.decode_seconds * 1e3},
                       {"predicted_per_second", rate}});
}

}  // namespace moat
