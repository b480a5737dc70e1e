// SPDX-License-Identifier: Apache-2.0
// Thirty-two clients at once against the real engine behind the real server, on little memory: requests of every kind,
// conversations that send their history again with a little more, and hang-ups at any moment. Nothing fails, nothing is
// lost, everything that was held is free again afterwards, and the process holds what the start-up table says.
//
// MOAT_SOAK_SECONDS (default 5) says how long; what happened is printed, resident memory every minute.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "base/log.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "engine/local_engine.h"
#include "golden_file.h"
#include "model/loader.h"
#include "server_harness.h"

namespace moat {
namespace {

constexpr int kClients = 32;

double soak_seconds() {
  const char* text = std::getenv("MOAT_SOAK_SECONDS");
  return text != nullptr ? std::max(1.0, std::atof(text)) : 5.0;
}

double resident_mib() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return static_cast<double>(resident * ::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

// The real engine with moat-nano behind a server on a free port.
class Rig {
 public:
  Rig() : pool_(num_usable_cpus()) {
    auto loaded = load_model(test::source_dir() + "/models/moat-nano", {}, pool_);
    EXPECT_TRUE(loaded.ok()) << loaded.status().message();
    loaded_ = std::move(loaded).value();
    // Fewer sequences than clients can ask for at once, so that some wait; fewer blocks than those can fill, so that
    // prefixes are evicted and sequences preempted.
    constexpr int64_t kMemory = 96'000'000;
    auto parts = make_engine_parts(*loaded_,
                                   {.max_num_seqs = 12,
                                    .max_batched_tokens = 512,
                                    .max_queued = 256,
                                    .memory_bytes = kMemory,
                                    .memory_fraction = 1},
                                   pool_);
    EXPECT_TRUE(parts.ok()) << parts.status().message();
    planned_bytes_ = parts->capacity.lines.back().bytes;
    fmt::print("{}", parts->capacity.table());
    engine_ = std::make_unique<LocalEngine>(std::move(parts).value(), 256);
    ApiServer::Options options;
    options.model.name = "moat-nano";
    server_ = std::make_unique<ApiServer>(std::move(options));
    server_->set_model(*engine_, nano());
    const Status started = server_->start();
    EXPECT_TRUE(started.ok()) << started.message();
  }
  ~Rig() { server_->stop(std::chrono::milliseconds(0)); }

  int port() const { return server_->port(); }
  EngineStats stats() const { return engine_->stats(); }
  double planned_mib() const { return static_cast<double>(planned_bytes_) / (1 << 20); }
  bool idle() const {
    const EngineStats s = stats();
    return s.num_running + s.num_waiting + s.blocks_used + s.slots_used == 0;
  }

 private:
  ThreadPool pool_;
  int64_t planned_bytes_ = 0;
  std::unique_ptr<LoadedModel> loaded_;
  std::unique_ptr<LocalEngine> engine_;
  std::unique_ptr<ApiServer> server_;
};

struct Call {
  std::string path;
  Json body;
  int choices = 1;
};

std::string words(Rng& rng, int count) {
  static constexpr const char* kWords[] = {"the", "castle", "moat", "river", "king", "a", "deep", "of", "and", "water"};
  std::string text;
  for (int i = 0; i < count; ++i) text += std::string(i > 0 ? " " : "") + kWords[rng.below(std::size(kWords))];
  return text;
}

// What one client has said so far; it sends all of it again with the next message, until it starts anew.
struct Conversation {
  Json messages = Json::array();
  int turns = 0;
};

void add_turn(Rng& rng, Conversation& conversation, const std::string& text) {
  static constexpr const char* kSystems[] = {"You are a castle guide.", "You answer in one sentence.", "You are kind."};
  if (conversation.turns == 0 || conversation.turns > 8 || rng.below(8) == 0) {
    conversation = {};
    const std::string system = kSystems[rng.below(std::size(kSystems))];
    conversation.messages.push_back(Json::object({{"role", "system"}, {"content", system + words(rng, 3)}}));
  } else {
    // What the client keeps of the reply: not always what was said.
    conversation.messages.push_back(Json::object({{"role", "assistant"}, {"content", words(rng, 20)}}));
  }
  conversation.messages.push_back(Json::object({{"role", "user"}, {"content", text}}));
  ++conversation.turns;
}

Call random_call(Rng& rng, Conversation& conversation) {
  Call call;
  const int length = rng.below(8) == 0 ? 200 + static_cast<int>(rng.below(1500)) : static_cast<int>(rng.below(40));
  Json body = Json::object({{"stream", true},
                            {"stream_options", Json::object({{"include_usage", true}})},
                            {"max_tokens", 1 + static_cast<int64_t>(rng.below(rng.below(10) == 0 ? 400 : 80))}});
  if (rng.below(3) == 0) {
    call.path = "/v1/completions";
    body.set("prompt", "Once upon a time " + words(rng, length));
    if (rng.below(2) == 0) body.set("ignore_eos", true);
    if (rng.below(4) == 0) body.set("logprobs", 3);
  } else {
    static constexpr const char* kQuestions[] = {"What is the capital of France?", "What is 12 + 30?",
                                                 "Tell me a short story about a fox.", "What is the weather in Paris?"};
    call.path = "/v1/chat/completions";
    std::string text = kQuestions[rng.below(std::size(kQuestions))];
    if (rng.below(2) == 0) text = words(rng, length) + ". " + text;
    if (rng.below(3) > 0) {
      add_turn(rng, conversation, text);
      body.set("messages", conversation.messages);
    } else {
      body.set("messages", user_messages(std::move(text)));
    }
    static constexpr const char* kEfforts[] = {"none", "low", "high", "max"};
    body.set("reasoning_effort", kEfforts[rng.below(std::size(kEfforts))]);
    if (rng.below(3) == 0) body.set("tools", weather_tools());
    if (rng.below(4) == 0) {
      body.set("logprobs", true);
      body.set("top_logprobs", static_cast<int64_t>(rng.below(6)));
    }
  }
  switch (rng.below(4)) {
    case 0: body.set("temperature", 0); break;
    case 1: body.set("top_p", 0.8); break;
    case 2: body.set("top_k", 20); break;
    default: body.set("min_p", 0.05); break;
  }
  if (rng.below(2) == 0) body.set("seed", static_cast<int64_t>(rng.below(1000)));
  if (rng.below(5) == 0) body.set("stop", Json::array({"castle", "fox."}));
  if (rng.below(6) == 0) {
    call.choices = 2 + static_cast<int>(rng.below(2));
    body.set("n", call.choices);
  }
  call.body = std::move(body);
  return call;
}

struct Totals {
  std::atomic<int64_t> requests = 0, completed = 0, cancelled = 0, choices_completed = 0, tokens_read = 0;
};

void read_to_the_end(RawClient& client, const Call& call, Totals& totals) {
  const RawResponse response = client.response();
  ASSERT_EQ(response.status, 200) << response.body << call.body.dump();
  ASSERT_TRUE(response.complete) << "a stream was cut: " << response.body;
  ASSERT_EQ(response.body.find("data: {\"error\""), std::string::npos) << response.body;
  for (const Summed& sum : sum_stream(response.body, static_cast<size_t>(call.choices))) {
    EXPECT_TRUE(sum.finish == "stop" || sum.finish == "length" || sum.finish == "tool_calls") << sum.finish;
  }
  const std::vector<std::string> events = sse_data(response.body);
  const int64_t tokens = number(at(parsed(events[events.size() - 2]), "usage", "completion_tokens"));
  EXPECT_GE(tokens, call.choices);
  totals.tokens_read += tokens;
  totals.choices_completed += call.choices;
  ++totals.completed;
}

// One request; two of five clients hang up, each in one of four ways.
void run_request(int port, Rng& rng, Conversation& conversation, Totals& totals) {
  const Call call = random_call(rng, conversation);
  RawClient client(port);
  ASSERT_TRUE(client.connected());
  ASSERT_TRUE(client.request("POST", call.path, call.body.dump()));
  ++totals.requests;
  if (rng.below(5) >= 2) {
    read_to_the_end(client, call, totals);
    return;
  }
  ++totals.cancelled;
  switch (rng.below(4)) {
    case 0: break;  // at once
    case 1:         // perhaps before the first token
      std::this_thread::sleep_for(std::chrono::milliseconds(rng.below(50)));
      break;
    case 2:  // after the head
      EXPECT_EQ(client.response(true).status, 200);
      break;
    default: {  // after some events, or the last one
      EXPECT_EQ(client.response(true).status, 200);
      std::string event = "-";
      for (uint64_t left = 1 + rng.below(30); left > 0 && event.find("[DONE]") == std::string::npos; --left) {
        event = client.read_until("\n\n");
        EXPECT_NE(event, "") << "a stream was cut";
      }
    }
  }
  client.hang_up();
}

Json greedy_answer(int port) {
  const Json body = Json::object(
      {{"messages", user_messages("What is the capital of France?")}, {"temperature", 0}, {"return_token_ids", true}});
  const RawResponse response = fetch(port, "POST", "/v1/chat/completions", body.dump());
  EXPECT_EQ(response.status, 200) << response.body;
  return at(parsed(response.body), "choices");
}

TEST(Soak, ThirtyTwoClientsWithRandomHangUps) {
  set_log_level(LogLevel::kWarn);  // not a line a request
  const Rig rig;
  const Json before = greedy_answer(rig.port());
  EXPECT_NE(before.dump().find("Paris"), std::string::npos) << before.dump();
  const EngineStats at_start = rig.stats();
  const double memory_at_start = resident_mib();

  Totals totals;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  std::vector<std::thread> clients;
  for (int c = 0; c < kClients; ++c) {
    clients.emplace_back([&, c] {
      Rng rng(static_cast<uint64_t>(c) + 1);
      Conversation conversation;
      while (elapsed() < soak_seconds() && !::testing::Test::HasFailure()) {
        run_request(rig.port(), rng, conversation, totals);
      }
    });
  }
  for (int minute = 1; minute * 60 < soak_seconds() && !::testing::Test::HasFailure(); ++minute) {
    while (elapsed() < minute * 60) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    fmt::print("minute {}: resident {:.1f} MiB, {:+.2f} % of the start-up table\n", minute, resident_mib(),
               100 * (resident_mib() / rig.planned_mib() - 1));
  }
  for (std::thread& client : clients) client.join();
  const double seconds = elapsed();

  EXPECT_TRUE(Harness::eventually([&] { return rig.idle(); })) << "blocks or slots stay in use";
  const EngineStats end = rig.stats();
  EXPECT_EQ(end.blocks_used, 0);
  EXPECT_EQ(end.slots_used, 0);
  EXPECT_EQ(end.errors_total, 0);
  EXPECT_EQ(end.rejected_total, 0);
  const int64_t finished = end.finished_stop_total + end.finished_length_total - at_start.finished_stop_total -
                           at_start.finished_length_total;
  EXPECT_GE(finished, totals.choices_completed) << "a choice that a client read to its end did not finish";
  EXPECT_EQ(totals.requests, totals.completed + totals.cancelled) << "a request is lost";
  EXPECT_GT(totals.completed, 0);
  EXPECT_GT(totals.cancelled, 0);

  const std::string metrics = fetch(rig.port(), "GET", "/metrics").body;
  for (const char* code : {"400", "500", "503"}) {
    EXPECT_EQ(metrics.find(fmt::format("moat_http_responses_total{{code=\"{}\"}}", code)), std::string::npos)
        << metrics;
  }
  EXPECT_EQ(greedy_answer(rig.port()), before);

  EXPECT_GT(end.cached_tokens_total, 0);
  EXPECT_NEAR(resident_mib() / rig.planned_mib(), 1.0, 0.1)
      << "the start-up table says " << rig.planned_mib() << " MiB";

  const int64_t tokens = end.generated_tokens_total - at_start.generated_tokens_total;
  const int64_t prompt_tokens = end.prompt_tokens_total - at_start.prompt_tokens_total;
  fmt::print(
      "soak: {:.1f} s, {} clients: {} requests, {} read to the end, {} hung up; engine: {} choices finished, {} "
      "cancelled, {} errors, {} preemptions; {} prompt tokens ({} restored), {} generated ({} read to the end), {:.0f} "
      "generated "
      "tokens/s; blocks used {}, slots used {}; resident memory {:.1f} -> {:.1f} MiB, start-up table {:.1f} "
      "MiB\n",
      seconds, kClients, totals.requests.load(), totals.completed.load(), totals.cancelled.load(), finished,
      end.cancelled_total - at_start.cancelled_total, end.errors_total,
      end.preemptions_total - at_start.preemptions_total, prompt_tokens,
      end.cached_tokens_total - at_start.cached_tokens_total, tokens, totals.tokens_read.load(),
      static_cast<double>(tokens) / seconds, end.blocks_used, end.slots_used, memory_at_start, resident_mib(),
      rig.planned_mib());
}

}  // namespace
}  // namespace moat
