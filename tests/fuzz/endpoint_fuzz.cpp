// What another process may do to an endpoint: letters and positions in its ring, notes and
// descriptors over its connection, what it gives back. Nonsense loses that peer, with an error, and
// nothing else.
#include <sys/eventfd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "base/guarded.h"
#include "convoy/error.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/fabric.h"
#include "transport/shm/letter_ring.h"
#include "transport/shm/shm_endpoint.h"

namespace {

using namespace convoy;
using namespace convoy::shm;
using transport::Address;
using transport::Arrival;
using transport::Endpoint;
using transport::Remote;

void require(bool condition) {
  if (!condition) std::abort();
}

// Every byte that it is given must be there.
class Victim final : public transport::Inbox {
 public:
  Remote* attacker = nullptr;
  bool lost_it = false;

  std::span<std::byte> place(Remote&, const Arrival& arrival, std::size_t,
                             std::size_t bytes) noexcept override {
    if (arrival.kind % 2 == 0 || bytes > sizeof room_) return {};
    return {room_, bytes};
  }
  void arrived(Remote& from, Arrival&& arrival) noexcept override {
    require(!lost_it && &from == attacker);
    touch(arrival.head);
    for (const auto& part : arrival.parts) touch(part.bytes);
    if (arrival.kind % 3 == 0) kept_ = std::move(arrival.parts);
  }
  void joined(Remote& remote) noexcept override { attacker = &remote; }
  void lost(Remote& remote, const Error& error) noexcept override {
    require(&remote == attacker && !lost_it && error.kind() == ErrorKind::kPeerLost);
    lost_it = true;
  }

 private:
  void touch(std::span<const std::byte> bytes) {
    for (std::size_t i = 0; i < bytes.size(); i += 64) sum_ = sum_ + static_cast<int>(bytes[i]);
    if (!bytes.empty()) sum_ = sum_ + static_cast<int>(bytes.back());
  }

  volatile int sum_ = 0;
  std::byte room_[1 << 16];
  std::vector<transport::Part> kept_;
};

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : left_(data, size) {}
  bool empty() const { return left_.empty(); }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    bytes = std::min(bytes, left_.size());
    if (bytes != 0) std::memcpy(&value, left_.data(), bytes);
    left_ = left_.subspan(bytes);
    return value;
  }
  std::span<const std::byte> bytes(std::size_t count) {
    count = std::min(count, left_.size());
    const auto taken = std::as_bytes(left_.first(count));
    left_ = left_.subspan(count);
    return taken;
  }

 private:
  std::span<const std::uint8_t> left_;
};

// Until the watch thread has read what was sent.
void settle(Fabric& fabric) {
  for (int i = 0; i < 2; ++i) fabric.close_door(Id{});
}

// A letter that is one, of numbers from the input.
void write_letter(Input& input, RingLayout& layout) {
  const auto head = input.bytes(input.number(1));
  const auto pieces = input.number(1) % 4;
  std::vector<std::byte> entry(sizeof(LetterEntry) + padded(head.size()));
  LetterEntry first{.bytes = 0,
                    .kind = static_cast<std::uint16_t>(input.number(1)),
                    .flags = static_cast<std::uint8_t>(input.number(1) % 4),
                    .zero = 0,
                    .head_bytes = static_cast<std::uint32_t>(head.size()),
                    .pieces = static_cast<std::uint16_t>(pieces),
                    .loan = 0};
  if (!head.empty()) std::memcpy(entry.data() + sizeof first, head.data(), head.size());
  for (std::uint64_t i = 0; i < pieces; ++i) {
    const PieceEntry piece{.bytes = input.number(2),
                           .how = static_cast<std::uint32_t>(input.number(1) % 3),
                           .zero = 0,
                           .segment = input.number(1) % 4,
                           .place = input.number(2)};
    if (piece.how == PieceEntry::kLent) first.loan = 1;
    const auto* const bytes = reinterpret_cast<const std::byte*>(&piece);
    entry.insert(entry.end(), bytes, bytes + sizeof piece);
  }
  first.bytes = static_cast<std::uint32_t>(entry.size());
  std::memcpy(entry.data(), &first, sizeof first);
  const std::uint64_t at = layout.written.load() % RingLayout::kCapacity;
  if (entry.size() > RingLayout::kCapacity - at) return;
  std::memcpy(reinterpret_cast<std::byte*>(&layout) + RingLayout::kData + at, entry.data(),
              entry.size());
  layout.written.fetch_add(entry.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    parse_letter(std::as_bytes(std::span(data, size)));
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidArgument);
  }
  static const std::uint64_t probe = 1;
  static const Segment segment = Segment::create(8192, "fuzz");
  Fabric& fabric = Fabric::instance();
  Victim victim;
  const auto endpoint = make_shm_endpoint(victim, {.service_thread = false});
  const Address address{Id::random(), fabric.self().encode()};
  // The endpoint's doorbell, and our slot there.
  Guarded<std::pair<Mapping, std::size_t>> door;
  const auto peer = fabric.dial(
      fabric.self(), endpoint->address().id, address.encode(),
      [&](Peer&, const Frame& frame, UniqueFd fd) {
        if (frame.segment != 1 || !fd) return;
        auto known = door.lock();
        known->first = adopt_mapping(std::move(fd), frame.bytes);
        known->second = frame.process.bytes[0];
      },
      Deadline::after(std::chrono::seconds(5)));
  RingWriter ring = RingWriter::create(probe);
  auto [bell, bell_fd] = make_mapping(sizeof(Doorbell), "fuzz bell");
  new (bell->data()) Doorbell{};
  const UniqueFd plain(::eventfd(0, EFD_CLOEXEC));
  const auto poll = [&] {
    settle(fabric);
    {
      auto known = door.lock();
      if (known->first) {
        Doorbell::Rung rung;
        reinterpret_cast<Doorbell*>(known->first->data())
            ->knock(static_cast<std::uint32_t>(known->second), false, rung);
      }
    }
    for (int i = 0; i < 4; ++i) endpoint->poll(Endpoint::Serve::kAll);
  };
  Input input(data, size);
  const std::uint64_t usual = input.number(1);  // which usual notes come first
  Id one{};
  one.bytes[0] = 1;
  if ((usual & 1) != 0) peer->try_note(1, bell->size(), bell_fd.get());
  if ((usual & 2) != 0) peer->try_note(2, ring.mapping()->size(), ring.fd());
  if ((usual & 4) != 0) peer->try_note(3, segment.size(), segment.fd(), one);
  poll();
  std::vector<std::byte> memory(5000);
  const transport::Piece pieces[] = {{memory}};
  while (!input.empty() && !victim.lost_it) {
    switch (input.number(1) % 8) {
      case 0: {
        const int fds[] = {-1, ring.fd(), bell_fd.get(), segment.fd(), plain.get()};
        const int fd = fds[input.number(1) % 5];
        const std::uint64_t type = input.number(1) % 6;
        const std::uint64_t bytes = input.number(4);
        Id id{};
        id.bytes[0] = static_cast<std::uint8_t>(input.number(1));
        peer->try_note(type, bytes, fd, id);
        break;
      }
      case 1: {
        const std::size_t at = input.number(2);
        const auto bytes = input.bytes(input.number(1));
        if (bytes.empty() || at + bytes.size() > RingLayout::kCapacity) break;
        std::memcpy(ring.mapping()->data() + RingLayout::kData + at, bytes.data(), bytes.size());
        break;
      }
      case 2: ring.layout().written.fetch_add(input.number(3)); break;
      case 3: write_letter(input, ring.layout()); break;
      case 4: ring.layout().blocked.store(static_cast<std::uint32_t>(input.number(1))); break;
      case 5: ring.layout().released[input.number(1) % 4].fetch_or(input.number(8)); break;
      case 6:
        if (victim.attacker) victim.attacker->try_send({.pieces = pieces});
        break;
      default: {  // how much of a letter that streams is there
        const std::size_t at = input.number(2) % segment.size() / 8 * 8;
        const std::uint64_t ready = input.number(3);
        reinterpret_cast<std::atomic<std::uint64_t>*>(segment.data() + at)->store(ready);
        break;
      }
    }
    poll();
  }
  fabric.hang_up({peer});
  return 0;
}
