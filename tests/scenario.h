// SPDX-License-Identifier: Apache-2.0
// Scheduler scenarios as text (tests/scheduler/*.scn): what clients do, line by line, and what each step must then be.
//
//   # comment
//   options max_num_seqs=2 max_batched_tokens=100 block_size=16 num_blocks=64 num_slots=4     first line, once
//           also: max_model_len, max_step_ms, seconds_per_priority, checkpoint_interval, checkpoint_gap, deterministic,
//           prefix_cache (0 or 1), verify_rows; row_ms and start_ms make the expected cost of a step start_ms + rows *
//           row_ms
//   time 2.5                              seconds, for what follows
//   add A prompt=sys:64+a:10 max_tokens=5 [priority=-1] [timeout=2] [salt=s] [ends=64,74] [restore=0] [ignore_eos=1] [speculative=0]
//           a prompt is a sum of name:count, the first `count` tokens of an endless text of that name
//   cancel A
//   flush
//   drafts 3                              what steps from here on may draft for a sequence, at most
//   answer A=9 B=-1 C=5,5,7 D=5,6/2       of the next step: the tokens sampled (9 is eos, -1 fails), the first of them
//                                         accepted drafts; of so many verified drafts, or of all that were planned. 5
//                                         without a word
//   step A@0+64 B@12+1! C@5+1(3)!         schedule, compute, advance: each sequence with first row and number of rows,
//                                         in plan order, drafts in brackets; ! where a token is sampled; nothing after
//                                         `step`: an empty plan
//   step ...                              any plan
//   run 10                                so many steps, whatever they are
//   ends A=length B=timeout               what ended since the last `ends` line, exactly (sorted by name)
//   expect waiting=1 running=2 cached A=64 preemptions=0 blocks_used=3 blocks_cached=4 checkpoints=1 saved=2 restored=1
//           also: recomputed, slots_used, evicted, rounds, drafted, accepted
#pragma once

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "engine/scheduler.h"

namespace moat::test {

class Scenario {
 public:
  // The first thing that was not as the file says, with its line; empty if all was.
  static std::string run_file(const std::string& path) {
    std::ifstream file(path);
    if (!file) return path + ": cannot be read";
    Scenario scenario;
    std::string line;
    for (int number = 1; std::getline(file, line); ++number) {
      std::istringstream words(line.substr(0, line.find('#')));
      std::vector<std::string> list;
      for (std::string word; words >> word;) list.push_back(word);
      if (list.empty()) continue;
      const std::string wrong = scenario.execute(list);
      if (!wrong.empty()) return fmt::format("{}:{}: {}\n  in: {}", path, number, wrong, line);
    }
    return scenario.steps_ == 0 ? path + ": has no step" : "";
  }

 private:
  using Words = std::vector<std::string>;

  static std::pair<std::string, std::string> split(const std::string& word, char at) {
    const size_t i = word.find(at);
    return i == std::string::npos ? std::pair{word, std::string()} : std::pair{word.substr(0, i), word.substr(i + 1)};
  }

  std::string execute(const Words& words) {
    const std::string& verb = words.front();
    if (verb == "options") return set_options(words);
    if (!scheduler_) return "the first line must be options";
    if (verb == "time") return now_ = std::stod(words.at(1)), "";
    if (verb == "add") return add(words);
    if (verb == "cancel") return scheduler_->cancel(ids_.at(words.at(1))), "";
    if (verb == "drafts") return max_drafts_ = std::stoll(words.at(1)), "";
    if (verb == "flush") return scheduler_->flush_cache(), "";
    if (verb == "answer") return set_answers(words);
    if (verb == "step") return step(words);
    if (verb == "run") {
      for (int64_t i = std::stoll(words.at(1)); i > 0; --i) one_step();
      return "";
    }
    if (verb == "ends") return compare_ends(words);
    if (verb == "expect") return compare_state(words);
    return "no such line: " + verb;
  }

  std::string set_options(const Words& words) {
    SchedulerOptions o{.max_num_seqs = 4, .max_batched_tokens = 256, .max_model_len = 1000, .eos_token_id = 9};
    CacheSizes sizes{.block_size = 16, .num_blocks = 64, .num_slots = 0, .verify_rows = 64};
    LedgerOptions ledger;
    double row_ms = 0;
    double start_ms = 0;
    for (size_t i = 1; i < words.size(); ++i) {
      const auto [key, text] = split(words[i], '=');
      const double value = std::stod(text);
      const auto whole = static_cast<int64_t>(value);
      if (key == "max_num_seqs")
        o.max_num_seqs = whole;
      else if (key == "max_batched_tokens")
        o.max_batched_tokens = whole;
      else if (key == "max_model_len")
        o.max_model_len = whole;
      else if (key == "max_step_ms")
        o.max_step_seconds = value / 1000;
      else if (key == "seconds_per_priority")
        o.seconds_per_priority = value;
      else if (key == "checkpoint_interval")
        o.checkpoint_interval = whole;
      else if (key == "checkpoint_gap")
        o.checkpoint_gap = whole;
      else if (key == "deterministic")
        o.deterministic = whole != 0;
      else if (key == "block_size")
        sizes.block_size = whole;
      else if (key == "num_blocks")
        sizes.num_blocks = whole;
      else if (key == "num_slots")
        sizes.num_slots = whole;
      else if (key == "prefix_cache")
        ledger.prefix_cache = whole != 0;
      else if (key == "verify_rows")
        sizes.verify_rows = whole;
      else if (key == "row_ms")
        row_ms = value;
      else if (key == "start_ms")
        start_ms = value;
      else
        return "no such option: " + key;
    }
    if (sizes.num_slots == 0) sizes.num_slots = o.max_num_seqs + 4;
    if (row_ms > 0) cost_.rows_seconds = {{0, start_ms / 1000}, {1000, start_ms / 1000 + row_ms}};
    scheduler_.emplace(o, sizes, ledger);
    return "";
  }

  // Token i of the text called `name`; never eos.
  static int32_t token_of(const std::string& name, int64_t i) {
    uint64_t x = 1469598103934665603ULL + static_cast<uint64_t>(i);
    for (const char c : name) x = (x ^ static_cast<uint64_t>(c)) * 1099511628211ULL;
    return static_cast<int32_t>(10 + (x >> 33) % 1000);
  }

  std::string add(const Words& words) {
    Request r;
    r.sampling.max_tokens = 1;
    for (size_t i = 2; i < words.size(); ++i) {
      const auto [key, text] = split(words[i], '=');
      if (key == "prompt") {
        std::istringstream parts(text);
        for (std::string part; std::getline(parts, part, '+');) {
          const auto [name, count] = split(part, ':');
          for (int64_t t = 0; t < std::stoll(count); ++t) r.prompt_ids.push_back(token_of(name, t));
        }
      } else if (key == "ends") {
        std::istringstream parts(text);
        for (std::string part; std::getline(parts, part, ',');) r.message_ends.push_back(std::stoi(part));
      } else if (key == "max_tokens") {
        r.sampling.max_tokens = std::stoi(text);
      } else if (key == "priority") {
        r.priority = std::stoi(text);
      } else if (key == "timeout") {
        r.timeout_seconds = std::stod(text);
      } else if (key == "salt") {
        r.cache_salt = text;
      } else if (key == "restore") {
        r.restore_prefix = text != "0";
      } else if (key == "ignore_eos") {
        r.sampling.ignore_eos = text != "0";
      } else if (key == "speculative") {
        r.speculative = text != "0";
      } else {
        return "no such field: " + key;
      }
    }
    const auto id = static_cast<SequenceId>(ids_.size() + 1);
    ids_[words.at(1)] = id;
    names_[id] = words.at(1);
    scheduler_->add(id, std::move(r), now_);
    return "";
  }

  std::string set_answers(const Words& words) {
    for (size_t i = 1; i < words.size(); ++i) {
      const auto [name, text] = split(words[i], '=');
      const auto [tokens, verified] = split(text, '/');
      Answer& answer = answers_[ids_.at(name)];
      answer = {.num_drafts = verified.empty() ? -1 : std::stoi(verified)};
      std::istringstream parts(tokens);
      for (std::string part; std::getline(parts, part, ',');) answer.tokens.push_back(std::stoi(part));
    }
    return "";
  }

  struct Answer {
    std::vector<int32_t> tokens;
    int32_t num_drafts = -1;  // all that were planned
  };

  std::string one_step() {
    StepPlan plan;
    std::vector<SequenceEvent> events;
    scheduler_->schedule(plan, events, now_, cost_, {.max_drafts = max_drafts_});
    std::string text;
    StepResult result;
    for (size_t s = 0; s < plan.sequences.size(); ++s) {
      const SequenceId id = plan.sequences[s];
      const int32_t drafts = plan.num_drafts[s];
      text +=
          fmt::format("{}{}@{}+{}{}{}", s == 0 ? "" : " ", names_.at(id), plan.first_positions[s], plan.num_tokens[s],
                      drafts > 0 ? fmt::format("({})", drafts) : "", plan.wants_token[s] ? "!" : "");
      if (!plan.wants_token[s]) continue;
      const auto found = answers_.find(id);
      const Answer answer = found == answers_.end() ? Answer{.tokens = {5}} : found->second;
      StepResult::Row& row = result.rows.emplace_back();
      row.sequence = id;
      row.num_drafts = answer.num_drafts < 0 ? drafts : answer.num_drafts;
      for (const int32_t token : answer.tokens) {
        if (token < 0) {
          row.error = "not finite";
        } else {
          row.tokens.push_back({.token_id = token});
        }
      }
    }
    answers_.clear();
    if (!plan.empty()) scheduler_->advance(plan, result, events);
    scheduler_->check_invariants();
    for (const SequenceEvent& e : events) {
      if (e.event.num_prompt_tokens > 0) cached_[names_.at(e.sequence)] = e.event.num_cached_tokens;
      if (e.event.finish == FinishReason::kNone) continue;
      ended_[names_.at(e.sequence)] = finish_reason_name(e.event.finish);
    }
    ++steps_;
    return text;
  }

  static std::string join(const Words& words, size_t first) {
    std::string text;
    for (size_t i = first; i < words.size(); ++i) text += (i == first ? "" : " ") + words[i];
    return text;
  }

  std::string step(const Words& words) {
    const std::string wanted = join(words, 1);
    const std::string got = one_step();
    if (wanted == "..." || got == wanted) return "";
    return fmt::format("the step is \"{}\", expected \"{}\"\n{}", got, wanted, scheduler_->describe());
  }

  std::string compare_ends(const Words& words) {
    std::string got;
    for (const auto& [name, reason] : ended_) got += fmt::format("{}{}={}", got.empty() ? "" : " ", name, reason);
    ended_.clear();
    const std::string wanted = join(words, 1);
    return got == wanted ? "" : fmt::format("ended: \"{}\", expected \"{}\"", got, wanted);
  }

  std::string compare_state(const Words& words) {
    const CacheLedger& ledger = scheduler_->ledger();
    const std::map<std::string, int64_t> facts = {{"waiting", scheduler_->num_waiting()},
                                                  {"running", scheduler_->num_running()},
                                                  {"preemptions", scheduler_->stats().preemptions},
                                                  {"recomputed", scheduler_->stats().recomputed_tokens},
                                                  {"rounds", scheduler_->stats().draft_rounds},
                                                  {"drafted", scheduler_->stats().drafted_tokens},
                                                  {"accepted", scheduler_->stats().accepted_tokens},
                                                  {"blocks_used", ledger.blocks_used()},
                                                  {"blocks_cached", ledger.blocks_cached()},
                                                  {"slots_used", ledger.slots_used()},
                                                  {"checkpoints", ledger.checkpoints()},
                                                  {"saved", ledger.saved_total()},
                                                  {"restored", ledger.restored_total()},
                                                  {"evicted", ledger.evicted_total()}};
    bool of_requests = false;  // after the word `cached`, names of requests
    for (size_t i = 1; i < words.size(); ++i) {
      if (words[i] == "cached") {
        of_requests = true;
        continue;
      }
      const auto [key, text] = split(words[i], '=');
      const auto fact = facts.find(key);
      if (fact == facts.end() && !of_requests) return "no such fact: " + key;
      const int64_t got = fact != facts.end() ? fact->second : cached_.at(key);
      if (got != std::stoll(text)) return fmt::format("{} is {}\n{}", key, got, scheduler_->describe());
    }
    return "";
  }

  std::optional<Scheduler> scheduler_;
  StepCost cost_;
  double now_ = 0;
  int64_t steps_ = 0;
  int64_t max_drafts_ = 0;
  std::map<std::string, SequenceId> ids_;
  std::map<SequenceId, std::string> names_;
  std::map<SequenceId, Answer> answers_;
  std::map<std::string, std::string> ended_;  // name -> reason
  std::map<std::string, int64_t> cached_;
};

}  // namespace moat::test
