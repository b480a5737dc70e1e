// SPDX-License-Identifier: Apache-2.0
// Generation: one completion call from its body to the last byte of its answer. The body is prepared on the pool; all
// state after that is touched only on the connection's strand, where the engine's events arrive through
// HttpResponder::post.
//
//   begin (strand) -> prepare (pool) -> launch (strand): submits one engine request a choice
//     -> on_event (strand) ... -> complete: answer or end of stream, access line
//  1. One answer: an error status before anything was sent, an error event after.
//  2. A hang-up at any point cancels every engine request; the generation lives on until their last events have come.
//  3. The first choice that fails fails the call and cancels the others.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "server/exchange.h"
#include "server/metrics.h"
#include "server/openai_request.h"
#include "server/openai_response.h"
#include "server/prepare_pool.h"
#include "server/reply_stream.h"
#include "text/tokenizer.h"

namespace moat {

// How many generations live, for an orderly stop.
class LiveCount {
 public:
  void add();
  void remove();
  bool wait_for_zero(std::chrono::milliseconds limit);

 private:
  std::mutex mutex_;
  std::condition_variable zero_;
  int64_t count_ = 0;
};

// What all generations use; outlives them.
struct GenerationContext {
  Engine& engine;
  const Tokenizer& tokenizer;
  const ServedModel& model;
  Metrics& metrics;
  LiveCount& live;
  ReasoningField reasoning_field = ReasoningField::kReasoningContent;
  std::string fingerprint;
};

class Generation : public std::enable_shared_from_this<Generation> {
 public:
  // On the strand. `chat`: the body is a chat completion's, else a completion's.
  static void begin(const GenerationContext& context, PreparePool& pool, Exchange exchange, std::string body,
                    bool chat);

  Generation(const GenerationContext& context, Exchange exchange);
  ~Generation();

 private:
  using Clock = std::chrono::steady_clock;
  struct Choice {
    explicit Choice(ReplyStream stream_in) : stream(std::move(stream_in)) {}
    ReplyStream stream;
    std::optional<Engine::RequestHandle> handle;  // once the engine has accepted it
    Clock::time_point last_token;
    RequestTimings timings;
    int64_t accepted_drafts = 0, rejected_drafts = 0;
  };

  void prepare(std::string body, bool chat);
  void launch(std::vector<Request> requests);
  void post_event(int32_t index, TokenEvent event);  // on the engine's thread
  void take_events();
  void on_event(int32_t index, TokenEvent event);
  void observe_tokens(Choice& choice, size_t count);
  void deliver(int32_t index, ReplyStream::Update update);
  void flush();
  void on_hangup();
  void fail(const ApiError& error);
  void cancel_all();
  void complete();
  void log_access() const;
  Usage usage() const;
  Json timings() const;

  const GenerationContext& context_;
  const Exchange exchange_;
  const std::string id_;
  ApiCall call_;  // set by prepare(), before launch() is posted; constant from then on
  std::vector<Choice> choices_;
  std::optional<ChunkWriter> chunks_;  // if streaming
  std::optional<WholeWriter> whole_;   // else
  std::mutex events_mutex_;
  std::vector<std::pair<int32_t, TokenEvent>> events_;  // choice and event, not yet taken by the strand
  std::string unwritten_;                               // of the stream, written once all events at hand are taken
  size_t num_open_ = 0;                                 // choices whose last event is still to come
  bool stream_started_ = false;
  bool gone_ = false;    // the peer hung up
  bool failed_ = false;  // an error was sent
  int status_ = 200;
  std::string finish_;  // for the access line: of the first choice, or why there is none
  std::optional<double> ttft_;
};

}  // namespace moat
