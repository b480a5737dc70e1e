// SPDX-License-Identifier: Apache-2.0
// Exec is what an op call needs; KernelPlan is which kernel each call site uses for each range of token counts.
//
// A call site is a label in the forward pass ("kda.q_proj"). The forward itself makes the plan: run once in dry mode at
// both ends of every bucket (null data, real shapes), each op call checks, asks every row, and is recorded. freeze()
// then picks, for each site and bucket, the first row that takes both ends, and fails with every row's reason if there
// is none. While serving nothing is chosen: a call looks its row up, and a miss is a CHECK. The reference is not a row:
// it runs only under ExecMode::kReference, for the whole model.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/thread_pool.h"
#include "core/comm.h"
#include "core/device.h"
#include "ops/op.h"

namespace moat {

// Token counts [first, last] that share kernels.
struct Bucket {
  int64_t first = 1;
  int64_t last = 1;
  bool operator==(const Bucket&) const = default;
};

// 1, 2-8, 9-64, 65-512, 513-... up to max_tokens.
std::vector<Bucket> default_buckets(int64_t max_tokens);

class KernelPlan {
 public:
  struct Candidate {
    const char* kernel;
    Tier tier;
    Reject reject;  // of the first end that refused; nothing: takes both ends
    bool built;
  };
  struct Entry {
    std::string site;
    const char* op;
    std::string shapes;                 // at the bucket's upper end
    std::vector<Candidate> candidates;  // rows of the backend, in order
    int chosen = -1;                    // index of the row in the op's table, after freeze()
    int64_t workspace_bytes = 0;        // of the chosen row at the upper end
    Cost cost;                          // of all calls of this site, at the upper end
    int calls = 0;                      // at the upper end
  };

  explicit KernelPlan(std::vector<Bucket> buckets) : buckets_(std::move(buckets)), entries_(buckets_.size()) {}

  const std::vector<Bucket>& buckets() const { return buckets_; }
  // The bucket of `tokens`; CHECKs that one covers it.
  int bucket_of(int64_t tokens) const;

  // Dry pass: one call at one end of a bucket.
  void record(int bucket, bool upper_end, const char* site, const char* op, std::string shapes,
              std::vector<std::pair<int, Candidate>> rows, const Cost& cost);
  // Chooses; fails naming each site without a kernel and each row's reason.
  Status freeze();
  bool frozen() const { return frozen_; }

  // Row index of `site`; `site` must be a literal (looked up by address first).
  int row(int bucket, const char* site) const;

  const std::vector<Entry>& entries(int bucket) const { return entries_[static_cast<size_t>(bucket)]; }
  // Golden text: one line a site and bucket, "site bucket op kernel tier".
  std::string to_text() const;
  // "kernels: 41 tuned (1 via adapter), 0 portable, 0 missing"
  std::string summary() const;

 private:
  struct Rows {
    std::vector<int> table_index;  // of candidates, in the op's table
  };
  std::vector<Bucket> buckets_;
  std::vector<std::vector<Entry>> entries_;  // [bucket][site]
  std::map<std::pair<int, std::string>, std::pair<size_t, Rows>> index_;
  mutable std::vector<std::unordered_map<const void*, int>> by_address_;
  bool frozen_ = false;
};

enum class ExecMode {
  kRun,        // through the frozen plan
  kDry,        // record into the plan, touch no data
  kCost,       // add what each site does at least to the profile, touch no data
  kEager,      // first row that takes the arguments; for tests and tools
  kReference,  // every op by its reference
};

// Time and work of each site, kept when a Profile is attached. Under kCost there is no time.
struct Profile {
  struct Site {
    int64_t calls = 0;
    double seconds = 0;
    Cost cost;
  };
  std::map<std::string, Site> sites;
};

class Exec {
 public:
  struct Options {
    ExecMode mode = ExecMode::kEager;
    Arch arch;
    ThreadPool* pool = nullptr;
    Arena* arena = nullptr;
    Comm* comm = nullptr;
    KernelPlan* plan = nullptr;  // kRun: frozen; kDry: being made
    Profile* profile = nullptr;  // kCost: needed
  };
  explicit Exec(const Options& options) : o_(options) {}

  ExecMode mode() const { return o_.mode; }
  bool dry() const { return o_.mode == ExecMode::kDry || o_.mode == ExecMode::kCost; }  // no data to touch
  const Arch& arch() const { return o_.arch; }
  ThreadPool& pool() const { return *o_.pool; }
  Arena& arena() const { return *o_.arena; }
  Comm& comm() const { return *o_.comm; }

  // Before a forward over `tokens` rows. In dry mode `upper_end` says which end of the bucket this is.
  void begin_step(int64_t tokens, bool upper_end = true);

  template <class Args>
  void call(const char* site, const Op<Args>& op, const Args& args);

 private:
  void add_profile(const char* site, double seconds, const Cost& cost);

  Options o_;
  int bucket_ = 0;
  bool upper_end_ = true;
};

// Index of the first built row of the arch's backend that takes `args`, or every row's reason.
template <class Args>
Result<int> select_row(const Op<Args>& op, const Args& args, const Arch& arch);

double now_seconds();  // monotonic

// --- implementation of the templates ---

template <class Args>
Result<int> select_row(const Op<Args>& op, const Args& args, const Arch& arch) {
  std::string reasons;
  for (size_t i = 0; i < op->kernels.size(); ++i) {
    const Kernel<Args>& k = op->kernels[i];
    if (k.backend != arch.backend) continue;
    const Reject reason = k.run == nullptr      ? Reject("not in this build")
                          : k.reject == nullptr ? Reject()
                                                : k.reject(args, arch);
    if (!reason) return static_cast<int>(i);
    reasons += fmt::format("\n  {}: {}", k.name, *reason);
  }
  return unsupported("{} has no kernel on {} for these arguments:{}", op->name, arch.name,
                     reasons.empty() ? "\n  no row" : reasons);
}

template <class Args>
void Exec::call(const char* site, const Op<Args>& op, const Args& args) {
  const Status status = op->check(args);
  MOAT_CHECK(status.ok(), "{}: {}", site, status.message());
  if (o_.mode == ExecMode::kReference) return op->reference(args);
  if (o_.mode == ExecMode::kCost) return add_profile(site, 0, op->cost(args));
  if (o_.mode == ExecMode::kDry) {
    std::vector<std::pair<int, KernelPlan::Candidate>> rows;
    int64_t workspace = 0;
    for (size_t i = 0; i < op->kernels.size(); ++i) {
      const Kernel<Args>& k = op->kernels[i];
      if (k.backend != o_.arch.backend) continue;
      Reject reason = k.reject == nullptr ? Reject() : k.reject(args, o_.arch);
      if (!reason && k.workspace != nullptr) workspace = std::max(workspace, k.workspace(args, *this));
      rows.push_back({static_cast<int>(i), {k.name, k.tier, std::move(reason), k.run != nullptr}});
    }
    o_.plan->record(bucket_, upper_end_, site, op->name, op->describe(args), std::move(rows), op->cost(args));
    ArenaScope scope(*o_.arena);
    o_.arena->alloc(DType::kU8, {workspace});
    return;
  }
  int row = 0;
  if (o_.mode == ExecMode::kRun) {
    row = o_.plan->row(bucket_, site);
  } else {
    Result<int> selected = select_row(op, args, o_.arch);
    MOAT_CHECK(selected.ok(), "{}: {}", site, selected.status().message());
    row = *selected;
  }
  const Kernel<Args>& kernel = op->kernels[static_cast<size_t>(row)];
  ArenaScope scope(*o_.arena);
  if (o_.profile == nullptr) return kernel.run(*this, args);
  const double start = now_seconds();
  kernel.run(*this, args);
  add_profile(site, now_seconds() - start, op->cost(args));
}

}  // namespace moat
