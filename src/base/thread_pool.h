// SPDX-License-Identifier: Apache-2.0
// ThreadPool: a fixed set of workers that run one parallel_for at a time. Work is split by index ranges only, so what is
// computed never depends on the number of threads. The calling thread takes part; num_threads == 1 starts no worker.
// One thread at a time may call parallel_for; the body must not throw and must not call parallel_for itself.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace moat {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);  // >= 1, the caller included
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Calls body(begin, end) over disjoint ranges covering [0, count), each a multiple of `grain` long except the last.
  void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// CPUs this process may use (affinity and cgroup limit), at least 1.
int num_usable_cpus();

}  // namespace moat
