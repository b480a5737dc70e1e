// SPDX-License-Identifier: Apache-2.0
// Chi-square tests: counts of outcomes against a law, or against other counts.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace moat::test {

struct ChiSquare {
  double statistic = 0;
  double degrees = 0;
  double p = 1;  // chance of a statistic this large where nothing differs
};

// Upper tail by the cube-root normal approximation (Wilson and Hilferty), good for many degrees of freedom.
inline double chi_square_p(double statistic, double degrees) {
  const double spread = 2.0 / (9.0 * degrees);
  const double z = (std::cbrt(statistic / degrees) - (1.0 - spread)) / std::sqrt(spread);
  return std::erfc(z / std::sqrt(2.0)) / 2;
}

// Of one sample, in cells of equal meaning: what came beside what was expected. Rare cells are taken together, and with
// the smallest of the others where they are too few still.
inline ChiSquare chi_square_against_law(const std::vector<double>& counts, const std::vector<double>& law) {
  constexpr double kRare = 8;
  struct Cell {
    double count = 0, expected = 0;
  };
  double total = 0;
  for (const double count : counts) total += count;
  std::vector<Cell> cells;
  Cell rare;
  for (size_t i = 0; i < law.size(); ++i) {
    const Cell cell{counts[i], law[i] * total};
    if (cell.expected >= kRare) {
      cells.push_back(cell);
    } else {
      rare.count += cell.count;
      rare.expected += cell.expected;
    }
  }
  std::sort(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) { return a.expected > b.expected; });
  if (rare.expected >= kRare || cells.empty()) {
    cells.push_back(rare);
  } else {
    cells.back().count += rare.count;
    cells.back().expected += rare.expected;
  }
  if (cells.size() < 2) return {};
  double statistic = 0;
  for (const Cell& cell : cells) statistic += std::pow(cell.count - cell.expected, 2) / cell.expected;
  const double degrees = static_cast<double>(cells.size()) - 1;
  return {statistic, degrees, chi_square_p(statistic, degrees)};
}

// Of two independent samples from one unknown law.
inline ChiSquare chi_square_of_two(const std::vector<double>& a, const std::vector<double>& b) {
  constexpr double kRare = 16;
  double total_a = 0, total_b = 0;
  for (const double count : a) total_a += count;
  for (const double count : b) total_b += count;
  double statistic = 0, cells = 0, rare_a = 0, rare_b = 0;
  const auto add = [&](double x, double y) {
    const double difference = x * std::sqrt(total_b / total_a) - y * std::sqrt(total_a / total_b);
    statistic += difference * difference / (x + y);
    ++cells;
  };
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] + b[i] >= kRare) {
      add(a[i], b[i]);
    } else {
      rare_a += a[i];
      rare_b += b[i];
    }
  }
  if (rare_a + rare_b > 0) add(rare_a, rare_b);
  if (cells < 2) return {};
  return {statistic, cells - 1, chi_square_p(statistic, cells - 1)};
}

}  // namespace moat::test
