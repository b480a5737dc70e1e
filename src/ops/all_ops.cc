// SPDX-License-Identifier: Apache-2.0
// The list of every op: one line an op, families in alphabetical order.
#include "ops/accept.h"
#include "ops/draft.h"
#include "ops/edit.h"
#include "ops/kda.h"
#include "ops/kda_verify.h"
#include "ops/matmul.h"
#include "ops/mla.h"
#include "ops/moe.h"
#include "ops/norm.h"
#include "ops/pointwise.h"
#include "ops/sample.h"
#include "ops/sparse.h"
#include "ops/typed_op.h"

namespace moat {

std::span<const AnyOp* const> all_ops() {
  static const TypedOp match_drafts(kMatchDrafts);
  static const TypedOp accept_drafts(kAcceptDrafts);
  static const TypedOp norm_rope(kNormRope);
  static const TypedOp block_attention(kBlockAttention);
  static const TypedOp markov_gate(kMarkovGate);
  static const TypedOp markov_cell(kMarkovCell);
  static const TypedOp confidence(kConfidence);
  static const TypedOp scatter_probs(kScatterProbs);
  static const TypedOp copy(kCopy);
  static const TypedOp mask_logits(kMaskLogits);
  static const TypedOp apply_penalties(kApplyPenalties);
  static const TypedOp bias_logits(kBiasLogits);
  static const TypedOp short_conv(kShortConv);
  static const TypedOp kda_gate(kKdaGate);
  static const TypedOp kda_recurrent(kKdaRecurrent);
  static const TypedOp kda_chunked(kKdaChunked);
  static const TypedOp kda_verify(kKdaVerify);
  static const TypedOp kda_commit(kKdaCommit);
  static const TypedOp conv_commit(kConvCommit);
  static const TypedOp matmul(kMatmul);
  static const TypedOp head_matmul(kHeadMatmul);
  static const TypedOp mla_kv_write(kMlaKvWrite);
  static const TypedOp mla_decode(kMlaDecode);
  static const TypedOp mla_prefill(kMlaPrefill);
  static const TypedOp router_topk(kRouterTopk);
  static const TypedOp moe_dispatch(kMoeDispatch);
  static const TypedOp grouped_matmul(kGroupedMatmul);
  static const TypedOp moe_combine(kMoeCombine);
  static const TypedOp rms_norm(kRmsNorm);
  static const TypedOp gated_rms_norm(kGatedRmsNorm);
  static const TypedOp l2_norm(kL2Norm);
  static const TypedOp attn_res_mix(kAttnResMix);
  static const TypedOp embed(kEmbed);
  static const TypedOp add(kAdd);
  static const TypedOp gated_act(kGatedAct);
  static const TypedOp sigmoid_gate(kSigmoidGate);
  static const TypedOp softmax(kSoftmax);
  static const TypedOp top_k_renorm(kTopKRenorm);
  static const TypedOp top_p_renorm(kTopPRenorm);
  static const TypedOp min_p_renorm(kMinPRenorm);
  static const TypedOp draw(kDraw);
  static const TypedOp argmax(kArgmax);
  static const TypedOp logprobs(kLogprobs);
  static const TypedOp top_k_probs(kTopKProbs);
  static const TypedOp draw_compact(kDrawCompact);
  static const AnyOp* const ops[] = {
      &match_drafts,
      &accept_drafts,
      &norm_rope,
      &block_attention,
      &markov_gate,
      &markov_cell,
      &confidence,
      &scatter_probs,
      &copy,
      &mask_logits,
      &apply_penalties,
      &bias_logits,
      &short_conv,
      &kda_gate,
      &kda_recurrent,
      &kda_chunked,
      &kda_verify,
      &kda_commit,
      &conv_commit,
      &matmul,
      &head_matmul,
      &mla_kv_write,
      &mla_decode,
      &mla_prefill,
      &router_topk,
      &moe_dispatch,
      &grouped_matmul,
      &moe_combine,
      &rms_norm,
      &gated_rms_norm,
      &l2_norm,
      &attn_res_mix,
      &embed,
      &add,
      &gated_act,
      &sigmoid_gate,
      &softmax,
      &top_k_renorm,
      &top_p_renorm,
      &min_p_renorm,
      &draw,
      &argmax,
      &logprobs,
      &top_k_probs,
      &draw_compact,
  };
  return ops;
}

}  // namespace moat
