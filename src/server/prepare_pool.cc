// SPDX-License-Identifier: Apache-2.0
#include "server/prepare_pool.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/log.h"

namespace moat {

PreparePool::PreparePool(Limits limits) : limits_(limits) {
  for (int i = 0; i < std::max(1, limits_.num_threads); ++i) {
    threads_.emplace_back([this] { loop(); });
  }
}

PreparePool::~PreparePool() { stop(); }

bool PreparePool::submit(size_t bytes, std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    const bool too_large = queued_bytes_ + bytes > limits_.max_bytes && !jobs_.empty();
    if (stopping_ || jobs_.size() >= limits_.max_jobs || too_large) return false;
    queued_bytes_ += bytes;
    jobs_.emplace_back(bytes, std::move(job));
  }
  wake_.notify_one();
  return true;
}

void PreparePool::stop() {
  std::deque<std::pair<size_t, std::function<void()>>> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(jobs_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void PreparePool::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    auto [bytes, job] = std::move(jobs_.front());
    jobs_.pop_front();
    queued_bytes_ -= bytes;
    lock.unlock();
    try {
      job();  // the responder it owns answers 500 if it is dropped
    } catch (const std::exception& e) {
      log_error("exception while preparing a request what=\"{}\"", e.what());
    }
    job = nullptr;
    lock.lock();
  }
}

}  // namespace moat
