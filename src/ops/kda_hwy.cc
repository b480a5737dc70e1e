// SPDX-License-Identifier: Apache-2.0
// Highway kernels of kda.h but the chunked form. Threads split by sequence and head, or channel block; vectors run over
// channels, or over the value dimension of a state.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kda_hwy.cc"
#include <hwy/foreach_target.h>
// foreach_target.h first.
#include <cmath>
#include <cstring>

#include "ops/kda_verify_kernels.h"
#include "ops/op_parts.h"
#include "ops/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moat {
namespace HWY_NAMESPACE {

// Kernel width 4. Channels [begin, end), a multiple of the vector length, of one sequence: the last three inputs stay
// in registers.
void ShortConv4(const ShortConvArgs& a, const StateSequence& seq, int64_t begin, int64_t end) {
  const D d;
  const int64_t channels = a.x.dim(1);
  float* tail = a.tails.f32() + seq.slot * a.tails.strides[0];
  for (int64_t c = begin; c < end; c += lanes()) {
    V w0, w1, w2, w3;
    hn::LoadInterleaved4(d, a.weight.f32() + 4 * c, w0, w1, w2, w3);
    V x0 = hn::Zero(d), x1 = x0, x2 = x0;
    if (seq.first != 0) {
      x0 = hn::LoadU(d, tail + c);
      x1 = hn::LoadU(d, tail + channels + c);
      x2 = hn::LoadU(d, tail + 2 * channels + c);
    }
    for (int64_t t = seq.begin; t < seq.end; ++t) {
      const V x3 = hn::LoadU(d, a.x.row(t) + c);
      const V sum = hn::MulAdd(w3, x3, hn::MulAdd(w2, x2, hn::MulAdd(w1, x1, hn::Mul(w0, x0))));
      hn::StoreU(hn::Mul(sum, sigmoid(sum)), d, a.out.row(t) + c);
      x0 = x1;
      x1 = x2;
      x2 = x3;
    }
    if (a.record.is_set()) continue;
    hn::StoreU(x0, d, tail + c);
    hn::StoreU(x1, d, tail + channels + c);
    hn::StoreU(x2, d, tail + 2 * channels + c);
  }
  for (int64_t t = seq.begin; t < seq.end && a.record.is_set(); ++t) {
    std::memcpy(a.record.row(t) + begin, a.x.row(t) + begin, static_cast<size_t>(end - begin) * sizeof(float));
  }
}

// Rows are (token, head) pairs.
void KdaGateRows(const KdaGateArgs& a, int64_t begin, int64_t end) {
  const D d;
  const int64_t n = lanes();
  const int64_t heads = a.raw.dim(1);
  const int64_t dim = a.raw.dim(2);
  for (int64_t r = begin; r < end; ++r) {
    const float* raw = a.raw.f32() + r * dim;
    const float* bias = a.dt_bias.f32() + r % heads * dim;
    float* out = a.out.f32() + r * dim;
    const V rate = hn::Set(d, std::exp(a.a_log.f32()[r % heads]));
    const V bound = hn::Set(d, a.lower_bound);
    const auto decay = [&](V x, V b) {
      const V z = hn::Add(x, b);
      return a.lower_bound < 0.0F ? hn::Mul(bound, sigmoid(hn::Mul(rate, z))) : hn::Neg(hn::Mul(rate, softplus(z)));
    };
    int64_t i = 0;
    for (; i + n <= dim; i += n) hn::StoreU(decay(hn::LoadU(d, raw + i), hn::LoadU(d, bias + i)), d, out + i);
    if (i < dim) store_first(decay(load_first(raw + i, dim - i), load_first(bias + i, dim - i)), out + i, dim - i);
  }
}

// One token, kVectors vectors of the value dimension starting at the pointers. The first pass reads the state for S^T
// k, the second decays, updates and writes it, and sums S^T q: in registers, per key channel in order. kOut false: only
// the state is wanted, and gets the same bits.
template <int kVectors, bool kOut>
HWY_INLINE void recurrent_columns(float* state, int64_t dim, const float* alpha, const float* k, const float* q,
                                  const float* v, float beta, float* out) {
  const D d;
  const int64_t n = lanes();
  V u[kVectors];
  for (int i = 0; i < kVectors; ++i) u[i] = hn::Zero(d);
  for (int64_t c = 0; c < dim; ++c) {
    const V decay = hn::Set(d, alpha[c]);
    const V key = hn::Set(d, k[c]);
    const float* s = state + c * dim;
    for (int i = 0; i < kVectors; ++i) u[i] = hn::MulAdd(hn::Mul(hn::LoadU(d, s + i * n), decay), key, u[i]);
  }
  V sum[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    u[i] = hn::Mul(hn::Set(d, beta), hn::Sub(hn::LoadU(d, v + i * n), u[i]));
    sum[i] = hn::Zero(d);
  }
  for (int64_t c = 0; c < dim; ++c) {
    const V decay = hn::Set(d, alpha[c]);
    const V key = hn::Set(d, k[c]);
    const V query = kOut ? hn::Set(d, q[c]) : key;
    float* s = state + c * dim;
    for (int i = 0; i < kVectors; ++i) {
      const V updated = hn::MulAdd(key, u[i], hn::Mul(hn::LoadU(d, s + i * n), decay));
      hn::StoreU(updated, d, s + i * n);
      if constexpr (kOut) sum[i] = hn::MulAdd(updated, query, sum[i]);
    }
  }
  for (int i = 0; i < kVectors && kOut; ++i) hn::StoreU(sum[i], d, out + i * n);
}

// One token of one head; dim is a multiple of 16 and at most kMaxKdaDim. q and out are not touched unless kOut.
template <bool kOut>
void recurrent_token(float* state, int64_t dim, const float* k, const float* v, const float* g, float beta_logit,
                     const float* q, float* out) {
  // As many accumulators as registers allow: twice this, and the broadcast factors.
  constexpr int kWide = HWY_TARGET <= HWY_AVX3 ? 8 : 4;
  const D d;
  const int64_t n = lanes();
  HWY_ALIGN float alpha[kMaxKdaDim];
  const float beta = sigmoid_f32(beta_logit);
  for (int64_t c = 0; c < dim; c += n) hn::Store(zero_below(exp_f32(hn::LoadU(d, g + c)), kTinyDecay), d, alpha + c);
  int64_t j = 0;
  for (; j + kWide * n <= dim; j += kWide * n) {
    recurrent_columns<kWide, kOut>(state + j, dim, alpha, k, q, v + j, beta, out + j);
  }
  for (; j + 2 * n <= dim; j += 2 * n) {
    recurrent_columns<2, kOut>(state + j, dim, alpha, k, q, v + j, beta, out + j);
  }
  for (; j < dim; j += n) recurrent_columns<1, kOut>(state + j, dim, alpha, k, q, v + j, beta, out + j);
}

// The rows of one head of one sequence, from the state at `state`, which advances.
void RecurrentHead(const KdaArgs& a, const StateSequence& seq, int64_t head, float* state) {
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  for (int64_t t = seq.begin; t < seq.end; ++t) {
    const int64_t at = (t * heads + head) * dim;
    recurrent_token<true>(state, dim, a.k.f32() + at, a.v.f32() + at, a.g.f32() + at,
                          a.beta_logits.f32()[t * heads + head], a.q.f32() + at, a.out.f32() + at);
  }
}

// The committed rows of one layer, sequence and head.
void CommitHead(const Tensor& records, const CommitTask& task, int64_t head) {
  const int64_t dim = (records.dim(2) - 1) / 3;
  for (int64_t row = task.begin; row < task.end; ++row) {
    const KdaRecord r = record_at(records, row, head);
    recurrent_token<false>(task.state, dim, r.k, r.v, r.g, *r.beta_logit, nullptr, nullptr);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moat
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moat {

HWY_EXPORT(ShortConv4);
HWY_EXPORT(KdaGateRows);
HWY_EXPORT(RecurrentHead);
HWY_EXPORT(CommitHead);

namespace simd {

void short_conv(Exec& exec, const ShortConvArgs& a) {
  constexpr int64_t kBlock = 256;  // channels a task
  const int64_t channels = a.x.dim(1);
  const int64_t blocks = (channels + kBlock - 1) / kBlock;
  exec.pool().parallel_for(a.seqs.num_seqs() * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const StateSequence seq = state_sequence(a.seqs, task / blocks);
      const int64_t first = task % blocks * kBlock;
      if (seq.begin == seq.end) continue;
      HWY_DYNAMIC_DISPATCH(ShortConv4)(a, seq, first, std::min(channels, first + kBlock));
    }
  });
}

void kda_gate(Exec& exec, const KdaGateArgs& a) {
  exec.pool().parallel_for(a.raw.dim(0) * a.raw.dim(1), row_grain(4 * a.raw.dim(2)), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(KdaGateRows)(a, begin, end);
  });
}

void kda_recurrent(Exec& exec, const KdaArgs& a) {
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  exec.pool().parallel_for(a.seqs.num_seqs() * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const StateSequence seq = state_sequence(a.seqs, task / heads);
      if (seq.begin == seq.end) continue;
      float* state = state_of(a.states, seq.slot, task % heads);
      if (seq.first == 0) std::memset(state, 0, static_cast<size_t>(dim * dim) * sizeof(float));
      HWY_DYNAMIC_DISPATCH(RecurrentHead)(a, seq, task % heads, state);
    }
  });
}

void kda_verify(Exec& exec, const KdaVerifyArgs& v) {
  const KdaArgs& a = v.rows;
  const int64_t heads = a.q.dim(1);
  for_each_scratch_state(exec, a.seqs.num_seqs() * heads, a.q.dim(2), [&](int64_t task, float* state) {
    const StateSequence seq = state_sequence(a.seqs, task / heads);
    if (seq.begin == seq.end) return;
    load_state(a.states, seq, task % heads, state);
    HWY_DYNAMIC_DISPATCH(RecurrentHead)(a, seq, task % heads, state);
    record_rows(v, seq, task % heads);
  });
}

void kda_commit(Exec& exec, const KdaCommitArgs& a) {
  const int64_t heads = a.states.dim(2);
  const int64_t per_layer = a.ranges.num_seqs() * heads;
  exec.pool().parallel_for(a.states.dim(0) * per_layer, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const CommitTask t = commit_task(a, task / per_layer, task % per_layer / heads, task % heads);
      HWY_DYNAMIC_DISPATCH(CommitHead)(a.records.at(task / per_layer), t, task % heads);
    }
  });
}

}  // namespace simd
}  // namespace moat
#endif
