// The memory of a ring:
//     0   8  magic "CVRING1"
//    64   8  bytes written, since ever      72  4  the reader sleeps
//   128   8  bytes read, since ever        136  4  the writer sleeps
//   192   8  messages that the reader is done with
//   256   n  the bytes: of each message its length (4), zero (4), itself, zeros up to 8
#include "share/ring.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <new>

#include "base/error.h"
#include "base/guarded.h"

namespace convoy::share {

struct Ring::Head {
  static constexpr std::uint64_t kMagic = 0x31474e49525643;

  std::uint64_t magic;
  alignas(64) std::atomic<std::uint64_t> written;
  SleepFlag reader_sleeps;
  alignas(64) std::atomic<std::uint64_t> read;
  SleepFlag writer_sleeps;
  alignas(64) std::atomic<std::uint64_t> done;
};

namespace {

constexpr std::size_t kDataOffset = 256;
constexpr std::size_t kLengthBytes = 8;

std::size_t padded(std::size_t bytes) { return kLengthBytes + (bytes + 7) / 8 * 8; }

// Both ends of a pair may be in one process; there the ring is mapped once, so that what threads
// tell each other by it is ordered at one address, as ThreadSanitizer and the language see it.
Guarded<std::map<Segment::Key, std::weak_ptr<const Segment>>>& mapped() {
  static auto* const rings = new Guarded<std::map<Segment::Key, std::weak_ptr<const Segment>>>;
  return *rings;
}

}  // namespace

Ring Ring::create() {
  static_assert(sizeof(Head) <= kDataOffset);
  auto segment = std::make_shared<const Segment>(
      Segment::create(kDataOffset + kCapacity, "ring", Segment::Warm::kYes));
  auto* const head = new (segment->data()) Head{};
  head->magic = Head::kMagic;
  auto rings = mapped().lock();
  std::erase_if(*rings, [](const auto& item) { return item.second.expired(); });
  (*rings)[segment->key()] = segment;
  return Ring(std::move(segment));
}

Ring Ring::adopt(UniqueFd fd, std::size_t bytes) {
  std::shared_ptr<const Segment> segment;
  {
    auto rings = mapped().lock();
    const auto found = rings->find(Segment::key_of(fd.get()));
    if (found != rings->end()) segment = found->second.lock();
  }
  if (!segment) {
    auto adopted = Segment::adopt(std::move(fd), bytes, Segment::Warm::kYes);
    adopted.close_descriptor();
    segment = std::make_shared<const Segment>(std::move(adopted));
  }
  Ring ring(std::move(segment));
  if (ring.bytes() < kDataOffset + kCapacity || ring.head().magic != Head::kMagic) {
    fail(ErrorKind::kInvalidArgument, "the peer passed memory that is not a ring of this version");
  }
  return ring;
}

std::byte* Ring::data() const { return segment_->data() + kDataOffset; }

SleepFlag& Ring::reader_sleeps() const { return head().reader_sleeps; }
SleepFlag& Ring::writer_sleeps() const { return head().writer_sleeps; }

void Ring::copy_in(std::uint64_t at, std::span<const std::byte> bytes) const {
  if (bytes.empty()) return;  // which may be at nullptr, and memcpy may not
  const std::size_t begin = at % kCapacity;
  const std::size_t first = std::min(bytes.size(), kCapacity - begin);
  std::memcpy(data() + begin, bytes.data(), first);
  if (first < bytes.size()) std::memcpy(data(), bytes.data() + first, bytes.size() - first);
}

void Ring::copy_out(std::uint64_t at, std::span<std::byte> bytes) const {
  if (bytes.empty()) return;
  const std::size_t begin = at % kCapacity;
  const std::size_t first = std::min(bytes.size(), kCapacity - begin);
  std::memcpy(bytes.data(), data() + begin, first);
  if (first < bytes.size()) std::memcpy(bytes.data() + first, data(), bytes.size() - first);
}

bool Ring::has_room(std::size_t message_bytes) const {
  const std::uint64_t read = head().read.load(std::memory_order_acquire);
  // A reader that has read what was not written has lost its mind; it gets nothing more.
  const std::uint64_t used = position_ - read;
  return used <= kCapacity && padded(message_bytes) <= kCapacity - used;
}

bool Ring::try_write(std::span<const std::byte> message) {
  CONVOY_CHECK(message.size() <= kMostBytes);
  if (!has_room(message.size())) return false;
  const std::uint64_t length = message.size();
  copy_in(position_, std::as_bytes(std::span(&length, 1)));
  copy_in(position_ + kLengthBytes, message);
  position_ += padded(message.size());
  head().written.store(position_, std::memory_order_release);
  return true;
}

std::uint64_t Ring::done() const { return head().done.load(std::memory_order_acquire); }

std::uint64_t Ring::written_checked() const {
  const std::uint64_t written = head().written.load(std::memory_order_acquire);
  if (written - position_ > kCapacity) {
    fail(ErrorKind::kPeerLost, "the peer's ring holds impossible numbers: it is unusable");
  }
  return written;
}

bool Ring::has_message() const { return written_checked() != position_; }

std::vector<std::byte> Ring::read() {
  const std::uint64_t there = written_checked() - position_;
  std::uint64_t length = 0;
  if (there >= kLengthBytes) copy_out(position_, std::as_writable_bytes(std::span(&length, 1)));
  if (there < kLengthBytes || length > kMostBytes || padded(length) > there) {
    fail(ErrorKind::kPeerLost,
         "the peer's ring holds a message of impossible length: it is unusable");
  }
  std::vector<std::byte> message(length);
  copy_out(position_ + kLengthBytes, message);
  position_ += padded(length);
  head().read.store(position_, std::memory_order_release);
  return message;
}

void Ring::finish() { head().done.store(++finished_, std::memory_order_release); }

}  // namespace convoy::share
