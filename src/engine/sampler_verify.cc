// SPDX-License-Identifier: Apache-2.0
// Sampler::verify: judging drafts. Each row of a sequence becomes a row as sample() knows it, with the drafts before it
// as part of its reply; then the rows' tokens are compared with the drafts, or their distributions with the drafts' laws.
#include <algorithm>

#include "base/rng.h"
#include "engine/sampler.h"
#include "ops/accept.h"

namespace moat {

// The rows of all sequences, as they stand in the logits.
struct Sampler::Rows {
  std::vector<SampleRow> rows;                  // [rows]
  std::vector<int32_t> begins;                  // [seqs], first row of each sequence
  std::vector<int32_t> num_drafts;              // [seqs], to be judged: cut where a draft ends the reply
  std::vector<std::vector<uint32_t>> allowed;   // bits that `rows` view
  std::vector<std::vector<int32_t>> histories;  // tokens with drafts, likewise
  std::vector<SampledRow> results;              // [rows], of rows whose token is part of the outcome
  std::vector<int32_t> accepted;                // [seqs]
};

namespace {

bool is_law_verified(const VerifySequence& s) {
  return !s.drafts.empty() && s.law_row >= 0 && s.params->temperature > 0.0F && !s.params->seeded;
}

bool reads_history(const SamplingParams& p) {
  return !p.bad_words.empty() || p.repetition_penalty != 1.0F || p.frequency_penalty != 0.0F ||
         p.presence_penalty != 0.0F;
}

// What a constraint allows at each row of `s`, following its drafts as far as they are legal. Where one ends the reply,
// later drafts are not judged: that a round ends there is known from the drafts up to it.
void walk_constraint(const VerifySequence& s, int64_t vocab_size, std::span<SampleRow> rows, int32_t& num_drafts,
                     std::vector<std::vector<uint32_t>>& allowed) {
  const auto words = static_cast<size_t>((vocab_size + 31) / 32);
  int walked = 0;
  for (size_t k = 0; k < rows.size(); ++k) {
    std::vector<uint32_t>& bits = allowed.emplace_back(words, ~0U);
    s.constraint->mask(bits);
    rows[k].allowed = bits.data();
    if (k == s.drafts.size()) break;
    const auto id = static_cast<size_t>(s.drafts[k]);
    if ((bits[id / 32] >> (id % 32) & 1) == 0) break;  // never accepted, so nothing is chosen after it
    ++walked;
    if (s.constraint->accept(s.drafts[k]) == ConstraintVerdict::kStop) {
      num_drafts = static_cast<int32_t>(k) + 1;
      break;
    }
  }
  s.constraint->rollback(walked);
}

}  // namespace

Sampler::Rows Sampler::expand(std::span<const VerifySequence> sequences) const {
  Rows out;
  size_t total = 0;
  for (const VerifySequence& s : sequences) total += s.drafts.size() + 1;
  out.rows.reserve(total);  // views of these are taken below
  out.allowed.reserve(total);
  out.histories.reserve(sequences.size());
  out.results.resize(total);
  out.accepted.resize(sequences.size());
  for (const VerifySequence& s : sequences) {
    out.begins.push_back(static_cast<int32_t>(out.rows.size()));
    std::span<const int32_t> history = s.tokens;
    if (!s.drafts.empty() && reads_history(*s.params)) {
      std::vector<int32_t>& tokens = out.histories.emplace_back(s.tokens.begin(), s.tokens.end());
      tokens.insert(tokens.end(), s.drafts.begin(), s.drafts.end());
      history = tokens;
    }
    for (size_t k = 0; k <= s.drafts.size(); ++k) {
      out.rows.push_back({.params = s.params,
                          .position = static_cast<int64_t>(s.tokens.size() + k),
                          .num_generated = s.num_generated + static_cast<int64_t>(k),
                          .tokens = history.first(std::min(history.size(), s.tokens.size() + k)),
                          .counts = s.counts});
    }
    out.num_drafts.push_back(static_cast<int32_t>(s.drafts.size()));
    if (s.constraint == nullptr) continue;
    walk_constraint(s, vocab_size_, std::span(out.rows).last(s.drafts.size() + 1), out.num_drafts.back(), out.allowed);
  }
  return out;
}

// Sequences whose tokens are those of sample(): chosen row by row, and kept while they are the drafts.
void Sampler::match(Exec& exec, const Tensor& logits, std::span<const VerifySequence> sequences, Rows& r) const {
  RowList chosen_rows;                           // of all of them
  RowList members, list, cu_rows = {0}, drafts;  // of those with drafts
  for (size_t s = 0; s < sequences.size(); ++s) {
    if (is_law_verified(sequences[s]) && !exec.dry()) continue;
    for (int32_t k = 0; k <= r.num_drafts[s]; ++k) chosen_rows.push_back(r.begins[s] + k);
    if (sequences[s].drafts.empty()) continue;
    members.push_back(static_cast<int32_t>(s));
    for (int32_t k = 0; k <= r.num_drafts[s]; ++k) {
      list.push_back(r.begins[s] + k);
      drafts.push_back(k < r.num_drafts[s] ? sequences[s].drafts[static_cast<size_t>(k)] : -1);
    }
    cu_rows.push_back(static_cast<int32_t>(list.size()));
  }
  choose(exec, logits, chosen_rows, r.rows, r.results);
  if (members.empty()) return;
  const ArenaScope scope(exec.arena());
  const auto count = static_cast<int64_t>(members.size());
  const Tensor chosen = exec.arena().alloc(DType::kI32, {static_cast<int64_t>(list.size())});
  const Tensor accepted = exec.arena().alloc(DType::kI32, {count});
  const Tensor bonus = exec.arena().alloc(DType::kI32, {count});
  for (size_t i = 0; i < list.size() && !exec.dry(); ++i) {
    chosen.i32()[i] = r.results[static_cast<size_t>(list[i])].token.token_id;
  }
  match_drafts(exec, "verify.match",
               {.accepted = accepted, .bonus = bonus, .chosen = chosen, .drafts = drafts, .cu_rows = cu_rows});
  for (int64_t m = 0; m < count && !exec.dry(); ++m) {
    const auto s = static_cast<size_t>(members[static_cast<size_t>(m)]);
    r.accepted[s] = accepted.i32()[m];
    for (int32_t k = accepted.i32()[m] + 1; k <= r.num_drafts[s]; ++k) {
      r.results[static_cast<size_t>(r.begins[s] + k)] = {.token = {.token_id = -1}};
    }
  }
}

// Sequences whose drafts were drawn from a known law.
void Sampler::accept(Exec& exec, const Tensor& logits, std::span<const VerifySequence> sequences, const Tensor& laws,
                     Rows& r) const {
  RowList few, dense;  // sequences
  for (size_t s = 0; s < sequences.size(); ++s) {
    if (!is_law_verified(sequences[s])) continue;
    (path_of(*sequences[s].params) == Path::kFew ? few : dense).push_back(static_cast<int32_t>(s));
  }
  const RowList overflow = judge(exec, logits, sequences, few, Path::kFew, laws, r);
  dense.insert(dense.end(), overflow.begin(), overflow.end());
  std::sort(dense.begin(), dense.end());
  judge(exec, logits, sequences, dense, Path::kDense, laws, r);
}

// Judges the drafts of `members`, all of one path; those with a row of more entries than the path has room for are not
// judged but returned.
Sampler::RowList Sampler::judge(Exec& exec, const Tensor& logits, std::span<const VerifySequence> sequences,
                                const RowList& members, Path path, const Tensor& laws, Rows& r) const {
  if (members.empty()) return {};
  RowList list, cu_rows = {0}, drafts, law_rows;
  std::vector<double> accept_uniforms, bonus_uniforms;
  for (const int32_t member : members) {
    const auto s = static_cast<size_t>(member);
    const VerifySequence& seq = sequences[s];
    const auto round = static_cast<uint64_t>(r.rows[static_cast<size_t>(r.begins[s])].position);
    for (int32_t k = 0; k <= r.num_drafts[s]; ++k) {
      const bool judged = k < r.num_drafts[s];
      list.push_back(r.begins[s] + k);
      drafts.push_back(judged ? seq.drafts[static_cast<size_t>(k)] : -1);
      law_rows.push_back(judged ? static_cast<int32_t>(seq.law_row + k) : -1);
      const bool given = judged && !seq.accept_uniforms.empty();
      accept_uniforms.push_back(given ? seq.accept_uniforms[static_cast<size_t>(k)]
                                      : random_uniform(seq.params->seed, draft_counter(round, static_cast<uint64_t>(k)),
                                                       RandomPurpose::kAccept));
    }
    bonus_uniforms.push_back(seq.bonus_uniform.has_value()
                                 ? *seq.bonus_uniform
                                 : random_uniform(seq.params->seed, round, RandomPurpose::kBonus));
    cu_rows.push_back(static_cast<int32_t>(list.size()));
  }
  const ArenaScope scope(exec.arena());
  const auto count = static_cast<int64_t>(members.size());
  const Filters filters = filters_of(list, r.rows);
  TargetRows target;
  if (path == Path::kFew) {
    target.compact = few_probs(exec, edit(exec, logits, list, r.rows, Access::kRead), filters);
  } else {
    target.dense = edit(exec, logits, list, r.rows, Access::kWrite);
    to_probs(exec, target.dense, filters);
  }
  const Tensor accepted = exec.arena().alloc(DType::kI32, {count});
  const Tensor bonus = exec.arena().alloc(DType::kI32, {count});
  const std::vector<AcceptRule> rules(members.size(), AcceptRule::kBlock);
  accept_drafts(exec, "verify.accept",
                {.accepted = accepted,
                 .bonus = bonus,
                 .target = target,
                 .q = laws,
                 .q_rows = law_rows,
                 .drafts = drafts,
                 .cu_rows = cu_rows,
                 .rules = rules,
                 .accept_uniforms = accept_uniforms,
                 .bonus_uniforms = bonus_uniforms});
  RowList overflow;
  for (int64_t m = 0; m < count && !exec.dry(); ++m) {
    const int32_t begin = cu_rows[static_cast<size_t>(m)], end = cu_rows[static_cast<size_t>(m) + 1];
    if (path == Path::kFew) {
      const int32_t* counts = target.compact.counts.i32();
      if (std::any_of(counts + begin, counts + end, [](int32_t n) { return n < 0; })) {
        overflow.push_back(members[static_cast<size_t>(m)]);
        continue;
      }
    }
    const auto s = static_cast<size_t>(members[static_cast<size_t>(m)]);
    r.accepted[s] = accepted.i32()[m];
    for (int32_t k = 0; k <= r.num_drafts[s]; ++k) {
      SampledRow& result = r.results[static_cast<size_t>(r.begins[s] + k)];
      const int32_t draft = drafts[static_cast<size_t>(begin + k)];
      result.token.token_id = k < r.accepted[s] ? draft : k == r.accepted[s] ? bonus.i32()[m] : -1;
      if (k == r.accepted[s] && bonus.i32()[m] < 0) result.error = kUnusableRow;
    }
  }
  return overflow;
}

std::vector<VerifiedSequence> Sampler::verify(Exec& exec, const Tensor& logits,
                                              std::span<const VerifySequence> sequences, const Tensor& laws) const {
  Rows r = expand(sequences);
  match(exec, logits, sequences, r);
  accept(exec, logits, sequences, laws, r);
  for (const VerifySequence& s : sequences) {
    if (s.counts != nullptr) s.counts->truncate(s.tokens, s.drafts);
  }
  const ArenaScope scope(exec.arena());
  add_logprobs(exec, logits, r.rows, r.results);
  std::vector<VerifiedSequence> out(sequences.size());
  for (size_t s = 0; s < sequences.size() && !exec.dry(); ++s) {
    out[s].num_drafts = r.num_drafts[s];
    for (int32_t k = 0; k <= r.accepted[s]; ++k) {
      SampledRow& result = r.results[static_cast<size_t>(r.begins[s] + k)];
      if (result.token.token_id < 0) {
        out[s].error = std::move(result.error);
        out[s].tokens.clear();
        break;
      }
      out[s].tokens.push_back(std::move(result.token));
    }
  }
  return out;
}

}  // namespace moat
