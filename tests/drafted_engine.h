// SPDX-License-Identifier: Apache-2.0
// The engine's parts under tests that look inside: a target and a drafter of a few kilobytes, drafts that are accepted
// as far as the test wants, and a record of every state, checkpoint and draft, to be compared with those of another run.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "draft_checkpoint.h"
#include "engine/dspark_drafter.h"
#include "engine/local_engine.h"

namespace moat::test {

using Ids = std::vector<int32_t>;

// Every switch of K3 in four layers, for the drafters of draft_checkpoint.h.
inline Json tiny_target_config(int64_t vocab_size = kTinyVocab) {
  Json config = tiny_config();
  Json& text = *config.find("text_config");
  text.set("vocab_size", vocab_size);
  text.set("hidden_size", kTinyHidden);
  text.set("num_hidden_layers", 4);
  text.set("max_position_embeddings", 4096);
  Json& kda = *text.find("linear_attn_config");
  kda.set("kda_layers", Json::array({1, 2, 4}));
  kda.set("full_attn_layers", Json::array({3}));
  return config;
}
inline Json tiny_drafter_config(int64_t vocab_size = kTinyVocab, int64_t block_size = 4) {
  Json config = flat_draft_config();
  config.set("vocab_size", vocab_size);
  config.set("block_size", block_size);
  config.set("num_target_layers", 4);
  config.set("target_layer_ids", Json::array({1, 3}));
  return config;
}

struct TinyModels {
  ThreadPool pool;
  TempDir target_dir, draft_dir;
  std::unique_ptr<LoadedModel> target;
  std::unique_ptr<LoadedDspark> drafter;

  explicit TinyModels(int threads = 2, int64_t vocab_size = kTinyVocab, int64_t block_size = 4) : pool(threads) {
    TinyCheckpoint(tiny_target_config(vocab_size)).write(target_dir.path());
    TinyDraft(tiny_drafter_config(vocab_size, block_size)).write(draft_dir.path());
    auto model = load_model(target_dir.path(), {}, pool);
    MOAT_CHECK(model.ok(), "{}", model.status().message());
    target = std::move(model).value();
    auto draft = load_dspark(draft_dir.path(), pool);
    MOAT_CHECK(draft.ok(), "{}", draft.status().message());
    drafter = std::move(draft).value();
  }
};

// Drafts that are right as often as `right` says: it is told their texts beforehand. A drafter behind it sees all that
// it would see without this one, and what it proposes is kept, by the tokens that it proposed for.
class ScriptedDrafter final : public moat::Drafter {
 public:
  static constexpr int64_t kMost = 7;

  int64_t max_drafts() const override { return kMost; }
  std::string describe() const override { return "scripted"; }
  std::span<const int32_t> tap_layers() const override {
    return inner_ == nullptr ? std::span<const int32_t>() : inner_->tap_layers();
  }
  TapStream tap_stream() const override { return inner_ == nullptr ? TapStream::kAttnRes : inner_->tap_stream(); }
  void extend(Exec& exec, const Tensor& taps, const ForwardInput& input) override { inner_->extend(exec, taps, input); }
  Drafts propose(Exec& exec, std::span<const DraftSequence> sequences, int64_t max_blocks,
                 int64_t num_drafts) override {
    if (inner_ != nullptr) {
      const int64_t count = std::min(num_drafts, inner_->max_drafts());
      const Drafts drafts = inner_->propose(exec, sequences, max_blocks, count);
      for (size_t s = 0; s < sequences.size(); ++s) {
        const auto first = drafts.ids.begin() + static_cast<int64_t>(s) * count;
        seen[Ids(sequences[s].tokens.begin(), sequences[s].tokens.end())] = Ids(first, first + count);
      }
    }
    Drafts drafts{.width = num_drafts};
    for (const DraftSequence& s : sequences) {
      const Ids* text = text_of(s.tokens);
      const int64_t num_right = right(static_cast<int64_t>(s.tokens.size()));
      for (int64_t k = 0; k < num_drafts; ++k) {
        const size_t place = s.tokens.size() + static_cast<size_t>(k);
        const int32_t truth = text != nullptr && place < text->size() ? (*text)[place] : 0;
        drafts.ids.push_back(k < num_right ? truth : (truth + 1) % static_cast<int32_t>(kTinyVocab));
      }
    }
    return drafts;
  }
  void dry_propose(Exec& exec, int64_t seqs, int64_t max_blocks, bool upper_end) override {
    if (inner_ != nullptr) inner_->dry_propose(exec, seqs, max_blocks, upper_end);
  }
  void dry_extend(Exec& exec, int64_t tokens) override {
    if (inner_ != nullptr) inner_->dry_extend(exec, tokens);
  }

  void set_inner(moat::Drafter* inner) { inner_ = inner; }

  std::vector<Ids> texts;                                             // prompts with their replies
  std::function<int64_t(int64_t)> right = [](int64_t) { return 7; };  // of a round that begins after so many tokens
  std::map<Ids, Ids> seen;                                            // tokens -> drafts of the drafter behind it

 private:
  const Ids* text_of(std::span<const int32_t> tokens) const {
    for (const Ids& text : texts) {
      if (text.size() >= tokens.size() && std::equal(tokens.begin(), tokens.end(), text.begin())) return &text;
    }
    return nullptr;
  }
  moat::Drafter* inner_ = nullptr;
};

struct Ask {
  Ids prompt;
  SamplingParams sampling = {};
  bool speculative = true;
  bool restore = true;
  std::function<std::unique_ptr<Constraint>()> constraint = {};
};

struct Answer {
  Ids tokens;
  FinishReason finish = FinishReason::kNone;
  int64_t cached = 0;
  bool operator==(const Answer&) const = default;
};

// Bits of one state slot, both of its parts.
inline std::vector<uint32_t> state_bits(const CacheView& view, int64_t slot) {
  std::vector<uint32_t> bits;
  for (int64_t layer = 0; layer < view.kda_state.dim(0); ++layer) {
    for (const Tensor& states : {view.kda_state.at(layer), view.kda_conv.at(layer)}) {
      const Tensor one = states.at(slot);
      const size_t begin = bits.size();
      bits.resize(begin + static_cast<size_t>(one.count()));
      std::memcpy(bits.data() + begin, one.data, static_cast<size_t>(storage_bytes(one.dtype, one.dims)));
    }
  }
  return bits;
}

// (prompt and its reply so far) -> bits of the state that has taken these tokens.
using StateMap = std::map<Ids, std::vector<uint32_t>>;

// What `got` and `want` both have must be the same. Returns how many that were.
inline int64_t expect_same_states(const StateMap& got, const StateMap& want, const std::string& what) {
  int64_t common = 0;
  for (const auto& [tokens, bits] : got) {
    const auto other = want.find(tokens);
    if (other == want.end()) continue;
    ++common;
    EXPECT_TRUE(other->second == bits) << what << ": the state after " << tokens.size() << " tokens";
  }
  return common;
}

// An engine without its loop: asks go in, and steps are run until all have been answered. Requests keep coming to the
// same scheduler and caches, whose memory is NaN at the start.
class DraftedEngine {
 public:
  struct Setup {
    EngineOptions options;
    int64_t num_blocks = 0, num_slots = 0;  // 0: all that there are
    bool with_drafter = false;              // behind the scripted one
  };

  DraftedEngine(TinyModels& models, Setup setup) : models_(models), scripted_(std::make_unique<ScriptedDrafter>()) {
    EngineOptions& o = setup.options;
    if (o.memory_bytes == 0) o.memory_bytes = int64_t{1} << 30;
    if (setup.with_drafter) {
      o.drafter = models.drafter.get();
    } else {
      o.custom_drafter = scripted_.get();
    }
    auto made = make_engine_parts(*models.target, o, models.pool);
    MOAT_CHECK(made.ok(), "{}", made.status().message());
    parts_ = std::move(made).value();
    CacheSizes& sizes = parts_.capacity.cache;
    if (setup.num_blocks > 0) sizes.num_blocks = setup.num_blocks;
    if (setup.num_slots > 0) sizes.num_slots = setup.num_slots;
    sizes.verify_rows = std::min(o.max_num_seqs * (1 + ScriptedDrafter::kMost), o.max_batched_tokens);
    const RunnerOptions runner{.arch = host_arch(),
                               .max_batched_tokens = o.max_batched_tokens,
                               .max_num_seqs = o.max_num_seqs,
                               .max_model_len = parts_.info.max_model_len};
    parts_.runner.reset();
    parts_.caches = std::make_unique<CacheMemory>(models.target->config, sizes);
    if (setup.with_drafter) {
      parts_.own_drafter =
          std::make_unique<DsparkDrafter>(*parts_.draft_model, parts_.caches->draft_rows(), o.block_size);
      scripted_->set_inner(parts_.own_drafter.get());
    }
    auto dry = dry_run(*parts_.model, runner, sizes, models.pool, scripted_.get());
    MOAT_CHECK(dry.ok(), "{}", dry.status().message());
    parts_.runner = std::make_unique<Runner>(*parts_.model, *parts_.caches, models.pool, runner, std::move(dry).value(),
                                             scripted_.get());
    const CacheView& view = parts_.caches->view();
    for (const Tensor& t : {view.mla, view.kda_state, view.kda_conv, parts_.caches->draft_rows()}) poison(t);
    scheduler_.emplace(parts_.scheduler_options, sizes, parts_.ledger_options);
  }

  // All of them together, with up to `drafts` drafts a round.
  std::vector<Answer> run(const std::vector<Ask>& asks, int64_t drafts) {
    const SequenceId base = next_id_;
    for (const Ask& ask : asks) add(ask);
    while (!scheduler_->idle()) step(drafts);
    std::vector<Answer> answers;
    for (size_t i = 0; i < asks.size(); ++i) answers.push_back(answers_.at(base + i));
    return answers;
  }

  // One after the other, without drafts. The drafter is told what comes.
  std::vector<Answer> plain(const std::vector<Ask>& asks) {
    std::vector<Answer> answers;
    for (const Ask& ask : asks) answers.push_back(run({ask}, 0).front());
    learn(asks, answers);
    return answers;
  }
  void learn(const std::vector<Ask>& asks, const std::vector<Answer>& answers) {
    for (size_t i = 0; i < asks.size(); ++i) {
      Ids& text = scripted_->texts.emplace_back(asks[i].prompt);
      text.insert(text.end(), answers[i].tokens.begin(), answers[i].tokens.end());
    }
  }

  SequenceId add(const Ask& ask) {
    Request request;
    request.prompt_ids = ask.prompt;
    request.sampling = ask.sampling;
    request.speculative = ask.speculative;
    request.restore_prefix = ask.restore;
    if (ask.constraint) request.constraint = ask.constraint();
    scheduler_->add(next_id_, std::move(request));
    return next_id_++;
  }

  void step(int64_t drafts) {
    StepPlan plan;
    std::vector<SequenceEvent> events;
    scheduler_->schedule(plan, events, 0, {}, {.max_drafts = drafts});
    take(events);
    if (plan.empty()) return;
    // Records of an earlier step must not be read.
    poison(parts_.caches->view().kda_records);
    poison(parts_.caches->view().conv_records);
    const StepResult result = parts_.runner->run(plan, *scheduler_);
    std::vector<Ids> texts;  // before the step
    for (const SequenceId id : plan.sequences) {
      const auto tokens = scheduler_->tokens(id);
      texts.emplace_back(tokens.begin(), tokens.end());
    }
    const StateCommits commits = scheduler_->advance(plan, result, events);
    parts_.runner->commit(commits);
    scheduler_->check_invariants();
    note(plan, result, commits, texts);
    take(events);
    const CacheLedger& ledger = scheduler_->ledger();
    most_blocks = std::max(most_blocks, ledger.blocks_used() + ledger.blocks_cached());
    for (size_t s = 0; s < plan.sequences.size(); ++s) {
      const SequenceId id = plan.sequences[s];
      if (!plan.wants_token[s] || answers_[id].finish != FinishReason::kNone) continue;
      const auto tokens = scheduler_->tokens(id);
      states[Ids(tokens.begin(), tokens.end() - 1)] = state_bits(parts_.caches->view(), plan.state_slots[s]);
    }
  }

  ScriptedDrafter& drafter() { return *scripted_; }
  Scheduler& scheduler() { return *scheduler_; }
  EngineParts& parts() { return parts_; }

  StateMap states;                                  // of sequences that go on, after each step
  StateMap checkpoints;                             // as saved
  std::vector<std::pair<int32_t, int32_t>> rounds;  // drafts verified, tokens kept by the states
  int64_t most_blocks = 0;                          // in use or cached

 private:
  static void poison(const Tensor& t) {
    if (t.is_set()) std::fill_n(t.f32(), t.count(), std::numeric_limits<float>::quiet_NaN());
  }

  void note(const StepPlan& plan, const StepResult& result, const StateCommits& commits,
            const std::vector<Ids>& texts) {
    const auto with_slot = [&](int32_t slot) {
      return static_cast<size_t>(std::find(plan.state_slots.begin(), plan.state_slots.end(), slot) -
                                 plan.state_slots.begin());
    };
    const auto keep = [&](Ids text, int64_t size, int32_t slot) {
      text.resize(static_cast<size_t>(size));
      checkpoints[text] = state_bits(parts_.caches->view(), slot);
    };
    for (const StateCopy& save : plan.saves) {
      const size_t s = with_slot(save.from);
      keep(texts[s], plan.first_positions[s] + plan.num_tokens[s], save.to);
    }
    std::map<SequenceId, const StepResult::Row*> rows;
    for (const StepResult::Row& row : result.rows) rows[row.sequence] = &row;
    for (const StateCopy& save : commits.saves) {
      const size_t s = with_slot(save.from);
      const auto entry = std::find_if(commits.entries.begin(), commits.entries.end(),
                                      [&](const StateCommits::Entry& e) { return e.slot == save.from; });
      Ids text = texts[s];
      for (const SampledToken& t : rows.at(plan.sequences[s])->tokens) text.push_back(t.token_id);
      // Without verified drafts the state has taken the step's one row.
      const int64_t taken = entry == commits.entries.end() ? 1 : entry->rows_to_save;
      keep(text, plan.first_positions[s] + taken, save.to);
    }
    for (const StateCommits::Entry& entry : commits.entries) {
      rounds.emplace_back(rows.at(entry.sequence)->num_drafts, entry.rows);
    }
  }

  void take(std::vector<SequenceEvent>& events) {
    for (const SequenceEvent& e : events) {
      Answer& answer = answers_[e.sequence];
      EXPECT_NE(e.event.finish, FinishReason::kError) << e.event.error.message();
      for (const SampledToken& t : e.event.tokens) answer.tokens.push_back(t.token_id);
      answer.finish = e.event.finish;
      answer.cached = e.event.num_cached_tokens;
    }
    events.clear();
  }

  TinyModels& models_;
  std::unique_ptr<ScriptedDrafter> scripted_;
  EngineParts parts_;
  std::optional<Scheduler> scheduler_;
  std::map<SequenceId, Answer> answers_;
  SequenceId next_id_ = 1;
};

// `count` tokens of a text of its own, none of them with a meaning.
inline Ids random_text(uint64_t name, int64_t count) {
  Rng rng(name);
  Ids ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(4 + rng.next() % (kTinyVocab - 6)));
  return ids;
}

inline SamplingParams greedy_to(int32_t max_tokens) {
  return {.temperature = 0.0F, .max_tokens = max_tokens, .ignore_eos = true};
}
// Draws that are the same with drafts and without, and more varied than what is most likely.
inline SamplingParams seeded_to(int32_t max_tokens, uint64_t seed) {
  return {.temperature = 1.5F, .seed = seed, .seeded = true, .max_tokens = max_tokens, .ignore_eos = true};
}

}  // namespace moat::test
