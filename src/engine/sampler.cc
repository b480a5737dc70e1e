// SPDX-License-Identifier: Apache-2.0
#include "engine/sampler.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/rng.h"
#include "ops/edit.h"
#include "ops/pointwise.h"
#include "ops/sample.h"

namespace moat {
namespace {

bool wants_penalties(const SampleRow& row) {
  const SamplingParams& p = *row.params;
  return p.repetition_penalty != 1.0F || p.frequency_penalty != 0.0F || p.presence_penalty != 0.0F;
}

bool wants_bias(const SampleRow& row) { return !row.params->logit_bias.empty(); }

bool wants_mask(const SampleRow& row) {
  return row.constraint != nullptr || row.allowed != nullptr || row.num_generated < row.params->min_tokens ||
         !row.params->bad_words.empty();
}

std::span<const int32_t> generated(const SampleRow& row) {
  const auto count = static_cast<size_t>(row.num_generated);
  MOAT_CHECK(count <= row.tokens.size(), "{} generated of {} tokens", count, row.tokens.size());
  return row.tokens.last(count);
}

// Calls forbid(id) for the last id of each word whose other ids end the reply so far; a word of one id always.
template <class Forbid>
void forbid_bad_words(const SampleRow& row, const Forbid& forbid) {
  if (row.params->bad_words.empty()) return;
  const std::span<const int32_t> reply = generated(row);
  for (const std::vector<int32_t>& word : row.params->bad_words) {
    const auto start = std::span(word).first(word.size() - 1);
    if (start.size() > reply.size()) continue;
    if (std::equal(start.begin(), start.end(), reply.end() - static_cast<int64_t>(start.size()))) forbid(word.back());
  }
}

}  // namespace

// The listed rows of the logits as a tensor of their own. [list, vocab]
Tensor Sampler::gather(Exec& exec, const Tensor& logits, const RowList& list) const {
  const Tensor work = exec.arena().alloc(DType::kF32, {static_cast<int64_t>(list.size()), vocab_size_});
  embed(exec, "sample.gather", {.out = work, .table = logits, .ids = list});
  return work;
}

// Penalties of the rows that ask for them; the lists of the others are empty.
void Sampler::penalize(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const {
  std::vector<int32_t> starts = {0}, ids, counts;
  std::vector<float> repetition, frequency, presence;
  for (const int32_t index : list) {
    const SampleRow& row = rows[static_cast<size_t>(index)];
    if (wants_penalties(row)) {
      TokenCounts fresh;
      TokenCounts& seen = row.counts != nullptr ? *row.counts : fresh;
      seen.update(row.tokens, static_cast<int64_t>(row.tokens.size() - generated(row).size()));
      ids.insert(ids.end(), seen.ids().begin(), seen.ids().end());
      counts.insert(counts.end(), seen.counts().begin(), seen.counts().end());
    }
    starts.push_back(static_cast<int32_t>(ids.size()));
    repetition.push_back(row.params->repetition_penalty);
    frequency.push_back(row.params->frequency_penalty);
    presence.push_back(row.params->presence_penalty);
  }
  apply_penalties(exec, "sample.penalties",
                  {.logits = work,
                   .tokens = {starts, ids},
                   .counts = counts,
                   .repetition = repetition,
                   .frequency = frequency,
                   .presence = presence});
}

void Sampler::bias(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const {
  std::vector<int32_t> starts = {0}, ids;
  std::vector<float> values;
  for (const int32_t index : list) {
    for (const TokenBias& entry : rows[static_cast<size_t>(index)].params->logit_bias) {
      ids.push_back(entry.token_id);
      values.push_back(entry.bias);
    }
    starts.push_back(static_cast<int32_t>(ids.size()));
  }
  bias_logits(exec, "sample.bias", {.logits = work, .tokens = {starts, ids}, .bias = values});
}

// Clears what constraints, min_tokens and bad_words forbid.
void Sampler::apply_masks(Exec& exec, const Tensor& work, const RowList& list, std::span<const SampleRow> rows) const {
  const int64_t words = (vocab_size_ + 31) / 32;
  const Tensor allowed = exec.arena().alloc(DType::kI32, {static_cast<int64_t>(list.size()), words});
  for (size_t i = 0; i < list.size() && !exec.dry(); ++i) {
    const SampleRow& row = rows[static_cast<size_t>(list[i])];
    uint32_t* bits = allowed.ptr<uint32_t>() + static_cast<int64_t>(i) * words;
    if (row.allowed != nullptr) {
      std::copy(row.allowed, row.allowed + words, bits);
    } else {
      std::fill(bits, bits + words, ~0U);
      if (row.constraint != nullptr) row.constraint->mask({bits, static_cast<size_t>(words)});
    }
    const auto forbid = [&](int32_t id) {
      if (id >= 0 && id < vocab_size_) bits[id / 32] &= ~(1U << (id % 32));
    };
    forbid_bad_words(row, forbid);
    if (row.num_generated >= row.params->min_tokens) continue;
    if (!row.params->ignore_eos) forbid(eos_token_id_);
    for (const int32_t id : row.params->stop_token_ids) forbid(id);
  }
  mask_logits(exec, "sample.mask", {.logits = work, .allowed = allowed});
}

Sampler::Path Sampler::path_of(const SamplingParams& p) const {
  if (!(p.temperature > 0.0F)) return Path::kGreedy;
  return p.top_k > 0 && p.top_k <= kMostFew && p.top_k < vocab_size_ ? Path::kFew : Path::kDense;
}

Sampler::Filters Sampler::filters_of(const RowList& list, std::span<const SampleRow> rows) const {
  Filters f;
  for (const int32_t index : list) {
    const SamplingParams& p = *rows[static_cast<size_t>(index)].params;
    f.temperature.push_back(p.temperature);
    f.top_k.push_back(p.top_k > 0 ? p.top_k : static_cast<int32_t>(vocab_size_));
    f.top_p.push_back(p.top_p);
    f.min_p.push_back(p.min_p);
  }
  return f;
}

// The distributions to draw from, as the entries that top-k leaves. counts -1: more tie than there is room for.
CompactRows Sampler::few_probs(Exec& exec, const Tensor& logits, const Filters& f) const {
  const int64_t rows = logits.dim(0);
  const CompactRows out{.ids = exec.arena().alloc(DType::kI32, {rows, kFewWidth}),
                        .probs = exec.arena().alloc(DType::kF32, {rows, kFewWidth}),
                        .counts = exec.arena().alloc(DType::kI32, {rows})};
  top_k_probs(
      exec, "sample.top_k_probs",
      {.out = out, .logits = logits, .temperature = f.temperature, .k = f.top_k, .top_p = f.top_p, .min_p = f.min_p});
  return out;
}

// Temperature, top-k, top-p, min-p: `work` becomes the distributions to draw from.
void Sampler::to_probs(Exec& exec, const Tensor& work, const Filters& f) const {
  const auto any = [&](const auto& values, auto is_on) {
    return exec.dry() || std::any_of(values.begin(), values.end(), is_on);
  };
  softmax(exec, "sample.softmax", {.probs = work, .logits = work, .temperature = f.temperature});
  if (any(f.top_k, [&](int32_t k) { return k < vocab_size_; })) {
    top_k_renorm(exec, "sample.top_k", {.probs = work, .k = f.top_k});
  }
  if (any(f.top_p, [](float p) { return p < 1.0F; })) {
    top_p_renorm(exec, "sample.top_p", {.probs = work, .p = f.top_p});
  }
  if (any(f.min_p, [](float p) { return p > 0.0F; })) {
    min_p_renorm(exec, "sample.min_p", {.probs = work, .min_p = f.min_p});
  }
}

void Sampler::add_logprobs(Exec& exec, const Tensor& logits, std::span<const SampleRow> rows,
                           std::vector<SampledRow>& results) const {
  RowList list;
  int64_t num_top = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].params->num_logprobs < 0 || results[i].token.token_id < 0) continue;
    list.push_back(static_cast<int32_t>(i));
    num_top = std::max<int64_t>(num_top, rows[i].params->num_logprobs);
  }
  if (list.empty()) return;
  const int64_t count = static_cast<int64_t>(list.size());
  num_top = std::min(num_top, vocab_size_);
  const Tensor work = gather(exec, logits, list);
  const Tensor ids = exec.arena().alloc(DType::kI32, {count});
  const Tensor chosen = exec.arena().alloc(DType::kF32, {count});
  Tensor top_ids;
  Tensor top_logprobs;
  if (num_top > 0) {
    top_ids = exec.arena().alloc(DType::kI32, {count, num_top});
    top_logprobs = exec.arena().alloc(DType::kF32, {count, num_top});
  }
  for (int64_t i = 0; i < count && !exec.dry(); ++i) {
    ids.i32()[i] = results[static_cast<size_t>(list[static_cast<size_t>(i)])].token.token_id;
  }
  logprobs(exec, "sample.logprobs",
           {.chosen = chosen, .top_ids = top_ids, .top_logprobs = top_logprobs, .logits = work, .ids = ids});
  if (exec.dry()) return;
  for (int64_t i = 0; i < count; ++i) {
    const size_t row = static_cast<size_t>(list[static_cast<size_t>(i)]);
    SampledToken& token = results[row].token;
    token.logprob = chosen.f32()[i];
    for (int64_t j = 0; j < std::min<int64_t>(rows[row].params->num_logprobs, num_top); ++j) {
      token.top.push_back({top_ids.i32()[i * num_top + j], top_logprobs.f32()[i * num_top + j]});
    }
  }
}

// The listed rows after penalties, biases and masks: to be read, or as a tensor of their own. [list, vocab]
Tensor Sampler::edit(Exec& exec, const Tensor& logits, const RowList& list, std::span<const SampleRow> rows,
                     Access access) const {
  const auto any = [&](bool (*wants)(const SampleRow&)) {
    return std::any_of(list.begin(), list.end(), [&](int32_t i) { return wants(rows[static_cast<size_t>(i)]); });
  };
  const bool penalties = any(wants_penalties), biases = any(wants_bias), masks = any(wants_mask);
  const auto count = static_cast<int64_t>(list.size());
  const bool is_range = list.back() - list.front() + 1 == count;  // lists ascend
  if (access == Access::kRead && is_range && !penalties && !biases && !masks) {
    return logits.rows(list.front(), list.front() + count);
  }
  const Tensor work = gather(exec, logits, list);
  if (penalties) penalize(exec, work, list, rows);
  if (biases) bias(exec, work, list, rows);
  if (masks) apply_masks(exec, work, list, rows);
  return work;
}

// A token for each listed row, all of one path. [list] i32. Rows with more entries than the path has room for are added
// to `overflow`.
Tensor Sampler::choose_ids(Exec& exec, const Tensor& logits, const RowList& list, std::span<const SampleRow> rows,
                           Path path, RowList& overflow) const {
  const Tensor work = edit(exec, logits, list, rows, path == Path::kDense ? Access::kWrite : Access::kRead);
  const Tensor ids = exec.arena().alloc(DType::kI32, {work.dim(0)});
  if (path == Path::kGreedy) {
    argmax(exec, "sample.argmax", {.ids = ids, .logits = work});
    return ids;
  }
  std::vector<double> uniform;
  for (const int32_t index : list) {
    const SampleRow& row = rows[static_cast<size_t>(index)];
    uniform.push_back(random_uniform(row.params->seed, static_cast<uint64_t>(row.position), RandomPurpose::kSample));
  }
  const Filters filters = filters_of(list, rows);
  if (path == Path::kDense) {
    to_probs(exec, work, filters);
    draw(exec, "sample.draw", {.ids = ids, .probs = work, .uniform = uniform});
    return ids;
  }
  const CompactRows probs = few_probs(exec, work, filters);
  draw_compact(exec, "sample.draw_compact", {.ids = ids, .probs = probs, .uniform = uniform});
  for (size_t i = 0; i < list.size() && !exec.dry(); ++i) {
    if (probs.counts.i32()[i] < 0) overflow.push_back(list[i]);
  }
  return ids;
}

// A token for each listed row.
void Sampler::choose(Exec& exec, const Tensor& logits, const RowList& list, std::span<const SampleRow> rows,
                     std::vector<SampledRow>& results) const {
  for (const bool masked : {false, true}) {  // a mask costs a row of bits for each row
    std::array<RowList, 3> groups;           // [Path]
    for (const int32_t index : list) {
      const SampleRow& row = rows[static_cast<size_t>(index)];
      if (wants_mask(row) == masked) groups[static_cast<size_t>(path_of(*row.params))].push_back(index);
    }
    for (const Path path : {Path::kGreedy, Path::kFew, Path::kDense}) {
      RowList& dense = groups[static_cast<size_t>(Path::kDense)];
      RowList& group = groups[static_cast<size_t>(path)];
      if (group.empty()) continue;
      std::sort(group.begin(), group.end());  // those of the path before may have been added
      const ArenaScope scope(exec.arena());
      const Tensor ids = choose_ids(exec, logits, group, rows, path, dense);
      for (size_t i = 0; i < group.size() && !exec.dry(); ++i) {
        SampledRow& result = results[static_cast<size_t>(group[i])];
        result.token.token_id = ids.i32()[i];
        result.error = result.token.token_id < 0 ? kUnusableRow : "";
      }
    }
  }
}

std::vector<SampledRow> Sampler::sample(Exec& exec, const Tensor& logits, std::span<const SampleRow> rows) const {
  std::vector<SampledRow> results(rows.size());
  RowList all(rows.size());
  std::iota(all.begin(), all.end(), 0);
  choose(exec, logits, all, rows, results);
  const ArenaScope scope(exec.arena());
  add_logprobs(exec, logits, rows, results);
  return results;
}

void Sampler::dry(Exec& exec, const Tensor& logits, int64_t max_drafts) const {
  const auto rows = static_cast<size_t>(logits.dim(0));
  // Rows that take every path, with penalties, biases, min_tokens masks and all filters on.
  for (const Path path : {Path::kGreedy, Path::kFew, Path::kDense}) {
    SamplingParams params;
    params.temperature = path == Path::kGreedy ? 0.0F : 1.0F;
    params.top_k = path == Path::kFew ? static_cast<int32_t>(std::min<int64_t>(kMostFew, vocab_size_ - 1)) : 0;
    params.presence_penalty = 1.0F;
    params.logit_bias = {{.token_id = 0, .bias = 1.0F}};
    params.min_tokens = 1;
    params.num_logprobs = SamplingParams::kMaxLogprobs;
    const std::vector<SampleRow> all(rows, SampleRow{.params = &params});
    sample(exec, logits, all);
    if (max_drafts == 0 || rows < 2) continue;
    // Sequences of one draft: most sequences, and as many rows of them as there are.
    params.seeded = false;
    const std::vector<int32_t> tokens = {0};
    const std::vector<VerifySequence> sequences(
        rows / 2, VerifySequence{.params = &params, .tokens = tokens, .drafts = tokens, .law_row = 0});
    verify(exec, logits, sequences, make_tensor(nullptr, DType::kF32, logits.dims));
  }
}

}  // namespace moat
