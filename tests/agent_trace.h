// SPDX-License-Identifier: Apache-2.0
// Traces of agent traffic from a seed: conversations that share a few system prompts and send their whole history again
// with every turn, longer each time. Nothing depends on what a model answers: replies are scripted, too, and the
// history goes on with the scripted one.
//
//   prompt of a turn = history + new messages (of a tool or a person) + kHeaderTokens that open the reply
//   history after it = prompt + scripted reply
//
// A prompt shares 60 to 95 % with the one before it. Now and then an agent takes back its last exchanges and goes on
// differently, rarely it replaces everything but the start by a summary, and some conversations end early. Most turns
// follow within seconds (tools); some after a pause with a heavy tail (people).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

#include "base/rng.h"

namespace moat::test {

struct AgentTraceOptions {
  int conversations = 40;
  int turns = 12;                       // of a conversation that does not end early
  int64_t max_history_tokens = 32'000;  // prompt and reply of the last turn; no turn has more
  int64_t reply_tokens = 256;           // at most; at least a quarter of it
  int32_t vocab_size = 50'000;          // ids are in [0, vocab_size)
  int system_prompts = 6;               // the first are used most
  double span_seconds = 600;            // in which conversations start
  uint64_t seed = 1;
};

struct AgentTrace {
  struct Turn {
    int conversation = 0;
    int turn = 0;
    std::vector<int32_t> prompt_ids;
    std::vector<int32_t> message_ends;  // positions after the last token of each prompt message, ascending
    std::vector<int32_t> reply_ids;     // the scripted reply, max_tokens long
    int32_t max_tokens = 0;
    double at = 0;  // arrival, seconds; not before the turn before it has been answered, whatever the clock says
  };
  std::vector<Turn> turns;  // in order of arrival
};

namespace agent_trace {

constexpr int64_t kHeaderTokens = 3;  // open a reply
constexpr int64_t kLeastMessageTokens = 12;
constexpr double kLeastShared = 0.6;  // of a prompt with the one before
constexpr double kMostShared = 0.95;

// Messages that grow, and where each ends.
struct History {
  std::vector<int32_t> ids;
  std::vector<int32_t> ends;

  int64_t size() const { return static_cast<int64_t>(ids.size()); }
  void append(int64_t count, int32_t vocab_size, Rng& rng) {
    for (; count > 0; --count) ids.push_back(static_cast<int32_t>(rng.below(vocab_size)));
  }
  void end_message() { ends.push_back(static_cast<int32_t>(ids.size())); }
  void keep_messages(size_t count) {
    ends.resize(count);
    ids.resize(static_cast<size_t>(ends.back()));
  }
};

// Seconds until an agent's next turn: mostly a tool's, sometimes a person's, who may be away for long.
inline double pause_seconds(Rng& rng) {
  if (rng.uniform() < 0.8) return 1 - 8 * std::log(1 - rng.uniform());
  return std::min(30 * std::pow(1 - rng.uniform(), -1 / 1.1), 3600.0);
}

// Tokens of the next prompt: uneven growth that reaches `most` with the last of `turns_left` turns.
inline int64_t next_size(int64_t size, int64_t most, int turns_left, Rng& rng) {
  const double even = std::log(std::max(1.0, static_cast<double>(most) / static_cast<double>(size))) / turns_left;
  const double shared = std::clamp(std::exp(-even * rng.uniform(0.3, 1.7)), kLeastShared, kMostShared);
  return std::min(static_cast<int64_t>(static_cast<double>(size) / shared), most);
}

// The agent thinks again. Message 0, the system prompt, always stays.
inline void maybe_step_back(History& history, int64_t summary_tokens, int32_t vocab_size, Rng& rng) {
  const double choice = rng.uniform();
  const size_t messages = history.ends.size();
  if (choice < 0.02 && messages > 4) {
    history.keep_messages(2);  // compacts: system prompt, task and a summary
    history.append(summary_tokens, vocab_size, rng);
    history.end_message();
  } else if (choice < 0.12 && messages > 2) {
    history.keep_messages(messages - 1 -
                          static_cast<size_t>(rng.below(std::min<int64_t>(4, static_cast<int64_t>(messages) - 2))));
  }
}

inline void append_conversation(int conversation, const History& system, const AgentTraceOptions& options, Rng& rng,
                                std::vector<AgentTrace::Turn>& turns) {
  const int64_t most = options.max_history_tokens - options.reply_tokens;
  const bool ends_early = rng.uniform() < 0.15;
  const int num_turns = ends_early ? 1 + static_cast<int>(rng.below(options.turns)) : options.turns;
  History history = system;
  int64_t prompt_size = system.size();
  double at = rng.uniform(0, options.span_seconds);
  for (int turn = 0; turn < num_turns; ++turn) {
    if (turn > 0) {
      maybe_step_back(history, options.max_history_tokens / 32, options.vocab_size, rng);
      at += pause_seconds(rng);
    }
    prompt_size = next_size(std::min(prompt_size, history.size()), most, options.turns - turn, rng);
    constexpr int64_t kMostParts = 3;
    if (history.size() + kMostParts * kLeastMessageTokens + kHeaderTokens > most) return;  // no room
    for (int64_t parts = 1 + rng.below(kMostParts); parts > 0; --parts) {  // several tools may answer at once
      const int64_t missing = prompt_size - history.size() - kHeaderTokens;
      history.append(std::max(missing / parts, kLeastMessageTokens), options.vocab_size, rng);
      history.end_message();
    }
    AgentTrace::Turn t;
    t.conversation = conversation;
    t.turn = turn;
    t.at = at;
    t.message_ends = history.ends;
    for (int64_t i = 0; i < kHeaderTokens; ++i) history.ids.push_back(static_cast<int32_t>(i));
    t.prompt_ids = history.ids;
    const int64_t least = std::max<int64_t>(options.reply_tokens / 4, 1);
    t.max_tokens = static_cast<int32_t>(least + rng.below(options.reply_tokens - least + 1));
    history.append(t.max_tokens, options.vocab_size, rng);
    history.end_message();
    t.reply_ids.assign(history.ids.end() - t.max_tokens, history.ids.end());
    at += 0.02 * t.max_tokens;
    turns.push_back(std::move(t));
  }
}

}  // namespace agent_trace

inline AgentTrace make_agent_trace(const AgentTraceOptions& options) {
  Rng rng(options.seed);
  std::vector<agent_trace::History> systems(static_cast<size_t>(options.system_prompts));
  for (agent_trace::History& system : systems) {
    const auto most = static_cast<double>(options.max_history_tokens);
    system.append(static_cast<int64_t>(rng.uniform(most / 40, most / 12)), options.vocab_size, rng);
    system.end_message();
  }
  AgentTrace trace;
  for (int c = 0; c < options.conversations; ++c) {
    const double u = rng.uniform();
    const auto& system = systems[static_cast<size_t>(u * u * static_cast<double>(systems.size()))];
    agent_trace::append_conversation(c, system, options, rng, trace.turns);
  }
  std::stable_sort(trace.turns.begin(), trace.turns.end(),
                   [](const AgentTrace::Turn& a, const AgentTrace::Turn& b) { return a.at < b.at; });
  return trace;
}

}  // namespace moat::test
