// SPDX-License-Identifier: Apache-2.0
// Constraint: what may come next in one sequence. Grammars, stop strings and thinking budgets all implement it, in
// text/; the engine only asks. Used by one thread at a time (the engine's).
#pragma once

#include <cstdint>
#include <span>

namespace moat {

enum class ConstraintVerdict { kContinue, kStop };

class Constraint {
 public:
  virtual ~Constraint() = default;

  // Clears the bit of each token id that may not come next; bit i of word i / 32. False: nothing was cleared.
  virtual bool mask(std::span<uint32_t> allowed) = 0;
  // The token that came; kStop ends the sequence with finish reason stop (the token is kept).
  virtual ConstraintVerdict accept(int32_t token_id) = 0;
  // Takes back the last `count` accepted tokens (rejected drafts).
  virtual void rollback(int count) = 0;
};

}  // namespace moat
