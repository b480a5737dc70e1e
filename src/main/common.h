// SPDX-License-Identifier: Apache-2.0
// What several subcommands share: loading with a progress bar, sampling defaults of a checkpoint, sizes on the command
// line, reading small inputs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "engine/request.h"
#include "model/dspark_weights.h"
#include "model/loader.h"

namespace moat {

// Flags that every command which loads a model takes.
struct ModelOptions {
  std::string model_dir;
  std::string backend = "cpu";  // cpu | reference (gpu: not built)
  std::string isa;              // empty: the best one here
  int threads = 0;              // 0: one per usable CPU
};

struct OpenModel {
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<LoadedModel> loaded;
  bool reference = false;
};

// Checks the flags, forces the instruction set, loads with a progress bar on a terminal (GB/s and ETA) and one closing
// log line.
Result<OpenModel> open_model(const ModelOptions& options);

// Flags of commands that can draft.
struct DraftOptions {
  std::string directory;          // a drafter's checkpoint; empty: none
  bool ngram = false;             // draft from the conversation itself
  int64_t num_draft_tokens = -1;  // -1: as many as pay; 0: none
};

// The drafter's checkpoint, if one is asked for, with its notes and one line in the log.
Result<std::unique_ptr<LoadedDspark>> open_drafter(const DraftOptions& options, ThreadPool& pool);

// generation_config.json: temperature, top_p, top_k, min_p where present; anything of the wrong type is an error.
Result<SamplingParams> load_sampling_defaults(const std::string& model_dir);

// "8GB", "512 MB", "1.5GiB", "4096": k, M, G, T are powers of ten, with an i powers of two; case and B do not matter.
Result<int64_t> parse_byte_size(std::string_view text);

// "1,8,32": numbers of at least 1. Errors name the flag.
Result<std::vector<int64_t>> parse_counts(const char* flag, const std::string& text);

double median(std::vector<double> values);  // at least one

Result<std::string> read_input(const std::string& path);  // "-" is standard input

// A JSON list of token ids, each checked against the vocabulary.
Result<std::vector<int32_t>> parse_token_ids(const Json& json, int64_t vocab_size);

}  // namespace moat
