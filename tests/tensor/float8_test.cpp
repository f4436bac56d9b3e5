// The kernels round floats of 8 bits as torch converts them.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <bit>
#include <cmath>
#include <random>

#include "coll/kernels.h"

namespace convoy::test {
namespace {

using coll::DataType;

std::uint8_t reduce_one(DataType type, ReduceOp op, std::uint8_t a, std::uint8_t b) {
  const std::byte values[] = {std::byte{a}, std::byte{b}};
  const std::byte* const sources[] = {&values[0], &values[1]};
  std::byte result{};
  std::byte* const targets[] = {&result};
  coll::reduce({.type = type, .op = op}, sources, targets, 1, coll::StoreHint::kCached);
  return static_cast<std::uint8_t>(result);
}

// Of any f32: one times a factor.
std::uint8_t convert(DataType type, float value) {
  const std::byte one{static_cast<std::uint8_t>(type == DataType::kF8E4M3 ? 0x38 : 0x3c)};
  const std::byte* const sources[] = {&one};
  std::byte result{};
  std::byte* const targets[] = {&result};
  coll::reduce({.type = type, .op = ReduceOp::kPremulSum, .factor = value}, sources, targets, 1,
               coll::StoreHint::kCached);
  return static_cast<std::uint8_t>(result);
}

// A NaN has one code with us, and one for each sign with torch.
void expect_same_bytes(DataType type, std::uint8_t actual, std::uint8_t torchs,
                       const std::string& what) {
  const bool nan = type == DataType::kF8E4M3 ? (torchs & 0x7f) == 0x7f : (torchs & 0x7f) > 0x7c;
  ASSERT_EQ(int{actual}, nan ? 0x7f : int{torchs}) << what;
}

struct Kind {
  DataType ours;
  at::ScalarType torchs;
};
constexpr Kind kKinds[] = {{DataType::kF8E4M3, at::kFloat8_e4m3fn},
                           {DataType::kF8E5M2, at::kFloat8_e5m2}};

// Every upper half of an f32, with lower halves at the borders of rounding, and random ones.
TEST(Float8Test, RoundsAsTorchConverts) {
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    for (const std::uint32_t lower : {0u, 1u, 0x8000u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  std::mt19937 random(3);
  for (int i = 0; i < 100'000; ++i) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  }
  const auto wide = at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())});
  for (const Kind& kind : kKinds) {
    const auto narrow = wide.to(kind.torchs).view(at::kByte);
    const auto* const codes = narrow.const_data_ptr<std::uint8_t>();
    for (std::size_t i = 0; i < values.size(); ++i) {
      expect_same_bytes(kind.ours, convert(kind.ours, values[i]), codes[i],
                        std::to_string(values[i]));
    }
  }
}

// All pairs of codes, infinities and NaN included: the sum and the product in f32, rounded once.
TEST(Float8Test, SumsAndProductsOfAllPairs) {
  const auto codes = at::arange(256).to(at::kByte);
  for (const Kind& kind : kKinds) {
    const auto values = codes.view(kind.torchs).to(at::kFloat);
    const auto sums = (values.unsqueeze(1) + values).to(kind.torchs).view(at::kByte);
    const auto products = (values.unsqueeze(1) * values).to(kind.torchs).view(at::kByte);
    for (int a = 0; a < 256; ++a) {
      for (int b = 0; b < 256; ++b) {
        const auto x = static_cast<std::uint8_t>(a), y = static_cast<std::uint8_t>(b);
        const auto at = static_cast<std::int64_t>(a) * 256 + b;
        const std::string what = std::to_string(a) + " and " + std::to_string(b);
        expect_same_bytes(kind.ours, reduce_one(kind.ours, ReduceOp::kSum, x, y),
                          sums.const_data_ptr<std::uint8_t>()[at], what);
        expect_same_bytes(kind.ours, reduce_one(kind.ours, ReduceOp::kProduct, x, y),
                          products.const_data_ptr<std::uint8_t>()[at], what);
      }
    }
  }
}

}  // namespace
}  // namespace convoy::test
