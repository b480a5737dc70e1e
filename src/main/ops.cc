// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>

#include "engine/runner.h"
#include "main/commands.h"
#include "model/kimi.h"
#include "plan/capacity.h"

namespace moat {
namespace {

const char* tier_name(Tier tier) { return tier == Tier::kTuned ? "tuned" : "portable"; }

Json rows_json(const AnyOp& op) {
  Json rows = Json::array();
  for (const AnyOp::Row& row : op.rows()) {
    rows.push_back(Json::object({{"name", row.name},
                                 {"backend", backend_name(row.backend)},
                                 {"tier", tier_name(row.tier)},
                                 {"built", row.built}}));
  }
  return rows;
}

void print_entry(const KernelPlan::Entry& entry) {
  fmt::print("{}  {}  {}\n", entry.site, entry.op, entry.shapes);
  bool chosen = false;
  for (const KernelPlan::Candidate& c : entry.candidates) {
    if (chosen) {
      fmt::print("  not tried {:<32} {}\n", c.kernel, tier_name(c.tier));
    } else if (c.reject) {
      fmt::print("  rejected  {:<32} {}\n", c.kernel, *c.reject);
    } else {
      chosen = true;
      fmt::print("  CHOSEN    {:<32} {}  {} call{}, {:.3g} MB, {:.3g} MFLOP\n", c.kernel, tier_name(c.tier),
                 entry.calls, entry.calls == 1 ? "" : "s", entry.cost.bytes / 1e6, entry.cost.flops / 1e6);
    }
  }
}

}  // namespace

Status ops_list_command(const OpsListOptions& o) {
  if (o.json) {
    Json list = Json::array();
    for (const AnyOp* op : all_ops()) {
      list.push_back(Json::object({{"op", op->name()}, {"rows", rows_json(*op)}}));
    }
    fmt::print("{}\n", list.dump());
    return {};
  }
  fmt::print("host: {}; instruction sets: {}\n", host_arch().name, fmt::join(host_isas(), ", "));
  for (const AnyOp* op : all_ops()) {
    fmt::print("{}\n  {:<32} reference, all backends\n", op->name(), "(definition)");
    for (const AnyOp::Row& row : op->rows()) {
      fmt::print("  {:<32} {} {}{}\n", row.name, backend_name(row.backend), tier_name(row.tier),
                 row.built ? "" : "  (not in this build)");
    }
  }
  return {};
}

Status ops_explain_command(const OpsExplainOptions& o) {
  if (o.tokens < 1 || o.tokens > o.max_batched_tokens) {
    return invalid_argument("--tokens is {}, expected 1 to {}", o.tokens, o.max_batched_tokens);
  }
  MOAT_ASSIGN(const ModelConfig config, load_model_config(o.model_dir));
  // The plan needs shapes only, so a config is enough; experts are taken as the config declares them.
  KimiWeights weights;
  const CheckpointLayout layout{.mxfp4_experts = config.mxfp4_experts_declared};
  MOAT_RETURN_IF_ERROR(shape_weights(config, layout, Parallel{}, weights));
  const KimiModel model(config, weights);
  const int64_t context = std::min<int64_t>(config.max_position_embeddings, 131072);
  CacheSizes sizes{.num_slots = 1};
  sizes.num_blocks = (context + sizes.block_size - 1) / sizes.block_size;
  ThreadPool pool(num_usable_cpus());
  MOAT_ASSIGN(const DryRun dry, dry_run(model,
                                        {.arch = host_arch(),
                                         .max_batched_tokens = o.max_batched_tokens,
                                         .max_num_seqs = 64,
                                         .max_model_len = context},
                                        sizes, pool));
  if (o.plan_text) {
    fmt::print("{}", dry.plan.to_text());
    return {};
  }
  const int bucket = dry.plan.bucket_of(o.tokens);
  const Bucket range = dry.plan.buckets()[static_cast<size_t>(bucket)];
  fmt::print("{} on {}, steps of {} to {} tokens; shapes, bytes and flops at {}\n", o.model_dir, host_arch().name,
             range.first, range.last, range.last);
  for (const KernelPlan::Entry& entry : dry.plan.entries(bucket)) {
    if (entry.site.find(o.site) != std::string::npos) print_entry(entry);
  }
  fmt::print("step temporaries: {} (largest bucket)\n{}\n", format_bytes(dry.arena_bytes), dry.plan.summary());
  return {};
}

}  // namespace moat
