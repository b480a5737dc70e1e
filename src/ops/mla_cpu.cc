// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/dot_cpu.h"
#include "ops/mla_kernels.h"

namespace moat {
namespace {

// A running softmax over blocks of keys: weights of what is summed so far are relative to the largest score so far.
struct OnlineSoftmax {
  float largest = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;

  // Turns `count` scores into weights; returns what the earlier sums must be multiplied with.
  float add_block(float* scores, int64_t count) {
    float block_largest = largest;
    for (int64_t j = 0; j < count; ++j) block_largest = std::max(block_largest, scores[j]);
    const float factor = std::exp(largest - block_largest);
    largest = block_largest;
    sum *= factor;
    for (int64_t j = 0; j < count; ++j) {
      scores[j] = std::exp(scores[j] - largest);
      sum += scores[j];
    }
    return factor;
  }
};

void scale_values(float* out, float factor, int64_t width) {
  for (int64_t d = 0; d < width; ++d) out[d] *= factor;
}

// Runs body(slot, item) for all items; a slot is worked on by one thread at a time, so that it can own scratch memory.
template <class Body>
void for_items(ThreadPool& pool, int64_t items, const Body& body) {
  const int64_t slots = pool.num_threads();
  pool.parallel_for(slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      for (int64_t item = slot; item < items; item += slots) body(slot, item);
    }
  });
}

}  // namespace

void mla_kv_write_cpu(Exec& exec, const MlaKvWriteArgs& a) {
  const size_t bytes = sizeof(float) * static_cast<size_t>(a.rows.dim(1));
  exec.pool().parallel_for(a.rows.dim(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t slot = a.slot_mapping[static_cast<size_t>(t)];
      MOAT_CHECK(slot >= 0 && slot < a.cache.dim(0), "slot {} of {}", slot, a.cache.dim(0));
      std::memcpy(a.cache.row(slot), a.rows.row(t), bytes);
    }
  });
}

void mla_decode_cpu(Exec& exec, const MlaDecodeArgs& a) {
  const int64_t heads = a.q.dim(1), width = a.q.dim(2), latent = a.out.dim(2);
  exec.pool().parallel_for(a.q.dim(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t r = item / heads;
      const int64_t s = sequence_of(a.seqs, r);
      const int64_t keys = sequence_rows(a.seqs, s).keys_of(r);
      const float* q = a.q.f32() + item * width;
      float* out = a.out.f32() + item * latent;
      std::fill_n(out, latent, 0.0F);
      OnlineSoftmax softmax;
      std::array<float, kKeyBlock> weights;
      std::array<const float*, kKeyBlock> rows;
      for (int64_t first = 0; first < keys; first += kKeyBlock) {
        const int64_t count = std::min(kKeyBlock, keys - first);
        for (int64_t j = 0; j < count; ++j) {
          rows[static_cast<size_t>(j)] = a.cache.row(slot_of(a.seqs, s, first + j));
          weights[static_cast<size_t>(j)] = a.scale * dot(q, rows[static_cast<size_t>(j)], width);
        }
        scale_values(out, softmax.add_block(weights.data(), count), latent);
        for (int64_t j = 0; j < count; ++j) {
          for (int64_t d = 0; d < latent; ++d)
            out[d] += weights[static_cast<size_t>(j)] * rows[static_cast<size_t>(j)][d];
        }
      }
      scale_values(out, 1.0F / softmax.sum, latent);
    }
  });
}

namespace {

// Floats of scratch a slot needs: expanded keys and values of a block, and a softmax for every row.
struct PrefillScratch {
  int64_t keys, values, softmax, total;
};
PrefillScratch prefill_scratch(const MlaPrefillArgs& a) {
  const int64_t keys = kKeyBlock * a.q.dim(2);
  const int64_t values = kKeyBlock * a.out.dim(2);
  const int64_t softmax = 2 * a.q.dim(0);
  return {keys, values, softmax, (keys + values + softmax + 15) / 16 * 16};
}

// Keys [count, nope + rope] and values [count, v_dim] of one head for positions first .. first + count.
void expand_block(const MlaPrefillArgs& a, int64_t s, int64_t h, int64_t first, int64_t count, float* keys,
                  float* values) {
  const int64_t latent = a.kv_b.dim(1), rope = a.cache.dim(1) - latent, v_dim = a.out.dim(2);
  const int64_t nope = a.q.dim(2) - rope;
  for (int64_t j = 0; j < count; ++j) {
    const float* row = a.cache.row(slot_of(a.seqs, s, first + j));
    float* key = keys + j * (nope + rope);
    for (int64_t d = 0; d < nope; ++d) key[d] = dot_row(row, a.kv_b, h * (nope + v_dim) + d);
    std::copy_n(row + latent, rope, key + nope);
    for (int64_t d = 0; d < v_dim; ++d) values[j * v_dim + d] = dot_row(row, a.kv_b, h * (nope + v_dim) + nope + d);
  }
}

// All rows of one sequence and head. Sums stay in `out` until the last key.
void prefill_head(const MlaPrefillArgs& a, int64_t s, int64_t h, float* scratch) {
  const int64_t heads = a.q.dim(1), width = a.q.dim(2), v_dim = a.out.dim(2);
  const PrefillScratch sizes = prefill_scratch(a);
  float* keys = scratch;
  float* values = keys + sizes.keys;
  auto* softmax = reinterpret_cast<OnlineSoftmax*>(values + sizes.values);
  const SequenceRows rows = sequence_rows(a.seqs, s);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    softmax[r - rows.begin] = OnlineSoftmax();
    std::fill_n(a.out.f32() + (r * heads + h) * v_dim, v_dim, 0.0F);
  }
  std::array<float, kKeyBlock> weights;
  const int64_t context = a.seqs.context_lens[static_cast<size_t>(s)];
  for (int64_t first = 0; first < context; first += kKeyBlock) {
    expand_block(a, s, h, first, std::min(kKeyBlock, context - first), keys, values);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const int64_t count = std::min(kKeyBlock, rows.keys_of(r) - first);  // of this block, seen by this row
      if (count <= 0) continue;
      const float* q = a.q.f32() + (r * heads + h) * width;
      float* out = a.out.f32() + (r * heads + h) * v_dim;
      for (int64_t j = 0; j < count; ++j) {
        weights[static_cast<size_t>(j)] = a.scale * dot(q, static_cast<const float*>(keys) + j * width, width);
      }
      scale_values(out, softmax[r - rows.begin].add_block(weights.data(), count), v_dim);
      for (int64_t j = 0; j < count; ++j) {
        for (int64_t d = 0; d < v_dim; ++d) out[d] += weights[static_cast<size_t>(j)] * values[j * v_dim + d];
      }
    }
  }
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    scale_values(a.out.f32() + (r * heads + h) * v_dim, 1.0F / softmax[r - rows.begin].sum, v_dim);
  }
}

}  // namespace

int64_t mla_prefill_cpu_workspace(const MlaPrefillArgs& a, const Exec& exec) {
  return dtype_bytes(DType::kF32, exec.pool().num_threads() * prefill_scratch(a).total);
}

void mla_prefill_cpu(Exec& exec, const MlaPrefillArgs& a) {
  if (a.q.dim(0) == 0) return;
  const int64_t heads = a.q.dim(1), slot_floats = prefill_scratch(a).total;
  float* scratch = exec.arena().alloc(DType::kF32, {exec.pool().num_threads() * slot_floats}).f32();
  for_items(exec.pool(), a.seqs.num_seqs() * heads, [&](int64_t slot, int64_t item) {
    prefill_head(a, item / heads, item % heads, scratch + slot * slot_floats);
  });
}

}  // namespace moat
