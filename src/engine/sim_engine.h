// SPDX-License-Identifier: Apache-2.0
// SimEngine: an Engine that plays scripts instead of running a model, for server and load tests. One thread of its own;
// time to first token, time per step and faults are set per request. It keeps every promise of engine.h (bounded queue,
// cancel, timeouts, drain, one final event), asks constraints accept() but not mask(): a script says what comes next.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace moat {

class SimEngine final : public Engine {
 public:
  struct Script {
    std::vector<int32_t>
        ids;  // what the model would say; at its end comes the eos id. Goes round when eos may not end it.
    std::chrono::microseconds ttft{0};  // from the moment the request runs to its first token
    std::chrono::microseconds tpot{0};  // between steps
    int32_t tokens_per_step = 1;        // > 1: as an engine that drafts
    int32_t num_cached_tokens = 0;      // reported as restored
    int32_t fail_after = -1;            // >= 0: kError after that many tokens
    bool reject = false;                // kRejected instead of running
  };
  struct Options {
    EngineInfo info;  // max_num_seqs and max_queued bound what runs and waits
    std::function<Script(const Request&)> script;
  };

  explicit SimEngine(Options options);
  ~SimEngine() override;  // cancels what lives
  SimEngine(const SimEngine&) = delete;
  SimEngine& operator=(const SimEngine&) = delete;

  const EngineInfo& info() const override { return options_.info; }
  EngineStats stats() const override;
  Result<RequestHandle> submit(Request request, EventSink sink) override;
  void cancel(RequestHandle handle) override;
  void flush_cache() override;
  void drain(std::chrono::steady_clock::time_point deadline) override;

  int64_t num_flushes() const;  // calls of flush_cache()

 private:
  using Clock = std::chrono::steady_clock;
  struct Sequence;
  struct Delivery;

  Status check(const Request& request) const;
  void loop();
  void admit(Clock::time_point now);
  void step(Clock::time_point now, std::vector<Delivery>& deliveries);
  bool advance(Sequence& sequence, Clock::time_point now, TokenEvent& event);  // true: it ended
  bool emit_token(Sequence& sequence, TokenEvent& event);                      // true: it ended
  int32_t next_token(Sequence& sequence) const;
  void count_finish(FinishReason reason);

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;  // the loop: something was submitted, cancelled or is to stop
  std::condition_variable idle_;  // drain(): nothing lives any more
  std::vector<std::unique_ptr<Sequence>>
      live_;  // in order of priority and arrival; the first max_num_seqs admitted run
  RequestHandle next_handle_ = 1;
  EngineStats stats_;
  int64_t num_flushes_ = 0;
  bool draining_ = false;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace moat
