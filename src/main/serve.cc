// SPDX-License-Identifier: Apache-2.0
#include "main/serve.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <optional>
#include <thread>

#include "base/log.h"
#include "main/serve_config.h"
#include "main/version.h"
#include "plan/host_memory.h"
#include "server/server.h"
#include "text/tokenizer.h"

namespace moat {
namespace {

// SIGTERM and SIGINT are blocked in every thread and taken here, so that no handler runs in the middle of anything.
class Signals {
 public:
  Signals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);  // before other threads start: they inherit it
  }
  int wait() const {
    int signal = 0;
    sigwait(&set_, &signal);
    return signal;
  }
  // True if another one comes within `limit`.
  bool wait_for(std::chrono::milliseconds limit) const {
    const timespec time{static_cast<time_t>(limit.count() / 1000), static_cast<long>(limit.count() % 1000 * 1'000'000)};
    return sigtimedwait(&set_, nullptr, &time) > 0;
  }

 private:
  sigset_t set_{};
};

// While the model loads, a signal ends the process at once: no request is under way, and loading may take minutes.
class ExitOnSignal {
 public:
  explicit ExitOnSignal(const Signals& signals)
      : thread_([&signals](const std::stop_token& loaded) {
          while (!loaded.stop_requested()) {
            if (!signals.wait_for(std::chrono::milliseconds(20))) continue;
            log_info("stopped while loading");
            std::_Exit(0);
          }
        }) {}

 private:
  std::jthread thread_;
};

std::string default_name(const std::string& model_dir) {
  const std::filesystem::path path = std::filesystem::path(model_dir).lexically_normal();
  return path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
}

ApiServer::Options server_options(const ServeOptions& o, const SamplingParams& defaults) {
  ApiServer::Options options;
  options.http.host = o.host;
  options.http.port = o.port;
  options.model.name = o.served_name;
  options.model.aliases = o.aliases;
  options.model.defaults.temperature = defaults.temperature;
  options.model.defaults.top_p = defaults.top_p;
  options.model.defaults.top_k = defaults.top_k;
  options.model.defaults.min_p = defaults.min_p;
  options.model.defaults.timeout_seconds = o.request_timeout_seconds;
  options.api_keys = o.api_keys;
  options.version = kVersion;
  return options;
}

void print_greeting(const ServeOptions& o, const ApiServer& server) {
  const std::string& name = o.served_name;
  fmt::print(
      "\n{} is served on http://{}:{}   (Ctrl-C stops it)\n\n"
      "  curl http://{}:{}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
      "    -d '{{\"model\": \"{}\", \"messages\": [{{\"role\": \"user\", \"content\": \"What is the capital of "
      "France?\"}}], "
      "\"temperature\": 0}}'\n\n",
      name, o.host, server.port(), o.host, server.port(), name);
  std::fflush(stdout);
}

}  // namespace

Status serve_command(const ServeOptions& asked) {
  const Signals signals;
  std::optional<ExitOnSignal> while_loading(signals);
  ServeOptions o = asked;  // with every default filled in
  if (o.served_name.empty()) o.served_name = default_name(o.model.model_dir);
  MOAT_ASSIGN(const SamplingParams defaults, load_sampling_defaults(o.model.model_dir));
  MOAT_ASSIGN(const Tokenizer tokenizer, Tokenizer::load(o.model.model_dir));
  if (!tokenizer.has_xtml()) {
    return unsupported(
        "{}: the tokenizer has no XTML control tokens; only Kimi K3's chat format is served, and no other is guessed",
        o.model.model_dir);
  }
  ApiServer server(server_options(o, defaults));
  MOAT_RETURN_IF_ERROR(server.start());  // answers /health and /ready while the model loads

  MOAT_ASSIGN(OpenModel open, open_model(o.model));
  if (tokenizer.vocab_size() != open.loaded->config.vocab_size) {
    return data_loss("{}: the tokenizer has {} ids, the model's vocabulary {}", o.model.model_dir,
                     tokenizer.vocab_size(), open.loaded->config.vocab_size);
  }
  o.port = server.port();
  o.model.threads = open.pool->num_threads();
  o.engine.reference = open.reference;
  const int64_t host_memory = host_memory_bytes();
  if (o.engine.memory_bytes == 0) o.engine.memory_bytes = host_memory;
  MOAT_ASSIGN(const std::unique_ptr<LoadedDspark> drafter, open_drafter(o.draft, *open.pool));
  o.engine.drafter = drafter.get();
  o.engine.ngram_drafter = o.draft.ngram;
  o.engine.num_draft_tokens = o.draft.num_draft_tokens;
  MOAT_ASSIGN(EngineParts parts, make_engine_parts(*open.loaded, o.engine, *open.pool));
  fmt::print("memory:\n{}{}\nspeculation: {}\n", parts.capacity.table(), parts.runner->kernel_plan().summary(),
             describe_speculation(o.engine, parts));
  log_info("config {}", config_line(o, defaults, parts));
  for (const std::string& warning : config_warnings(o.engine, parts, host_memory)) log_warn("{}", warning);
  LocalEngine engine(std::move(parts), o.engine.max_queued);
  while_loading.reset();
  server.set_model(engine, tokenizer);
  log_info("ready model={} host={} port={} max_model_len={} max_num_seqs={}", o.served_name, o.host, o.port,
           engine.info().max_model_len, engine.info().max_num_seqs);
  print_greeting(o, server);

  const int signal = signals.wait();
  log_info("draining signal={} limit={}s", signal == SIGTERM ? "SIGTERM" : "SIGINT", o.drain_seconds);
  server.begin_drain();
  // A second signal ends the wait: the drain gets what is left of its limit, or nothing.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(o.drain_seconds);
  while (std::chrono::steady_clock::now() < deadline) {
    const EngineStats stats = engine.stats();
    if (stats.num_running + stats.num_waiting == 0 || signals.wait_for(std::chrono::milliseconds(50))) break;
  }
  server.stop(std::chrono::milliseconds(1000));
  const EngineStats stats = engine.stats();
  log_info("stopped blocks_used={} slots_used={} requests: stop={} length={} cancelled={} errors={}", stats.blocks_used,
           stats.slots_used, stats.finished_stop_total, stats.finished_length_total, stats.cancelled_total,
           stats.errors_total);
  return {};
}

}  // namespace moat
