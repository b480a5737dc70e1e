// SPDX-License-Identifier: Apache-2.0
// `moat bench speculation`: the same replies with and without drafts, one way after the other in each repeat, so that a
// machine that changes its speed changes both. Times are of the decode phase alone: from the step that gave the last
// sequence its first token to the last token of all.
#include <algorithm>
#include <unordered_map>

#include "base/rng.h"
#include "engine/local_engine.h"
#include "main/commands.h"

namespace moat {
namespace {

using Ids = std::vector<int32_t>;

// Drafts what the reply is known to be, and at every position something else with chance 1 - acceptance. It costs
// nothing, so what is left is the cost of verifying.
class ScriptedDrafter final : public Drafter {
 public:
  static constexpr int64_t kMaxDrafts = 7;

  void set_acceptance(double acceptance) { acceptance_ = acceptance; }
  void learn(const Ids& prompt, const Ids& reply) {
    Ids all = prompt;
    all.insert(all.end(), reply.begin(), reply.end());
    known_[prompt] = std::move(all);
    prompt_tokens_ = prompt.size();
  }

  int64_t max_drafts() const override { return kMaxDrafts; }
  std::string describe() const override { return fmt::format("scripted, {} accepted at every position", acceptance_); }
  Drafts propose(Exec&, std::span<const DraftSequence> sequences, int64_t, int64_t num_drafts) override {
    Drafts drafts{.width = num_drafts};
    for (const DraftSequence& s : sequences) {
      const auto it = known_.find(Ids(s.tokens.begin(), s.tokens.begin() + static_cast<int64_t>(prompt_tokens_)));
      for (size_t k = 0; k < static_cast<size_t>(num_drafts); ++k) {
        const size_t at = s.tokens.size() + k;
        const bool known = it != known_.end() && at < it->second.size();
        const int32_t right = known ? it->second[at] : 0;
        drafts.ids.push_back(known && rng_.uniform() < acceptance_ ? right : (right + 1) % 2);
      }
    }
    return drafts;
  }

 private:
  struct Hash {
    size_t operator()(const Ids& ids) const {
      size_t h = 0;
      for (const int32_t id : ids) h = h * 1000003 + static_cast<size_t>(id);
      return h;
    }
  };
  double acceptance_ = 1;
  size_t prompt_tokens_ = 0;
  std::unordered_map<Ids, Ids, Hash> known_;
  Rng rng_{7};
};

struct RunResult {
  double seconds = 0;
  int64_t tokens = 0;
  std::vector<Ids> replies;
  SchedulerStats stats;
};

// The prompts `batch` at a time; decode phases only. Drafts begin when all prompts are through, so that a phase begins
// with the same sequences, each with the same tokens, whatever is drafted in it.
RunResult run_once(EngineParts& parts, const BenchSpeculationOptions& o, std::span<const Ids> prompts, int64_t batch) {
  RunResult result;
  for (size_t first = 0; first < prompts.size(); first += static_cast<size_t>(batch)) {
    const auto count = std::min(prompts.size() - first, static_cast<size_t>(batch));
    Scheduler scheduler(parts.scheduler_options, parts.capacity.cache, parts.ledger_options);
    Stepper stepper(parts, scheduler);
    for (size_t i = 0; i < count; ++i) {
      Request request;
      request.prompt_ids = prompts[first + i];
      request.sampling = {.temperature = o.temperature,
                          .seed = first + i,
                          .seeded = false,
                          .max_tokens = static_cast<int32_t>(o.tokens),
                          .ignore_eos = o.prompts_path.empty()};
      scheduler.add(i + 1, std::move(request));
    }
    std::vector<Ids> replies(count);
    StepPlan plan;
    std::vector<SequenceEvent> events;
    size_t started = 0, ended = 0;
    double start = 0;
    DraftLength waiting;  // that of `parts` while prompts come
    std::swap(parts.draft_length, waiting);
    while (ended < count) {
      stepper.schedule(plan, events, 0);
      stepper.run(plan, events);
      for (const SequenceEvent& e : events) {
        Ids& reply = replies[e.sequence - 1];
        started += reply.empty() && !e.event.tokens.empty();
        for (const SampledToken& t : e.event.tokens) reply.push_back(t.token_id);
        if (start > 0) result.tokens += static_cast<int64_t>(e.event.tokens.size());
        ended += e.event.finish != FinishReason::kNone;
      }
      events.clear();
      if (start == 0 && started == count) {
        std::swap(parts.draft_length, waiting);
        start = now_seconds();
      }
    }
    if (start > 0) {
      result.seconds += now_seconds() - start;
    } else {
      std::swap(parts.draft_length, waiting);
    }
    result.stats.draft_rounds += scheduler.stats().draft_rounds;
    result.stats.drafted_tokens += scheduler.stats().drafted_tokens;
    result.stats.accepted_tokens += scheduler.stats().accepted_tokens;
    std::move(replies.begin(), replies.end(), std::back_inserter(result.replies));
  }
  return result;
}

Result<std::vector<Ids>> load_prompts(const BenchSpeculationOptions& o, const ModelConfig& config, int64_t count) {
  std::vector<Ids> prompts;
  if (o.prompts_path.empty()) {
    Rng rng(11);
    for (int64_t p = 0; p < count; ++p) {
      Ids& ids = prompts.emplace_back();
      for (int64_t i = 0; i < o.prompt_tokens; ++i) ids.push_back(static_cast<int32_t>(rng.below(config.vocab_size)));
    }
    return prompts;
  }
  MOAT_ASSIGN(const std::string text, read_input(o.prompts_path));
  Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(o.prompts_path);
  if (!json->is_array()) return invalid_argument("{}: a {}, expected a list", o.prompts_path, json->type_name());
  for (const Json& row : json->as_array()) {
    const Json* ids = row.is_object() ? row.find("prompt") : nullptr;
    if (ids == nullptr) return invalid_argument("{}: an entry has no \"prompt\"", o.prompts_path);
    Result<Ids> parsed = parse_token_ids(*ids, config.vocab_size);
    if (!parsed.ok()) return parsed.status().with_prefix(o.prompts_path);
    prompts.push_back(std::move(parsed).value());
  }
  return prompts;
}

struct Line {
  int64_t batch = 0;
  double acceptance = -1;  // simulated
  double off_tokens_per_second = 0;
  double automatic = 0;  // over off
  std::vector<std::pair<int64_t, double>> fixed;
  double tokens_per_round = 0, drafts_per_round = 0;  // automatic
  bool same_replies = true;

  double best_fixed() const {
    double best = 0;
    for (const auto& [drafts, ratio] : fixed) best = std::max(best, ratio);
    return best;
  }
};

// One line of the table: off, automatic and each fixed length, in turn, `repeats` times.
Line measure(EngineParts& off, EngineParts& on, const BenchSpeculationOptions& o, const std::vector<int64_t>& fixed,
             std::span<const Ids> prompts, int64_t batch, ScriptedDrafter* scripted) {
  Line line{.batch = batch};
  const int64_t most = on.drafter->max_drafts();
  const bool confident = on.drafter->has_confidence();
  DraftLength automatic(most, 0, confident);
  std::vector<double> off_rates, ratios;
  std::vector<std::vector<double>> fixed_ratios(fixed.size());
  // Enough replies a run that a decode phase is not over in an instant.
  const auto count = static_cast<size_t>(std::max(batch, o.replies));
  for (int r = -1; r < o.repeats; ++r) {  // -1: warm up, and learn
    const size_t first = static_cast<size_t>(r + 1) * count % std::max<size_t>(1, prompts.size() - count + 1);
    const auto group = prompts.subspan(first, std::min(count, prompts.size() - first));
    const RunResult plain = run_once(off, o, group, batch);
    if (scripted != nullptr) {
      for (size_t i = 0; i < group.size(); ++i) scripted->learn(group[i], plain.replies[i]);
    }
    const double plain_rate = static_cast<double>(plain.tokens) / plain.seconds;
    const auto ratio_of = [&](DraftLength& length, RunResult& result) {
      std::swap(on.draft_length, length);
      result = run_once(on, o, group, batch);
      std::swap(on.draft_length, length);
      line.same_replies &= o.temperature > 0 || result.replies == plain.replies;
      return static_cast<double>(result.tokens) / result.seconds / plain_rate;
    };
    RunResult result;
    const double ratio = ratio_of(automatic, result);
    if (r >= 0) {
      off_rates.push_back(plain_rate);
      ratios.push_back(ratio);
      const auto rounds = static_cast<double>(std::max<int64_t>(1, result.stats.draft_rounds));
      line.tokens_per_round += (1 + static_cast<double>(result.stats.accepted_tokens) / rounds) / o.repeats;
      line.drafts_per_round += static_cast<double>(result.stats.drafted_tokens) / rounds / o.repeats;
    }
    for (size_t f = 0; f < fixed.size(); ++f) {
      DraftLength length(most, fixed[f], confident);
      const double fixed_ratio = ratio_of(length, result);
      if (r >= 0) fixed_ratios[f].push_back(fixed_ratio);
    }
  }
  line.off_tokens_per_second = median(off_rates);
  line.automatic = median(ratios);
  for (size_t f = 0; f < fixed.size(); ++f) line.fixed.emplace_back(fixed[f], median(fixed_ratios[f]));
  return line;
}

Json to_json(const Line& line) {
  Json fixed = Json::object();
  for (const auto& [drafts, ratio] : line.fixed) fixed.set(std::to_string(drafts), ratio);
  Json json = Json::object({{"batch", line.batch},
                            {"off_tokens_per_second", line.off_tokens_per_second},
                            {"automatic_ratio", line.automatic},
                            {"fixed_ratios", std::move(fixed)},
                            {"tokens_per_round", line.tokens_per_round},
                            {"drafts_per_round", line.drafts_per_round},
                            {"same_replies", line.same_replies}});
  if (line.acceptance >= 0) json.set("simulated_acceptance", line.acceptance);
  return json;
}

void print(const Line& line) {
  fmt::print("{:>6} {:>9} {:>12.1f} {:>8.3f}", line.batch,
             line.acceptance < 0 ? "real" : fmt::format("{:.2f}", line.acceptance), line.off_tokens_per_second,
             line.automatic);
  for (const auto& [drafts, ratio] : line.fixed) fmt::print(" {:>8.3f}", ratio);
  fmt::print(" {:>10.3f} {:>9.2f} {:>9.2f} {:>6}\n", line.best_fixed() / line.automatic, line.tokens_per_round,
             line.drafts_per_round, line.same_replies ? "yes" : "NO");
  std::fflush(stdout);
}

}  // namespace

Status bench_speculation_command(const BenchSpeculationOptions& o) {
  MOAT_ASSIGN(const std::vector<int64_t> batches, parse_counts("--batch", o.batches));
  MOAT_ASSIGN(std::vector<int64_t> fixed, parse_counts("--fixed", o.fixed));
  const bool simulates = !o.simulate.empty();
  if (simulates == (!o.draft.directory.empty() || o.draft.ngram)) {
    return invalid_argument("give either a drafter (--draft DIR, --draft-ngram) or --simulate");
  }
  MOAT_ASSIGN(OpenModel open, open_model(o.model));
  MOAT_ASSIGN(const std::unique_ptr<LoadedDspark> drafter, open_drafter(o.draft, *open.pool));
  const int64_t largest = *std::max_element(batches.begin(), batches.end());
  MOAT_ASSIGN(const std::vector<Ids> prompts,
              load_prompts(o, open.loaded->config, std::max(largest, o.replies) * (1 + o.repeats)));
  size_t longest = 0;
  for (const Ids& ids : prompts) longest = std::max(longest, ids.size());
  ScriptedDrafter scripted;
  EngineOptions options{.max_model_len = static_cast<int64_t>(longest) + o.tokens + 1,
                        .max_num_seqs = largest,
                        .memory_fraction = 0.4,  // two engines stand side by side
                        .prefix_cache = false,
                        .reference = open.reference};
  MOAT_ASSIGN(EngineParts off, make_engine_parts(*open.loaded, options, *open.pool));
  options.drafter = drafter.get();
  options.ngram_drafter = o.draft.ngram;
  options.custom_drafter = simulates ? &scripted : nullptr;
  MOAT_ASSIGN(EngineParts on, make_engine_parts(*open.loaded, options, *open.pool));
  if (on.capacity.max_num_seqs < largest) {
    return resource_exhausted("batch {} does not fit: {}", largest, on.capacity.bound);
  }
  std::erase_if(fixed, [&](int64_t drafts) { return drafts > on.drafter->max_drafts(); });

  if (!o.json) {
    fmt::print("model {}  backend {}  threads {}  activations f32\n{}\nratios over decoding without drafts\n",
               o.model.model_dir, on.info.backend, open.pool->num_threads(), on.drafter->describe());
    fmt::print("{:>6} {:>9} {:>12} {:>8}", "batch", "accepted", "off tok/s", "auto");
    for (const int64_t drafts : fixed) fmt::print(" {:>8}", fmt::format("fixed {}", drafts));
    fmt::print(" {:>10} {:>9} {:>9} {:>6}\n", "best/auto", "tok/round", "drafts", "same");
  }
  Json results = Json::array();
  for (const int64_t batch : batches) {
    for (const double acceptance : simulates ? o.simulate : std::vector<double>{-1}) {
      scripted.set_acceptance(acceptance);
      Line line = measure(off, on, o, fixed, prompts, batch, simulates ? &scripted : nullptr);
      line.acceptance = acceptance;
      results.push_back(to_json(line));
      if (!o.json) print(line);
    }
  }
  if (o.json) {
    fmt::print("{}\n", Json::object({{"model", o.model.model_dir},
                                     {"backend", on.info.backend},
                                     {"threads", open.pool->num_threads()},
                                     {"drafter", on.drafter->describe()},
                                     {"results", std::move(results)}})
                           .dump());
  }
  return {};
}

}  // namespace moat
