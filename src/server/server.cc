// SPDX-License-Identifier: Apache-2.0
#include "server/server.h"

#include <algorithm>
#include <utility>

#include "server/api_error.h"
#include "server/random_id.h"
#include "server/tokenize_api.h"

namespace moat {
namespace {

constexpr std::string_view kModelPrefix = "/v1/models/";

// Time does not depend on where the first difference is.
bool equal_in_constant_time(std::string_view secret, std::string_view given) {
  unsigned difference = secret.size() == given.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i) {
    const char expected = secret.empty() ? '\0' : secret[i % secret.size()];
    difference |= static_cast<unsigned>(static_cast<unsigned char>(expected ^ given[i]));
  }
  return difference == 0;
}

// The client's id if it is fit for a log line and a header, else one of ours.
std::string request_id_of(const HttpRequest& request) {
  constexpr size_t kMaxLength = 128;
  const std::string* given = request.header("X-Request-Id");
  const auto printable = [](char c) { return c > 0x20 && c < 0x7f && c != '"'; };
  if (given != nullptr && !given->empty() && given->size() <= kMaxLength &&
      std::all_of(given->begin(), given->end(), printable)) {
    return *given;
  }
  return random_id("req-");
}

HttpResponse json_response(const Json& json) { return {.body = json.dump()}; }

}  // namespace

ApiServer::ApiServer(Options options)
    : options_(std::move(options)),
      started_at_(std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
                      .count()),
      pool_(std::make_unique<PreparePool>(options_.prepare)) {
  HttpOptions http = options_.http;
  http.error_body = [](int status, std::string_view message) {
    return error_json({.status = status, .message = std::string(message)}).dump();
  };
  http.on_response = [this](int status) { metrics_.count_response(status); };
  http_ = std::make_unique<HttpServer>(std::move(http),
                                       [this](HttpRequest request, std::shared_ptr<HttpResponder> responder) {
                                         handle(std::move(request), std::move(responder));
                                       });
}

ApiServer::~ApiServer() { stop(std::chrono::milliseconds(0)); }

Status ApiServer::start() { return http_->start(); }

int ApiServer::port() const { return http_->port(); }

void ApiServer::set_model(Engine& engine, const Tokenizer& tokenizer) {
  set_model(engine, tokenizer, options_.model.defaults);
}

void ApiServer::set_model(Engine& engine, const Tokenizer& tokenizer, ServingDefaults defaults) {
  MOAT_CHECK(!has_model_, "set_model is called once");
  options_.model.defaults = std::move(defaults);
  context_ = std::make_unique<const GenerationContext>(GenerationContext{.engine = engine,
                                                                         .tokenizer = tokenizer,
                                                                         .model = options_.model,
                                                                         .metrics = metrics_,
                                                                         .live = live_,
                                                                         .reasoning_field = options_.reasoning_field,
                                                                         .fingerprint = options_.fingerprint});
  has_model_ = true;
  State loading = State::kLoading;
  state_.compare_exchange_strong(loading, State::kServing);  // a drain that began meanwhile stays
}

void ApiServer::begin_drain() { state_ = State::kDraining; }

void ApiServer::stop(std::chrono::milliseconds limit) {
  if (std::exchange(stopped_, true)) return;
  begin_drain();
  constexpr std::chrono::seconds kAnswerTime{5};  // for answers whose tokens are all there
  if (has_model_) context_->engine.drain(std::chrono::steady_clock::now() + limit);
  if (!live_.wait_for_zero(kAnswerTime)) log_warn("requests did not complete in time and are cut");
  pool_->stop();
  http_->stop(kAnswerTime);
}

// --- routing ---

const std::vector<ApiServer::Route>& ApiServer::routes() {
  static const std::vector<Route> table = {
      {"GET", "/health", &ApiServer::get_health, Need::kNothing},
      {"GET", "/ready", &ApiServer::get_ready, Need::kNothing},
      {"GET", "/version", &ApiServer::get_version, Need::kNothing},
      {"GET", "/metrics", &ApiServer::get_metrics, Need::kKey},
      {"GET", "/v1/models", &ApiServer::get_models, Need::kModel},
      {"GET", kModelPrefix, &ApiServer::get_model, Need::kModel},
      {"POST", "/v1/chat/completions", &ApiServer::post_chat, Need::kModel},
      {"POST", "/v1/completions", &ApiServer::post_completions, Need::kModel},
      {"POST", "/tokenize", &ApiServer::post_tokenize, Need::kModel},
      {"POST", "/detokenize", &ApiServer::post_detokenize, Need::kModel},
      {"POST", "/v1/cache/flush", &ApiServer::flush_cache, Need::kModel},
      // As other servers call it.
      {"POST", "/reset_prefix_cache", &ApiServer::flush_cache, Need::kModel},
      {"POST", "/flush_cache", &ApiServer::flush_cache, Need::kModel},
      {"GET", "/flush_cache", &ApiServer::flush_cache, Need::kModel},
  };
  return table;
}

bool ApiServer::Route::is_at(std::string_view asked) const {
  return path == kModelPrefix ? asked.starts_with(path) : asked == path;
}

void ApiServer::handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) {
  const Exchange exchange{.request_id = request_id_of(request),
                          .method = request.method,
                          .path = request.path,
                          .received = request.received,
                          .responder = std::move(responder)};
  const Route* route = nullptr;
  std::vector<std::string_view> methods;  // that the path takes
  for (const Route& candidate : routes()) {
    if (!candidate.is_at(request.path)) continue;
    methods.push_back(candidate.method);
    if (candidate.method == request.method) route = &candidate;
  }
  if (methods.empty()) {
    return exchange.finish(error_response(
        {.status = 404, .message = fmt::format("there is no {}", request.path), .code = "unknown_path"}));
  }
  if (route == nullptr) {
    HttpResponse response = error_response({.status = 405,
                                            .message = fmt::format("{} does not take {}, expected {}", request.path,
                                                                   request.method, fmt::join(methods, " or ")),
                                            .code = "method_not_allowed"});
    std::string allowed;
    for (const std::string_view method : methods) allowed += method == "GET" ? "GET, HEAD, " : "POST, ";
    response.headers.emplace_back("Allow", allowed + "OPTIONS");
    return exchange.finish(std::move(response));
  }
  if (const std::optional<ApiError> error = refuse(*route, request)) return exchange.finish(error_response(*error));
  (this->*route->handler)(exchange, request);
}

std::optional<ApiError> ApiServer::refuse(const Route& route, const HttpRequest& request) const {
  if (route.need == Need::kNothing) return std::nullopt;
  if (!key_accepted(request)) {
    return ApiError{
        .status = 401, .message = "a valid API key is needed: Authorization: Bearer KEY", .code = "invalid_api_key"};
  }
  if (route.need != Need::kModel) return std::nullopt;
  const State state = state_;
  if (state == State::kLoading) return ApiError{.status = 503, .message = "the model is loading", .code = "loading"};
  if (state == State::kDraining || !has_model_) {
    return ApiError{.status = 503, .message = "the server is shutting down", .code = "draining"};
  }
  return std::nullopt;
}

bool ApiServer::key_accepted(const HttpRequest& request) const {
  if (options_.api_keys.empty()) return true;
  const std::string* header = request.header("Authorization");
  constexpr std::string_view kScheme = "bearer ";
  if (header == nullptr || header->size() <= kScheme.size()) return false;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    const char c = (*header)[i];
    if ((c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c) != kScheme[i]) return false;
  }
  const std::string_view given = std::string_view(*header).substr(kScheme.size());
  bool accepted = false;
  for (const std::string& key : options_.api_keys) {
    const bool equal = equal_in_constant_time(key, given);
    accepted = accepted || equal;
  }
  return accepted;
}

// --- handlers ---

void ApiServer::get_health(const Exchange& exchange, HttpRequest&) {
  exchange.finish(json_response(Json::object({{"status", "ok"}})), LogLevel::kDebug);
}

void ApiServer::get_ready(const Exchange& exchange, HttpRequest&) {
  const State state = state_;
  const char* name = state == State::kServing ? "ready" : state == State::kLoading ? "loading" : "draining";
  HttpResponse response = json_response(Json::object({{"status", name}}));
  if (state != State::kServing) {
    response.status = 503;
    response.headers.emplace_back("Retry-After", "1");
  }
  exchange.finish(std::move(response), LogLevel::kDebug);
}

void ApiServer::get_version(const Exchange& exchange, HttpRequest&) {
  exchange.finish(json_response(Json::object({{"version", options_.version}})), LogLevel::kDebug);
}

void ApiServer::get_metrics(const Exchange& exchange, HttpRequest&) {
  std::optional<EngineStats> stats;
  if (has_model_) stats = context_->engine.stats();
  exchange.finish(
      {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_.render(stats ? &*stats : nullptr)},
      LogLevel::kDebug);
}

Json ApiServer::model_json(const std::string& name) const {
  const int32_t context = context_->engine.info().max_model_len;
  return Json::object({{"id", name},
                       {"object", "model"},
                       {"created", started_at_},
                       {"owned_by", "moat"},
                       {"root", options_.model.name},
                       {"max_model_len", context},
                       {"context_length", context}});
}

void ApiServer::get_models(const Exchange& exchange, HttpRequest&) {
  Json::Array models = {model_json(options_.model.name)};
  for (const std::string& alias : options_.model.aliases) models.push_back(model_json(alias));
  exchange.finish(json_response(Json::object({{"object", "list"}, {"data", std::move(models)}})), LogLevel::kDebug);
}

void ApiServer::get_model(const Exchange& exchange, HttpRequest& request) {
  const std::string name = request.path.substr(kModelPrefix.size());
  if (options_.model.is(name)) return exchange.finish(json_response(model_json(name)), LogLevel::kDebug);
  exchange.finish(error_response({.status = 404,
                                  .message = fmt::format("the model \"{}\" does not exist here", name),
                                  .param = "model",
                                  .code = "model_not_found"}));
}

void ApiServer::post_chat(const Exchange& exchange, HttpRequest& request) {
  Generation::begin(*context_, *pool_, exchange, std::move(request.body), true);
}

void ApiServer::post_completions(const Exchange& exchange, HttpRequest& request) {
  Generation::begin(*context_, *pool_, exchange, std::move(request.body), false);
}

void ApiServer::post_tokenize(const Exchange& exchange, HttpRequest& request) {
  run_tokenize(*context_, *pool_, exchange, std::move(request.body));
}

void ApiServer::post_detokenize(const Exchange& exchange, HttpRequest& request) {
  run_detokenize(*context_, *pool_, exchange, std::move(request.body));
}

void ApiServer::flush_cache(const Exchange& exchange, HttpRequest&) {
  context_->engine.flush_cache();
  exchange.finish(json_response(Json::object({{"status", "flushed"}})));
}

}  // namespace moat
