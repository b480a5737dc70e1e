// SPDX-License-Identifier: Apache-2.0
#include "ops/select.h"

#include <chrono>

namespace moat {

std::vector<Bucket> default_buckets(int64_t max_tokens) {
  std::vector<Bucket> buckets;
  for (const int64_t last : {int64_t{1}, int64_t{8}, int64_t{64}, int64_t{512}}) {
    const int64_t first = buckets.empty() ? 1 : buckets.back().last + 1;
    if (first > max_tokens) return buckets;
    buckets.push_back({first, std::min(last, max_tokens)});
  }
  if (buckets.back().last < max_tokens) buckets.push_back({buckets.back().last + 1, max_tokens});
  return buckets;
}

int KernelPlan::bucket_of(int64_t tokens) const {
  for (size_t i = 0; i < buckets_.size(); ++i) {
    if (tokens >= buckets_[i].first && tokens <= buckets_[i].last) return static_cast<int>(i);
  }
  MOAT_CHECK(false, "no bucket for {} tokens", tokens);
  return 0;
}

void KernelPlan::record(int bucket, bool upper_end, const char* site, const char* op, std::string shapes,
                        std::vector<std::pair<int, Candidate>> rows, const Cost& cost) {
  MOAT_CHECK(!frozen_, "recording into a frozen plan");
  auto& entries = entries_[static_cast<size_t>(bucket)];
  const auto [it, is_new] = index_.try_emplace({bucket, site}, entries.size(), Rows{});
  if (is_new) {
    Entry entry;
    entry.site = site;
    entry.op = op;
    for (auto& [table_index, candidate] : rows) {
      it->second.second.table_index.push_back(table_index);
      entry.candidates.push_back(std::move(candidate));
    }
    entries.push_back(std::move(entry));
  } else {
    Entry& entry = entries[it->second.first];
    MOAT_CHECK(std::string_view(entry.op) == op, "site {} is used by {} and {}", site, entry.op, op);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!entry.candidates[i].reject) entry.candidates[i].reject = std::move(rows[i].second.reject);
    }
  }
  Entry& entry = entries[it->second.first];
  if (!upper_end) return;
  entry.shapes = std::move(shapes);
  entry.cost.flops += cost.flops;
  entry.cost.bytes += cost.bytes;
  ++entry.calls;
}

Status KernelPlan::freeze() {
  std::string missing;
  for (size_t b = 0; b < entries_.size(); ++b) {
    for (Entry& entry : entries_[b]) {
      const Rows& rows = index_.at({static_cast<int>(b), entry.site}).second;
      std::string reasons;
      for (size_t i = 0; i < entry.candidates.size() && entry.chosen < 0; ++i) {
        const Candidate& c = entry.candidates[i];
        if (!c.reject) {
          entry.chosen = rows.table_index[i];
        } else {
          reasons += fmt::format("\n    {}: {}", c.kernel, *c.reject);
        }
      }
      if (entry.chosen < 0) {
        missing += fmt::format("\n  {} ({}, {} to {} tokens) {}:{}", entry.site, entry.op, buckets_[b].first,
                               buckets_[b].last, entry.shapes, reasons.empty() ? "\n    no row" : reasons);
      }
    }
  }
  if (!missing.empty()) return unsupported("no kernel for:{}", missing);
  by_address_.resize(buckets_.size());
  frozen_ = true;
  return {};
}

int KernelPlan::row(int bucket, const char* site) const {
  auto& known = by_address_[static_cast<size_t>(bucket)];
  const auto it = known.find(site);
  if (it != known.end()) return it->second;
  const auto found = index_.find({bucket, site});
  MOAT_CHECK(found != index_.end(), "site {} is not in the kernel plan", site);
  const int row = entries_[static_cast<size_t>(bucket)][found->second.first].chosen;
  known.emplace(site, row);
  return row;
}

namespace {

const KernelPlan::Candidate& chosen_candidate(const KernelPlan::Entry& entry) {
  for (const auto& c : entry.candidates) {
    if (!c.reject) return c;
  }
  MOAT_CHECK(false, "site {} has no kernel", entry.site);
  return entry.candidates.front();
}

}  // namespace

std::string KernelPlan::to_text() const {
  std::string text;
  for (size_t b = 0; b < entries_.size(); ++b) {
    for (const Entry& entry : entries_[b]) {
      const Candidate& c = chosen_candidate(entry);
      text += fmt::format("{}-{} {} {} {} {}\n", buckets_[b].first, buckets_[b].last, entry.site, entry.op, c.kernel,
                          c.tier == Tier::kTuned ? "tuned" : "portable");
    }
  }
  return text;
}

std::string KernelPlan::summary() const {
  int tuned = 0;
  int adapters = 0;
  int portable = 0;
  for (const auto& entries : entries_) {
    for (const Entry& entry : entries) {
      const Candidate& c = chosen_candidate(entry);
      (c.tier == Tier::kTuned ? tuned : portable) += 1;
      if (std::string_view(c.kernel).find(" via ") != std::string_view::npos) ++adapters;
    }
  }
  return fmt::format("kernels: {} tuned ({} via adapter), {} portable, 0 missing", tuned, adapters, portable);
}

void Exec::begin_step(int64_t tokens, bool upper_end) {
  upper_end_ = upper_end;
  bucket_ = o_.plan == nullptr ? 0 : o_.plan->bucket_of(tokens);
}

void Exec::add_profile(const char* site, double seconds, const Cost& cost) {
  Profile::Site& s = o_.profile->sites[site];
  ++s.calls;
  s.seconds += seconds;
  s.cost.flops += cost.flops;
  s.cost.bytes += cost.bytes;
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace moat
