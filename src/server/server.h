// SPDX-License-Identifier: Apache-2.0
// ApiServer: the routes of the HTTP API over one Engine and one Tokenizer. It may listen before the model is loaded:
// until set_model() the API answers 503 and /ready says so.
//
// States, one way: loading -> serving -> draining -> stopped.
//   loading: /health 200, /ready 503, API 503        serving: all answer
//   draining: /health 200, /ready 503, new API requests 503, those under way complete
// start, set_model, begin_drain and stop are called from one thread (main's); the rest runs on the server's own
// threads.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "server/exchange.h"
#include "server/generation.h"
#include "server/http.h"
#include "server/metrics.h"
#include "server/openai_request.h"
#include "server/prepare_pool.h"
#include "text/tokenizer.h"

namespace moat {

class ApiServer {
 public:
  struct Options {
    HttpOptions http;  // host, port, limits; error_body and on_response are set by the server
    PreparePool::Limits prepare;
    ServedModel model;                  // name, aliases, sampling defaults
    std::vector<std::string> api_keys;  // empty: no key needed
    ReasoningField reasoning_field = ReasoningField::kReasoningContent;
    std::string version;      // shown by /version
    std::string fingerprint;  // system_fingerprint of answers; empty: none
  };

  explicit ApiServer(Options options);
  ~ApiServer();  // stop(0)
  ApiServer(const ApiServer&) = delete;
  ApiServer& operator=(const ApiServer&) = delete;

  Status start();    // binds and listens
  int port() const;  // after start()

  // The model is ready. Both must outlive stop().
  void set_model(Engine& engine, const Tokenizer& tokenizer);
  // As above, with defaults read from the checkpoint (generation_config.json).
  void set_model(Engine& engine, const Tokenizer& tokenizer, ServingDefaults defaults);

  void begin_drain();
  // Drains: requests under way get `limit` to complete, what is left is cancelled; then closes everything.
  void stop(std::chrono::milliseconds limit);

 private:
  using Handler = void (ApiServer::*)(const Exchange&, HttpRequest&);
  enum class State { kLoading, kServing, kDraining };
  enum class Need { kNothing, kKey, kModel };  // kModel: a key and a loaded model
  struct Route {
    std::string_view method;
    std::string_view path;
    Handler handler;
    Need need;

    bool is_at(std::string_view asked) const;
  };
  static const std::vector<Route>& routes();

  void handle(HttpRequest request, std::shared_ptr<HttpResponder> responder);
  std::optional<ApiError> refuse(const Route& route, const HttpRequest& request) const;
  bool key_accepted(const HttpRequest& request) const;

  void get_health(const Exchange& exchange, HttpRequest& request);
  void get_ready(const Exchange& exchange, HttpRequest& request);
  void get_version(const Exchange& exchange, HttpRequest& request);
  void get_metrics(const Exchange& exchange, HttpRequest& request);
  void get_models(const Exchange& exchange, HttpRequest& request);
  void get_model(const Exchange& exchange, HttpRequest& request);
  void post_chat(const Exchange& exchange, HttpRequest& request);
  void post_completions(const Exchange& exchange, HttpRequest& request);
  void post_tokenize(const Exchange& exchange, HttpRequest& request);
  void post_detokenize(const Exchange& exchange, HttpRequest& request);
  void flush_cache(const Exchange& exchange, HttpRequest& request);

  Json model_json(const std::string& name) const;

  Options options_;  // model.defaults changes once, before the state becomes kServing
  const int64_t started_at_;
  Metrics metrics_;
  LiveCount live_;
  std::atomic<State> state_{State::kLoading};
  std::unique_ptr<const GenerationContext> context_;  // set before the state becomes kServing
  std::atomic<bool> has_model_{false};
  bool stopped_ = false;
  std::unique_ptr<PreparePool> pool_;
  std::unique_ptr<HttpServer> http_;
};

}  // namespace moat
