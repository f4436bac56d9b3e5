#include "reference.h"

#include <array>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

namespace convoy::coll::reference {
namespace {

template <class T>
T get(const Buffer& buffer, std::size_t index) {
  T value;
  std::memcpy(&value, buffer.data() + index * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void put(Buffer& buffer, std::size_t index, T value) {
  std::memcpy(buffer.data() + index * sizeof(T), &value, sizeof(T));
}

template <class T>
T canonical(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

template <class T>
T reduce_floats(const Reduction& r, std::span<const T> values) {
  T total = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T x = r.op == ReduceOp::kPremulSum ? values[i] * static_cast<T>(r.factor) : values[i];
    if (i == 0) {
      total = x;
    } else if (r.op == ReduceOp::kProduct) {
      total = total * x;
    } else if (r.op == ReduceOp::kMin) {
      total = std::isnan(total) ? total : (std::isnan(x) || x < total) ? x : total;
    } else if (r.op == ReduceOp::kMax) {
      total = std::isnan(total) ? total : (std::isnan(x) || x > total) ? x : total;
    } else {
      total = total + x;
    }
  }
  if (r.op == ReduceOp::kAvg) total = total / static_cast<T>(r.ranks);
  return total;
}

// NOLINTBEGIN(bugprone-signed-char-misuse): the sign is meant to be extended
template <class T>
T reduce_integers(const Reduction& r, std::span<const T> values) {
  using Wide = unsigned __int128;  // wraps on the way back to T
  Wide total = static_cast<Wide>(values[0]);
  for (const T x : values.subspan(1)) {
    const T so_far = static_cast<T>(total);
    switch (r.op) {
      case ReduceOp::kProduct: total *= static_cast<Wide>(x); break;
      case ReduceOp::kMin: total = static_cast<Wide>(x < so_far ? x : so_far); break;
      case ReduceOp::kMax: total = static_cast<Wide>(x > so_far ? x : so_far); break;
      case ReduceOp::kBand: total &= static_cast<Wide>(x); break;
      case ReduceOp::kBor: total |= static_cast<Wide>(x); break;
      case ReduceOp::kBxor: total ^= static_cast<Wide>(x); break;
      default: total += static_cast<Wide>(x);
    }
  }
  if (r.op != ReduceOp::kAvg) return static_cast<T>(total);
  return static_cast<T>(static_cast<__int128>(total) / r.ranks);
}
// NOLINTEND(bugprone-signed-char-misuse)

bool reduce_bools(const Reduction& r, std::span<const std::uint8_t> values) {
  bool total = values[0] != 0;
  for (const std::uint8_t x : values.subspan(1)) {
    const bool b = x != 0;
    switch (r.op) {
      case ReduceOp::kProduct:
      case ReduceOp::kMin:
      case ReduceOp::kBand: total = total && b; break;
      case ReduceOp::kBxor: total = total != b; break;
      default: total = total || b;
    }
  }
  return total;
}

// `one(values)` gives the result of one element.
template <class T, class One>
Buffer each(std::span<const Buffer> sources, One one) {
  Buffer out(sources[0].size());
  std::vector<T> values(sources.size());
  for (std::size_t k = 0; k < out.size() / sizeof(T); ++k) {
    for (std::size_t s = 0; s < sources.size(); ++s) values[s] = get<T>(sources[s], k);
    put<T>(out, k, one(std::span<const T>(values)));
  }
  return out;
}

template <class T>
Buffer reduce_as(const Reduction& r, std::span<const Buffer> sources) {
  return each<T>(sources, [&](std::span<const T> values) {
    if constexpr (std::is_floating_point_v<T>) {
      return canonical(reduce_floats<T>(r, values));
    } else {
      return reduce_integers<T>(r, values);
    }
  });
}

// As if the sources had been stored in that format, and the result too.
Buffer reduce_rounded(const Format& format, const Reduction& r, std::span<const Buffer> sources) {
  const auto round = [&](float value) {
    const float stored = static_cast<float>(decode(format, encode(format, value)));
    return canonical(stored);
  };
  thread_local std::vector<float> stored;
  return each<float>(sources, [&](std::span<const float> values) {
    stored.clear();
    for (const float value : values) stored.push_back(round(value));
    return round(reduce_floats<float>(r, stored));
  });
}

template <class Code>
Buffer reduce_small(const Format& format, const Reduction& r, std::span<const Buffer> sources) {
  thread_local std::vector<float> wide;
  return each<Code>(sources, [&](std::span<const Code> codes) {
    wide.clear();
    for (const Code code : codes) wide.push_back(static_cast<float>(decode(format, code)));
    return static_cast<Code>(encode(format, reduce_floats<float>(r, wide)));
  });
}

template <class T>
Buffer reduce_complex(const Reduction& r, std::span<const Buffer> sources) {
  if (r.op != ReduceOp::kProduct) return reduce_as<T>(r, sources);
  struct Pair {
    T real, imaginary;
  };
  return each<Pair>(sources, [](std::span<const Pair> values) {
    Pair a = values[0];
    for (const Pair& b : values.subspan(1)) {
      a = {a.real * b.real - a.imaginary * b.imaginary,
           a.real * b.imaginary + a.imaginary * b.real};
    }
    return Pair{canonical(a.real), canonical(a.imaginary)};
  });
}

template <class T>
T corner(std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  if constexpr (std::is_floating_point_v<T>) {
    const std::array<T, 13> corners = {T(0),
                                       -T(0),
                                       Limits::infinity(),
                                       -Limits::infinity(),
                                       Limits::max(),
                                       Limits::lowest(),
                                       Limits::min(),
                                       -Limits::min(),
                                       Limits::denorm_min(),
                                       -Limits::denorm_min(),
                                       Limits::min() / 2,
                                       Limits::quiet_NaN(),
                                       T(1)};
    return corners[random() % corners.size()];
  } else {
    const std::array<T, 5> corners = {T(0), T(1), static_cast<T>(-1), Limits::min(), Limits::max()};
    return corners[random() % corners.size()];
  }
}

template <class T, class Bits>
Buffer random_values(std::size_t count, std::mt19937_64& random) {
  Buffer out(count * sizeof(T));
  for (std::size_t k = 0; k < count; ++k) {
    const auto kind = random() % 8;
    if (kind == 0) {
      put<T>(out, k, corner<T>(random));
    } else if (kind == 1 || std::is_integral_v<T>) {
      put<Bits>(out, k, static_cast<Bits>(random()));
    } else if (kind == 2) {
      // Sums and products of these overflow.
      const T half = std::numeric_limits<T>::max() / 2;
      put<T>(out, k, random() % 2 == 0 ? half + half / 3 : -half - half / 3);
    } else {
      const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
      put<T>(out, k, static_cast<T>((unit - 0.5) * 4));
    }
  }
  return out;
}

template <class Code>
Buffer random_codes(const Format& format, std::size_t count, std::mt19937_64& random) {
  Buffer out(count * sizeof(Code));
  const std::uint32_t infinity = ((1u << format.exponent) - 1) << format.mantissa;
  const std::array<std::uint32_t, 7> corners = {0,
                                                1,
                                                infinity - 1,
                                                infinity,
                                                infinity + 1,
                                                (1u << format.mantissa) - 1,
                                                1u << format.mantissa};
  for (std::size_t k = 0; k < count; ++k) {
    const auto kind = random() % 8;
    std::uint32_t code = 0;
    if (kind == 0) {
      code = corners[random() % corners.size()] | (random() % 2 == 0 ? 0 : format.sign());
    } else if (kind == 1) {
      code = static_cast<std::uint32_t>(random());
    } else if (kind == 2) {
      // Of the largest exponents: sums and products overflow.
      code = infinity - 1 - static_cast<std::uint32_t>(random() % (2u << format.mantissa));
      code |= random() % 2 == 0 ? 0 : format.sign();
    } else {
      const double unit = static_cast<double>(random() >> 11) * 0x1p-53;
      code = encode(format, static_cast<float>((unit - 0.5) * 4));
    }
    put<Code>(out, k, static_cast<Code>(code));
  }
  return out;
}

}  // namespace

double decode(const Format& format, std::uint32_t code) {
  const double sign = (code & format.sign()) != 0 ? -1 : 1;
  const int top = (1 << format.exponent) - 1;
  const int exponent = static_cast<int>(code >> format.mantissa) & top;
  const int mantissa = static_cast<int>(code) & ((1 << format.mantissa) - 1);
  if (format.has_infinity && exponent == top) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (!format.has_infinity && (code & (format.sign() - 1)) == format.sign() - 1) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const int leading = exponent == 0 ? 0 : 1 << format.mantissa;
  const int power = (exponent == 0 ? 1 : exponent) - format.bias() - format.mantissa;
  return sign * std::ldexp(leading + mantissa, power);
}

std::uint32_t encode(const Format& format, float value) {
  if (std::isnan(value)) return format.nan;
  const std::uint32_t sign = std::signbit(value) ? format.sign() : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  const int top = (1 << format.exponent) - 1;
  const std::uint32_t infinity = static_cast<std::uint32_t>(top) << format.mantissa;
  // Without infinity everything beyond the largest finite code becomes that one.
  const std::uint32_t beyond = format.has_infinity ? infinity : format.sign() - 2;
  if (std::isinf(magnitude)) return sign | beyond;
  if (magnitude == 0) return sign;
  // Round in units of the last place at this magnitude.
  const int smallest = 1 - format.bias();
  const int power = std::max(std::ilogb(magnitude), smallest) - format.mantissa;
  const auto units = static_cast<std::uint64_t>(std::nearbyint(std::ldexp(magnitude, -power)));
  // Codes of one sign are consecutive integers in the order of their values.
  const int exponent = power + format.mantissa - smallest;
  const std::uint64_t code = (static_cast<std::uint64_t>(exponent) << format.mantissa) + units;
  return sign | static_cast<std::uint32_t>(std::min<std::uint64_t>(code, beyond));
}

bool has_meaning(DataType type, ReduceOp op) {
  const bool is_float = type <= DataType::kF8E5M2;
  const bool is_complex = type == DataType::kC64 || type == DataType::kC128;
  const bool is_bool = type == DataType::kBool;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct: return true;
    case ReduceOp::kAvg: return !is_bool;
    case ReduceOp::kMin:
    case ReduceOp::kMax: return !is_complex;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor: return !is_float && !is_complex;
    case ReduceOp::kPremulSum: return is_float || is_complex;
  }
  return false;
}

Buffer reduce(const Reduction& r, std::span<const Buffer> sources) {
  switch (r.type) {
    case DataType::kF32:
      if (r.rounding == Rounding::kF16) return reduce_rounded(kHalf, r, sources);
      if (r.rounding == Rounding::kBF16) return reduce_rounded(kBrain, r, sources);
      return reduce_as<float>(r, sources);
    case DataType::kF64: return reduce_as<double>(r, sources);
    case DataType::kF16: return reduce_small<std::uint16_t>(kHalf, r, sources);
    case DataType::kBF16: return reduce_small<std::uint16_t>(kBrain, r, sources);
    case DataType::kF8E4M3: return reduce_small<std::uint8_t>(kE4M3, r, sources);
    case DataType::kF8E5M2: return reduce_small<std::uint8_t>(kE5M2, r, sources);
    case DataType::kI8: return reduce_as<std::int8_t>(r, sources);
    case DataType::kI16: return reduce_as<std::int16_t>(r, sources);
    case DataType::kI32: return reduce_as<std::int32_t>(r, sources);
    case DataType::kI64: return reduce_as<std::int64_t>(r, sources);
    case DataType::kU8: return reduce_as<std::uint8_t>(r, sources);
    case DataType::kU16: return reduce_as<std::uint16_t>(r, sources);
    case DataType::kU32: return reduce_as<std::uint32_t>(r, sources);
    case DataType::kU64: return reduce_as<std::uint64_t>(r, sources);
    case DataType::kBool:
      return each<std::uint8_t>(sources, [&](std::span<const std::uint8_t> values) {
        return static_cast<std::uint8_t>(reduce_bools(r, values));
      });
    case DataType::kC64: return reduce_complex<float>(r, sources);
    case DataType::kC128: return reduce_complex<double>(r, sources);
  }
  return {};
}

Buffer random_elements(DataType type, std::size_t count, std::mt19937_64& random) {
  switch (type) {
    case DataType::kF32: return random_values<float, std::uint32_t>(count, random);
    case DataType::kF64: return random_values<double, std::uint64_t>(count, random);
    case DataType::kF16: return random_codes<std::uint16_t>(kHalf, count, random);
    case DataType::kBF16: return random_codes<std::uint16_t>(kBrain, count, random);
    case DataType::kF8E4M3: return random_codes<std::uint8_t>(kE4M3, count, random);
    case DataType::kF8E5M2: return random_codes<std::uint8_t>(kE5M2, count, random);
    case DataType::kC64: return random_values<float, std::uint32_t>(2 * count, random);
    case DataType::kC128: return random_values<double, std::uint64_t>(2 * count, random);
    case DataType::kI16:
    case DataType::kU16: return random_values<std::int16_t, std::uint16_t>(count, random);
    case DataType::kI32:
    case DataType::kU32: return random_values<std::int32_t, std::uint32_t>(count, random);
    case DataType::kI64:
    case DataType::kU64: return random_values<std::int64_t, std::uint64_t>(count, random);
    default: return random_values<std::int8_t, std::uint8_t>(count, random);
  }
}

}  // namespace convoy::coll::reference
