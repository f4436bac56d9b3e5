#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace convoy::coll {

// The sizes of the tensor behind a buffer, if there is one. Ranks compare them, as a hash, and name
// them where they differ: [2, 3] is not [3, 2], though their counts are equal. Refers to memory of
// the caller's.
struct Shape {
  const std::int64_t* sizes = nullptr;
  std::uint32_t dims = 0;
  bool given = false;  // false: only counts are compared

  static Shape of(std::span<const std::int64_t> sizes) {
    return {sizes.data(), static_cast<std::uint32_t>(sizes.size()), true};
  }
  std::span<const std::int64_t> span() const { return {sizes, dims}; }
};

// Continues a hash; never 0 for a shape that is given. Other shapes have other hashes, but for one
// in 2^64.
inline std::uint64_t hash_shape(const Shape& shape, std::uint64_t hash = 0) {
  if (!shape.given) return hash;
  constexpr std::uint64_t kFactor = 0x9e3779b97f4a7c15;
  hash = (hash + shape.dims + 1) * kFactor;
  for (const std::int64_t size : shape.span()) {
    hash = (hash ^ (hash >> 29) ^ static_cast<std::uint64_t>(size)) * kFactor;
  }
  hash ^= hash >> 32;
  return hash == 0 ? 1 : hash;
}

// "[2, 3]"; empty if it is not given.
std::string to_string(const Shape& shape);

// Copies of several shapes, for a call that outlives its caller's.
class ShapeList {
 public:
  void add(const Shape& shape);
  std::size_t size() const { return entries_.size(); }
  Shape at(std::size_t i) const;

 private:
  std::vector<std::int64_t> sizes_;
  struct Entry {
    std::size_t begin;
    std::uint32_t dims;
    bool given;
  };
  std::vector<Entry> entries_;
};
// "[2, 3], [4]"; empty if none is given.
std::string to_string(const ShapeList& shapes);

}  // namespace convoy::coll
