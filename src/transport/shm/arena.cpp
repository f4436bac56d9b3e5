#include "transport/shm/arena.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"

namespace convoy::shm {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

Arena::Piece Arena::allocate(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2)
    fail(ErrorKind::kResource, "shared memory of ", bytes, " bytes: too large");
  const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), kAlignment);
  // Best fit: the smallest hole that suffices.
  SegmentId best = 0;
  std::size_t best_offset = 0;
  std::size_t best_length = SIZE_MAX;
  for (auto& [id, region] : regions_) {
    for (const auto& [offset, length] : region.free) {
      if (length < size || length >= best_length) continue;
      best = id;
      best_offset = offset;
      best_length = length;
    }
  }
  if (best == 0) {
    grow(size);
    return allocate(bytes);
  }
  Region& region = regions_.at(best);
  region.free.erase(best_offset);
  if (best_length > size) region.free.emplace(best_offset + size, best_length - size);
  region.used.emplace(best_offset, size);
  return {region.segment.data() + best_offset, size, {best, best_offset}};
}

Arena::Region& Arena::grow(std::size_t bytes) {
  std::size_t size = std::max(bytes, std::clamp(mapped_bytes(), kLeastSegment, kMostSegment));
  const std::uint64_t headroom = hooks_.headroom();
  if (size > headroom) size = bytes;  // a small machine: take what is asked for and no more
  if (size > headroom) {
    fail(ErrorKind::kResource, "shared memory cannot grow by ", bytes, " bytes: ", headroom,
         " are left before this machine or its cgroup runs out (", used_bytes(),
         " in use here); free tensors, raise the memory limit, or use fewer ranks");
  }
  const SegmentId id = hooks_.next_id();
  Region region{
      .segment = Segment::create(size, "arena", Segment::Warm::kYes), .free = {}, .used = {}};
  region.free.emplace(0, region.segment.size());
  try {
    hooks_.added(id, region.segment);
  } catch (...) {
    // Some peers may have it mapped.
    try {
      hooks_.removed(id);
    } catch (const Error& error) {
      log_warn("taking back memory that could not be shared: ", error.what());
    }
    throw;
  }
  return regions_.emplace(id, std::move(region)).first->second;
}

void Arena::free(const Location& location) {
  Region& region = regions_.at(location.segment);
  const auto used = region.used.find(location.offset);
  CONVOY_CHECK(used != region.used.end(), "freeing memory that is not in use");
  std::size_t begin = used->first;
  std::size_t end = begin + used->second;
  region.used.erase(used);
  const auto after = region.free.lower_bound(begin);
  if (after != region.free.end() && after->first == end) {
    end += after->second;
    region.free.erase(after);
  }
  auto before = region.free.lower_bound(begin);
  if (before != region.free.begin()) --before;
  if (before != region.free.end() && before->first + before->second == begin) {
    begin = before->first;
    region.free.erase(before);
  }
  region.free.emplace(begin, end - begin);
}

std::size_t Arena::trim() {
  std::size_t released = 0;
  for (auto i = regions_.begin(); i != regions_.end();) {
    if (!i->second.used.empty()) {
      ++i;
      continue;
    }
    released += i->second.segment.size();
    hooks_.removed(i->first);
    i = regions_.erase(i);
  }
  return released;
}

std::optional<Location> Arena::locate(const std::byte* address, std::size_t bytes) const {
  for (const auto& [id, region] : regions_) {
    const std::byte* begin = region.segment.data();
    if (address < begin || address >= begin + region.segment.size()) continue;
    const auto offset = static_cast<std::size_t>(address - begin);
    if (bytes > region.segment.size() - offset) return std::nullopt;
    return Location{id, offset};
  }
  return std::nullopt;
}

std::byte* Arena::resolve(const Location& location, std::size_t bytes) const {
  const auto found = regions_.find(location.segment);
  if (found == regions_.end()) return nullptr;
  const Segment& segment = found->second.segment;
  if (location.offset > segment.size() || bytes > segment.size() - location.offset) return nullptr;
  return segment.data() + location.offset;
}

std::size_t Arena::mapped_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [id, region] : regions_) bytes += region.segment.size();
  return bytes;
}

std::size_t Arena::used_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [id, region] : regions_) {
    for (const auto& [offset, length] : region.used) bytes += length;
  }
  return bytes;
}

void Arena::for_each_segment(const std::function<void(SegmentId, const Segment&)>& visit) const {
  for (const auto& [id, region] : regions_) visit(id, region.segment);
}

}  // namespace convoy::shm
