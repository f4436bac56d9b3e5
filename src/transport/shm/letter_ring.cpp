#include "transport/shm/letter_ring.h"

#include <bit>
#include <cstring>
#include <new>
#include <tuple>

#include "base/error.h"
#include "os/wait.h"

namespace convoy::shm {
namespace {

constexpr std::size_t kRingMask = RingLayout::kCapacity - 1;

template <class Value>
Value value_at(const std::byte* place) {
  Value value;
  std::memcpy(&value, place, sizeof value);
  return value;
}

std::byte* data_of(const Mapping& mapping) { return mapping->data() + RingLayout::kData; }

[[noreturn]] void bad_ring(const char* what) {
  fail(ErrorKind::kInvalidArgument, "its ring of messages holds ", what);
}

// What is the same in all letters.
LetterEntry parse_entry(std::span<const std::byte> entry) {
  if (entry.size() < sizeof(LetterEntry)) bad_ring("a message that is cut off");
  // As whole words: they were just written, and are not put together out of parts again.
  static_assert(std::endian::native == std::endian::little);
  const auto first = value_at<std::uint64_t>(entry.data());
  const auto second = value_at<std::uint64_t>(entry.data() + sizeof first);
  const LetterEntry head{.bytes = static_cast<std::uint32_t>(first),
                         .kind = static_cast<std::uint16_t>(first >> 32),
                         .flags = static_cast<std::uint8_t>(first >> 48),
                         .zero = static_cast<std::uint8_t>(first >> 56),
                         .head_bytes = static_cast<std::uint32_t>(second),
                         .pieces = static_cast<std::uint16_t>(second >> 32),
                         .loan = static_cast<std::uint16_t>(second >> 48)};
  if (head.bytes != entry.size() || head.zero != 0 || head.flags > 3 ||
      head.head_bytes > transport::Letter::kMostHead ||
      head.pieces > transport::Letter::kMostPieces || head.loan > RingLayout::kLoans) {
    bad_ring("a message with impossible numbers");
  }
  return head;
}

}  // namespace

bool parse_plain(std::span<const std::byte> entry, PlainLetter& letter) {
  const LetterEntry head = parse_entry(entry);
  if (head.pieces != 0) return false;
  if (sizeof(LetterEntry) + padded(head.head_bytes) != entry.size() || head.loan != 0 ||
      (head.flags & LetterEntry::kStreams) != 0) {
    bad_ring("a message with an inconsistent length");
  }
  letter.kind = head.kind;
  letter.reply = (head.flags & LetterEntry::kReply) != 0;
  letter.bytes = head.head_bytes;
  letter.data = entry.data() + sizeof(LetterEntry);
  return true;
}

ParsedLetter parse_letter(std::span<const std::byte> entry) {
  const LetterEntry head = parse_entry(entry);
  std::size_t at = sizeof(LetterEntry) + padded(head.head_bytes);
  const std::size_t inline_at = at + head.pieces * sizeof(PieceEntry);
  if (inline_at > entry.size()) bad_ring("a message with an inconsistent length");
  ParsedLetter letter;
  letter.kind = head.kind;
  letter.reply = (head.flags & LetterEntry::kReply) != 0;
  letter.loan = head.loan;
  letter.head = entry.subspan(sizeof(LetterEntry), head.head_bytes);
  std::size_t data = inline_at;
  bool lent = false;
  if (head.pieces != 0) letter.pieces.reserve(head.pieces);
  for (std::size_t i = 0; i < head.pieces; ++i, at += sizeof(PieceEntry)) {
    const auto piece = value_at<PieceEntry>(entry.data() + at);
    if (piece.zero != 0 || piece.how > PieceEntry::kDirect) bad_ring("a piece of unknown kind");
    if (piece.how != PieceEntry::kInline) {
      const bool direct = piece.how == PieceEntry::kDirect;
      const std::uint64_t loan = direct ? piece.segment : head.loan;
      if (loan == 0 || loan > RingLayout::kLoans || piece.bytes > SIZE_MAX / 2 ||
          piece.place + piece.bytes < piece.place ||
          (direct && letter.direct_loan != 0 && letter.direct_loan != loan)) {
        bad_ring("a piece with impossible numbers");
      }
      if (direct) letter.direct_loan = static_cast<std::uint16_t>(loan);
      lent |= !direct;
      letter.large = true;
      letter.pieces.push_back({piece, {}});
      continue;
    }
    if (piece.bytes > entry.size() - data || padded(piece.bytes) > entry.size() - data) {
      bad_ring("a piece longer than its message");
    }
    letter.pieces.push_back({piece, entry.subspan(data, piece.bytes)});
    data += padded(piece.bytes);
  }
  if (data != entry.size()) bad_ring("a message with bytes after its end");
  if ((head.loan != 0 && !lent) || (head.loan != 0 && head.loan == letter.direct_loan)) {
    bad_ring("an empty loan");
  }
  letter.streams = (head.flags & LetterEntry::kStreams) != 0;
  if (letter.streams && (!lent || letter.direct_loan != 0)) bad_ring("an empty stream");
  return letter;
}

RingWriter RingWriter::create(const std::uint64_t& probe) {
  RingWriter writer;
  std::tie(writer.mapping_, writer.fd_) = make_mapping(RingLayout::kBytes, "letters");
  auto* const layout = new (writer.mapping_->data()) RingLayout{};
  layout->magic = RingLayout::kMagic;
  layout->probe_address = reinterpret_cast<std::uintptr_t>(&probe);
  layout->probe_value = probe;
  return writer;
}

// A reader that says it has read what was not written gets nothing more.
bool RingWriter::fits(std::size_t bytes) {
  const auto left = [&] {
    const std::uint64_t used = position_ - seen_read_;
    return used <= RingLayout::kCapacity && bytes <= RingLayout::kCapacity - used;
  };
  if (left()) return true;
  seen_read_ = layout().read.load();
  return left();
}

std::size_t RingWriter::free_bytes() {
  seen_read_ = layout().read.load();
  const std::uint64_t used = position_ - seen_read_;
  return used <= RingLayout::kCapacity ? RingLayout::kCapacity - used : 0;
}

std::span<std::byte> RingWriter::begin(std::size_t entry_bytes) {
  CONVOY_CHECK(entry_bytes <= RingLayout::kMostEntry && entry_bytes % 8 == 0);
  std::size_t at = position_ & kRingMask;
  const std::size_t rest = RingLayout::kCapacity - at;
  const std::size_t skip = rest < entry_bytes ? rest : 0;
  if (!fits(skip + entry_bytes)) return {};
  if (skip != 0) {
    const std::uint32_t mark = LetterEntry::kSkip;
    std::memcpy(data_of(mapping_) + at, &mark, sizeof mark);
    at = 0;
  }
  begun_ = skip + entry_bytes;
  return {data_of(mapping_) + at, entry_bytes};
}

void RingWriter::commit() {
  position_ += begun_;
  layout().written.store(position_, std::memory_order_release);
}

RingReader::RingReader(Mapping mapping) : mapping_(std::move(mapping)) {
  if (mapping_->size() < RingLayout::kBytes || layout().magic != RingLayout::kMagic) {
    fail(ErrorKind::kInvalidArgument, "the memory is not a ring of messages of this version");
  }
}

std::span<const std::byte> RingReader::take(std::span<std::byte> small,
                                            std::vector<std::byte>& large) {
  std::uint64_t position = position_.load(std::memory_order_relaxed);
  const auto advance = [&](std::size_t bytes) {
    position += bytes;
    position_.store(position, std::memory_order_relaxed);
    layout().read.store(position, std::memory_order_release);
  };
  for (;;) {
    std::uint64_t written = seen_written_.load(std::memory_order_relaxed);
    if (position == written) {
      // Sequentially consistent: see Doorbell::knock().
      written = layout().written.load();
      if (written - position > RingLayout::kCapacity) bad_ring("impossible positions");
      if (position == written) return {};
      seen_written_.store(written, std::memory_order_relaxed);
      was_full_ |= written - position >= kMuch;
    }
    const std::size_t there = written - position;
    const std::size_t at = position & kRingMask;
    const std::size_t rest = RingLayout::kCapacity - at;
    const std::byte* const from = data_of(mapping_) + at;
    const auto bytes = value_at<std::uint32_t>(from);  // once: the writer may change it
    if (bytes == LetterEntry::kSkip) {
      if (rest > there) bad_ring("impossible lengths");
      advance(rest);
      continue;
    }
    if (bytes < sizeof(LetterEntry) || bytes % 8 != 0 || bytes > there || bytes > rest ||
        bytes > RingLayout::kMostEntry) {
      bad_ring("impossible lengths");
    }
    std::span<std::byte> to = small.first(bytes <= small.size() ? bytes : 0);
    if (to.empty()) {
      large.resize(bytes);
      to = large;
    }
    // Whoever parses it finds out if the length has changed meanwhile.
    std::memcpy(to.data(), from, bytes);
    advance(bytes);
    return to;
  }
}

bool RingReader::next_is_plain(std::size_t most_bytes, bool reply) const noexcept {
  const std::size_t at = position_.load(std::memory_order_relaxed) & kRingMask;
  if (drained() || RingLayout::kCapacity - at < sizeof(LetterEntry)) return false;
  const auto entry = value_at<LetterEntry>(data_of(mapping_) + at);
  return entry.bytes <= most_bytes && entry.pieces == 0 &&
         ((entry.flags & LetterEntry::kReply) != 0) == reply;
}

bool RingReader::writer_is_blocked(bool drained) noexcept {
  if (!was_full_) return false;
  if (drained) was_full_ = false;
  full_fence();
  return layout().blocked.load(std::memory_order_relaxed) != 0;
}

bool RingReader::release(std::uint16_t loan) noexcept {
  layout().released[loan / 64].fetch_or(std::uint64_t{1} << loan % 64);
  return layout().blocked.load() != 0;
}

}  // namespace convoy::shm
