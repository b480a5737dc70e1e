// SPDX-License-Identifier: Apache-2.0
// The CPU kernels of kda.h: portable in kda_cpu.cc and kda_chunked_cpu.cc, Highway in kda_hwy.cc and
// kda_chunked_hwy.cc.
#pragma once

#include <algorithm>
#include <atomic>

#include "ops/kda.h"

namespace moat {

// Where one sequence of a call is.
struct StateSequence {
  int64_t begin, end;  // rows of the call's tensors
  int64_t slot;
  int64_t first;  // absolute position of row `begin`
};

inline StateSequence state_sequence(const StateSequences& seqs, int64_t s) {
  const auto i = static_cast<size_t>(s);
  return {seqs.cu_seqlens[i] - seqs.cu_seqlens[0], seqs.cu_seqlens[i + 1] - seqs.cu_seqlens[0], seqs.slots[i],
          seqs.first_positions[i]};
}

// The state of one slot and head. [dim, dim]
inline float* state_of(const Tensor& states, int64_t slot, int64_t head) {
  return states.f32() + slot * states.strides[0] + head * states.dim(2) * states.dim(3);
}

// Rows of a query tile of the chunked form: decays between rows are multiplied up from the start of the tile, so every
// factor is at most 1 whatever the decay.
constexpr int64_t kKdaTile = 16;

// Decay factors and their products below this count as zero: beside a term of weight 1 nothing that small shows, and products
// of two of them with keys would be subnormal, which costs a hundred cycles an operation.
constexpr float kTinyDecay = 1e-16F;
inline float flush_tiny(float decay) { return decay < kTinyDecay ? 0.0F : decay; }

// Temporaries of one chunk and head, one such block a thread.
struct KdaChunkScratch {
  float* alpha;      // [chunk, dim] decay factors exp(g)
  float* q_tile;     // [chunk, dim] q times the decay since the start of its tile
  float* k_tile;     // [chunk, dim] k likewise
  float* q_chunk;    // [chunk, dim] q times the decay since the start of the chunk
  float* k_chunk;    // [chunk, dim] k likewise
  float* k_end;      // [chunk, dim] k times the decay to the end of the chunk
  float* u;          // [chunk, dim] the corrected values
  float* a;          // [chunk, chunk] beta_i k_i^T decay(m, i) k_m below the diagonal
  float* p;          // [chunk, chunk] q_i^T decay(m, i) k_m on and below the diagonal
  float* beta;       // [chunk]
  float* running;    // [dim] products of decays
  float* end_decay;  // [dim] decay of the whole chunk

  static int64_t floats(int64_t dim) {
    return 7 * kKdaChunk * padded(dim) + 2 * kKdaChunk * kKdaChunk + kKdaChunk + 2 * padded(dim);
  }
  static KdaChunkScratch at(float* memory, int64_t dim) {
    const int64_t rows = kKdaChunk * padded(dim);
    const int64_t square = kKdaChunk * kKdaChunk;
    KdaChunkScratch s{};
    for (float** part : {&s.alpha, &s.q_tile, &s.k_tile, &s.q_chunk, &s.k_chunk, &s.k_end, &s.u}) {
      *part = memory;
      memory += rows;
    }
    s.a = memory;
    s.p = s.a + square;
    s.beta = s.p + square;
    s.running = s.beta + kKdaChunk;
    s.end_decay = s.running + padded(dim);
    return s;
  }

 private:
  static int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }
};

// Calls body(sequence, head, scratch) for every sequence with rows and every head, each thread with its own scratch
// memory.
template <class Body>
void for_each_chunked_head(Exec& exec, const KdaArgs& args, const Body& body) {
  const int64_t heads = args.q.dim(1);
  const int64_t dim = args.q.dim(2);
  const int64_t tasks = args.seqs.num_seqs() * heads;
  const int64_t workers = std::min<int64_t>(exec.pool().num_threads(), tasks);
  const int64_t floats = KdaChunkScratch::floats(dim);
  const Tensor memory = exec.arena().alloc(DType::kF32, {std::max<int64_t>(workers, 1), floats});
  std::atomic<int64_t> next{0};
  exec.pool().parallel_for(workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      const KdaChunkScratch scratch = KdaChunkScratch::at(memory.f32() + worker * floats, dim);
      for (int64_t task = next.fetch_add(1); task < tasks; task = next.fetch_add(1)) {
        const StateSequence seq = state_sequence(args.seqs, task / heads);
        if (seq.begin < seq.end) body(seq, task % heads, scratch);
      }
    }
  });
}

// Head dimensions that the Highway kernels keep a row of on the stack.
constexpr int64_t kMaxKdaDim = 512;

int64_t kda_chunked_workspace(const KdaArgs& args, const Exec& exec);

namespace cpu {
void short_conv(Exec& exec, const ShortConvArgs& a);
void kda_gate(Exec& exec, const KdaGateArgs& a);
void kda_recurrent(Exec& exec, const KdaArgs& a);
void kda_chunked(Exec& exec, const KdaArgs& a);
}  // namespace cpu

namespace simd {
void short_conv(Exec& exec, const ShortConvArgs& a);
void kda_gate(Exec& exec, const KdaGateArgs& a);
void kda_recurrent(Exec& exec, const KdaArgs& a);
void kda_chunked(Exec& exec, const KdaArgs& a);
}  // namespace simd

}  // namespace moat
