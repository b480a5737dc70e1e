// SPDX-License-Identifier: Apache-2.0
#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "base/cgroup.h"
#include "base/file.h"
#include "base/status.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moat {
namespace {

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// About 20 to 50 microseconds: longer than the gap between two operators of one forward pass, shorter than a time
// slice.
constexpr int kSpins = 1000;

// The control word: how many workers are inside the job, whether it may still be entered, and which job it is.
constexpr uint32_t kRunningMask = 0xFFF;
constexpr uint32_t kOpen = 0x1000;
constexpr uint32_t kStop = 0x2000;
constexpr uint32_t kEpochOne = 0x4000;
constexpr uint32_t kEpochMask = ~(kEpochOne - 1);

}  // namespace

// A job is published by opening the control word and ends when it is closed and no worker is inside. Workers that wake
// too late never enter, so a call costs no more than the workers that took part. Job fields are written only while the
// word is closed and nobody is inside.
struct ThreadPool::State {
  const std::function<void(int64_t, int64_t)>* body = nullptr;
  int64_t count = 0;
  int64_t chunk = 1;
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint32_t> control{0};
  alignas(64) std::atomic<uint32_t> left{0};  // counts "the last worker has left": what the caller sleeps on
  int spins = 0;
  std::vector<std::thread> workers;

  void drain() {
    while (true) {
      const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) return;
      (*body)(begin, std::min(count, begin + chunk));
    }
  }

  // The control word once it shows a job other than `epoch`, or the stop.
  uint32_t await_job(uint32_t epoch) {
    const auto ready = [&](uint32_t word) {
      return (word & kStop) != 0 || ((word & kOpen) != 0 && (word & kEpochMask) != epoch);
    };
    uint32_t word = control.load(std::memory_order_acquire);
    for (int i = 0; i < spins && !ready(word); ++i) {
      pause_cpu();
      word = control.load(std::memory_order_acquire);
    }
    while (!ready(word)) {
      control.wait(word, std::memory_order_acquire);
      word = control.load(std::memory_order_acquire);
    }
    return word;
  }

  void work() {
    uint32_t epoch = 0;
    while (true) {
      uint32_t word = await_job(epoch);
      if ((word & kStop) != 0) return;
      if (!control.compare_exchange_strong(word, word + 1, std::memory_order_acq_rel)) continue;
      epoch = word & kEpochMask;
      drain();
      const uint32_t after = control.fetch_sub(1, std::memory_order_acq_rel) - 1;
      if ((after & (kRunningMask | kOpen)) == 0) {
        left.fetch_add(1, std::memory_order_release);
        left.notify_one();
      }
    }
  }

  void close_and_wait() {
    control.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto empty = [&] { return (control.load(std::memory_order_acquire) & kRunningMask) == 0; };
    for (int i = 0; i < spins; ++i) {
      if (empty()) return;
      pause_cpu();
    }
    while (true) {
      const uint32_t seen = left.load(std::memory_order_acquire);
      if (empty()) return;
      left.wait(seen, std::memory_order_acquire);
    }
  }
};

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  MOAT_CHECK(num_threads >= 1 && num_threads <= static_cast<int>(kRunningMask), "{} threads", num_threads);
  // With more threads than processors a spinning thread keeps a working one from running.
  state_->spins = num_threads <= num_usable_cpus() ? kSpins : 0;
  for (int i = 1; i < num_threads; ++i) state_->workers.emplace_back([state = state_.get()] { state->work(); });
}

ThreadPool::~ThreadPool() {
  state_->control.fetch_or(kStop, std::memory_order_release);
  state_->control.notify_all();
  for (auto& worker : state_->workers) worker.join();
}

int ThreadPool::num_threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (state_->workers.empty() || count <= grain) {
    body(0, count);
    return;
  }
  // A few chunks per thread even out uneven ones without making the shared counter hot.
  constexpr int64_t kChunksPerThread = 4;
  const int64_t grains = (count - 1) / grain + 1;
  State& state = *state_;
  state.body = &body;
  state.count = count;
  state.chunk = std::max<int64_t>(1, grains / (num_threads() * kChunksPerThread)) * grain;
  state.next.store(0, std::memory_order_relaxed);
  const uint32_t epoch = (state.control.load(std::memory_order_relaxed) & kEpochMask) + kEpochOne;
  // Epoch 0 is what a new worker believes to have done already.
  state.control.store((epoch == 0 ? kEpochOne : epoch) | kOpen, std::memory_order_release);
  state.control.notify_all();
  state.drain();
  state.close_and_wait();
}

namespace {

int affinity_cpus() {
  for (size_t cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
    cpu_set_t* set = CPU_ALLOC(cpus);
    const size_t bytes = CPU_ALLOC_SIZE(cpus);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    const int count = known ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (known) return std::max(count, 1);
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// The processors that "QUOTA PERIOD" of a cpu.max file allows, rounded up; 0 if there is no limit.
int quota_cpus(const std::string& path) {
  const auto text = read_file(path);
  if (!text.ok()) return 0;
  int64_t quota = 0, period = 0;
  const char* end = text->data() + text->size();
  const auto first = std::from_chars(text->data(), end, quota);
  if (first.ec != std::errc() || first.ptr == end) return 0;  // "max 100000"
  const auto second = std::from_chars(first.ptr + 1, end, period);
  if (second.ec != std::errc() || quota <= 0 || period <= 0) return 0;
  return static_cast<int>(std::min<int64_t>((quota + period - 1) / period, 1 << 20));
}

}  // namespace

int num_usable_cpus() {
  int cpus = affinity_cpus();
  for (const std::string& directory : cgroup_directories("cpu")) {
    const int quota = quota_cpus(directory + "/cpu.max");
    if (quota > 0) cpus = std::min(cpus, quota);
  }
  return std::max(cpus, 1);
}

}  // namespace moat
