// SPDX-License-Identifier: Apache-2.0
// The subcommands as functions of plain options, so that tests call them without a process. Output goes to stdout,
// progress and logs to stderr. inspect.h, make_synthetic.h and serve.h hold the rest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "main/common.h"

namespace moat {

// `ids_path`: a JSON list of lists of token ids. Writes a safetensors file with "logits.0", ... [tokens, vocab] f32.
struct LogitsOptions {
  ModelOptions model;
  std::string ids_path, out_path;
  int64_t chunk = 512;  // rows a forward
};
Status logits_command(const LogitsOptions& options);

// Text on stdin -> JSON ids on stdout, or with decode the reverse. `markup` recognises the names of reserved ids.
struct TokenizeOptions {
  std::string model_dir;
  bool decode = false;
  bool markup = false;
};
Status tokenize_command(const TokenizeOptions& options);

// An OpenAI chat request on stdin -> {"ids": [...], "text": "..."} on stdout, as the server would render it.
struct RenderOptions {
  std::string model_dir;
};
Status render_command(const RenderOptions& options);

struct GenerateOptions {
  ModelOptions model;
  std::string prompt;         // plain text to continue; or
  std::string messages_path;  // a JSON list of messages, or a whole chat request; "-" is stdin
  bool has_prompt = false;
  int32_t max_tokens = 256;
  std::optional<float> temperature, top_p;
  std::optional<uint64_t> seed;
  bool ignore_eos = false;
  DraftOptions draft;
  bool json = false;  // one JSON object instead of streamed text
};
Status generate_command(const GenerateOptions& options);

struct OpsListOptions {
  bool json = false;
};
Status ops_list_command(const OpsListOptions& options);

// The kernel plan of a model directory (config.json and, if there, tensors' names), no weights needed.
struct OpsExplainOptions {
  std::string model_dir;
  std::string site;    // only sites that contain this; empty: all
  int64_t tokens = 1;  // which bucket
  int64_t max_batched_tokens = 2048;
  bool plan_text = false;  // the golden form of the whole plan
};
Status ops_explain_command(const OpsExplainOptions& options);

struct BenchEngineOptions {
  ModelOptions model;
  int64_t prefill = 512;  // prompt tokens of each sequence
  int64_t decode = 64;    // tokens decoded by each sequence
  std::string batches = "1,8,32";
  int repeats = 3;
  DraftOptions draft;  // drafts of random prompts are seldom accepted: bench speculation has real ones
  bool profile = false;
  bool json = false;
};
Status bench_engine_command(const BenchEngineOptions& options);

// Decoding with drafts against decoding without, alternately, on the same replies: ratios.
struct BenchSpeculationOptions {
  ModelOptions model;
  DraftOptions draft;
  std::string prompts_path;      // JSON list of objects with "prompt": token ids; empty: random prompts
  std::vector<double> simulate;  // acceptance at every position of a scripted drafter, instead of a real one
  int64_t prompt_tokens = 256;   // of random prompts
  int64_t tokens = 128;          // of a reply, at most
  int64_t replies = 12;          // a run, at least
  std::string batches = "1,4,16,64";
  std::string fixed = "1,2,3,5,7";  // draft lengths to compare with the automatic choice
  float temperature = 0.0F;
  int repeats = 5;
  bool json = false;
};
Status bench_speculation_command(const BenchSpeculationOptions& options);

struct BenchSchedulerOptions {
  int64_t sequences = 1000;
  int64_t blocks = 200;  // of each sequence
  int64_t steps = 2000;
  int64_t hash_tokens = 100'000;
  bool json = false;
};
Status bench_scheduler_command(const BenchSchedulerOptions& options);

struct BenchCacheOptions {
  ModelOptions model;
  int64_t history = 16'000;  // tokens before the second turn; at most what the context allows
  int64_t prompt = 8'000;    // tokens of the prompt that arrives among decoding streams
  int64_t streams = 16;
  int64_t stream_context = 2048;  // prompt tokens of each stream
  double step_ratio = 1.7;        // step limit, in decode steps
};
Status bench_cache_command(const BenchCacheOptions& options);

struct BenchCeilingsOptions {
  int threads = 0;
  bool json = false;
};
Status bench_ceilings_command(const BenchCeilingsOptions& options);

struct BenchVerifyOptions {
  int threads = 0;
  int64_t repeats = 25;
};
Status bench_verify_command(const BenchVerifyOptions& options);

}  // namespace moat
