// SPDX-License-Identifier: Apache-2.0
// Highway kernels of kda.h but the chunked form. Threads split by sequence and head, or channel block; vectors run over
// channels, or over the value dimension of a state.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kda_hwy.cc"
#include <hwy/foreach_target.h>
// foreach_target.h first.
#include <cmath>
#include <cstring>

#include "ops/kda_kernels.h"
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
    hn::StoreU(x0, d, tail + c);
    hn::StoreU(x1, d, tail + channels + c);
    hn::StoreU(x2, d, tail + 2 * channels + c);
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
// k, the second decays, updates and writes it, and sums S^T q: in registers, per key channel in order.
template <int kVectors>
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
    const V query = hn::Set(d, q[c]);
    float* s = state + c * dim;
    for (int i = 0; i < kVectors; ++i) {
      const V updated = hn::MulAdd(key, u[i], hn::Mul(hn::LoadU(d, s + i * n), decay));
      hn::StoreU(updated, d, s + i * n);
      sum[i] = hn::MulAdd(updated, query, sum[i]);
    }
  }
  for (int i = 0; i < kVectors; ++i) hn::StoreU(sum[i], d, out + i * n);
}

// One head of one sequence; dim is a multiple of 16 and at most kMaxKdaDim.
void RecurrentHead(const KdaArgs& a, const StateSequence& seq, int64_t head) {
  // As many accumulators as registers allow: twice this, and the broadcast factors.
  constexpr int kWide = HWY_TARGET <= HWY_AVX3 ? 8 : 4;
  const D d;
  const int64_t n = lanes();
  const int64_t heads = a.q.dim(1);
  const int64_t dim = a.q.dim(2);
  float* state = a.states.f32() + seq.slot * a.states.strides[0] + head * dim * dim;
  if (seq.first == 0) std::memset(state, 0, static_cast<size_t>(dim * dim) * sizeof(float));
  HWY_ALIGN float alpha[kMaxKdaDim];
  for (int64_t t = seq.begin; t < seq.end; ++t) {
    const int64_t at = (t * heads + head) * dim;
    const float* q = a.q.f32() + at;
    const float* k = a.k.f32() + at;
    const float* v = a.v.f32() + at;
    const float* g = a.g.f32() + at;
    float* out = a.out.f32() + at;
    const float beta = sigmoid_f32(a.beta_logits.f32()[t * heads + head]);
    for (int64_t c = 0; c < dim; c += n) hn::Store(zero_below(exp_f32(hn::LoadU(d, g + c)), kTinyDecay), d, alpha + c);
    int64_t j = 0;
    for (; j + kWide * n <= dim; j += kWide * n) {
      recurrent_columns<kWide>(state + j, dim, alpha, k, q, v + j, beta, out + j);
    }
    for (; j + 2 * n <= dim; j += 2 * n) recurrent_columns<2>(state + j, dim, alpha, k, q, v + j, beta, out + j);
    for (; j < dim; j += n) recurrent_columns<1>(state + j, dim, alpha, k, q, v + j, beta, out + j);
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
  exec.pool().parallel_for(a.seqs.num_seqs() * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const StateSequence seq = state_sequence(a.seqs, task / heads);
      if (seq.begin < seq.end) HWY_DYNAMIC_DISPATCH(RecurrentHead)(a, seq, task % heads);
    }
  });
}

}  // namespace simd
}  // namespace moat
#endif
