#pragma once

#include <cstddef>
#include <cstdint>

namespace convoy {

// A row of `block` elements as bytes: the scale (f32), then a signed byte for each element. The
// value of a code is scale * code, codes go from -127 to 127, and the largest magnitude has code
// 127: nothing is clipped, and what is lost of an element is at most half a scale. A row with a NaN
// or an infinity has NaN for a scale.
inline constexpr std::size_t kScaleBytes = 4;
inline std::size_t row_bytes(std::size_t block) { return kScaleBytes + block; }

// `values` become what is lost, which is zero where there is no number.
void quantize_row(float* values, std::size_t block, std::uint8_t* row);
void decode_row(const std::uint8_t* row, std::size_t block, float* values);
// values[k] += weight * decoded[k]
void add_row(const std::uint8_t* row, std::size_t block, float weight, float* values);

}  // namespace convoy
