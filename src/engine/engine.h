// SPDX-License-Identifier: Apache-2.0
// Engine: requests in, token events out. The public face for server and command line; implementations are the real
// engine (local_engine.h) and the scripted one for server and load tests (sim_engine.h). All members may be called from
// any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/request.h"

namespace moat {

// Facts that do not change while the engine lives.
struct EngineInfo {
  int32_t vocab_size = 0;
  int32_t max_model_len = 0;  // prompt + generated tokens of one request
  int32_t max_num_seqs = 0;   // that run at once
  int32_t max_queued = 0;     // that may wait
  int32_t eos_token_id = 0;   // from the model's config
  std::string backend;        // "cpu[AVX3]", "reference", "sim"
};

// A snapshot for /metrics and tests.
struct EngineStats {
  int64_t num_running = 0, num_waiting = 0;
  int64_t blocks_total = 0, blocks_used = 0;  // pages of the MLA cache; used: by live requests
  int64_t blocks_cached = 0;                  // pages kept for prefixes that no live request uses
  int64_t slots_total = 0, slots_used = 0;    // recurrent-state slots; used: by live requests
  int64_t checkpoints = 0;                    // slots that hold the state at the end of a cached prefix
  int64_t steps_total = 0;
  int64_t prompt_tokens_total = 0, cached_tokens_total = 0, generated_tokens_total = 0;
  int64_t finished_stop_total = 0, finished_length_total = 0, cancelled_total = 0, rejected_total = 0, errors_total = 0;
  int64_t timeouts_total = 0;
  int64_t preemptions_total = 0;
  int64_t checkpoints_saved_total = 0, checkpoints_restored_total = 0, checkpoints_evicted_total = 0;
  int64_t draft_rounds_total = 0;    // steps of a sequence in which drafts were verified
  int64_t drafted_tokens_total = 0;  // verified ones, and of them those that became part of a reply
  int64_t accepted_tokens_total = 0;
  std::vector<int64_t> drafted_at_total, accepted_at_total;  // [position in the round]
};

class Engine {
 public:
  using RequestHandle = uint64_t;
  // Called on the engine's thread, in order, never after the last event. Must return quickly and not call back into the
  // engine; hand the event to a queue.
  using EventSink = std::function<void(TokenEvent)>;

  virtual ~Engine() = default;

  virtual const EngineInfo& info() const = 0;
  virtual EngineStats stats() const = 0;

  // Queues the request. Refuses at once, with a message that shows the arithmetic, what is malformed or can never fit
  // (kInvalidArgument), a full queue (kResourceExhausted) and a draining engine (kUnavailable); the sink is then never
  // called.
  virtual Result<RequestHandle> submit(Request request, EventSink sink) = 0;

  // Ends the request with kCancelled within a step, wherever it is. Unknown or finished handles are ignored.
  virtual void cancel(RequestHandle handle) = 0;

  // Forgets every cached prefix: requests submitted after it returns restore nothing that was computed before. Live
  // requests go on undisturbed.
  virtual void flush_cache() = 0;

  // Refuses new requests from now on, waits until the live ones have ended or `deadline` passes, then cancels the rest
  // and returns when none is left.
  virtual void drain(std::chrono::steady_clock::time_point deadline) = 0;
};

}  // namespace moat
