// SPDX-License-Identifier: Apache-2.0
// PreparePool: one or two threads for the text work of a request (JSON, rendering, tokenizing), so that a long prompt
// never holds up the I/O threads. The queue is bounded in jobs and in bytes of request bodies.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moat {

class PreparePool {
 public:
  struct Limits {
    int num_threads = 2;
    size_t max_jobs = 1024;
    size_t max_bytes = 256 << 20;  // a single job may exceed it when the queue is empty
  };

  explicit PreparePool(Limits limits);
  ~PreparePool();  // stop()
  PreparePool(const PreparePool&) = delete;
  PreparePool& operator=(const PreparePool&) = delete;

  bool submit(size_t bytes, std::function<void()> job);  // false: full or stopped; any thread
  void stop();                                           // drops what waits, returns when what runs has ended

 private:
  void loop();

  const Limits limits_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::pair<size_t, std::function<void()>>> jobs_;
  size_t queued_bytes_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace moat
