// The shared-memory endpoint: what is sent.
#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"
#include "transport/shm/copy.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

using transport::Letter;
using transport::SendResult;
using transport::Sent;

namespace {

// Pieces up to this size travel in the ring, so many of them together.
constexpr std::size_t kMostInlinePiece = 1024;
constexpr std::size_t kMostInline = 8192;
// From here on the receiver copies while the sender still does, so much at a time.
constexpr std::size_t kLeastStream = std::size_t{128} << 10;
constexpr std::size_t kStreamStep = std::size_t{64} << 10;
// Pieces in one block begin at multiples of this.
constexpr std::size_t kPieceAlignment = 64;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

void write_head(std::span<std::byte> to, const Letter& letter, std::size_t entry_bytes,
                std::uint16_t loan, bool streams = false) {
  // As whole words: one that is read soon after it was written in parts stalls the core.
  const std::uint64_t flags =
      (letter.reply ? LetterEntry::kReply : 0) | (streams ? LetterEntry::kStreams : 0);
  const std::array<std::uint64_t, 2> entry{
      entry_bytes | std::uint64_t{letter.kind} << 32 | flags << 48,
      letter.head.size() | std::uint64_t{letter.pieces.size()} << 32 | std::uint64_t{loan} << 48};
  static_assert(sizeof entry == sizeof(LetterEntry));
  static_assert(std::endian::native == std::endian::little);
  std::memcpy(to.data(), entry.data(), sizeof entry);
  letter.head.write(to.subspan(sizeof entry, letter.head.size()));
}

}  // namespace

// How the pieces of a letter will travel.
struct ShmRemote::Plan {
  std::array<std::uint8_t, Letter::kMostPieces> how;  // PieceEntry::How
  std::size_t entry_bytes = sizeof(LetterEntry);
  std::size_t block_bytes = 0;  // of what is lent, with gaps
  std::size_t lent_bytes = 0;
  std::size_t direct_bytes = 0;  // of what is read where it is
  int loan = -1;
  int direct_loan = -1;
  Location block;

  std::size_t loaned_bytes() const { return lent_bytes + direct_bytes; }
  bool streams() const { return direct_bytes == 0 && lent_bytes >= kLeastStream; }
  std::size_t first_piece() const { return streams() ? StreamHead::kBytes : 0; }
};

ShmRemote::ShmRemote(ShmEndpoint& owner, const transport::Address& address, const ProcessInfo& info,
                     std::uint32_t number)
    : Remote(address, concat("pid ", info.pid)), owner_(owner), info_(info), number_(number) {}

void ShmRemote::cut() noexcept {
  if (!owner_.home_.is_here() || lost_.exchange(true)) return;
  {
    const std::scoped_lock lock(send_mutex_);
    for (const auto& link : links_) link.peer->send_bye();
  }
  owner_.happen({.type = Event::Type::kCut, .remote = this});
}

SendResult ShmRemote::try_send(const Letter& letter, Sent on_sent) {
  owner_.require_home();
  if (lost()) return SendResult::kLost;
  if (letter.pieces.empty() && letter.head.size() <= Letter::kMostHead) {
    const SendResult result = send_plain(letter);
    if (result == SendResult::kSent && on_sent) on_sent(nullptr);
    return result;
  }
  transport::check_letter(letter, owner_.options_.quota);
  Plan plan;
  std::size_t inline_bytes = 0;
  const bool may_read = std::any_of(letter.pieces.begin(), letter.pieces.end(),
                                    [](const auto& piece) { return piece.stays; }) &&
                        can_be_read();
  for (std::size_t i = 0; i < letter.pieces.size(); ++i) {
    const std::size_t bytes = letter.pieces[i].bytes.size();
    if (bytes <= kMostInlinePiece && inline_bytes + padded(bytes) <= kMostInline) {
      plan.how[i] = PieceEntry::kInline;
      inline_bytes += padded(bytes);
      continue;
    }
    if (letter.pieces[i].stays && may_read && bytes >= owner_.options_.least_direct) {
      plan.how[i] = PieceEntry::kDirect;
      plan.direct_bytes += bytes;
    } else {
      plan.how[i] = PieceEntry::kLent;
      plan.lent_bytes += bytes;
      plan.block_bytes += aligned(bytes);
    }
  }
  plan.entry_bytes +=
      padded(letter.head.size()) + letter.pieces.size() * sizeof(PieceEntry) + inline_bytes;
  const SendResult result =
      plan.loaned_bytes() != 0 ? send_large(letter, plan, on_sent) : send_small(letter, plan);
  if (result != SendResult::kSent) return result;
  bell_->announce_letter(letter.reply);
  if (on_sent) on_sent(nullptr);  // unless the loan has it
  return result;
}

bool ShmRemote::can_be_read() {
  const std::scoped_lock lock(send_mutex_);
  return writer_ && writer_.layout().direct.load(std::memory_order_acquire) == RingLayout::kAllowed;
}

// The first letter makes the ring. False: it could not be passed on now.
bool ShmRemote::make_ring() {
  if (writer_) return true;
  RingWriter made = RingWriter::create(owner_.probe_);
  if (links_.empty() || !links_[0].peer->try_note(static_cast<std::uint64_t>(NoteType::kRing),
                                                  made.mapping()->size(), made.fd())) {
    return false;
  }
  made.close_descriptor();
  writer_ = std::move(made);
  loans_.make();
  return true;
}

void ShmRemote::write_entry(std::span<std::byte> to, const Letter& letter, const Plan& plan) {
  write_head(to, letter, plan.entry_bytes, static_cast<std::uint16_t>(plan.loan + 1),
             plan.streams());
  std::byte* at = to.data() + sizeof(LetterEntry) + padded(letter.head.size());
  std::byte* inlined = at + letter.pieces.size() * sizeof(PieceEntry);
  std::uint64_t offset = plan.block.offset + plan.first_piece();
  for (std::size_t i = 0; i < letter.pieces.size(); ++i, at += sizeof(PieceEntry)) {
    const auto bytes = letter.pieces[i].bytes;
    PieceEntry piece{
        .bytes = bytes.size(), .how = plan.how[i], .zero = 0, .segment = 0, .place = 0};
    if (piece.how == PieceEntry::kInline) {
      if (!bytes.empty()) std::memcpy(inlined, bytes.data(), bytes.size());
      inlined += padded(bytes.size());
    } else if (piece.how == PieceEntry::kLent) {
      piece.segment = plan.block.segment;
      piece.place = offset;
      offset += aligned(bytes.size());
    } else {
      piece.segment = static_cast<std::uint64_t>(plan.direct_loan) + 1;
      piece.place = reinterpret_cast<std::uintptr_t>(bytes.data());
    }
    std::memcpy(at, &piece, sizeof piece);
  }
}

// Announces that this side waits for room, so that the reader knocks; send_mutex_ is held. What
// came free meanwhile is found by the next look.
void ShmRemote::refuse(std::size_t ring_bytes, std::size_t loan_bytes) {
  refused_.any = true;
  to_look_.store(true);
  refused_.ring_bytes = std::max(refused_.ring_bytes, ring_bytes);
  refused_.loan_bytes = std::max(refused_.loan_bytes, loan_bytes);
  if (writer_) writer_.layout().blocked.store(1);
}

bool ShmRemote::has_room() {
  if (!writer_) return !links_.empty();
  // More than what was refused: or there would be a call for every letter.
  if (writer_.free_bytes() < std::max(2 * refused_.ring_bytes, RingLayout::kCapacity / 2))
    return false;
  if (refused_.loan_bytes == 0) return true;
  collect();
  return loans_.lent_bytes() + refused_.loan_bytes <= owner_.options_.quota && loans_.has_free();
}

bool ShmRemote::look_at_sent() {
  if (!to_look_.load()) return false;
  const std::scoped_lock lock(send_mutex_);
  if (writer_ && loans_.lent_bytes() != 0) collect();
  if (!refused_.any && loans_.lent_bytes() == 0) to_look_.store(false);
  if (!refused_.any || !has_room()) return false;
  refused_ = {};
  if (writer_) writer_.layout().blocked.store(0);
  return true;
}

// Room for an entry, or an empty span; send_mutex_ is held.
std::span<std::byte> ShmRemote::begin_small(std::size_t entry_bytes) {
  std::span<std::byte> to;
  if (make_ring()) to = writer_.begin(entry_bytes);
  if (!to.empty()) return to;
  refuse(entry_bytes, 0);
  // Once more, now that the reader knows; or nobody might come by again.
  if (writer_) to = writer_.begin(entry_bytes);
  if (!writer_) owner_.retry_soon(*this);
  return to;
}

// A letter without pieces: the quickest way.
SendResult ShmRemote::send_plain(const Letter& letter) {
  const std::size_t entry_bytes = sizeof(LetterEntry) + padded(letter.head.size());
  {
    const std::scoped_lock lock(send_mutex_);
    if (lost()) return SendResult::kLost;
    const auto to = begin_small(entry_bytes);
    if (to.empty()) return SendResult::kWouldBlock;
    write_head(to, letter, entry_bytes, 0);
    writer_.commit();
  }
  bell_->announce_letter(letter.reply);
  return SendResult::kSent;
}

SendResult ShmRemote::send_small(const Letter& letter, const Plan& plan) {
  const std::scoped_lock lock(send_mutex_);
  if (lost()) return SendResult::kLost;
  const auto to = begin_small(plan.entry_bytes);
  if (to.empty()) return SendResult::kWouldBlock;
  write_entry(to, letter, plan);
  writer_.commit();
  return SendResult::kSent;
}

SendResult ShmRemote::send_large(const Letter& letter, const Plan& planned, Sent& on_sent) {
  Plan plan = planned;
  {
    const std::scoped_lock lock(send_mutex_);
    if (lost()) return SendResult::kLost;
    const bool made = make_ring();
    if (!made || !reserve_loans(plan)) {
      refuse(plan.entry_bytes, plan.loaned_bytes());
      if (!made) owner_.retry_soon(*this);
      if (!made || !reserve_loans(plan)) return SendResult::kWouldBlock;
    }
  }
  // The copy is made without a lock: others go on sending.
  std::byte* block = nullptr;
  try {
    if (plan.block_bytes != 0) {
      {
        auto heap = owner_.heap_.lock();
        heap->sweep();
        const auto piece = heap->arena->allocate(plan.first_piece() + plan.block_bytes);
        plan.block = piece.location;
        block = piece.data;
      }
      std::byte* at = block;
      if (plan.streams()) new (block) StreamHead;
      for (std::size_t i = 0; i < letter.pieces.size(); ++i) {
        if (plan.how[i] != PieceEntry::kLent || plan.streams()) continue;
        const auto bytes = letter.pieces[i].bytes;
        copy_for_others(at, bytes.data(), bytes.size());
        at += aligned(bytes.size());
      }
    }
  } catch (...) {
    const std::scoped_lock lock(send_mutex_);
    drop_loans(plan);
    throw;
  }
  std::unique_lock lock(send_mutex_);
  if (lost() || !writer_) {
    drop_loans(plan);
    return SendResult::kLost;
  }
  std::span<std::byte> to;
  if (plan.block_bytes == 0 || pass_segment(plan.block.segment)) {
    to = writer_.begin(plan.entry_bytes);
    if (to.empty()) {
      refuse(plan.entry_bytes, plan.loaned_bytes());
      to = writer_.begin(plan.entry_bytes);
    }
  } else {
    refuse(plan.entry_bytes, plan.loaned_bytes());
    owner_.retry_soon(*this);
  }
  if (to.empty()) {
    drop_loans(plan);
    return SendResult::kWouldBlock;
  }
  write_entry(to, letter, plan);
  if (plan.loan >= 0) {
    Loan& loan = loans_.at(plan.loan);
    loan.state = plan.streams() ? Loan::State::kStreaming : Loan::State::kLent;
    if (!plan.streams()) loan.block = plan.block;
  }
  if (plan.direct_loan >= 0) {
    Loan& loan = loans_.at(plan.direct_loan);
    loan.state = Loan::State::kLent;
    loan.on_sent = std::exchange(on_sent, nullptr);
  }
  writer_.commit();
  if (!plan.streams()) return SendResult::kSent;
  const Mapping ring = writer_.mapping();
  const std::shared_ptr<Peer> peer = links_.at(0).peer;
  lock.unlock();
  bell_->announce_letter(letter.reply);
  stream(letter, plan, block);
  lock.lock();
  end_stream(plan, ring, peer);
  return SendResult::kSent;
}

// The loan was not free until now, whatever has happened to the other side; send_mutex_ is held.
void ShmRemote::end_stream(const Plan& plan, const Mapping& ring,
                           const std::shared_ptr<Peer>& peer) {
  Loan& loan = loans_.at(plan.loan);
  if (writer_ && !loan.given_back) {
    loan.state = Loan::State::kLent;
    loan.block = plan.block;
    return;
  }
  if (auto heap = owner_.heap_.lock(); loan.given_back) {
    heap->arena->free(plan.block);
  } else {
    // The remote is gone. It may be read for as long as the other process lives.
    heap->limbo.push_back({ring, peer, {{static_cast<std::uint16_t>(plan.loan), plan.block}}});
    heap->sweep();
  }
  loans_.free(loan);
  if (refused_.any && !lost()) owner_.retry_soon(*this);  // who waits for room was not told
}

// Without the lock: copies while the receiver does.
void ShmRemote::stream(const Letter& letter, const Plan& plan, std::byte* block) {
  auto& ready = std::launder(reinterpret_cast<StreamHead*>(block))->ready;
  std::byte* const begin = block + StreamHead::kBytes;
  std::byte* at = begin;
  for (std::size_t i = 0; i < letter.pieces.size(); ++i) {
    if (plan.how[i] != PieceEntry::kLent) continue;
    const auto bytes = letter.pieces[i].bytes;
    for (std::size_t done = 0; done < bytes.size(); done += kStreamStep) {
      const std::size_t step = std::min(kStreamStep, bytes.size() - done);
      copy_for_others(at + done, bytes.data() + done, step);
      ready.store(static_cast<std::uint64_t>(at + done + step - begin), std::memory_order_release);
    }
    at += aligned(bytes.size());
  }
  // The receiver may have given up to look.
  bell_->knock(letter.reply);
}

// --- loans; send_mutex_ is held ---

bool ShmRemote::reserve_loans(Plan& plan) {
  collect();
  if (loans_.lent_bytes() + plan.loaned_bytes() > owner_.options_.quota) return false;
  if (plan.lent_bytes != 0) plan.loan = loans_.reserve(plan.lent_bytes);
  if (plan.direct_bytes != 0) plan.direct_loan = loans_.reserve(plan.direct_bytes);
  if (plan.loan >= 0 || plan.direct_loan >= 0) to_look_.store(true);
  if ((plan.loan >= 0) == (plan.lent_bytes != 0) &&
      (plan.direct_loan >= 0) == (plan.direct_bytes != 0)) {
    return true;
  }
  drop_loans(plan);
  return false;
}

void ShmRemote::drop_loans(Plan& plan) {
  for (int* const number : {&plan.loan, &plan.direct_loan}) {
    if (*number < 0) continue;
    loans_.free(loans_.at(std::exchange(*number, -1)));
  }
  if (plan.block) owner_.heap_.lock()->arena->free(plan.block);
  plan.block = {};
}

bool ShmRemote::pass_segment(SegmentId id) {
  if (passed_.contains(id)) return true;
  bool passed = false;
  owner_.heap_.lock()->arena->for_each_segment([&](SegmentId other, const Segment& segment) {
    if (other != id) return;
    passed = links_[0].peer->try_note(static_cast<std::uint64_t>(NoteType::kSegment),
                                      segment.size(), segment.fd(), note_id(id));
  });
  if (passed) passed_.insert(id);
  return passed;
}

void ShmRemote::collect() {
  if (!writer_) return;
  SentList sent;
  RingLayout& layout = writer_.layout();
  for (std::size_t w = 0; w < layout.released.size(); ++w) {
    if (layout.released[w].load(std::memory_order_relaxed) == 0) continue;
    for (std::uint64_t set = layout.released[w].exchange(0); set != 0; set &= set - 1) {
      Loan& loan = loans_.at(64 * static_cast<int>(w) + std::countr_zero(set));
      if (loan.state == Loan::State::kStreaming && !loan.given_back) {
        loan.given_back = true;
        continue;
      }
      if (loan.state != Loan::State::kLent) {
        owner_.happen(
            {.type = Event::Type::kCut, .text = "gave back what was not lent", .remote = this});
        continue;
      }
      if (loan.block) owner_.heap_.lock()->arena->free(loan.block);
      if (loan.on_sent) sent.emplace_back(std::move(loan.on_sent), true);
      loans_.free(loan);
    }
  }
  if (sent.empty()) return;
  owner_.happen({.type = Event::Type::kSent, .remote = this, .sent = std::move(sent)});
}

}  // namespace convoy::shm
