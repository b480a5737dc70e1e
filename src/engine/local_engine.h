// SPDX-License-Identifier: Apache-2.0
// LocalEngine: the real engine on this machine. One thread runs the loop
//     drain inbox -> Scheduler::schedule -> Runner::run -> Scheduler::advance -> publish events
// and owns scheduler, runner and caches; submit() and cancel() only put messages into the inbox.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/thread_pool.h"
#include "engine/draft_length.h"
#include "engine/engine.h"
#include "engine/runner.h"
#include "engine/scheduler.h"
#include "model/dspark.h"
#include "model/kimi.h"
#include "model/loader.h"
#include "plan/capacity.h"

namespace moat {

struct EngineOptions {
  int64_t max_model_len = 0;  // 0: the model's max_position_embeddings
  int64_t max_num_seqs = 64;
  int64_t max_batched_tokens = 2048;
  int64_t max_queued = 256;  // requests that may wait
  int64_t block_size = 64;
  int64_t memory_bytes = 0;  // 0: what the machine or its cgroup has
  double memory_fraction = 0.9;
  bool prefix_cache = true;              // false: every prompt is computed from its first token
  int64_t checkpoint_memory_bytes = -1;  // for states at the end of cached prefixes; -1: chosen by plan_capacity
  int64_t checkpoint_interval = 4096;    // tokens between checkpoints inside a long prompt
  double max_step_seconds = 0;           // prefill is cut so that a step is expected to stay under it; 0: no limit
  bool deterministic = false;  // every row in the row-invariant form of the attention leaves: the same bits whatever
                               // was cached, batched or preempted
  bool reference = false;      // --backend reference
  // Speculation: at most one of these drafts.
  const LoadedDspark* drafter = nullptr;  // checked against the target; must outlive the engine's parts
  bool ngram_drafter = false;
  Drafter* custom_drafter = nullptr;  // of a test or a benchmark; must outlive the engine's parts
  int64_t num_draft_tokens =
      -1;  // a round: -1: as many as pay; 0: none; else always so many (at most what the drafter can)
};

// Everything between a loaded model and running steps, also used by `moat bench engine` and tests without the loop.
struct EngineParts {
  std::unique_ptr<KimiModel> model;
  SchedulerOptions scheduler_options;
  LedgerOptions ledger_options;
  StepCostTracker step_cost;  // unknown where neither max_step_seconds nor a drafter asks for it
  Capacity capacity;
  std::unique_ptr<CacheMemory> caches;
  std::unique_ptr<DsparkModel> draft_model;  // of a DSpark drafter
  std::unique_ptr<Drafter> own_drafter;
  Drafter* drafter = nullptr;  // null: no speculation
  DraftLength draft_length;
  std::unique_ptr<Runner> runner;
  EngineInfo info;
};
// `loaded` and `pool` must outlive the parts.
Result<EngineParts> make_engine_parts(const LoadedModel& loaded, const EngineOptions& options, ThreadPool& pool);

// The steps of a scheduler on a runner. What is learnt from one for the next, what steps cost and how many drafts pay,
// stays with the parts. One thread.
class Stepper {
 public:
  // `parts` and `scheduler` must outlive it.
  Stepper(EngineParts& parts, Scheduler& scheduler) : parts_(parts), scheduler_(scheduler) {}

  void schedule(StepPlan& plan, std::vector<SequenceEvent>& events, double now);
  // Runs what schedule() planned, and appends what became known.
  void run(const StepPlan& plan, std::vector<SequenceEvent>& events);

 private:
  EngineParts& parts_;
  Scheduler& scheduler_;
  double mean_context_ = 0;  // of the last step's rows in decode form
};

class LocalEngine final : public Engine {
 public:
  // Takes over `parts`; starts the loop.
  LocalEngine(EngineParts parts, int64_t max_queued);
  ~LocalEngine() override;  // cancels what is live

  const EngineInfo& info() const override { return parts_.info; }
  EngineStats stats() const override;
  Result<RequestHandle> submit(Request request, EventSink sink) override;
  void cancel(RequestHandle handle) override;
  void flush_cache() override;
  void drain(std::chrono::steady_clock::time_point deadline) override;

  const EngineParts& parts() const { return parts_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Live {
    EventSink sink;
    Clock::time_point submitted, started, first_token;
    bool has_started = false, has_token = false;
  };
  struct Message {
    enum class Kind { kSubmit, kCancel, kFlush };
    Kind kind = Kind::kSubmit;
    SequenceId id = 0;
    Request request;
    Live live;
  };

  void loop();
  bool take_inbox();   // waits while idle; false: time to stop
  double now() const;  // seconds since the engine started
  void note_started(const StepPlan& plan);
  void take_stats(int64_t num_live);  // of the scheduler; mutex_ is held
  void publish(std::vector<SequenceEvent>& events);
  void count(const TokenEvent& event);
  Status check_request(const Request& request) const;

  EngineParts parts_;
  const int64_t max_queued_;
  const Clock::time_point started_ = Clock::now();
  Scheduler scheduler_;                        // engine thread
  Stepper stepper_;                            // engine thread
  std::unordered_map<SequenceId, Live> live_;  // engine thread

  mutable std::mutex mutex_;
  std::condition_variable wake_;     // inbox, stop
  std::condition_variable drained_;  // num_live_ == 0
  std::vector<Message> inbox_;
  EngineStats stats_;
  int64_t num_live_ = 0;       // submitted and not ended
  int64_t num_unstarted_ = 0;  // of them, not yet scheduled
  SequenceId next_id_ = 1;
  bool draining_ = false;
  bool stopping_ = false;
  bool cancel_all_ = false;

  std::thread thread_;
};

}  // namespace moat
