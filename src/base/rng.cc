// SPDX-License-Identifier: Apache-2.0
#include "base/rng.h"

#include <cmath>
#include <numbers>

namespace moat {

double Rng::normal() {
  // Box-Muller; 1 - u lies in (0, 1], so the logarithm is finite. The second number of the pair is not kept: a
  // generator's state stays one counter.
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

}  // namespace moat
