// SPDX-License-Identifier: Apache-2.0
// `moat bench cache`: what prefix reuse and mixed traffic cost and give on a real checkpoint, through the engine as it is
// served: a checkpoint's bytes and copies, the first token of a second turn against a cold start, and the gaps between
// tokens of decoding streams while a long prompt comes in.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>

#include "base/rng.h"
#include "engine/local_engine.h"
#include "main/commands.h"
#include "plan/capacity.h"

namespace moat {
namespace {

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

// When the tokens of one request came.
struct Arrivals {
  double submitted = 0;
  std::vector<double> tokens;
  int32_t num_cached = 0;
  bool ended = false;
  double first_token_seconds() const { return tokens.front() - submitted; }
};

// Requests of random tokens to one engine, and when their tokens came.
class Client {
 public:
  Client(Engine& engine, uint64_t seed) : engine_(engine), rng_(seed) {}
  ~Client() {  // nothing may call back once this is gone
    for (const Engine::RequestHandle& handle : handles_) engine_.cancel(handle);
    wait(
        [](const auto& all) { return std::all_of(all.begin(), all.end(), [](const Arrivals& a) { return a.ended; }); });
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  std::vector<int32_t> random_prompt(int64_t count) {
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>(rng_.below(engine_.info().vocab_size)));
    return ids;
  }

  int64_t max_model_len() const { return engine_.info().max_model_len; }

  // Returns the index for at().
  Result<size_t> submit(std::vector<int32_t> prompt, int64_t max_tokens) {
    Request r;
    r.message_ends = {static_cast<int32_t>(prompt.size())};
    r.prompt_ids = std::move(prompt);
    r.sampling.temperature = 0.0F;
    r.sampling.ignore_eos = true;
    r.sampling.max_tokens = static_cast<int32_t>(max_tokens);
    std::unique_lock lock(mutex_);
    const size_t index = arrivals_.size();
    arrivals_.push_back({.submitted = now_seconds()});
    lock.unlock();
    const auto handle = engine_.submit(std::move(r), [this, index](const TokenEvent& event) {
      const std::lock_guard guard(mutex_);
      Arrivals& a = arrivals_[index];
      a.tokens.insert(a.tokens.end(), event.tokens.size(), now_seconds());
      a.num_cached = event.num_cached_tokens;
      a.ended = event.finish != FinishReason::kNone;
      changed_.notify_all();
    });
    if (!handle.ok()) {
      lock.lock();
      arrivals_[index].ended = true;
      return handle.status();
    }
    handles_.push_back(*handle);
    return index;
  }

  template <class Condition>
  void wait(Condition&& condition) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return condition(arrivals_); });
  }
  Arrivals at(size_t index) {
    const std::lock_guard lock(mutex_);
    return arrivals_[index];
  }

 private:
  Engine& engine_;
  Rng rng_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Arrivals> arrivals_;
  std::vector<Engine::RequestHandle> handles_;  // of the thread that submits
};

Result<Arrivals> run_alone(Client& client, std::vector<int32_t> prompt, int64_t max_tokens) {
  MOAT_ASSIGN(const size_t index, client.submit(std::move(prompt), max_tokens));
  client.wait([&](const auto& all) { return all[index].ended; });
  return client.at(index);
}

// Seconds of one copy of a recurrent state from slot to slot.
double state_copy_seconds(const EngineParts& parts, ThreadPool& pool) {
  const StateCopy copies[2] = {{.from = 0, .to = 1}, {.from = 1, .to = 0}};
  std::vector<double> seconds;
  for (int i = 0; i < 20; ++i) {
    const double start = now_seconds();
    parts.caches->copy_states({&copies[i % 2], 1}, pool);
    seconds.push_back(now_seconds() - start);
  }
  return quantile(seconds, 0.5);
}

struct MixedFigures {
  double gap_p50 = 0, gap_p99 = 0;            // seconds between tokens of the decoding streams by themselves
  double with_gap_p50 = 0, with_gap_p99 = 0;  // ... while the prompt is computed
  double with_gap_mean = 0;
  double first_token = 0;  // seconds to the prompt's first token
};

// `streams` decode; when all do, a prompt of `prompt` tokens arrives. By themselves is before and after it, half each:
// the streams grow meanwhile, and longer ones take longer.
Result<MixedFigures> run_mixed(Client& client, const BenchCacheOptions& o, int64_t prompt_tokens) {
  constexpr size_t kQuietTokens = 100;  // of each stream, before and after
  const int64_t room = client.max_model_len() - o.stream_context;
  std::vector<size_t> streams;
  for (int64_t s = 0; s < o.streams; ++s) {
    MOAT_ASSIGN(const size_t index, client.submit(client.random_prompt(o.stream_context), room));
    streams.push_back(index);
  }
  const auto all_have = [&](size_t count) {
    client.wait([&](const auto& all) {
      return std::all_of(streams.begin(), streams.end(),
                         [&](size_t s) { return all[s].tokens.size() >= count || all[s].ended; });
    });
  };
  const auto more_tokens = [&](size_t count) { all_have(client.at(streams.front()).tokens.size() + count); };
  all_have(8);
  const double start = now_seconds();
  more_tokens(kQuietTokens);
  MOAT_ASSIGN(const size_t prompt, client.submit(client.random_prompt(prompt_tokens), 1));
  client.wait([&](const auto& all) { return all[prompt].ended; });
  more_tokens(kQuietTokens);
  const Arrivals arrived = client.at(prompt);

  std::vector<double> quiet;
  std::vector<double> busy;
  bool lasted = true;
  for (const size_t s : streams) {
    const Arrivals a = client.at(s);
    lasted &= !a.ended;
    for (size_t t = 1; t < a.tokens.size(); ++t) {
      const double from = a.tokens[t - 1];
      const double to = a.tokens[t];
      if (from >= arrived.submitted && to <= arrived.tokens.front()) busy.push_back(to - from);
      if (from >= start && (to <= arrived.submitted || from >= arrived.tokens.front())) quiet.push_back(to - from);
    }
  }
  if (!lasted) return internal_error("a stream ended before the prompt had its first token");
  MixedFigures f;
  f.gap_p50 = quantile(quiet, 0.5);
  f.gap_p99 = quantile(quiet, 0.99);
  f.with_gap_p50 = quantile(busy, 0.5);
  f.with_gap_p99 = quantile(busy, 0.99);
  f.with_gap_mean = std::accumulate(busy.begin(), busy.end(), 0.0) / static_cast<double>(busy.size());
  f.first_token = arrived.first_token_seconds();
  return f;
}

struct TurnFigures {
  double cold = 0, second = 0;  // seconds to the first token
  int64_t cached = 0;           // tokens of the second turn's prompt that were restored
};

// A history of random tokens cold, then the same with its reply and 64 new tokens.
Result<TurnFigures> run_turns(Client& client, int64_t history) {
  TurnFigures f;
  std::vector<double> cold;
  std::vector<double> second;
  for (int repeat = 0; repeat < 3; ++repeat) {
    std::vector<int32_t> prompt = client.random_prompt(history);
    MOAT_ASSIGN(const Arrivals first, run_alone(client, prompt, 16));
    const std::vector<int32_t> more = client.random_prompt(16 + 64);
    prompt.insert(prompt.end(), more.begin(), more.end());
    MOAT_ASSIGN(const Arrivals next, run_alone(client, prompt, 16));
    cold.push_back(first.first_token_seconds());
    second.push_back(next.first_token_seconds());
    f.cached = next.num_cached;
  }
  f.cold = quantile(cold, 0.5);
  f.second = quantile(second, 0.5);
  return f;
}

}  // namespace

Status bench_cache_command(const BenchCacheOptions& o) {
  MOAT_ASSIGN(OpenModel open, open_model(o.model));
  const ModelConfig& config = open.loaded->config;
  EngineOptions options{.max_num_seqs = o.streams + 1, .reference = open.reference};
  options.max_model_len = std::min(config.max_position_embeddings, std::max(o.history + 256, o.prompt + 1024));
  const int64_t history = std::min(o.history, options.max_model_len - 128);
  const int64_t prompt = std::min(o.prompt, options.max_model_len - 8);

  MOAT_ASSIGN(EngineParts parts, make_engine_parts(*open.loaded, options, *open.pool));
  if (parts.capacity.max_num_seqs < o.streams + 1) return resource_exhausted("{}", parts.capacity.bound);
  const double copy = state_copy_seconds(parts, *open.pool);
  TurnFigures turns;
  MixedFigures whole;
  {
    LocalEngine engine(std::move(parts), o.streams + 8);
    Client client(engine, 1);
    MOAT_ASSIGN(turns, run_turns(client, history));
    MOAT_ASSIGN(whole, run_mixed(client, o, prompt));
  }
  // The same with steps that may take step_ratio times what a decode step took.
  options.max_step_seconds = o.step_ratio * whole.gap_p50;
  MOAT_ASSIGN(EngineParts bounded_parts, make_engine_parts(*open.loaded, options, *open.pool));
  MixedFigures bounded;
  double alone = 0;
  {
    LocalEngine engine(std::move(bounded_parts), o.streams + 8);
    Client client(engine, 2);
    for (int i = 0; i < 2; ++i) {  // the first one teaches the engine what steps take
      MOAT_ASSIGN(const Arrivals arrivals, run_alone(client, client.random_prompt(prompt), 1));
      alone = arrivals.first_token_seconds();
    }
    MOAT_ASSIGN(bounded, run_mixed(client, o, prompt));
  }
  // Of the time that passed, what the streams by themselves would not have taken.
  const double share = 1 - bounded.gap_p50 / bounded.with_gap_mean;

  const int64_t state = slot_bytes(config);
  fmt::print("model {}  backend {}  threads {}  activations f32\n", o.model.model_dir,
             open.reference ? "reference" : host_arch().name, open.pool->num_threads());
  fmt::print("checkpoint of the recurrent state: {}; one copy (write or restore) {:.3f} ms, {:.1f} GB/s\n",
             format_bytes(state), copy * 1e3, 2 * static_cast<double>(state) / copy / 1e9);
  fmt::print(
      "first token after {} tokens: cold {:.1f} ms; second turn (80 tokens more) {:.1f} ms = {:.2f} %, {} restored\n",
      history, turns.cold * 1e3, turns.second * 1e3, 100 * turns.second / turns.cold, turns.cached);
  const auto print_mixed = [&](const char* name, const MixedFigures& f) {
    fmt::print("{} streams that start at {} tokens, {}: between tokens p50 {:.2f} ms, p99 {:.2f} ms\n", o.streams,
               o.stream_context, name, f.gap_p50 * 1e3, f.gap_p99 * 1e3);
    fmt::print(
        "  while a prompt of {} is computed: p50 {:.2f} ms, p99 {:.2f} ms ({:.2f} x); its first token {:.0f} ms\n",
        prompt, f.with_gap_p50 * 1e3, f.with_gap_p99 * 1e3, f.with_gap_p99 / f.gap_p99, f.first_token * 1e3);
  };
  print_mixed("steps not limited", whole);
  print_mixed(fmt::format("steps limited to {:.2f} ms", options.max_step_seconds * 1e3).c_str(), bounded);
  fmt::print("  alone under that limit {:.0f} ms; at the {:.0f} % of the time that decoding left {:.0f} ms: {:.2f} x\n",
             alone * 1e3, 100 * share, alone / share * 1e3, bounded.first_token / (alone / share));
  return {};
}

}  // namespace moat
