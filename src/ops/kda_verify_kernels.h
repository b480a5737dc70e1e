// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of kda_verify.h, in kda_cpu.cc and kda_hwy.cc beside the recurrence whose arithmetic they repeat.
#pragma once

#include <cstring>

#include "ops/kda_kernels.h"
#include "ops/kda_verify.h"

namespace moat {

// One row and head of a record tensor. [rows, heads, 3 dim + 1]
struct KdaRecord {
  float *k, *v, *g, *beta_logit;
};
inline KdaRecord record_at(const Tensor& records, int64_t row, int64_t head) {
  const int64_t dim = (records.dim(2) - 1) / 3;
  float* at = records.f32() + row * records.strides[0] + head * records.strides[1];
  return {at, at + dim, at + 2 * dim, at + 3 * dim};
}

inline void record_rows(const KdaVerifyArgs& v, const StateSequence& seq, int64_t head) {
  const KdaArgs& a = v.rows;
  const int64_t heads = a.q.dim(1);
  const auto bytes = static_cast<size_t>(a.q.dim(2)) * sizeof(float);
  for (int64_t t = seq.begin; t < seq.end; ++t) {
    const int64_t at = (t * heads + head) * a.q.dim(2);
    const KdaRecord r = record_at(v.records, t, head);
    std::memcpy(r.k, a.k.f32() + at, bytes);
    std::memcpy(r.v, a.v.f32() + at, bytes);
    std::memcpy(r.g, a.g.f32() + at, bytes);
    *r.beta_logit = a.beta_logits.f32()[t * heads + head];
  }
}

// What the rows of one layer, sequence and head are committed to.
struct CommitTask {
  float* state;
  int64_t begin, end;  // rows of the layer's records
};
inline CommitTask commit_task(const KdaCommitArgs& a, int64_t layer, int64_t seq, int64_t head) {
  const auto s = static_cast<size_t>(seq);
  return {state_of(a.states.at(layer), a.ranges.slots[s], head), a.ranges.begins[s], a.ranges.ends[s]};
}

// Copies the state of the sequence, or zeros at the start of one. [dim, dim]
inline void load_state(const Tensor& states, const StateSequence& seq, int64_t head, float* to) {
  const auto bytes = static_cast<size_t>(states.dim(2) * states.dim(3)) * sizeof(float);
  if (seq.first == 0) {
    std::memset(to, 0, bytes);
  } else {
    std::memcpy(to, state_of(states, seq.slot, head), bytes);
  }
}

// Calls body(task, state) for each task, each thread with memory for one state.
template <class Body>
void for_each_scratch_state(Exec& exec, int64_t tasks, int64_t dim, const Body& body) {
  const int64_t workers = std::min<int64_t>(exec.pool().num_threads(), tasks);
  const Tensor memory = exec.arena().alloc(DType::kF32, {std::max<int64_t>(workers, 1), dim, dim});
  std::atomic<int64_t> next{0};
  exec.pool().parallel_for(workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1))
        body(task, memory.at(worker).f32());
    }
  });
}

int64_t kda_verify_workspace(const KdaVerifyArgs& args, const Exec& exec);

namespace cpu {
void kda_verify(Exec& exec, const KdaVerifyArgs& a);
void kda_commit(Exec& exec, const KdaCommitArgs& a);
void conv_commit(Exec& exec, const ConvCommitArgs& a);
}  // namespace cpu

namespace simd {
void kda_verify(Exec& exec, const KdaVerifyArgs& a);
void kda_commit(Exec& exec, const KdaCommitArgs& a);
}  // namespace simd

}  // namespace moat
