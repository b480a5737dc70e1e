// SPDX-License-Identifier: Apache-2.0
// The moat binary: flags to options, options to commands, failures to stderr and exit status 1.
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>

#include "base/log.h"
#include "main/commands.h"
#include "main/inspect.h"
#include "main/make_synthetic.h"
#include "main/serve.h"
#include "main/version.h"
#include "server/openai_request.h"

namespace moat {
namespace {

void install_log() {
  auto logger = spdlog::stderr_color_mt("moat");
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%l%$ %v");
  set_log_sink([logger](LogLevel level, std::string_view line) {
    static constexpr spdlog::level::level_enum kLevels[] = {spdlog::level::debug, spdlog::level::info,
                                                            spdlog::level::warn, spdlog::level::err};
    logger->log(kLevels[static_cast<int>(level)], "{}", line);
  });
}

using Run = std::function<Status()>;

const CLI::Range kThreadCount(1, 1024);  // what a ThreadPool takes, and more than any machine has use for
const CLI::Range kStepTokens(1, 1 << 20);
const CLI::Range kSeconds(0.0, kMaxTimeoutSeconds);

// Sizes with a unit become the digits of an option that holds bytes.
std::string to_bytes(std::string& text) {
  const Result<int64_t> bytes = parse_byte_size(text);
  if (!bytes.ok()) return bytes.status().message();
  text = std::to_string(*bytes);
  return {};
}
std::string to_bytes_or_auto(std::string& text) {
  if (text != "auto") return to_bytes(text);
  text = "-1";
  return {};
}
const CLI::Validator kSize(to_bytes, "");
const CLI::Validator kSizeOrAuto(to_bytes_or_auto, "");

void add_model_flags(CLI::App& app, ModelOptions& o) {
  app.add_option("-m,--model", o.model_dir, "Checkpoint directory (config.json and safetensors)")->required();
  app.add_option("--backend", o.backend, "cpu or reference")->capture_default_str();
  app.add_option("--isa", o.isa, "Force an instruction set (see `moat ops list`)");
  app.add_option("--threads", o.threads, "Threads (default: one per usable CPU)")->check(kThreadCount);
}

void add_engine_flags(CLI::App& app, EngineOptions& o) {
  app.add_option("--max-model-len", o.max_model_len, "Tokens of one sequence (default: the model's)")
      ->check(CLI::PositiveNumber);
  app.add_option("--max-num-seqs", o.max_num_seqs, "Sequences running at once")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--max-batched-tokens", o.max_batched_tokens, "Tokens of one step")
      ->capture_default_str()
      ->check(kStepTokens);
  app.add_option("--max-queued", o.max_queued, "Requests that may wait")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option_function<double>(
         "--max-step-ms", [&o](double ms) { o.max_step_seconds = ms / 1e3; },
         "Prefill is cut so that a step is expected to stay under it (default: no limit)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--max-memory", o.memory_bytes, "Plan with this instead of the machine's memory: 64GB, 512MiB")
      ->type_name("SIZE")
      ->transform(kSize);
  app.add_option("--memory-fraction", o.memory_fraction, "Of the memory, the share to plan with")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 1.0));
  auto* memory = app.add_option("--checkpoint-memory", o.checkpoint_memory_bytes,
                                "For states of cached prefixes: 8GB, 512MiB or auto (the default)")
                     ->type_name("SIZE")
                     ->transform(kSizeOrAuto);
  auto* interval = app.add_option("--checkpoint-interval", o.checkpoint_interval,
                                  "Tokens between checkpoints inside a long prompt; 0: none there")
                       ->capture_default_str()
                       ->check(CLI::NonNegativeNumber);
  app.add_flag_callback(
         "--no-prefix-cache", [&o] { o.prefix_cache = false; }, "Compute every prompt from its first token")
      ->excludes(memory)
      ->excludes(interval);
  app.add_flag("--deterministic", o.deterministic, "The same bits whatever was cached, batched or preempted");
}

std::string to_draft_count(std::string& text) {
  if (text == "auto") text = "-1";
  return {};
}
const CLI::Validator kDraftCount(to_draft_count, "");

void add_draft_flags(CLI::App& app, DraftOptions& o) {
  auto* draft =
      app.add_option("--draft", o.directory, "Checkpoint directory of a DSpark drafter: speculative decoding");
  app.add_flag("--draft-ngram", o.ngram, "Draft what followed the same tokens earlier in the conversation")
      ->excludes(draft);
  app.add_option("--num-draft-tokens", o.num_draft_tokens,
                 "Drafts a round: auto (the default: as many as pay), 0 (none) or always so many")
      ->type_name("N|auto")
      ->transform(kDraftCount)
      ->check(CLI::Range(-1, 63));
}

void add_serve(CLI::App& root, Run& run) {
  auto* app = root.add_subcommand("serve", "Serve a checkpoint over the OpenAI HTTP API");
  auto o = std::make_shared<ServeOptions>();
  add_model_flags(*app, o->model);
  app->add_option("--host", o->host)->capture_default_str();
  app->add_option("--port", o->port)->capture_default_str()->check(CLI::Range(0, 65535));
  app->add_option("--served-model-name", o->served_name, "Name in the API (default: the directory's name)");
  app->add_option("--alias", o->aliases, "Further names");
  app->add_option("--api-key", o->api_keys, "Require one of these keys");
  add_engine_flags(*app, o->engine);
  add_draft_flags(*app, o->draft);
  app->add_option("--request-timeout", o->request_timeout_seconds,
                  "Seconds a request may take, waiting included; 0: no limit")
      ->capture_default_str()
      ->check(kSeconds);
  app->add_option("--drain-seconds", o->drain_seconds, "Time for live requests after SIGTERM")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app->callback([o, &run] { run = [o] { return serve_command(*o); }; });
}

void add_generate(CLI::App& root, Run& run) {
  auto* app = root.add_subcommand("generate", "Generate once and print");
  auto o = std::make_shared<GenerateOptions>();
  add_model_flags(*app, o->model);
  auto* prompt = app->add_option("--prompt", o->prompt, "Plain text to continue");
  app->add_option("--messages", o->messages_path, "JSON messages or a chat request (- is stdin)")->excludes(prompt);
  app->add_option("--max-tokens", o->max_tokens)->capture_default_str()->check(CLI::PositiveNumber);
  app->add_option("--temperature", o->temperature, "0 is greedy (default: generation_config.json)")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--top-p", o->top_p)->check(CLI::Range(1e-9, 1.0));
  app->add_option("--seed", o->seed);
  app->add_flag("--ignore-eos", o->ignore_eos);
  add_draft_flags(*app, o->draft);
  app->add_flag("--json", o->json, "Print one JSON object: text, ids, finish_reason, usage, timings");
  app->callback([o, prompt, &run] {
    o->has_prompt = prompt->count() > 0;
    run = [o] { return generate_command(*o); };
  });
}

void add_checkpoint_commands(CLI::App& root, Run& run) {
  auto* inspect = root.add_subcommand("inspect", "What is in a checkpoint, or in a config with an index");
  auto io = std::make_shared<InspectOptions>();
  inspect->add_option("-m,--model,model", io->directory, "Checkpoint directory")->required();
  inspect->add_flag("--json", io->json);
  inspect->callback([io, &run] { run = [io] { return inspect_command(*io); }; });

  auto* synthetic = root.add_subcommand("make-synthetic", "Write a random checkpoint of any K3-shaped config");
  auto so = std::make_shared<MakeSyntheticOptions>();
  synthetic->add_option("--config", so->config_path, "config.json")->required();
  synthetic->add_option("-o,--out", so->out_directory, "Directory to create")->required();
  synthetic->add_option("--seed", so->seed)->capture_default_str();
  synthetic->add_option("--tokenizer", so->tokenizer_directory, "Copy the tokenizer files of this checkpoint");
  synthetic->add_option("--shard-bytes", so->shard_bytes)->capture_default_str()->check(CLI::PositiveNumber);
  synthetic->add_option("--threads", so->threads)->check(kThreadCount);
  synthetic->callback([so, &run] { run = [so] { return make_synthetic_command(*so); }; });

  auto* logits = root.add_subcommand("logits", "Logits of every position of given id lists");
  auto lo = std::make_shared<LogitsOptions>();
  add_model_flags(*logits, lo->model);
  logits->add_option("--ids", lo->ids_path, "JSON list of lists of token ids")->required();
  logits->add_option("-o,--out", lo->out_path, "safetensors file to write")->required();
  logits->add_option("--chunk", lo->chunk, "Rows a forward")->capture_default_str()->check(CLI::PositiveNumber);
  logits->callback([lo, &run] { run = [lo] { return logits_command(*lo); }; });
}

void add_text_commands(CLI::App& root, Run& run) {
  auto* tokenize = root.add_subcommand("tokenize", "UTF-8 on stdin -> JSON ids on stdout");
  auto to = std::make_shared<TokenizeOptions>();
  tokenize->add_option("-m,--model", to->model_dir)->required();
  tokenize->add_flag("--decode", to->decode, "JSON ids on stdin -> bytes on stdout");
  tokenize->add_flag("--markup", to->markup, "Recognise the names of reserved ids");
  tokenize->callback([to, &run] { run = [to] { return tokenize_command(*to); }; });

  auto* render = root.add_subcommand("render", "A chat request on stdin -> ids and text of its prompt");
  auto ro = std::make_shared<RenderOptions>();
  render->add_option("-m,--model", ro->model_dir)->required();
  render->callback([ro, &run] { run = [ro] { return render_command(*ro); }; });
}

void add_ops(CLI::App& root, Run& run) {
  auto* ops = root.add_subcommand("ops", "Ops and kernels")->require_subcommand(1);
  auto* list = ops->add_subcommand("list", "Every op with its kernels");
  auto lo = std::make_shared<OpsListOptions>();
  list->add_flag("--json", lo->json);
  list->callback([lo, &run] { run = [lo] { return ops_list_command(*lo); }; });

  auto* explain = ops->add_subcommand("explain", "Which kernel each call site of a model uses, and why");
  auto eo = std::make_shared<OpsExplainOptions>();
  explain->add_option("-m,--model", eo->model_dir, "Directory with config.json")->required();
  explain->add_option("--site", eo->site, "Only sites that contain this");
  explain->add_option("--tokens", eo->tokens, "Tokens of the step")->capture_default_str();
  explain->add_option("--max-batched-tokens", eo->max_batched_tokens)->capture_default_str()->check(kStepTokens);
  explain->add_flag("--plan", eo->plan_text, "The whole plan, one line a site and bucket");
  explain->callback([eo, &run] { run = [eo] { return ops_explain_command(*eo); }; });
}

void add_bench(CLI::App& root, Run& run) {
  auto* bench = root.add_subcommand("bench", "Measure")->require_subcommand(1);
  auto* ceilings = bench->add_subcommand("ceilings", "Read bandwidth and f32 rate of this machine");
  auto co = std::make_shared<BenchCeilingsOptions>();
  ceilings->add_option("--threads", co->threads)->check(kThreadCount);
  ceilings->add_flag("--json", co->json);
  ceilings->callback([co, &run] { run = [co] { return bench_ceilings_command(*co); }; });

  auto* engine = bench->add_subcommand("engine", "Prefill and decode without HTTP");
  auto eo = std::make_shared<BenchEngineOptions>();
  add_model_flags(*engine, eo->model);
  engine->add_option("--prefill", eo->prefill, "Prompt tokens of each sequence")->capture_default_str();
  engine->add_option("--decode", eo->decode, "Decode steps")->capture_default_str();
  engine->add_option("--batch", eo->batches, "Sequences together, e.g. 1,8,32")->capture_default_str();
  engine->add_option("--repeats", eo->repeats, "Medians of so many runs")->capture_default_str();
  add_draft_flags(*engine, eo->draft);
  engine->add_flag("--profile", eo->profile, "Time, GB/s and share of each call site");
  engine->add_flag("--json", eo->json);
  engine->callback([eo, &run] { run = [eo] { return bench_engine_command(*eo); }; });

  auto* speculation = bench->add_subcommand("speculation", "Decoding with drafts against without, in one run");
  auto po = std::make_shared<BenchSpeculationOptions>();
  add_model_flags(*speculation, po->model);
  add_draft_flags(*speculation, po->draft);
  speculation->add_option("--prompts", po->prompts_path, "JSON list of objects with \"prompt\": token ids");
  speculation
      ->add_option("--simulate", po->simulate, "Scripted drafts, accepted so often at every position, e.g. 0.9,0.7,0.4")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 1.0));
  speculation->add_option("--prompt-tokens", po->prompt_tokens, "Of random prompts")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  speculation->add_option("--tokens", po->tokens, "Of a reply, at most")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  speculation->add_option("--replies", po->replies, "Of a run, at least")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  speculation->add_option("--batch", po->batches, "Sequences together")->capture_default_str();
  speculation->add_option("--fixed", po->fixed, "Draft lengths to compare with")->capture_default_str();
  speculation->add_option("--temperature", po->temperature)->check(CLI::NonNegativeNumber);
  speculation->add_option("--repeats", po->repeats)->capture_default_str()->check(CLI::PositiveNumber);
  speculation->add_flag("--json", po->json);
  speculation->callback([po, &run] { run = [po] { return bench_speculation_command(*po); }; });

  auto* scheduler = bench->add_subcommand("scheduler", "Bookkeeping of a step, without a model");
  auto so = std::make_shared<BenchSchedulerOptions>();
  scheduler->add_option("--sequences", so->sequences)->capture_default_str()->check(CLI::PositiveNumber);
  scheduler->add_option("--blocks", so->blocks, "Blocks of each sequence")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  scheduler->add_option("--steps", so->steps)->capture_default_str()->check(CLI::PositiveNumber);
  scheduler->add_flag("--json", so->json);
  scheduler->callback([so, &run] { run = [so] { return bench_scheduler_command(*so); }; });

  auto* cache = bench->add_subcommand("cache", "Prefix reuse, and a long prompt among decoding streams");
  auto ko = std::make_shared<BenchCacheOptions>();
  add_model_flags(*cache, ko->model);
  cache->add_option("--history", ko->history, "Tokens before the second turn")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  cache->add_option("--prompt", ko->prompt, "Tokens of the prompt that arrives")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  cache->add_option("--streams", ko->streams)->capture_default_str()->check(CLI::PositiveNumber);
  cache->add_option("--stream-context", ko->stream_context, "Prompt tokens of each stream")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  cache->add_option("--step-ratio", ko->step_ratio, "Step limit in decode steps")
      ->capture_default_str()
      ->check(CLI::Range(1.05, 1000.0));
  cache->callback([ko, &run] { run = [ko] { return bench_cache_command(*ko); }; });

  auto* verify = bench->add_subcommand("verify", "From the target's logits to accepted drafts, without a model");
  auto vo = std::make_shared<BenchVerifyOptions>();
  verify->add_option("--threads", vo->threads)->check(kThreadCount);
  verify->add_option("--repeats", vo->repeats, "Medians of so many runs")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  verify->callback([vo, &run] { run = [vo] { return bench_verify_command(*vo); }; });
}

int run_main(int argc, char** argv) {
  install_log();
  CLI::App root("moat: serves Kimi K3 and its kind from their Hugging Face releases", "moat");
  root.set_version_flag("--version", kVersion);
  root.require_subcommand(1);
  root.fallthrough();  // --log-level may stand after the command, too
  std::string log_level = "info";
  root.add_option("--log-level", log_level, "debug, info, warn or error")
      ->check(CLI::IsMember({"debug", "info", "warn", "error"}))
      ->capture_default_str();
  Run run;
  add_serve(root, run);
  add_generate(root, run);
  add_checkpoint_commands(root, run);
  add_text_commands(root, run);
  add_ops(root, run);
  add_bench(root, run);
  // Flags of a command that does not exist would only be reported as a missing command.
  const auto is_named = [&](const CLI::App* command) { return command->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && root.get_subcommands(is_named).empty()) {
    std::fprintf(stderr, "moat: no command %s; moat --help lists them\n", argv[1]);
    return 1;
  }
  CLI11_PARSE(root, argc, argv);
  set_log_level(log_level == "debug"  ? LogLevel::kDebug
                : log_level == "info" ? LogLevel::kInfo
                : log_level == "warn" ? LogLevel::kWarn
                                      : LogLevel::kError);
  const Status status = run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "moat: %s\n", status.message().c_str());
  return 1;
}

}  // namespace
}  // namespace moat

int main(int argc, char** argv) { return moat::run_main(argc, argv); }
