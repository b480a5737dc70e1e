// SPDX-License-Identifier: Apache-2.0
#include "text/stop_strings.h"

#include <algorithm>
#include <utility>

#include "text/reply_machine.h"

namespace moat {

StopMatcher::StopMatcher(std::vector<std::string> stops) {
  std::vector<Pattern> patterns;
  for (std::string& stop : stops) {
    if (stop.empty()) continue;
    // fallback[n]: length of the longest proper beginning of the first n bytes that is also their end.
    std::vector<size_t> fallback(stop.size() + 1, 0);
    for (size_t n = 2, length = 0; n <= stop.size(); ++n) {
      while (length > 0 && stop[n - 1] != stop[length]) length = fallback[length];
      if (stop[n - 1] == stop[length]) ++length;
      fallback[n] = length;
    }
    patterns.push_back({std::move(stop), std::move(fallback)});
  }
  progress_.assign(patterns.size(), 0);
  patterns_ = std::make_shared<const std::vector<Pattern>>(std::move(patterns));
}

const std::string& StopMatcher::matched_stop() const {
  MOAT_CHECK(matched(), "no stop string has matched");
  return (*patterns_)[static_cast<size_t>(matched_index_)].text;
}

std::string StopMatcher::push(std::string_view text) {
  if (matched()) return {};
  const size_t begin = held_.size();
  held_.append(text);
  const auto& patterns = *patterns_;
  for (size_t at = begin; at < held_.size(); ++at) {
    // Of the stop strings that end at the same byte the longest counts: it begins first.
    size_t longest = 0;
    for (size_t i = 0; i < patterns.size(); ++i) {
      const Pattern& pattern = patterns[i];
      size_t& length = progress_[i];
      while (length > 0 && pattern.text[length] != held_[at]) length = pattern.fallback[length];
      if (pattern.text[length] == held_[at]) ++length;
      if (length < pattern.text.size()) continue;
      if (length > longest) {
        longest = length;
        matched_index_ = static_cast<int>(i);
      }
    }
    if (longest > 0) {
      held_.resize(at + 1 - longest);
      return std::exchange(held_, {});
    }
  }
  // A matched beginning starts where its first byte does, which is the start of a character.
  const size_t keep = progress_.empty() ? 0 : *std::max_element(progress_.begin(), progress_.end());
  std::string known = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return known;
}

std::string StopMatcher::flush() { return std::exchange(held_, {}); }

namespace {

// The content channel of a chat reply. Calls are of no interest, and without tools the machine keeps none of their
// text.
class ChatSource {
 public:
  ChatSource(const Tokenizer& tokenizer, ReplyParser::Options options)
      : machine_(tokenizer, {.start = options.start, .tools = false}) {}

  std::string feed(int32_t token_id) {
    std::vector<ReplyEvent> events;
    machine_.feed(token_id, events);
    std::string text;
    for (const ReplyEvent& event : events) {
      if (event.kind == ReplyEvent::Kind::kContent) text.append(event.text);
    }
    return text;
  }

 private:
  ReplyMachine machine_;
};

class TextSource {
 public:
  explicit TextSource(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}

  std::string feed(int32_t token_id) {
    if (token_id < 0 || token_id >= tokenizer_->num_ranks()) return {};
    return utf8_.push(tokenizer_->token_bytes(token_id));
  }

 private:
  const Tokenizer* tokenizer_;
  Utf8Stream utf8_;
};

template <class Source>
class StopStringConstraint : public Constraint {
 public:
  StopStringConstraint(Source source, std::vector<std::string> stops)
      : start_{std::move(source), StopMatcher(std::move(stops))}, base_(start_), now_(start_) {}

  bool mask(std::span<uint32_t>) override { return false; }

  ConstraintVerdict accept(int32_t token_id) override {
    ids_.push_back(token_id);
    now_.feed(token_id);
    // The base follows at a distance, so that taking back drafts repeats few tokens.
    if (ids_.size() - base_count_ > 2 * kWindow) {
      while (ids_.size() - base_count_ > kWindow) base_.feed(ids_[base_count_++]);
    }
    return now_.matcher.matched() ? ConstraintVerdict::kStop : ConstraintVerdict::kContinue;
  }

  void rollback(int count) override {
    MOAT_CHECK(count >= 0 && static_cast<size_t>(count) <= ids_.size(), "rollback of {} of {}", count, ids_.size());
    if (count == 0) return;
    ids_.resize(ids_.size() - static_cast<size_t>(count));
    if (ids_.size() < base_count_) {
      base_ = start_;
      base_count_ = 0;
    }
    now_ = base_;
    for (size_t i = base_count_; i < ids_.size(); ++i) now_.feed(ids_[i]);
  }

 private:
  static constexpr size_t kWindow = 16;

  struct State {
    Source source;
    StopMatcher matcher;
    void feed(int32_t token_id) { (void)matcher.push(source.feed(token_id)); }
  };

  State start_, base_, now_;
  std::vector<int32_t> ids_;
  size_t base_count_ = 0;  // ids that base_ has seen
};

}  // namespace

std::unique_ptr<Constraint> make_chat_stop_constraint(const Tokenizer& tokenizer, ReplyParser::Options options,
                                                      std::vector<std::string> stops) {
  return std::make_unique<StopStringConstraint<ChatSource>>(ChatSource(tokenizer, options), std::move(stops));
}

std::unique_ptr<Constraint> make_text_stop_constraint(const Tokenizer& tokenizer, std::vector<std::string> stops) {
  return std::make_unique<StopStringConstraint<TextSource>>(TextSource(tokenizer), std::move(stops));
}

}  // namespace moat
