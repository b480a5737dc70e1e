// SPDX-License-Identifier: Apache-2.0
#include "server/call_limit.h"

#include <deque>
#include <string_view>
#include <utility>

#include "text/stop_strings.h"

namespace moat {
namespace {

class SingleCallConstraint final : public Constraint {
 public:
  explicit SingleCallConstraint(const Tokenizer& tokenizer) : tokenizer_(tokenizer), states_(1) {}

  bool mask(std::span<uint32_t>) override { return false; }

  ConstraintVerdict accept(int32_t token_id) override {
    State state = states_.back();
    const bool stop = advance(state, token_id);
    states_.push_back(std::move(state));
    if (states_.size() > kMaxRollback + 1) states_.pop_front();
    return stop ? ConstraintVerdict::kStop : ConstraintVerdict::kContinue;
  }

  void rollback(int count) override {
    for (int i = 0; i < count && states_.size() > 1; ++i) states_.pop_back();
  }

 private:
  static constexpr size_t kMaxRollback = 256;  // far more than any draft
  static constexpr size_t kMaxHeader = 4096;   // a header that goes on longer is no header
  enum class In { kText, kOpenHeader, kCloseHeader };
  struct State {
    In in = In::kText;
    bool tools_open = false;
    bool call_open = false;
    std::string header;
  };

  // True: the first call is closed by this token.
  bool advance(State& state, int32_t id) const {
    const Tokenizer::ControlIds& control = tokenizer_.control();
    if (id == control.open || id == control.close) {
      state.in = id == control.open ? In::kOpenHeader : In::kCloseHeader;
      state.header.clear();
      return false;
    }
    if (id != control.sep) {
      if (state.in != In::kText && state.header.size() < kMaxHeader) state.header += tokenizer_.token_bytes(id);
      return false;
    }
    const In in = std::exchange(state.in, In::kText);
    const std::string header = std::exchange(state.header, {});
    const std::string_view tag = std::string_view(header).substr(0, header.find(' '));
    if (in == In::kCloseHeader) return state.call_open && (tag == "call" || tag == "tools" || tag == "message");
    if (in == In::kOpenHeader && tag == "tools") state.tools_open = true;
    if (in != In::kOpenHeader || tag != "call" || !state.tools_open) return false;
    if (state.call_open) return true;
    constexpr std::string_view kName = " tool=\"";
    const size_t name = header.find(kName);
    state.call_open =
        name != std::string::npos && name + kName.size() < header.size() && header[name + kName.size()] != '"';
    return false;
  }

  const Tokenizer& tokenizer_;
  std::deque<State> states_;  // after each of the latest tokens, newest last; never empty
};

class JointConstraint final : public Constraint {
 public:
  explicit JointConstraint(std::vector<std::unique_ptr<Constraint>> parts) : parts_(std::move(parts)) {}

  bool mask(std::span<uint32_t> allowed) override {
    bool any = false;
    for (const auto& part : parts_) any = part->mask(allowed) || any;
    return any;
  }
  ConstraintVerdict accept(int32_t token_id) override {
    ConstraintVerdict verdict = ConstraintVerdict::kContinue;
    for (const auto& part : parts_) {
      if (part->accept(token_id) == ConstraintVerdict::kStop) verdict = ConstraintVerdict::kStop;
    }
    return verdict;
  }
  void rollback(int count) override {
    for (const auto& part : parts_) part->rollback(count);
  }

 private:
  std::vector<std::unique_ptr<Constraint>> parts_;
};

}  // namespace

std::unique_ptr<Constraint> make_single_call_constraint(const Tokenizer& tokenizer) {
  return std::make_unique<SingleCallConstraint>(tokenizer);
}

std::unique_ptr<Constraint> make_joint_constraint(std::vector<std::unique_ptr<Constraint>> parts) {
  if (parts.empty()) return nullptr;
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<JointConstraint>(std::move(parts));
}

std::unique_ptr<Constraint> make_call_constraint(const ApiCall& call, const Tokenizer& tokenizer) {
  std::vector<std::unique_ptr<Constraint>> parts;
  if (!call.stops.empty()) {
    parts.push_back(call.chat ? make_chat_stop_constraint(tokenizer, call.parser, call.stops)
                              : make_text_stop_constraint(tokenizer, call.stops));
  }
  if (call.chat && call.parser.tools && call.single_tool_call) parts.push_back(make_single_call_constraint(tokenizer));
  return make_joint_constraint(std::move(parts));
}

}  // namespace moat
