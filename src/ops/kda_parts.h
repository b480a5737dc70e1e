// SPDX-License-Identifier: Apache-2.0
// What the definitions in kda.cc and kda_verify.cc share: contract, reference and cases of the recurrence.
#pragma once

#include "ops/case_data.h"
#include "ops/kda.h"

namespace moat {

// In dry passes only the sizes of the arrays are there.
bool rows_agree(const StateSequences& seqs, const Tensor& rows);
bool sizes_agree(const StateSequences& seqs);
// Everything after the first dimension is contiguous.
bool slots_contiguous(const Tensor& tensor);
Status check_kda(const char* op, const KdaArgs& args);

// Token by token in f64; advances the states.
void kda_reference(const KdaArgs& args);

// decay 0: as K3 gives, in (-5, 0); 1: near -5; 2: near 0; 3: down to -100 (Kimi-Linear); 4: a mixture of 0 and -1e4.
Case kda_case(int64_t heads, int64_t dim, int64_t seqs, int64_t len, int64_t first, int64_t decay);
Case random_kda(uint64_t seed);
KdaArgs build_kda(const Case& c, CaseData& data);
// Sequence lengths are len, 1, about len / 2, len + 1, ...; positions `first` apart, every third sequence starts at 0.
// Slots are distinct and not in order, some stay unused, and the first row number is not 0.
StateSequences build_sequences(const Case& c, CaseData& data);
// [seqs + 2, inner...] with slots `pad` elements apart. Slots of sequences that start at position 0 hold NaN.
Tensor build_slots(const Case& c, CaseData& data, const char* name, const StateSequences& seqs, const Dims& dims);
// Where nothing may be written NaN cannot be compared: a number that would show instead.
void hide_nans(const Tensor& slots);

}  // namespace moat
