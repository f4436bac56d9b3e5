#include "ddp/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace convoy {
namespace {

float scale_of(const std::uint8_t* row) {
  float scale = 0;
  std::memcpy(&scale, row, sizeof scale);
  return scale;
}

float code_at(const std::uint8_t* row, std::size_t k) {
  return static_cast<float>(static_cast<std::int8_t>(row[kScaleBytes + k]));
}

// The nearest integer of a number up to 2^22, ties to even. std::nearbyint is a call where the CPU
// has no instruction for it.
float nearest(float value) {
  constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: no bits are left for fractions
  return (value + kShift) - kShift;
}

}  // namespace

void quantize_row(float* values, std::size_t block, std::uint8_t* row) {
  float largest = 0;
  bool finite = true;
  for (std::size_t k = 0; k < block; ++k) {
    finite &= std::isfinite(values[k]);
    largest = std::max(largest, std::abs(values[k]));
  }
  float scale = largest / 127;
  if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(row, &scale, sizeof scale);
  std::uint8_t* const codes = row + kScaleBytes;
  if (!finite) {
    std::fill_n(codes, block, std::uint8_t{0});
    std::fill_n(values, block, 0.0F);
    return;
  }
  if (scale == 0) {  // or so small that it underflows: then all is lost, and fed back
    std::fill_n(codes, block, std::uint8_t{0});
    return;
  }
  for (std::size_t k = 0; k < block; ++k) {
    const float code = std::clamp(nearest(values[k] / scale), -127.0F, 127.0F);
    codes[k] = static_cast<std::uint8_t>(static_cast<std::int8_t>(code));
    values[k] -= scale * code;
  }
}

void decode_row(const std::uint8_t* row, std::size_t block, float* values) {
  const float scale = scale_of(row);
  for (std::size_t k = 0; k < block; ++k) values[k] = scale * code_at(row, k);
}

void add_row(const std::uint8_t* row, std::size_t block, float weight, float* values) {
  const float scale = scale_of(row) * weight;
  for (std::size_t k = 0; k < block; ++k) values[k] += scale * code_at(row, k);
}

}  // namespace convoy
