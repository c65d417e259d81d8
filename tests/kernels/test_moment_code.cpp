// The 8-bit code of moments and stochastic rounding to bf16, over every code and every random half-word: exact
// statements, no samples.
#include "kernels/moment_code.h"
#include "tests/kernels/harness.h"

namespace oomb::kernels::testing {
namespace {

constexpr uint32_t kRandoms = 1u << 16;
constexpr float kLargest = std::numeric_limits<float>::max(), kLeast = std::numeric_limits<float>::denorm_min();

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
float bf16_value(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

/// The code's value by its definition.
double value_of(int64_t code, double scale) {
  if (code == 0) return 0;
  return scale * (1 + static_cast<double>((code - 1) % 8) / 8) * std::ldexp(1.0, static_cast<int>((code - 1) / 8));
}

float scale_for(float largest, uint32_t binades) {
  return std::bit_cast<float>(moment_scale_bits(bits_of(largest), binades));
}
float inverse_for(float scale) { return inverse_scale(bits_of(scale)); }

// From the smallest normal float to the largest scale that a block can have.
const float kScales[] = {std::ldexp(1.0f, -126), std::ldexp(1.0f, -40), 1.0f, std::ldexp(1.0f, 95)};

TEST(MomentCode, EveryCodeIsItsValueAndStaysWhatItIs) {
  for (const float scale : kScales) {
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      const float v = decode_v(byte, scale), m = decode_m(byte, scale);
      EXPECT_EQ(v, value_of(code, scale));
      EXPECT_EQ(m, (code & 0x80) != 0 ? -value_of(code & 0x7f, scale) : value_of(code, scale));
      for (const uint32_t random : {0u, 1u, 0x7fffu, 0xffffu}) {
        EXPECT_EQ(encode_v(v, inverse_for(scale), random), code);
        EXPECT_EQ(encode_m(m, inverse_for(scale), random), code);
      }
      if (code >= 2) {
        const double step = value_of(code, scale) / value_of(code - 1, scale) - 1;
        EXPECT_GE(step, 1.0 / 15 - 1e-12);
        EXPECT_LE(step, 1.0 / 8 + 1e-12);
      }
    }
  }
}

TEST(MomentCode, RoundsToANeighbourAndKeepsTheExpectedValue) {
  std::mt19937_64 engine(5);
  std::uniform_real_distribution<float> octave(0.0f, 31.8f);
  for (int trial = 0; trial < 40; ++trial) {
    const float scale = kScales[trial % 4], x = scale * std::exp2(trial < 8 ? 0.01f * octave(engine) : octave(engine));
    double sum = 0;
    for (uint32_t random = 0; random < kRandoms; ++random) {
      const double got = decode_v(encode_v(x, inverse_for(scale), random), scale);
      EXPECT_LT(std::fabs(got - x), x / 8.0);
      sum += got;
    }
    EXPECT_NEAR(sum / kRandoms, x, x * std::ldexp(1.0, -20)) << "scale " << scale;
  }
}

TEST(MomentCode, BelowTheSmallestCode) {
  for (const float scale : kScales) {
    for (const float part : {0.9f, 0.5f, 0.013f, 1e-6f}) {
      const float x = part * scale;
      double sum = 0;
      for (uint32_t random = 0; random < kRandoms; ++random) {
        const float m = decode_m(encode_m(-x, inverse_for(scale), random), scale);
        EXPECT_TRUE(m == 0 || m == -scale);
        sum += m;
        // A second moment of 0 under a first moment that is not would make the step explode.
        EXPECT_EQ(decode_v(encode_v(x, inverse_for(scale), random), scale), scale);
      }
      EXPECT_NEAR(sum / kRandoms, -x, scale * std::ldexp(1.0, -17));
    }
    EXPECT_EQ(encode_v(kLeast, inverse_for(scale), 0), 1);
    EXPECT_EQ(encode_v(0.0f, inverse_for(scale), 0xffff), 0);
    EXPECT_EQ(decode_m(encode_m(-0.0f, inverse_for(scale), 0xffff), scale), 0.0f);
  }
}

TEST(MomentCode, ScaleIsTheSmallestThatHoldsTheLargest) {
  for (const uint32_t binades : {kBinadesM, kBinadesV}) {
    const int64_t top_code = binades * 8 - 1;
    std::mt19937_64 engine(7);
    std::vector<float> cases{1.0f,   1.75f,  std::nextafter(1.75f, 2.0f),  std::nextafter(2.0f, 0.0f), 2.0f,
                             3e-38f, 1e-35f, 1.75f * std::ldexp(1.0f, 127)};
    for (int i = 0; i < 1000; ++i) cases.push_back(std::exp2(std::uniform_real_distribution<float>(-90, 126)(engine)));
    for (const float largest : cases) {
      const float scale = scale_for(largest, binades);
      EXPECT_LE(largest, value_of(top_code, scale)) << largest;
      if (scale > std::ldexp(1.0f, -126)) {
        EXPECT_GT(largest, value_of(top_code, scale / 2.0)) << largest;
      }
      for (const uint32_t random : {0u, 0xffffu}) {
        const uint32_t code = encode_magnitude(largest, inverse_for(scale), random);
        EXPECT_LE(code, top_code);
        EXPECT_LT(std::fabs(value_of(code, scale) - largest), largest / 8);
      }
    }
    EXPECT_EQ(scale_for(0.0f, binades), std::ldexp(1.0f, -126));
    EXPECT_EQ(scale_for(kLeast, binades), std::ldexp(1.0f, -126));
    for (const float bad : {std::nextafter(1.75f * std::ldexp(1.0f, 127), kLargest), kLargest, INFINITY, NAN}) {
      const float scale = scale_for(bad, binades);
      EXPECT_TRUE(std::isnan(scale)) << bad;
      for (int code = 0; code < 256; ++code) EXPECT_TRUE(std::isnan(decode_m(static_cast<uint8_t>(code), scale)));
    }
  }
}

TEST(StochasticBf16, ExpectedValueIsTheValueExactly) {
  std::mt19937_64 engine(11);
  std::vector<uint32_t> cases{0x3f800001u, 0x3f80ffffu, 0x00000001u, 0x00018000u, 0x007fffffu, 0x7f7effffu};
  for (int i = 0; i < 20; ++i) cases.push_back(static_cast<uint32_t>(engine()) % 0x7f7f0000u);
  for (uint32_t bits : cases) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float x = std::bit_cast<float>(bits | sign);
      // Whole steps of the last fp32 place: sums of 2^16 of them are exact in double.
      double sum = 0;
      for (uint32_t random = 0; random < kRandoms; ++random) {
        const uint16_t got = stochastic_bf16_bits(x, random);
        EXPECT_TRUE(got == (bits_of(x) >> 16) || got == (bits_of(x) >> 16) + 1);
        sum += bf16_value(got);
      }
      EXPECT_EQ(sum / kRandoms, x) << std::hex << bits;
    }
  }
}

TEST(StochasticBf16, WhatHasNoNeighbourToRoundTo) {
  for (const uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
    for (const uint32_t sign : {0u, 0x8000u}) {
      const auto round = [&](uint32_t bits) {
        return stochastic_bf16_bits(std::bit_cast<float>(bits | sign << 16), random);
      };
      for (const uint32_t exact : {0u, 1u, 0x0080u, 0x3f80u, 0x7f7fu, 0x7f80u})
        EXPECT_EQ(round(exact << 16), exact | sign);
      EXPECT_EQ(round(0x7f7fffffu), 0x7f7f | sign);  // the largest float does not become infinite
      for (const uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
        EXPECT_TRUE(std::isnan(bf16_value(round(nan))));
      }
    }
  }
}

TEST(RoundingWords, DependOnAllThatKeysThem) {
  const auto base = rounding_words(1, 2, 3);
  EXPECT_EQ(base, rounding_words(1, 2, 3));
  for (const auto& other : {rounding_words(2, 2, 3), rounding_words(1 | (uint64_t{1} << 40), 2, 3),
                            rounding_words(1, 3, 3), rounding_words(1, 2 + (int64_t{1} << 40), 3),
                            rounding_words(1, 2, 4), rounding_words(1, 2, 3 + (int64_t{1} << 40))}) {
    for (size_t i = 0; i < 4; ++i) EXPECT_NE(base[i], other[i]);
  }
}

}  // namespace
}  // namespace oomb::kernels::testing
