#include "share/pool.h"

#include <algorithm>

namespace convoy::share {
namespace {

constexpr std::size_t kLeastRegion = std::size_t{4} << 20;
constexpr std::size_t kUsualRegion = std::size_t{64} << 20;

std::size_t whole_pages(std::size_t bytes) {
  return (std::max<std::size_t>(bytes, 1) + kBookPage - 1) / kBookPage * kBookPage;
}

}  // namespace

void Pool::add(std::shared_ptr<Region> region) {
  const std::uint64_t serial = region->serial();
  const std::uint64_t first = region->book().head().first;
  const std::size_t length = region->bytes() - first;
  bytes_ += region->bytes();
  Area& area = areas_[serial];
  area.region = std::move(region);
  area.free.emplace(first, length);
  holes_.emplace(length, serial, first);
}

std::optional<Pool::Place> Pool::take(std::size_t bytes) {
  const std::size_t size = whole_pages(bytes);
  const auto found = holes_.lower_bound({size, 0, 0});
  if (found == holes_.end()) return std::nullopt;
  return take_from(*found, size);
}

Pool::Place Pool::add_in_use(std::shared_ptr<Region> region, std::size_t bytes) {
  const std::uint64_t first = region->book().head().first;
  const Hole whole{region->bytes() - first, region->serial(), first};
  add(std::move(region));
  return take_from(whole, whole_pages(bytes));
}

Pool::Place Pool::take_from(const Hole& hole, std::size_t size) {
  const auto [length, serial, offset] = hole;
  holes_.erase(Hole(length, serial, offset));
  Area& area = areas_.at(serial);
  area.free.erase(offset);
  if (length > size) {
    area.free.emplace(offset + size, length - size);
    holes_.emplace(length - size, serial, offset + size);
  }
  return Place{area.region, offset, size};
}

void Pool::give_back(const Place& place) {
  const std::uint64_t serial = place.region->serial();
  Area& area = areas_.at(serial);
  std::uint64_t begin = place.offset, end = begin + place.bytes;
  const auto after = area.free.lower_bound(begin);
  if (after != area.free.end() && after->first == end) {
    end += after->second;
    holes_.erase({after->second, serial, after->first});
    area.free.erase(after);
  }
  auto before = area.free.lower_bound(begin);
  if (before != area.free.begin()) --before;
  if (before != area.free.end() && before->first + before->second == begin) {
    begin = before->first;
    holes_.erase({before->second, serial, before->first});
    area.free.erase(before);
  }
  area.free.emplace(begin, end - begin);
  holes_.emplace(end - begin, serial, begin);
}

std::shared_ptr<Region> Pool::take_unused() {
  for (auto& [serial, area] : areas_) {
    const std::uint64_t first = area.region->book().head().first;
    const std::size_t whole = area.region->bytes() - first;
    if (area.free.size() != 1 || area.free.begin()->second != whole) continue;
    holes_.erase({whole, serial, first});
    auto region = std::move(area.region);
    bytes_ -= region->bytes();
    areas_.erase(serial);
    return region;
  }
  return nullptr;
}

std::size_t Pool::region_bytes_for(std::size_t block_bytes) {
  const std::size_t block = whole_pages(block_bytes);
  std::size_t bytes = block + Book::head_bytes(block);
  while (bytes - Book::head_bytes(bytes) < block) bytes += kBookPage;
  return bytes;
}

// As much as there is already, up to a limit; beyond it a quarter, so that the number of regions
// grows with the logarithm of the memory.
std::size_t Pool::next_region_bytes(std::size_t bytes) const {
  const std::size_t usual = bytes_ < 4 * kUsualRegion
                                ? std::clamp(bytes_, kLeastRegion, kUsualRegion)
                                : whole_pages(bytes_ / 4);
  return std::max(region_bytes_for(bytes), usual);
}

}  // namespace convoy::share
