// SPDX-License-Identifier: Apache-2.0
// That verification is lossless: the exact law of what accept_drafts emits against the target's, for every rule; the
// same statistic on planted mistakes, which it has to catch; chi-square tests of whole rounds with random numbers; and
// the traps of docs/design/dspark.md section 7 that live at this level, by number.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "accept_law.h"
#include "chi_square.h"
#include "ops/accept.h"
#include "ops/case_data.h"
#include "ops/sample.h"

namespace moat {
namespace {

using test::Conditional;
using test::Decision;
using test::Emission;
using test::Law;
using test::Round;
using test::Toy;
using test::Verdict;
using test::Verify;

constexpr AcceptRule kRules[] = {AcceptRule::kToken, AcceptRule::kBlock, AcceptRule::kOneHot};

const char* rule_name(AcceptRule rule) {
  return rule == AcceptRule::kToken ? "token" : rule == AcceptRule::kBlock ? "block" : "one-hot";
}
Decision decision_of(AcceptRule rule) {
  return rule == AcceptRule::kBlock ? Decision::kLastSuccessWins : Decision::kFirstFailureStops;
}

enum class Path { kReference, kDense, kCompact };
constexpr Path kPaths[] = {Path::kReference, Path::kDense, Path::kCompact};

struct Machine {
  ThreadPool pool{2};
  Arena arena{size_t{64} << 20};
  Exec kernels{{.mode = ExecMode::kEager, .arch = host_arch(), .pool = &pool, .arena = &arena}};
  Exec references{{.mode = ExecMode::kReference, .arch = host_arch(), .pool = &pool, .arena = &arena}};

  Exec& exec(Path path) { return path == Path::kReference ? references : kernels; }
};
Machine& machine() {
  static Machine m;
  return m;
}

// One call over stacked rounds, and its results.
struct Call {
  explicit Call(int64_t vocab_size) : vocab(vocab_size) {}

  int64_t vocab;
  std::vector<float> p, q;
  std::vector<int32_t> drafts, cu_rows = {0};
  std::vector<AcceptRule> rules;
  std::vector<double> accept_u, bonus_u;
  std::vector<int32_t> accepted, bonus;
  std::vector<float> final_probs;

  void add(const Round& round, AcceptRule rule) {
    for (size_t k = 0; k < round.p.size(); ++k) {
      const bool judges = k < round.drafts.size();
      p.insert(p.end(), round.p[k].begin(), round.p[k].end());
      // The last row is nobody's: poisoned.
      if (judges) q.insert(q.end(), round.q[k].begin(), round.q[k].end());
      if (!judges) q.insert(q.end(), static_cast<size_t>(vocab), NAN);
      drafts.push_back(judges ? round.drafts[k] : std::numeric_limits<int32_t>::max());
      accept_u.push_back(judges ? round.accept_u[k] : NAN);
    }
    cu_rows.push_back(static_cast<int32_t>(drafts.size()));
    rules.push_back(rule);
    bonus_u.push_back(round.bonus_u);
  }

  void run(Path path) {
    const auto rows = static_cast<int64_t>(drafts.size());
    const auto seqs = static_cast<int64_t>(rules.size());
    accepted.assign(rules.size(), 0x5a5a5a5a);
    bonus.assign(rules.size(), 0x5a5a5a5a);
    final_probs.assign(static_cast<size_t>(seqs * vocab), NAN);
    const ArenaScope scope(machine().arena);
    std::memset(machine().arena.memory().data(), 0x7F, size_t{1} << 16);  // poisoned scratch
    AcceptDraftsArgs args{.accepted = make_tensor(accepted.data(), DType::kI32, {seqs}),
                          .bonus = make_tensor(bonus.data(), DType::kI32, {seqs}),
                          .final_probs = make_tensor(final_probs.data(), DType::kF32, {seqs, vocab}),
                          .q = make_tensor(q.data(), DType::kF32, {rows, vocab}),
                          .drafts = drafts,
                          .cu_rows = cu_rows,
                          .rules = rules,
                          .accept_uniforms = accept_u,
                          .bonus_uniforms = bonus_u};
    const Tensor dense = make_tensor(p.data(), DType::kF32, {rows, vocab});
    if (path == Path::kCompact) {
      args.target.compact = compact(dense);
    } else {
      args.target.dense = dense;
    }
    accept_drafts(machine().exec(path), "accept", args);
  }

 private:
  CompactRows compact(const Tensor& dense) {
    ids_.assign(p.size(), -1);
    probs_.assign(p.size(), 0.0F);
    counts_.clear();
    for (int64_t r = 0; r < dense.dim(0); ++r) {
      int32_t count = 0;
      for (int64_t v = 0; v < vocab; ++v) {
        if (dense.row(r)[v] == 0) continue;
        const auto at = static_cast<size_t>(r * vocab + count++);
        ids_[at] = static_cast<int32_t>(v);
        probs_[at] = dense.row(r)[v];
      }
      counts_.push_back(count);
    }
    return {.ids = make_tensor(ids_.data(), DType::kI32, dense.dims),
            .probs = make_tensor(probs_.data(), DType::kF32, dense.dims),
            .counts = make_tensor(counts_.data(), DType::kI32, {dense.dim(0)})};
  }
  std::vector<int32_t> ids_, counts_;
  std::vector<float> probs_;
};

Verify op_verifier(AcceptRule rule, Path path) {
  return [rule, path](const Round& round) {
    Call call(static_cast<int64_t>(round.p[0].size()));
    call.add(round, rule);
    call.run(path);
    return Verdict{call.accepted[0], Law(call.final_probs.begin(), call.final_probs.end())};
  };
}

// --- exact laws ---

// A toy whose drafts suit the rule: the one-hot rule takes drafts that are sampled, or the same for a prefix.
Toy random_toy(int vocab, int num_drafts, uint64_t seed, double zero_share) {
  Toy toy{.vocab = vocab, .num_drafts = num_drafts};
  toy.target = test::random_conditional(vocab, 2 * seed, zero_share);
  toy.draft = test::random_conditional(vocab, 2 * seed + 1, zero_share / 2);
  toy.declared = toy.draft;
  return toy;
}

Conditional argmax_of(const Conditional& law) {
  return [law](std::span<const int32_t> prefix) {
    const Law probs = law(prefix);
    return test::one_hot(static_cast<size_t>(std::max_element(probs.begin(), probs.end()) - probs.begin()),
                         probs.size());
  };
}

double tv_of(const Toy& toy, const Verify& verify, Decision decision) {
  return test::total_variation(emission_law(toy, verify, decision).law, target_law(toy));
}

TEST(ExactLaw, EveryRuleEmitsTheTarget) {
  double worst = 0;
  int toys = 0;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    for (const auto& [vocab, drafts] : {std::pair{3, 1}, std::pair{5, 1}, std::pair{4, 2}, std::pair{3, 3}}) {
      const Toy toy = random_toy(vocab, drafts, seed, seed % 2 == 0 ? 0.35 : 0.0);
      const Law want = target_law(toy);
      double tokens[3] = {};
      for (const AcceptRule rule : kRules) {
        for (const Path path : kPaths) {
          const Emission got = emission_law(toy, op_verifier(rule, path), decision_of(rule));
          const double tv = test::total_variation(got.law, want);
          EXPECT_LT(tv, 1e-6) << rule_name(rule) << " V=" << vocab << " l=" << drafts << " seed " << seed;
          worst = std::max(worst, tv);
          tokens[static_cast<size_t>(rule)] = got.tokens;
          ++toys;
        }
      }
      EXPECT_GE(tokens[1], tokens[0] - 1e-6) << "block verification accepts fewer, seed " << seed;
      EXPECT_GE(tokens[0], tokens[2] - 1e-6) << "stored q is worth nothing, seed " << seed;
      // A proposal that is a function of the prefix.
      Toy deterministic = toy;
      deterministic.draft = argmax_of(toy.draft);
      EXPECT_LT(tv_of(deterministic, op_verifier(AcceptRule::kOneHot, Path::kDense), Decision::kFirstFailureStops),
                1e-6);
    }
  }
  std::printf("exact laws: %d, largest total variation %.2e\n", toys, worst);
}

TEST(ExactLaw, LargerVocabularies) {
  for (const AcceptRule rule : kRules) {
    EXPECT_LT(tv_of(random_toy(5, 3, 91, 0.2), op_verifier(rule, Path::kDense), decision_of(rule)), 1e-6);
  }
}

// 3.5: "verify draft k" may depend on the drafts before k.
TEST(ExactLaw, CutsThatDoNotLookAheadAreLossless) {
  for (const AcceptRule rule : kRules) {
    Toy toy = random_toy(3, 3, 17, 0.2);
    for (int kept = 0; kept <= 3; ++kept) {
      toy.cut = [kept](std::span<const int32_t>) { return kept; };
      EXPECT_LT(tv_of(toy, op_verifier(rule, Path::kDense), decision_of(rule)), 1e-6) << rule_name(rule) << " " << kept;
    }
    toy.cut = [](std::span<const int32_t> x) { return x[0] == 1 ? 1 : x[1] == 2 ? 2 : 3; };
    EXPECT_LT(tv_of(toy, op_verifier(rule, Path::kDense), decision_of(rule)), 1e-6) << rule_name(rule);
  }
}

// --- planted mistakes: the same statistic has to catch each ---

constexpr double kCaught = 3e-3;

void expect_caught(const char* name, double tv) {
  std::printf("control %-44s total variation %.4f\n", name, tv);
  EXPECT_GT(tv, kCaught) << name;
}

// q_k = softmax(base_k + bias[x_{k-1}]), as a Markov head makes it.
struct MarkovDraft {
  int vocab = 3;
  double temperature = 1;

  std::vector<double> logits(std::span<const int32_t> prefix, bool with_bias) const {
    Rng base(500 + prefix.size());
    Rng bias(900 + static_cast<uint64_t>(prefix.empty() ? vocab : prefix.back()));
    std::vector<double> out;
    for (int v = 0; v < vocab; ++v) out.push_back(base.normal() + (with_bias ? 1.2 : 0.0) * bias.normal());
    return out;
  }
  Conditional law(bool with_bias, double divided_by) const {
    return [*this, with_bias, divided_by](std::span<const int32_t> prefix) {
      return test::softmax_of(logits(prefix, with_bias), divided_by);
    };
  }
};

Toy markov_toy() {
  Toy toy{.vocab = 3, .num_drafts = 3};
  toy.target = test::random_conditional(3, 77);
  toy.draft = MarkovDraft().law(true, 1.0);
  toy.declared = toy.draft;
  return toy;
}

TEST(Control, TheToyOfTheControlsIsLossless) {
  for (const AcceptRule rule : kRules) {
    EXPECT_LT(tv_of(markov_toy(), op_verifier(rule, Path::kDense), decision_of(rule)), 1e-6);
  }
}

TEST(Control, DraftLawWithoutTheMarkovBias) {
  Toy toy = markov_toy();
  toy.declared = MarkovDraft().law(false, 1.0);
  for (const AcceptRule rule : {AcceptRule::kToken, AcceptRule::kBlock}) {
    const std::string name = fmt::format("q without the Markov bias, {}", rule_name(rule));
    expect_caught(name.c_str(), tv_of(toy, op_verifier(rule, Path::kDense), decision_of(rule)));
  }
}

TEST(Control, ResidualReplacedByTheTarget) {
  for (const AcceptRule rule : kRules) {
    const Verify right = op_verifier(rule, Path::kDense);
    const Verify wrong = [&right](const Round& round) {
      Verdict verdict = right(round);
      verdict.final_probs = round.p[static_cast<size_t>(verdict.accepted)];
      return verdict;
    };
    const std::string name = fmt::format("residual replaced by p, {}", rule_name(rule));
    expect_caught(name.c_str(), tv_of(markov_toy(), wrong, decision_of(rule)));
  }
}

// Thresholds as serving stacks offer them: also accept what the target finds likely enough, or divide by a constant.
TEST(Control, AcceptanceThresholds) {
  for (const double limit : {0.9, 0.5}) {
    const Verify wrong = [limit](const Round& round) { return test::accept_above(limit, round); };
    Toy toy = markov_toy();
    toy.draft = argmax_of(toy.draft);
    const std::string name = fmt::format("thresholds {0}/{0}", limit);
    expect_caught(name.c_str(), tv_of(toy, wrong, Decision::kFirstFailureStops));
  }
}

// One draft, and the uniform that judged it also draws the bonus.
TEST(Control, OneStreamForAcceptanceAndBonus) {
  Toy toy = random_toy(3, 1, 5, 0.0);
  const auto law_with = [&](const auto& bonus_u) {
    std::vector<Law> levels = test::empty_levels(toy);
    constexpr int kSteps = 20000;
    for (int32_t x = 0; x < toy.vocab; ++x) {
      Round round = test::round_of(toy, {x});
      Call call(toy.vocab);
      for (int i = 0; i < kSteps; ++i) {
        round.accept_u[0] = (i + 0.5) / kSteps;
        round.bonus_u = bonus_u(i, kSteps);
        call.add(round, AcceptRule::kToken);
      }
      call.run(Path::kDense);
      const double weight = toy.draft({})[static_cast<size_t>(x)] / kSteps;
      for (size_t i = 0; i < kSteps; ++i) {
        const std::array<int32_t, 2> emitted = {x, call.bonus[i]};
        if (call.accepted[i] == 1) levels[2][static_cast<size_t>(test::index_of(emitted, toy.vocab))] += weight;
        if (call.accepted[i] == 0) levels[1][static_cast<size_t>(call.bonus[i])] += weight;
      }
    }
    return test::total_variation(continue_by_target(toy, std::move(levels)), target_law(toy));
  };
  // A separate stream: spread evenly, whatever the other is.
  EXPECT_LT(law_with([](int i, int steps) { return std::fmod(i * 0.6180339887498949, 1.0) + 0.0 * steps; }), 1e-3);
  expect_caught("one stream for acceptance and bonus", law_with([](int i, int steps) { return (i + 0.5) / steps; }));
}

// --- whole rounds with random numbers ---

// Laws given by the last two tokens; the two before the first token are 0 and 1.
struct PairTable {
  int vocab;
  std::vector<Law> laws;  // [vocab * vocab]

  PairTable(int vocab_size, uint64_t seed) : vocab(vocab_size) {
    Rng rng(seed);
    for (int i = 0; i < vocab * vocab; ++i) {
      Law weights;
      for (int v = 0; v < vocab; ++v) weights.push_back(std::pow(rng.uniform(0.1, 1.0), 2.0));
      laws.push_back(test::normalised(weights));
    }
  }
  const Law& after(std::span<const int32_t> prefix) const {
    const size_t n = prefix.size();
    const int32_t last = n > 0 ? prefix[n - 1] : 1;
    const int32_t before = n > 1 ? prefix[n - 2] : n == 1 ? 1 : 0;
    return laws[static_cast<size_t>(before * vocab + last)];
  }
};

int32_t draw_from(const Law& law, double u) {
  double sum = 0;
  for (size_t v = 0; v + 1 < law.size(); ++v) {
    if ((sum += law[v]) > u) return static_cast<int32_t>(v);
  }
  return static_cast<int32_t>(law.size() - 1);
}

double chi_square_p(const std::vector<int64_t>& counts, const Law& law, double total) {
  double statistic = 0;
  double rare_expected = 0;
  double rare_count = 0;
  double cells = 0;
  const auto add = [&](double count, double expected) {
    statistic += (count - expected) * (count - expected) / expected;
    ++cells;
  };
  for (size_t i = 0; i < law.size(); ++i) {
    const double expected = law[i] * total;
    if (expected >= 8) {
      add(static_cast<double>(counts[i]), expected);
    } else {
      rare_expected += expected;
      rare_count += static_cast<double>(counts[i]);
    }
  }
  if (rare_expected > 0) add(rare_count, rare_expected);
  return test::chi_square_p(statistic, cells - 1);
}

using Cut = std::function<int(std::span<const int32_t> drafts)>;

constexpr int kRounds = 200'000;

// p-value of the joint law of the first num_drafts + 1 tokens over kRounds rounds.
double rounds_p_value(AcceptRule rule, const PairTable& target, const PairTable& draft, int num_drafts, const Cut& cut,
                      uint64_t seed) {
  Toy toy{.vocab = target.vocab, .num_drafts = num_drafts};
  toy.target = [&](std::span<const int32_t> prefix) { return target.after(prefix); };
  const Law want = target_law(toy);
  std::vector<int64_t> counts(want.size());
  Rng draft_stream(seed), accept_stream(seed + 1), bonus_stream(seed + 2), plain_stream(seed + 3);
  constexpr int kBatch = 2000;
  for (int done = 0; done < kRounds; done += kBatch) {
    Call call(target.vocab);
    for (int s = 0; s < kBatch; ++s) {
      std::vector<int32_t> x;
      while (static_cast<int>(x.size()) < num_drafts) x.push_back(draw_from(draft.after(x), draft_stream.uniform()));
      const auto kept = static_cast<size_t>(cut(x));
      Round round;
      for (size_t k = 0; k <= kept; ++k) {
        round.p.push_back(target.after(std::span(x).first(k)));
        if (k == kept) break;
        round.q.push_back(draft.after(std::span(x).first(k)));
        round.drafts.push_back(x[k]);
        round.accept_u.push_back(accept_stream.uniform());
      }
      round.bonus_u = bonus_stream.uniform();
      call.add(round, rule);
    }
    call.run(Path::kDense);
    for (size_t s = 0; s < kBatch; ++s) {
      const auto* first = call.drafts.data() + call.cu_rows[s];
      std::vector<int32_t> emitted(first, first + call.accepted[s]);
      emitted.push_back(call.bonus[s]);
      while (static_cast<int>(emitted.size()) <= num_drafts) {
        emitted.push_back(draw_from(target.after(emitted), plain_stream.uniform()));
      }
      ++counts[static_cast<size_t>(test::index_of(emitted, target.vocab))];
    }
  }
  return chi_square_p(counts, want, kRounds);
}

// Confidence in draft k, which may depend on the token before it.
double confidence(size_t k, int32_t before) { return 0.95 - 0.1 * static_cast<double>(k) - 0.12 * before; }

TEST(ChiSquare, TokenBlockAndOneHotWithEveryCut) {
  const PairTable target(4, 21);
  const PairTable draft(4, 22);
  const std::pair<const char*, Cut> cuts[] = {
      {"full", [](std::span<const int32_t> x) { return static_cast<int>(x.size()); }},
      {"static cut", [](std::span<const int32_t>) { return 2; }},
      {"confidence cut", [](std::span<const int32_t> x) {
         size_t k = 0;
         while (k < x.size() && confidence(k, k > 0 ? x[k - 1] : 1) >= 0.5) ++k;
         return static_cast<int>(k);
       }}};
  uint64_t seed = 4000;
  for (const AcceptRule rule : kRules) {
    for (const auto& [name, cut] : cuts) {
      const double p = rounds_p_value(rule, target, draft, 4, cut, seed += 10);
      std::printf("chi-square %-8s %-15s p = %.4f\n", rule_name(rule), name, p);
      EXPECT_GT(p, 1e-4) << rule_name(rule) << " " << name;
    }
  }
}

// dspark.md 1.7: verifying both drafts only where the first is A, and none otherwise, lets the first token decide
// whether it is verified: its law becomes (.85, .15) instead of (.7, .3).
TEST(ChiSquare, T60_LookAheadCutIsCaught) {
  PairTable target(2, 1);
  PairTable draft(2, 1);
  std::fill(target.laws.begin(), target.laws.end(), test::normalised({0.7, 0.3}));
  std::fill(draft.laws.begin(), draft.laws.end(), Law{0.5, 0.5});
  const Cut looks_ahead = [](std::span<const int32_t> x) { return x[0] == 0 ? 2 : 0; };
  for (const AcceptRule rule : kRules) {
    const double p = rounds_p_value(rule, target, draft, 2, looks_ahead, 7);
    std::printf("chi-square %-8s look-ahead cut  p = %.1e\n", rule_name(rule), p);
    // The one-hot rule is right for each draft by itself, so a cut may look at drafts without harm.
    if (rule == AcceptRule::kOneHot) {
      EXPECT_GT(p, 1e-4);
    } else {
      EXPECT_LT(p, 1e-12);
    }
  }
  Toy toy{.vocab = 2, .num_drafts = 2, .cut = looks_ahead};
  toy.target = [&](std::span<const int32_t> prefix) { return target.after(prefix); };
  toy.draft = toy.declared = [&](std::span<const int32_t> prefix) { return draft.after(prefix); };
  const Law law = emission_law(toy, op_verifier(AcceptRule::kToken, Path::kDense), Decision::kFirstFailureStops).law;
  EXPECT_NEAR(law[0] + law[1] + law[2] + law[3], 0.85, 1e-6);  // first token A
  expect_caught("look-ahead cut", test::total_variation(law, target_law(toy)));
}

// --- the sparse path ---

// The kernels of both paths on rows of full size: the same support, probabilities within 1e-6, the same draws.
TEST(SparsePath, GivesWhatTheDenseKernelsGive) {
  constexpr int64_t kRows = 12, kVocab = 163840, kWidth = 160;
  Exec& exec = machine().kernels;
  CaseData data(12);
  for (const int kind : {0, 1, 2}) {  // as drawn; rounded to bf16; with ties made at and around rank k
    const Tensor logits = data.normal({kRows, kVocab}, 2.5);
    std::vector<float> temperature, top_p, min_p;
    std::vector<int32_t> k;
    std::vector<double> uniform;
    for (int64_t r = 0; r < kRows; ++r) {
      temperature.push_back(static_cast<float>(data.rng().uniform(0.5, 1.5)));
      k.push_back(static_cast<int32_t>(1 + data.rng().below(60)));
      top_p.push_back(r % 3 == 0 ? 1.0F : static_cast<float>(data.rng().uniform(0.3, 0.99)));
      min_p.push_back(r % 4 == 3 ? 0.05F : 0.0F);
      uniform.push_back(data.rng().uniform());
      float* row = logits.row(r);
      for (int64_t i = 0; i < kVocab && kind == 1; ++i) row[i] = bf16_to_f32(f32_to_bf16(row[i]));
      for (int64_t i = 0; i < 40 && kind == 2; ++i) {
        row[data.rng().below(kVocab)] = 12.0F + static_cast<float>(data.rng().below(3));
      }
    }
    const ArenaScope scope(machine().arena);
    const Tensor dense = exec.arena().alloc(DType::kF32, {kRows, kVocab});
    softmax(exec, "softmax", {.probs = dense, .logits = logits, .temperature = temperature});
    top_k_renorm(exec, "top_k", {.probs = dense, .k = k});
    top_p_renorm(exec, "top_p", {.probs = dense, .p = top_p});
    min_p_renorm(exec, "min_p", {.probs = dense, .min_p = min_p});
    const CompactRows sparse{exec.arena().alloc(DType::kI32, {kRows, kWidth}),
                             exec.arena().alloc(DType::kF32, {kRows, kWidth}),
                             exec.arena().alloc(DType::kI32, {kRows})};
    top_k_probs(exec, "sparse",
                {.out = sparse, .logits = logits, .temperature = temperature, .k = k, .top_p = top_p, .min_p = min_p});
    for (int64_t r = 0; r < kRows; ++r) {
      std::vector<int32_t> support;
      for (int32_t i = 0; i < kVocab; ++i) {
        if (dense.row(r)[i] > 0) support.push_back(i);
      }
      const int32_t* ids = sparse.ids.i32() + r * kWidth;
      const int32_t count = std::max(sparse.counts.i32()[r], 0);
      ASSERT_EQ(std::vector<int32_t>(ids, ids + count), support) << "kind " << kind << " row " << r;
      for (int32_t i = 0; i < count; ++i) EXPECT_NEAR(sparse.probs.row(r)[i], dense.row(r)[ids[i]], 1e-6);
    }
    const Tensor from_dense = exec.arena().alloc(DType::kI32, {kRows});
    const Tensor from_sparse = exec.arena().alloc(DType::kI32, {kRows});
    draw(exec, "draw", {.ids = from_dense, .probs = dense, .uniform = uniform});
    draw_compact(exec, "draw", {.ids = from_sparse, .probs = sparse, .uniform = uniform});
    EXPECT_TRUE(std::equal(from_dense.i32(), from_dense.i32() + kRows, from_sparse.i32()));
  }
}

// --- traps ---

// 27: any top_k, top_p and min_p gives a distribution, by both paths.
TEST(Trap, T27_EveryFilterParameterGivesADistribution) {
  constexpr int64_t kVocab = 1000, kWidth = 64;
  std::vector<float> logits(kVocab);
  Rng rng(3);
  for (float& x : logits) x = static_cast<float>(3 * rng.normal());
  const Tensor row = make_tensor(logits.data(), DType::kF32, {1, kVocab});
  Exec& exec = machine().kernels;
  for (const int32_t k : {-1, 0, 1, 2, 20, 64, 999, 1000, 1001, std::numeric_limits<int32_t>::max()}) {
    for (const float top_p : {-1.0F, 0.0F, 1e-9F, 0.5F, 0.95F, 0.9999999F, 1.0F, 2.0F}) {
      for (const float min_p : {-1.0F, 0.0F, 0.05F, 1.0F}) {
        const ArenaScope scope(machine().arena);
        const float temperature[] = {1.0F};
        const int32_t ks[] = {k};
        const float top_ps[] = {top_p};
        const float min_ps[] = {min_p};
        const Tensor dense = exec.arena().alloc(DType::kF32, {1, kVocab});
        softmax(exec, "softmax", {.probs = dense, .logits = row, .temperature = temperature});
        top_k_renorm(exec, "top_k", {.probs = dense, .k = ks});
        top_p_renorm(exec, "top_p", {.probs = dense, .p = top_ps});
        min_p_renorm(exec, "min_p", {.probs = dense, .min_p = min_ps});
        EXPECT_NEAR(std::accumulate(dense.row(0), dense.row(0) + kVocab, 0.0), 1.0, 1e-6);
        const CompactRows sparse{exec.arena().alloc(DType::kI32, {1, kWidth}),
                                 exec.arena().alloc(DType::kF32, {1, kWidth}), exec.arena().alloc(DType::kI32, {1})};
        top_k_probs(
            exec, "sparse",
            {.out = sparse, .logits = row, .temperature = temperature, .k = ks, .top_p = top_ps, .min_p = min_ps});
        const int32_t count = sparse.counts.i32()[0];
        EXPECT_EQ(count == -1, k > kWidth) << k;
        if (count == -1) continue;
        EXPECT_EQ(count, std::count_if(dense.row(0), dense.row(0) + kVocab, [](float p) { return p > 0; }));
        for (int32_t i = 0; i < count; ++i) {
          EXPECT_NEAR(sparse.probs.f32()[i], dense.row(0)[sparse.ids.i32()[i]], 1e-6);
        }
      }
    }
  }
}

// 28: q of another temperature or precision than the drafts were drawn with.
TEST(Trap, T28_DraftLawOfAnotherTemperatureOrPrecisionIsCaught) {
  Toy toy = markov_toy();
  toy.declared = MarkovDraft().law(true, 0.8);
  expect_caught("T28 q of another temperature",
                tv_of(toy, op_verifier(AcceptRule::kBlock, Path::kDense), Decision::kLastSuccessWins));
  toy.declared = [](std::span<const int32_t> prefix) {
    std::vector<double> logits = MarkovDraft().logits(prefix, true);
    for (double& x : logits) x = std::round(x * 4) / 4;
    return test::softmax_of(logits);
  };
  expect_caught("T28 q from rounded logits",
                tv_of(toy, op_verifier(AcceptRule::kToken, Path::kDense), Decision::kFirstFailureStops));
}

// 29: argmax drafts with a soft q. The same drafts under the one-hot rule are right.
TEST(Trap, T29_ArgmaxDraftsWithASoftLawAreCaught) {
  Toy toy = markov_toy();
  toy.draft = argmax_of(toy.declared);
  for (const AcceptRule rule : {AcceptRule::kToken, AcceptRule::kBlock}) {
    const std::string name = fmt::format("T29 argmax draft, q = softmax, {}", rule_name(rule));
    expect_caught(name.c_str(), tv_of(toy, op_verifier(rule, Path::kDense), decision_of(rule)));
  }
  EXPECT_LT(tv_of(toy, op_verifier(AcceptRule::kOneHot, Path::kDense), Decision::kFirstFailureStops), 1e-6);
  toy.declared = toy.draft;  // or with the law they really have
  EXPECT_LT(tv_of(toy, op_verifier(AcceptRule::kToken, Path::kDense), Decision::kFirstFailureStops), 1e-6);
  EXPECT_LT(tv_of(toy, op_verifier(AcceptRule::kBlock, Path::kDense), Decision::kLastSuccessWins), 1e-6);
}

// A round of random rows with drafts drawn from q.
Round random_round(int vocab, int num_drafts, Rng& rng) {
  const Toy toy = random_toy(vocab, num_drafts, rng.next() % 100000, 0.0);
  std::vector<int32_t> x;
  while (static_cast<int>(x.size()) < num_drafts) x.push_back(draw_from(toy.draft(x), rng.uniform()));
  Round round = round_of(toy, x);
  for (double& u : round.accept_u) u = rng.uniform();
  round.bonus_u = rng.uniform();
  return round;
}

// 31: a greedy row is a choice, not a distribution: matching needs no softmax, and one-hot rows under the one-hot rule
// agree.
TEST(Trap, T31_GreedyRowsAreMatchedNotSampled) {
  Rng rng(31);
  constexpr int kVocab = 9, kDrafts = 5;
  Call call(kVocab);
  std::vector<int32_t> chosen;
  for (int s = 0; s < 100; ++s) {
    Round round = random_round(kVocab, kDrafts, rng);
    for (size_t k = 0; k < round.p.size(); ++k) {
      chosen.push_back(static_cast<int32_t>(rng.below(kVocab)));
      if (k < kDrafts && rng.below(4) > 0) round.drafts[k] = chosen.back();
      round.p[k] = test::one_hot(static_cast<size_t>(chosen.back()), kVocab);
    }
    call.add(round, AcceptRule::kOneHot);
  }
  std::vector<int32_t> accepted(100), bonus(100);
  match_drafts(machine().kernels, "match",
               {.accepted = make_tensor(accepted.data(), DType::kI32, {100}),
                .bonus = make_tensor(bonus.data(), DType::kI32, {100}),
                .chosen = make_tensor(chosen.data(), DType::kI32, {static_cast<int64_t>(chosen.size())}),
                .drafts = call.drafts,
                .cu_rows = call.cu_rows});
  for (const Path path : kPaths) {
    call.run(path);
    EXPECT_EQ(call.accepted, accepted);
    EXPECT_EQ(call.bonus, bonus);
  }
}

// 32: a broken row fails its own sequence; the others get the same bits, and nobody gets the last id for want of a
// better.
TEST(Trap, T32_BrokenRowsFailAlone) {
  constexpr int kVocab = 40, kSeqs = 12;
  for (const double damage : {static_cast<double>(NAN), static_cast<double>(INFINITY), 0.0}) {
    for (const AcceptRule rule : kRules) {
      Rng rng(32);
      Call whole(kVocab);
      Call broken(kVocab);
      for (int s = 0; s < kSeqs; ++s) {
        Round round = random_round(kVocab, 3, rng);
        for (Law& law : round.p)
          law = test::normalised([&] {
            law.back() = 0;
            return law;
          }());
        whole.add(round, rule);
        // Every row of sequence 5 as a whole.
        if (s == 5) {
          for (Law& law : round.p) law.assign(kVocab, damage);
        }
        broken.add(round, rule);
      }
      for (const Path path : kPaths) {
        whole.run(path);
        broken.run(path);
        EXPECT_EQ(broken.accepted[5], 0);
        EXPECT_EQ(broken.bonus[5], -1);
        for (size_t s = 0; s < kSeqs; ++s) {
          EXPECT_NE(broken.bonus[s], kVocab - 1);
          if (s == 5) continue;
          EXPECT_EQ(broken.accepted[s], whole.accepted[s]);
          EXPECT_EQ(broken.bonus[s], whole.bonus[s]);
          EXPECT_EQ(std::memcmp(&broken.final_probs[s * kVocab], &whole.final_probs[s * kVocab], kVocab * 4), 0);
        }
      }
    }
  }
}

// 33: sequences without drafts draw from their one row, sequences without rows output nothing. Scratch is poisoned in
// run().
TEST(Trap, T33_NoDraftsAndNoRows) {
  for (const AcceptRule rule : kRules) {
    for (const Path path : kPaths) {
      Call call(4);
      Round plain{.p = {{0, 0, 1, 0}}};
      plain.bonus_u = 0.99;
      call.add(Round{}, rule);
      call.add(plain, rule);
      call.add(Round{}, rule);
      call.run(path);
      EXPECT_EQ(call.accepted, (std::vector<int32_t>{0, 0, 0}));
      EXPECT_EQ(call.bonus, (std::vector<int32_t>{-1, 2, -1}));
    }
  }
}

// 34: ids that the target does not have, from a padded head or a stale slot.
TEST(Trap, T34_DraftsOutsideTheVocabularyAreRejected) {
  Rng rng(34);
  for (const AcceptRule rule : kRules) {
    for (const int32_t id :
         {-1, 6, 6 + 128, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
      for (const Path path : kPaths) {
        Call call(6);
        Round round = random_round(6, 3, rng);
        round.drafts[1] = id;
        std::fill(round.accept_u.begin(), round.accept_u.end(), 0.0);
        call.add(round, rule);
        call.run(path);
        EXPECT_LE(call.accepted[0], 1) << rule_name(rule) << " " << id;
        EXPECT_TRUE(call.bonus[0] >= 0 && call.bonus[0] < 6);
      }
    }
  }
}

// 40: block verification beside a table worked out by hand: p = (.6, .4), q = (.2, .8), drafts (1, 0).
TEST(Trap, T40_BlockVerificationByHand) {
  // w_1 = .4 / .8 = .5; the row after it: Z_1 = max(.5 * .6 - .2, 0) + max(.5 * .4 - .8, 0) = .1, h_1 = .1 / .6;
  // w_2 = min(.5 * .6 / .2, 1) = 1 = h_2.
  const Law p = {0.6, 0.4};
  const Law q = {0.2, 0.8};
  for (const Path path : kPaths) {
    const Verify verify = op_verifier(AcceptRule::kBlock, path);
    Round round{.drafts = {1, 0}, .p = {p, p, p}, .q = {q, q}, .accept_u = {0.999, 0.999}};
    EXPECT_EQ(verify(round).accepted, 2);  // the later success overrides the earlier failure
    round = {.drafts = {1, 1}, .p = {p, p, p}, .q = {q, q}, .accept_u = {0.1666, 0.999}};  // w_2 = .25
    EXPECT_EQ(verify(round).accepted, 1);
    EXPECT_NEAR(verify(round).final_probs[0], 1.0, 1e-6);
    round.accept_u[0] = 0.1667;
    EXPECT_EQ(verify(round).accepted, 0);
    EXPECT_NEAR(verify(round).final_probs[0], 1.0, 1e-6);
    round.accept_u[1] = 0.2499;
    EXPECT_EQ(verify(round).accepted, 2);
    EXPECT_NEAR(verify(round).final_probs[0], 0.6, 1e-6);
  }
}

// 46: with p = q everything is accepted, whatever the uniforms.
TEST(Trap, T46_EqualLawsAcceptEverything) {
  Rng rng(46);
  for (const AcceptRule rule : {AcceptRule::kToken, AcceptRule::kBlock}) {
    for (const Path path : kPaths) {
      Call call(7);
      for (int s = 0; s < 200; ++s) {
        Round round = random_round(7, 4, rng);
        std::copy(round.q.begin(), round.q.end(), round.p.begin());
        if (s % 2 == 0) std::fill(round.accept_u.begin(), round.accept_u.end(), test::kJustBelowOne);
        call.add(round, rule);
      }
      call.run(path);
      EXPECT_EQ(std::count(call.accepted.begin(), call.accepted.end(), 4), 200);
    }
  }
}

// 47 and 49: each row says a token of its own, so a bonus from any row but the one after the accepted drafts shows;
// accepted is counted from the first draft and never exceeds l, so accepted + 1 rows have been judged.
TEST(Trap, T47_T49_TheBonusComesFromTheRowAfterTheAcceptedDrafts) {
  constexpr int kDrafts = 5, kVocab = 12;
  for (const AcceptRule rule : kRules) {
    for (const Path path : kPaths) {
      for (int a = 0; a <= kDrafts; ++a) {
        Round round;
        for (int k = 0; k <= kDrafts; ++k) {
          round.p.push_back(test::one_hot(static_cast<size_t>(k), kVocab));
          if (k == kDrafts) break;
          round.drafts.push_back(k < a ? k : kVocab - 1);
          round.q.push_back(test::one_hot(static_cast<size_t>(round.drafts.back()), kVocab));
          round.accept_u.push_back(0.3);
        }
        Call call(kVocab);
        call.add(round, rule);
        call.add(round, rule);
        call.run(path);
        EXPECT_EQ(call.accepted, (std::vector<int32_t>{a, a})) << rule_name(rule);
        EXPECT_EQ(call.bonus, (std::vector<int32_t>{a, a})) << rule_name(rule);
      }
    }
  }
}

}  // namespace
}  // namespace moat
