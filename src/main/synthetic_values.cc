// SPDX-License-Identifier: Apache-2.0
#include "main/synthetic_values.h"

#include <cmath>
#include <cstring>
#include <string_view>

namespace moat {
namespace {

// SplitMix64: good enough for weights, and any position is one multiplication away.
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15U;

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return x ^ x >> 31;
}

uint64_t word(uint64_t key, int64_t index) { return mix(key + (static_cast<uint64_t>(index) + 1) * kGolden); }

double uniform(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }

// Sum of four 16-bit uniforms: close to normal, no transcendental, tails end at 3.5 deviations.
float normal(uint64_t bits) {
  const auto sum = static_cast<int32_t>((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
  constexpr float kDeviation = 37837.227F;  // sqrt(4 (2^32 - 1) / 12)
  return static_cast<float>(sum - 131070) / kDeviation;
}

float draw_float(const ValueRule& rule, uint64_t bits) {
  const auto a = static_cast<float>(rule.a), b = static_cast<float>(rule.b);
  switch (rule.draw) {
    case Draw::kUniform: return static_cast<float>(rule.a + (rule.b - rule.a) * uniform(bits));
    case Draw::kLogUniform: return static_cast<float>(std::log(rule.a + (rule.b - rule.a) * uniform(bits)));
    default: return a + b * normal(bits);
  }
}

// Eight bytes, 16 codes at a time; a group is two words.
void fill_codes(uint64_t key, int64_t first_byte, std::span<std::byte> out) {
  constexpr uint64_t kTopMagnitudeBit = 0x4444444444444444U;
  constexpr size_t kGroupBytes = 16;
  for (size_t at = 0; at < out.size(); at += kGroupBytes) {
    const int64_t index = (first_byte + static_cast<int64_t>(at)) / 8;
    uint64_t words[2] = {word(key, index), word(key, index + 1)};
    // Magnitudes 4 and 6 are codes 6 and 7: both upper magnitude bits set.
    const auto has_large = [](uint64_t w) { return (w & w << 1 & kTopMagnitudeBit) != 0; };
    if (!has_large(words[0]) && !has_large(words[1])) words[0] |= 6;
    std::memcpy(out.data() + at, words, std::min(kGroupBytes, out.size() - at));
  }
}

void fill_scales(const ValueRule& rule, uint64_t key, int64_t first_byte, std::span<std::byte> out) {
  const auto low = static_cast<uint64_t>(rule.a), count = static_cast<uint64_t>(rule.b - rule.a) + 1;
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t bits = word(key, first_byte + static_cast<int64_t>(i)) >> 32;
    out[i] = static_cast<std::byte>(low + (bits * count >> 32));
  }
}

// Nearly all bytes of a checkpoint go through here or fill_codes.
void fill_normal_bf16(const ValueRule& rule, uint64_t key, int64_t first, std::span<std::byte> out) {
  const auto mean = static_cast<float>(rule.a), deviation = static_cast<float>(rule.b);
  const size_t count = out.size() / sizeof(uint16_t);
  for (size_t i = 0; i < count; ++i) {
    const uint16_t bits = f32_to_bf16(mean + deviation * normal(word(key, first + static_cast<int64_t>(i))));
    std::memcpy(out.data() + i * sizeof(bits), &bits, sizeof(bits));
  }
}

}  // namespace

ValueRule value_rule(const WeightSpec& spec) {
  const std::string_view name = spec.name;
  if (spec.part == WeightPart::kCodes) return {.draw = Draw::kCodes};
  if (spec.part == WeightPart::kScales) return {.draw = Draw::kScaleBytes, .a = 112, .b = 122};
  if (spec.transform == Transform::kLeadF32) {
    return {.draw = Draw::kLogUniform, .a = 0.5, .b = 8, .live = spec.live};
  }
  if (name.ends_with("dt_bias")) return {.draw = Draw::kUniform, .a = -3, .b = 3};
  if (name.ends_with("e_score_correction_bias")) return {.draw = Draw::kUniform, .a = -0.2, .b = 0.2};
  if (name.ends_with("embed_tokens.weight")) return {.a = 0, .b = 1};
  if (spec.shape.rank() == 1) return {.a = 1, .b = 0.2};  // norms: never all ones, which would hide their absence
  const int64_t fan_in = spec.shape[spec.shape.rank() - 1];
  double deviation = 1 / std::sqrt(static_cast<double>(fan_in));
  if (name.ends_with("_res_proj.weight")) deviation *= 2;  // scores of order 2, so that the mixture is not uniform
  if (name.ends_with(".q_a_proj.weight") || name.ends_with(".kv_a_proj_with_mqa.weight")) {
    deviation *= 1e-2;  // latents small enough that the epsilon of their norm shows
  }
  return {.a = 0, .b = deviation};
}

void fill_values(const ValueRule& rule, DType dtype, uint64_t key, int64_t first_byte, std::span<std::byte> out) {
  if (rule.draw == Draw::kCodes) return fill_codes(key, first_byte, out);
  if (rule.draw == Draw::kScaleBytes) return fill_scales(rule, key, first_byte, out);
  const int64_t size = dtype_bytes(dtype, 1);
  const int64_t first = first_byte / size, count = static_cast<int64_t>(out.size()) / size;
  if (rule.draw == Draw::kNormal && rule.live < 0 && dtype == DType::kBF16) {
    return fill_normal_bf16(rule, key, first, out);
  }
  MOAT_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "no synthetic values of {}", dtype_name(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const bool padding = rule.live >= 0 && first + i >= rule.live;
    const float value = padding ? 0.0F : draw_float(rule, word(key, first + i));
    if (dtype == DType::kF32) {
      std::memcpy(out.data() + i * 4, &value, 4);
    } else {
      const uint16_t bits = f32_to_bf16(value);
      std::memcpy(out.data() + i * 2, &bits, 2);
    }
  }
}

uint64_t tensor_key(uint64_t seed, uint64_t tensor) { return mix(mix(seed + kGolden) ^ tensor * kGolden); }

}  // namespace moat
