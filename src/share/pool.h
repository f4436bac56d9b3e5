#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>

#include "share/region.h"

namespace convoy::share {

// The free space of a process's own regions. Takes the smallest hole that suffices. Not
// thread-safe.
class Pool {
 public:
  struct Place {
    std::shared_ptr<Region> region;
    std::uint64_t offset = 0;
    std::size_t bytes = 0;  // whole pages
  };

  void add(std::shared_ptr<Region> region);
  std::optional<Place> take(std::size_t bytes);
  // Adds a region of which the first block is in use.
  Place add_in_use(std::shared_ptr<Region> region, std::size_t bytes);
  void give_back(const Place& place);
  // A region without a block in use; nullptr if there is none. It is not in the pool any more.
  std::shared_ptr<Region> take_unused();

  std::size_t bytes() const { return bytes_; }
  std::size_t regions() const { return areas_.size(); }

  // How large a region should be that is made because `bytes` did not fit. Regions are few: each
  // costs every process that uses it a descriptor.
  std::size_t next_region_bytes(std::size_t bytes) const;
  static std::size_t region_bytes_for(std::size_t block_bytes);

  template <class Visit>
  void for_each_region(Visit visit) const {
    for (const auto& [serial, area] : areas_) visit(area.region);
  }

 private:
  struct Area {
    std::shared_ptr<Region> region;
    std::map<std::uint64_t, std::size_t> free;  // offset -> bytes, no two adjacent
  };
  using Hole = std::tuple<std::size_t, std::uint64_t, std::uint64_t>;  // bytes, serial, offset
  Place take_from(const Hole& hole, std::size_t size);

  std::map<std::uint64_t, Area> areas_;  // by serial
  std::set<Hole> holes_;
  std::size_t bytes_ = 0;
};

}  // namespace convoy::share
