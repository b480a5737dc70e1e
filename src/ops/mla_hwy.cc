// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/mla_hwy.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "ops/mla_kernels.h"
#include "ops/panel-inl.h"
#include "ops/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// Cached rows of positions first .. first + count of sequence s.
void find_rows(const PagedSequences& seqs, const Tensor& cache, int64_t s, int64_t first, int64_t count,
               const float** rows) {
  for (int64_t j = 0; j < count; ++j) rows[j] = cache.row(slot_of(seqs, s, first + j));
}

// --- decode ---

constexpr int64_t kHeadGroup = 4;  // heads that share the loads of a cached row: the rows of a register tile

// `heads` heads of one row, from head `first_head`.
void decode_heads(const MlaDecodeArgs& a, int64_t r, int64_t first_head, int64_t heads) {
  const int64_t width = a.q.dim(2), latent = a.out.dim(2);
  const int64_t s = sequence_of(a.seqs, r);
  const int64_t keys = sequence_rows(a.seqs, s).keys_of(r);
  const float* q[kHeadGroup];
  float* out[kHeadGroup];
  const float* weights[kHeadGroup];
  float* scores[kHeadGroup];
  float factors[kHeadGroup];
  HWY_ALIGN float products[kHeadGroup * kKeyBlock];
  for (int64_t h = 0; h < heads; ++h) {
    q[h] = a.q.f32() + (r * a.q.dim(1) + first_head + h) * width;
    out[h] = a.out.f32() + (r * a.q.dim(1) + first_head + h) * latent;
    weights[h] = scores[h] = products + h * kKeyBlock;
  }
  RunningSoftmax softmax[kHeadGroup];
  const float* rows[kKeyBlock];
  for (int64_t first = 0; first < keys; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, keys - first);
    find_rows(a.seqs, a.cache, s, first, count, rows);
    dot_block<float>(q, heads, rows, count, width, scores, 0);
    for (int64_t h = 0; h < heads; ++h) factors[h] = add_scores(softmax[h], scores[h], count, a.scale);
    mix_rows<float>(weights, first == 0 ? nullptr : factors, heads, rows, count, latent, out);
  }
  for (int64_t h = 0; h < heads; ++h) finish_row(softmax[h], out[h], latent);
}

// Threads take (row, group of heads).
void mla_decode_impl(Exec& exec, const MlaDecodeArgs& a) {
  const int64_t heads = a.q.dim(1);
  const int64_t groups = (heads + kHeadGroup - 1) / kHeadGroup;
  exec.pool().parallel_for(a.q.dim(0) * groups, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % groups * kHeadGroup;
      decode_heads(a, item / groups, first, std::min(kHeadGroup, heads - first));
    }
  });
}

// --- prefill ---

// Scratch of a thread, carved out of `floats`.
struct PrefillScratch {
  float* kv_b;              // [nope + v_dim, latent], one head's weights as f32
  float* keys;              // [kKeyBlock, nope + rope]
  float* values;            // [kKeyBlock, v_dim]
  float* weights;           // [kQueryBlock, kKeyBlock]
  RunningSoftmax* softmax;  // [rows of a sequence]
};

PrefillScratch carve(const MlaPrefillArgs& a, float* floats) {
  const int64_t head_rows = a.kv_b.dim(0) / a.q.dim(1);
  PrefillScratch s;
  s.kv_b = floats;
  s.keys = s.kv_b + head_rows * a.kv_b.dim(1);
  s.values = s.keys + kKeyBlock * a.q.dim(2);
  s.weights = s.values + kKeyBlock * a.out.dim(2);
  s.softmax = reinterpret_cast<RunningSoftmax*>(s.weights + kQueryBlock * kKeyBlock);
  return s;
}

// Keys and values of one head for `count` cached rows.
void expand_rows(const MlaPrefillArgs& a, const PrefillScratch& scratch, const float* const* rows, int64_t count) {
  const int64_t latent = a.kv_b.dim(1), rope = a.cache.dim(1) - latent, width = a.q.dim(2), v_dim = a.out.dim(2);
  const int64_t nope = width - rope;
  float* keys[kKeyBlock];
  float* values[kKeyBlock];
  for (int64_t j = 0; j < count; ++j) {
    keys[j] = scratch.keys + j * width;
    values[j] = scratch.values + j * v_dim;
    std::copy_n(rows[j] + latent, rope, keys[j] + nope);
  }
  const float* w[kPanelCols];
  for (int64_t first = 0; first < nope + v_dim;) {
    const bool is_key = first < nope;
    const int64_t columns = std::min(kPanelCols, is_key ? nope - first : nope + v_dim - first);
    for (int64_t c = 0; c < columns; ++c) w[c] = scratch.kv_b + (first + c) * latent;
    dot_block<float>(rows, count, w, columns, latent, is_key ? keys : values, is_key ? first : first - nope);
    first += columns;
  }
}

// Rows begin .. begin + num of head h against one block of keys; every row sees some of them. `block` is their first
// position.
void attend_block(const MlaPrefillArgs& a, const PrefillScratch& scratch, const SequenceRows& sequence, int64_t h,
                  int64_t begin, int64_t num, int64_t block) {
  const int64_t heads = a.q.dim(1), width = a.q.dim(2), v_dim = a.out.dim(2);
  const float* q[kQueryBlock];
  float* out[kQueryBlock];
  float* scores[kQueryBlock];
  const float* weights[kQueryBlock];
  float factors[kQueryBlock];
  for (int64_t i = 0; i < num; ++i) {
    q[i] = a.q.f32() + ((begin + i) * heads + h) * width;
    out[i] = a.out.f32() + ((begin + i) * heads + h) * v_dim;
    weights[i] = scores[i] = scratch.weights + i * kKeyBlock;
  }
  const float* keys[kKeyBlock];
  const float* values[kKeyBlock];
  for (int64_t j = 0; j < kKeyBlock; ++j) {
    keys[j] = scratch.keys + j * width;
    values[j] = scratch.values + j * v_dim;
  }
  // The last row sees most keys; earlier ones get weight zero for those that come after them.
  const int64_t most = std::min(kKeyBlock, sequence.keys_of(begin + num - 1) - block);
  dot_block<float>(q, num, keys, most, width, scores, 0);
  for (int64_t i = 0; i < num; ++i) {
    const int64_t count = std::min(kKeyBlock, sequence.keys_of(begin + i) - block);
    factors[i] = add_scores(scratch.softmax[begin + i - sequence.begin], scores[i], count, a.scale);
  }
  mix_rows<float>(weights, block == 0 ? nullptr : factors, num, values, most, v_dim, out);
}

// All rows of sequence s and head h; sums stay in `out` until the last key.
void prefill_head(const MlaPrefillArgs& a, int64_t s, int64_t h, const PrefillScratch& scratch) {
  const SequenceRows sequence = sequence_rows(a.seqs, s);
  if (sequence.begin == sequence.end) return;
  const int64_t head_rows = a.kv_b.dim(0) / a.q.dim(1), latent = a.kv_b.dim(1), v_dim = a.out.dim(2);
  for (int64_t n = 0; n < head_rows; ++n) decode_row(a.kv_b, h * head_rows + n, 0, latent, scratch.kv_b + n * latent);
  std::fill_n(scratch.softmax, sequence.end - sequence.begin, RunningSoftmax());
  const int64_t context = a.seqs.context_lens[static_cast<size_t>(s)];
  const float* rows[kKeyBlock];
  for (int64_t block = 0; block < context; block += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, context - block);
    find_rows(a.seqs, a.cache, s, block, count, rows);
    expand_rows(a, scratch, rows, count);
    // The first row that sees a key of this block: its keys are more than `block`.
    const int64_t first = std::max(sequence.begin, sequence.begin + block + 1 - sequence.first_keys);
    for (int64_t r = first; r < sequence.end; r += kQueryBlock) {
      attend_block(a, scratch, sequence, h, r, std::min(kQueryBlock, sequence.end - r), block);
    }
  }
  for (int64_t r = sequence.begin; r < sequence.end; ++r) {
    finish_row(scratch.softmax[r - sequence.begin], a.out.f32() + (r * a.q.dim(1) + h) * v_dim, v_dim);
  }
}

// Threads take (sequence, head), each with its own part of `scratch`.
void mla_prefill_impl(Exec& exec, const MlaPrefillArgs& a, float* scratch, int64_t slot_floats) {
  const int64_t heads = a.q.dim(1), items = a.seqs.num_seqs() * heads, slots = exec.pool().num_threads();
  exec.pool().parallel_for(slots, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t slot = begin; slot < end; ++slot) {
      const PrefillScratch mine = carve(a, scratch + slot * slot_floats);
      for (int64_t item = slot; item < items; item += slots) prefill_head(a, item / heads, item % heads, mine);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(mla_decode_impl);
HWY_EXPORT(mla_prefill_impl);

void mla_decode_hwy(Exec& exec, const MlaDecodeArgs& args) { HWY_DYNAMIC_DISPATCH(mla_decode_impl)(exec, args); }

namespace {

// What PrefillScratch takes, rounded up to a cache line.
int64_t prefill_slot_floats(const MlaPrefillArgs& a) {
  const int64_t floats = a.kv_b.dim(0) / a.q.dim(1) * a.kv_b.dim(1) + kKeyBlock * (a.q.dim(2) + a.out.dim(2)) +
                         kQueryBlock * kKeyBlock + 2 * a.q.dim(0);
  return (floats + 15) / 16 * 16;
}

}  // namespace

int64_t mla_prefill_hwy_workspace(const MlaPrefillArgs& args, const Exec& exec) {
  return dtype_bytes(DType::kF32, exec.pool().num_threads() * prefill_slot_floats(args));
}

void mla_prefill_hwy(Exec& exec, const MlaPrefillArgs& args) {
  if (args.q.count() == 0) return;
  const int64_t slot_floats = prefill_slot_floats(args);
  float* scratch = exec.arena().alloc(DType::kF32, {exec.pool().num_threads() * slot_floats}).f32();
  HWY_DYNAMIC_DISPATCH(mla_prefill_impl)(exec, args, scratch, slot_floats);
}

}  // namespace moat
#endif  // HWY_ONCE
