#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>

#include "base/unique_fd.h"
#include "share/region.h"

namespace convoy::share {

// Descriptors of memory that outlive the processes that put them there: they wait in the buffer of
// a socket that nobody reads, only looks into. The kernel drops them with the last descriptor of
// the socket. What lies in them is said beside each.
//
// Not thread-safe, and one process at a time: under the lock of what it belongs to.
class DescriptorStore {
 public:
  struct Entry {
    static constexpr std::uint64_t kMagic = 0x3145524f54535643;  // "CVSTORE1"

    std::uint64_t magic = kMagic;
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::uint64_t bytes = 0;
    ProcessWord owner = 0;   // of the memory
    std::uint32_t kind = 0;  // Region::Kind
    std::uint32_t unused = 0;
  };
  static_assert(sizeof(Entry) == 48);

  DescriptorStore();
  // The two ends, of another process's.
  DescriptorStore(UniqueFd writer, UniqueFd reader);

  // This process puts no more in: whether others can, or will (the end is under way to them).
  // Afterwards it can still look.
  void close_writer() { writer_.reset(); }
  bool has_writers() const;
  void reopen_writer(UniqueFd writer) { writer_ = std::move(writer); }

  int writer() const { return writer_.get(); }
  int reader() const { return reader_.get(); }

  // kResource: no more fit.
  void add(const Entry& entry, int descriptor) const;
  // nullopt: it is not there.
  std::optional<std::pair<Entry, UniqueFd>> find(const Segment::Key& key) const;
  // Drops all that `keep` refuses; how many.
  std::size_t prune(const std::function<bool(const Entry&)>& keep) const;
  std::size_t size() const;

 private:
  std::optional<Entry> look(std::size_t index, UniqueFd* descriptor) const;

  UniqueFd writer_;
  UniqueFd reader_;
};

}  // namespace convoy::share
