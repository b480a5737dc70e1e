// SPDX-License-Identifier: Apache-2.0
#include "main/common.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <iterator>

#include "base/file.h"
#include "base/log.h"
#include "core/device.h"
#include "plan/capacity.h"

namespace moat {
namespace {

void draw_progress(const LoadProgress& p) {
  const double rate = p.seconds > 0 ? static_cast<double>(p.bytes_done) / p.seconds : 0;
  const double share = p.bytes_total > 0 ? static_cast<double>(p.bytes_done) / static_cast<double>(p.bytes_total) : 1;
  const double eta = rate > 0 ? static_cast<double>(p.bytes_total - p.bytes_done) / rate : 0;
  constexpr int kWidth = 30;
  const int filled = static_cast<int>(share * kWidth);
  std::fprintf(stderr, "\rloading [%.*s%.*s] %3.0f%%  %s  %.1f GB/s  ETA %.0f s ", filled,
               "##############################", kWidth - filled, "..............................", share * 100,
               format_bytes(static_cast<int64_t>(p.bytes_done)).c_str(), rate / 1e9, eta);
  if (p.bytes_done >= p.bytes_total) std::fputc('\n', stderr);
}

}  // namespace

Result<OpenModel> open_model(const ModelOptions& options) {
  if (options.backend != "cpu" && options.backend != "reference") {
    return unsupported("backend {} is not in this build; built: cpu, reference", options.backend);
  }
  if (!options.isa.empty()) MOAT_RETURN_IF_ERROR(force_isa(options.isa));
  OpenModel open;
  open.reference = options.backend == "reference";
  open.pool = std::make_unique<ThreadPool>(options.threads > 0 ? options.threads : num_usable_cpus());
  LoadOptions load;
  if (isatty(STDERR_FILENO)) load.progress = draw_progress;
  MOAT_ASSIGN(open.loaded, load_model(options.model_dir, load, *open.pool));
  const LoadReport& r = open.loaded->report;
  log_info(
      "loaded model={} tensors={} used={} ignored={} mapped={} owned={} seconds={:.2f} backend={} isa={} threads={}",
      options.model_dir, r.num_tensors, r.num_used, r.num_ignored, format_bytes(static_cast<int64_t>(r.bytes_mapped)),
      format_bytes(static_cast<int64_t>(r.bytes_owned)), r.seconds, options.backend, host_arch().level,
      open.pool->num_threads());
  if (open.reference) {
    log_warn(
        "backend=reference: every op runs its reference implementation on one thread; for checking, not for serving");
  }
  return open;
}

Result<std::unique_ptr<LoadedDspark>> open_drafter(const DraftOptions& options, ThreadPool& pool) {
  if (options.directory.empty()) return std::unique_ptr<LoadedDspark>();
  MOAT_ASSIGN(std::unique_ptr<LoadedDspark> loaded, load_dspark(options.directory, pool));
  const DraftLoadReport& r = loaded->report;
  log_info("loaded drafter={} tensors={} used={} ignored={} mapped={} owned={}", options.directory, r.num_tensors,
           r.num_used, r.num_ignored, format_bytes(static_cast<int64_t>(r.bytes_mapped)),
           format_bytes(static_cast<int64_t>(r.bytes_owned)));
  for (const std::string& note : loaded->config.notes) log_info("drafter: {}", note);
  return loaded;
}

Result<SamplingParams> load_sampling_defaults(const std::string& model_dir) {
  SamplingParams params;
  const std::string path = join_path(model_dir, "generation_config.json");
  if (!file_exists(path)) return params;
  MOAT_ASSIGN(const std::string text, read_file(path));
  Result<Json> json = parse_json(text);
  if (!json.ok()) return json.status().with_prefix(path);
  const auto number = [&](const char* key, auto& field) -> Status {
    const Json* value = json->find_set(key);
    if (value == nullptr) return {};
    if (!value->is_number())
      return invalid_argument("{}: {} is a {}, expected a number", path, key, value->type_name());
    field = static_cast<std::remove_reference_t<decltype(field)>>(value->as_double());
    return {};
  };
  MOAT_RETURN_IF_ERROR(number("temperature", params.temperature));
  MOAT_RETURN_IF_ERROR(number("top_p", params.top_p));
  MOAT_RETURN_IF_ERROR(number("top_k", params.top_k));
  MOAT_RETURN_IF_ERROR(number("min_p", params.min_p));
  return params;
}

Result<int64_t> parse_byte_size(std::string_view text) {
  constexpr std::string_view kPrefixes = "kmgt";
  constexpr double kMax = 0x1p62;
  double number = 0;
  const auto [rest, failure] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(rest, text.data() + text.size());
  unit.erase(0, unit.find_first_not_of(' '));
  for (char& c : unit) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  const size_t prefix = unit.empty() ? std::string::npos : kPrefixes.find(unit[0]);
  if (prefix != std::string::npos) {
    const bool binary = unit.size() > 1 && unit[1] == 'i';
    number *= std::pow(binary ? 1024.0 : 1000.0, static_cast<double>(prefix + 1));
    unit.erase(0, binary ? 2 : 1);
  }
  const bool known = unit.empty() || unit == "b";
  if (failure != std::errc() || !known || !(number >= 0 && number <= kMax)) {
    return invalid_argument("\"{}\" is not a size, expected one like 512MB, 8GB, 1.5GiB or a number of bytes", text);
  }
  return static_cast<int64_t>(std::llround(number));
}

Result<std::vector<int64_t>> parse_counts(const char* flag, const std::string& text) {
  std::vector<int64_t> counts;
  const char* p = text.data();
  const char* end = p + text.size();
  while (p < end) {
    int64_t value = 0;
    const auto [next, error] = std::from_chars(p, end, value);
    if (error != std::errc() || value < 1)
      return invalid_argument("{} is \"{}\", expected numbers like 1,8,32", flag, text);
    counts.push_back(value);
    p = next < end && *next == ',' ? next + 1 : next;
    if (next < end && *next != ',') return invalid_argument("{} is \"{}\", expected numbers like 1,8,32", flag, text);
  }
  if (counts.empty()) return invalid_argument("{} is empty", flag);
  return counts;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

Result<std::string> read_input(const std::string& path) {
  if (path != "-") return read_file(path);
  return std::string(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
}

Result<std::vector<int32_t>> parse_token_ids(const Json& json, int64_t vocab_size) {
  if (!json.is_array()) return invalid_argument("token ids are a {}, expected a list", json.type_name());
  std::vector<int32_t> ids;
  for (const Json& item : json.as_array()) {
    const auto id = item.is_number() ? item.as_int64() : std::nullopt;
    if (!id || *id < 0 || *id >= vocab_size) {
      return invalid_argument("token id {} is not an integer in [0, {})", item.dump(), vocab_size);
    }
    ids.push_back(static_cast<int32_t>(*id));
  }
  return ids;
}

}  // namespace moat
