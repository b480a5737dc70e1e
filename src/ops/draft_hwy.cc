// SPDX-License-Identifier: Apache-2.0
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/draft_hwy.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "ops/draft_kernels.h"
#include "ops/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// What a thread takes: up to kQueryBlock query rows of one sequence and kv head. Query i of a (sequence, kv head) is row
// i / group of the block and head i % group of the kv head's group.
struct DraftTask {
  int64_t sequence, kv_head, first, count;
};

// Meets the queries with one block of keys, the first columns of `rows` apart; `count_of(i)` keys are seen by query i.
template <class CountOf>
void attend_keys(const BlockAttentionArgs& a, const DraftTask& task, const float* const* rows, int64_t count,
                 bool first_block, const CountOf& count_of, const float* const* q, float* scores,
                 RunningSoftmax* softmax, float* const* out) {
  const int64_t k_dim = a.q.dim(2), v_dim = a.out.dim(2);
  const float* keys[kKeyBlock];
  const float* values[kKeyBlock];
  float* score_rows[kQueryBlock];
  const float* weights[kQueryBlock];
  float factors[kQueryBlock];
  for (int64_t j = 0; j < count; ++j) {
    keys[j] = rows[j] + task.kv_head * k_dim;
    values[j] = rows[j] + a.value_offset + task.kv_head * v_dim;
  }
  for (int64_t i = 0; i < task.count; ++i) weights[i] = score_rows[i] = scores + i * kKeyBlock;
  dot_block<float>(q, task.count, keys, count, k_dim, score_rows, 0);
  for (int64_t i = 0; i < task.count; ++i) factors[i] = add_scores(softmax[i], score_rows[i], count_of(i), a.scale);
  mix_rows<float>(weights, first_block ? nullptr : factors, task.count, values, count, v_dim, out);
}

// The context in blocks of kKeyBlock by absolute position, then the block's own rows.
void attend(const BlockAttentionArgs& a, const DraftTask& task) {
  const int64_t heads = a.q.dim(1), group = heads / a.num_kv_heads, k_dim = a.q.dim(2), v_dim = a.out.dim(2);
  const float* q[kQueryBlock];
  float* out[kQueryBlock];
  RunningSoftmax softmax[kQueryBlock];
  HWY_ALIGN float scores[kQueryBlock * kKeyBlock];
  for (int64_t i = 0; i < task.count; ++i) {
    const int64_t row = task.sequence * a.gamma + (task.first + i) / group;
    const int64_t head = task.kv_head * group + (task.first + i) % group;
    q[i] = a.q.f32() + (row * heads + head) * k_dim;
    out[i] = a.out.f32() + (row * heads + head) * v_dim;
  }
  const float* rows[kKeyBlock];
  const int64_t context = a.context_lens[static_cast<size_t>(task.sequence)];
  for (int64_t first = 0; first < context; first += kKeyBlock) {
    const int64_t count = std::min(kKeyBlock, context - first);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t slot = a.slot_of(task.sequence, first + j);
      MOAT_CHECK(slot >= 0 && slot < a.cache.dim(0), "slot {} of {}", slot, a.cache.dim(0));
      rows[j] = a.cache.row(slot);
    }
    attend_keys(
        a, task, rows, count, first == 0, [&](int64_t) { return count; }, q, scores, softmax, out);
  }
  for (int64_t j = 0; j < a.gamma; ++j) rows[j] = a.rows.row(task.sequence * a.gamma + j);
  const auto own_count = [&](int64_t i) { return a.causal ? (task.first + i) / group + 1 : a.gamma; };
  attend_keys(a, task, rows, a.gamma, context == 0, own_count, q, scores, softmax, out);
  for (int64_t i = 0; i < task.count; ++i) finish_row(softmax[i], out[i], v_dim);
}

void block_attention_impl(Exec& exec, const BlockAttentionArgs& a) {
  const int64_t queries = a.gamma * a.q.dim(1) / a.num_kv_heads;  // of a sequence and kv head
  const int64_t parts = (queries + kQueryBlock - 1) / kQueryBlock;
  exec.pool().parallel_for(a.num_seqs() * a.num_kv_heads * parts, 1, [&](int64_t begin, int64_t end) HWY_ATTR {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t head = item / parts, first = item % parts * kQueryBlock;
      attend(a, {.sequence = head / a.num_kv_heads,
                 .kv_head = head % a.num_kv_heads,
                 .first = first,
                 .count = std::min(kQueryBlock, queries - first)});
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {
HWY_EXPORT(block_attention_impl);
namespace simd {
void block_attention(Exec& exec, const BlockAttentionArgs& args) {
  HWY_DYNAMIC_DISPATCH(block_attention_impl)(exec, args);
}
}  // namespace simd
}  // namespace moat
#endif  // HWY_ONCE
