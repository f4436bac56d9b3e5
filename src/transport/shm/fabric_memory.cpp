// The Fabric: memory that peers see.
#include <algorithm>

#include "base/error.h"
#include "os/fork_guard.h"
#include "os/machine.h"
#include "transport/shm/fabric_impl.h"
#include "transport/shm/fence.h"

namespace convoy::shm {
namespace {

// Left to the rest of the machine when the arena grows.
constexpr std::uint64_t kMemoryReserve = std::uint64_t{256} << 20;

bool overlaps(const Location& a, std::size_t a_bytes, const Location& b, std::size_t b_bytes) {
  return a.segment == b.segment && a.offset < b.offset + b_bytes && b.offset < a.offset + a_bytes;
}

}  // namespace

std::uint64_t machine_headroom() {
  const std::uint64_t left = memory_state().headroom();
  return left - std::min(left, kMemoryReserve);
}

Block Fabric::allocate(std::size_t bytes) {
  auto memory = impl_->memory.lock();
  impl_->release_limbo(*memory);
  const auto piece = memory->arena->allocate(bytes);
  memory->sizes[{piece.location.segment, piece.location.offset}] = piece.size;
  return {this, piece.data, piece.size, piece.location};
}

void Fabric::free(const Location& location) noexcept {
  // In a forked child the memory is the parent's, and its lock may be held by a thread that is not
  // here.
  if (fork_generation() != generation_) return;
  auto memory = impl_->memory.lock();
  memory->limbo.push_back(location);
  impl_->release_limbo(*memory);
}

void Fabric::Impl::release_limbo(Memory& state) {
  std::erase_if(state.quarantine, [](const Quarantine& entry) { return entry.released(); });
  std::erase_if(state.limbo, [&](const Location& location) {
    const std::pair key{location.segment, location.offset};
    const std::size_t size = state.sizes.at(key);
    for (const auto& entry : state.quarantine) {
      if (overlaps(location, size, entry.location, 1)) return false;
      if (overlaps(location, size, entry.reads, 1)) return false;
    }
    state.arena->free(location);
    state.sizes.erase(key);
    return true;
  });
}

void Fabric::quarantine(const Location& location, std::function<bool()> released,
                        const Location& reads) {
  impl_->memory.lock()->quarantine.push_back({location, std::move(released), reads});
}

Location Fabric::locate(const void* address, std::size_t bytes) {
  return impl_->memory.lock()
      ->arena->locate(static_cast<const std::byte*>(address), bytes)
      .value_or(Location{});
}

std::byte* Fabric::resolve(const Location& location, std::size_t bytes) {
  return impl_->memory.lock()->arena->resolve(location, bytes);
}

Fabric::SharedSegment Fabric::share_segment(SegmentId id) {
  std::optional<SharedSegment> found;
  impl_->memory.lock()->arena->for_each_segment([&](SegmentId other, const Segment& segment) {
    if (other == id) found = SharedSegment{duplicate(segment.fd()), segment.data(), segment.size()};
  });
  if (!found) fail(ErrorKind::kInvalidArgument, "there is no segment ", id, " in this process");
  return std::move(*found);
}

void Fabric::fence(const std::vector<std::shared_ptr<Peer>>& outsiders, const std::string& why,
                   const Deadline& deadline) {
  // Asked for when they are dead or lost: from then on they are sent no more of it.
  const auto keys = [this] {
    std::vector<Segment::Key> all;
    impl_->memory.lock()->arena->for_each_segment(
        [&](SegmentId, const Segment& segment) { all.push_back(segment.key()); });
    return all;
  };
  shm::fence(outsiders, self_.id, keys, why, deadline);
}

std::size_t Fabric::trim() {
  auto memory = impl_->memory.lock();
  impl_->release_limbo(*memory);
  impl_->watch.loop().post([this] { impl_->reap_on_loop(); });
  return memory->arena->trim();
}

void Fabric::set_headroom_for_testing(std::function<std::uint64_t()> headroom) {
  *impl_->headroom.lock() = headroom ? std::move(headroom) : machine_headroom;
}

Block::Block(Block&& other) noexcept
    : owner_(other.owner_),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      location_(other.location_) {}

Block& Block::operator=(Block&& other) noexcept {
  if (this != &other) {
    if (data_) owner_->free(location_);
    owner_ = other.owner_;
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    location_ = other.location_;
  }
  return *this;
}

Block::~Block() {
  if (data_) owner_->free(location_);
}

}  // namespace convoy::shm
