#include "share/version_board.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.h"

namespace convoy::share {
namespace {

constexpr std::size_t kAlignment = 4096;
constexpr std::uint64_t kBufferBits = 8;
static_assert(kMostBuffers <= (1U << kBufferBits));

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct BoardOffsets {
  std::size_t states, readers, layout, data, stride, end;

  BoardOffsets(std::size_t buffers, std::size_t buffer_bytes, std::size_t layout_bytes)
      : states(sizeof(BoardHead)),
        readers((states + buffers * sizeof(BoardBuffer) + 63) / 64 * 64),
        layout(readers + kMostReaders * sizeof(BoardReader)),
        data(aligned(layout + layout_bytes)),
        stride(aligned(std::max<std::size_t>(buffer_bytes, 1))),
        end(data + buffers * stride) {}
};

std::uint64_t newest_word(std::uint64_t version, std::size_t buffer) {
  return version << kBufferBits | buffer;
}
std::size_t buffer_of(std::uint64_t newest) { return newest & ((1U << kBufferBits) - 1); }
std::uint64_t version_of(std::uint64_t newest) { return newest >> kBufferBits; }

Deadline sooner(const Deadline& a, const Deadline& b) { return std::min(a, b); }

}  // namespace

std::size_t VersionBoard::bytes_for(std::size_t buffers, std::size_t buffer_bytes,
                                    std::size_t layout_bytes) {
  if (buffers < 2 || buffers > kMostBuffers) {
    fail(ErrorKind::kInvalidArgument, "Published: ", buffers, " buffers; it can have 2 to ",
         kMostBuffers);
  }
  if (buffer_bytes > SIZE_MAX / (2 * kMostBuffers) || layout_bytes > SIZE_MAX / 4) {
    fail(ErrorKind::kResource, "Published: ", buffer_bytes, " bytes are too large for any memory");
  }
  return BoardOffsets(buffers, buffer_bytes, layout_bytes).end;
}

VersionBoard VersionBoard::create(std::span<std::byte> memory, std::size_t buffers,
                                  std::size_t buffer_bytes, std::string_view layout) {
  CONVOY_CHECK(memory.size() >= bytes_for(buffers, buffer_bytes, layout.size()));
  const BoardOffsets at(buffers, buffer_bytes, layout.size());
  std::memset(memory.data(), 0, at.end);
  auto* const head = new (memory.data()) BoardHead;
  for (std::size_t i = 0; i < buffers; ++i) {
    new (memory.data() + at.states + i * sizeof(BoardBuffer)) BoardBuffer;
  }
  for (std::size_t i = 0; i < kMostReaders; ++i) {
    new (memory.data() + at.readers + i * sizeof(BoardReader)) BoardReader;
  }
  std::memcpy(memory.data() + at.layout, layout.data(), layout.size());
  head->buffers = static_cast<std::uint32_t>(buffers);
  head->buffer_bytes = buffer_bytes;
  head->layout_bytes = layout.size();
  head->layout_offset = at.layout;
  head->data_offset = at.data;
  head->domain = own_domain();
  std::atomic_ref(head->magic).store(BoardHead::kMagic, std::memory_order_release);
  return open(memory);
}

VersionBoard VersionBoard::open(std::span<std::byte> memory) {
  const auto refuse = [] {
    fail(ErrorKind::kInvalidArgument,
         "this is not a handle of published tensors of this version: refused");
  };
  if (memory.size() < sizeof(BoardHead)) refuse();
  auto* const head = reinterpret_cast<BoardHead*>(memory.data());
  if (std::atomic_ref(head->magic).load(std::memory_order_acquire) != BoardHead::kMagic) refuse();
  const std::size_t buffers = head->buffers, bytes = head->buffer_bytes;
  const std::size_t layout_bytes = head->layout_bytes;
  if (buffers < 2 || buffers > kMostBuffers || bytes > memory.size() ||
      layout_bytes > memory.size()) {
    refuse();
  }
  const BoardOffsets at(buffers, bytes, layout_bytes);
  if (at.end > memory.size() || head->layout_offset != at.layout || head->data_offset != at.data) {
    refuse();
  }
  VersionBoard board;
  board.domain_ = head->domain;
  require_own_domain(board.domain_, "Published");
  board.head_ = head;
  board.states_ = reinterpret_cast<BoardBuffer*>(memory.data() + at.states);
  board.readers_ = reinterpret_cast<BoardReader*>(memory.data() + at.readers);
  board.data_ = memory.data() + at.data;
  board.buffers_ = buffers;
  board.buffer_bytes_ = bytes;
  board.stride_ = at.stride;
  board.layout_ = {reinterpret_cast<const char*>(memory.data()) + at.layout, layout_bytes};
  return board;
}

ProcessWord VersionBoard::self() const {
  require_own_domain(domain_, "Published");
  return own_process_word();
}

std::uint64_t VersionBoard::version() const {
  return version_of(head_->newest.load(std::memory_order_acquire));
}

bool VersionBoard::wait_newer(std::uint64_t version, const Deadline& deadline) const {
  const WaitPolicy policy{.spins = 0, .yields = 0};
  const auto newer = [&](std::uint32_t) { return this->version() > version; };
  for (;;) {
    const auto slice = sooner(deadline, Deadline::after(kLookAtDeaths));
    if (wait_until(head_->news, policy, slice, newer)) return true;
    if (deadline.expired()) return false;
    if (is_dead(writer(), domain_)) return newer(0);
  }
}

std::size_t VersionBoard::enter() const {
  const ProcessWord me = self();
  for (int pass = 0; pass < 2; ++pass) {
    for (std::size_t i = 0; i < kMostReaders; ++i) {
      BoardReader& reader = readers_[i];
      ProcessWord seen = reader.process.load(std::memory_order_acquire);
      // The second time slots of the dead will do.
      if (seen != 0 && (pass == 0 || !is_dead(seen, domain_))) continue;
      if (!reader.process.compare_exchange_strong(seen, me)) continue;
      for (auto& pins : reader.pins) pins.store(0);
      return i;
    }
  }
  fail(ErrorKind::kResource, "published tensors have ", kMostReaders,
       " readers already, which is the limit");
}

void VersionBoard::leave(std::size_t slot) const noexcept { readers_[slot].process.store(0); }

std::optional<VersionBoard::Pinned> VersionBoard::pin(std::size_t slot) const {
  auto newest = head_->newest.load();
  for (;;) {
    if (version_of(newest) == 0) return std::nullopt;
    const std::size_t buffer = buffer_of(newest);
    CONVOY_CHECK(buffer < buffers_);
    auto& pins = readers_[slot].pins[buffer];
    pins.fetch_add(1);
    const auto again = head_->newest.load();
    if (again == newest) {
      const auto when = states_[buffer].published_ns.load(std::memory_order_relaxed);
      return Pinned{buffer, version_of(newest),
                    std::chrono::steady_clock::time_point(std::chrono::nanoseconds(when))};
    }
    pins.fetch_sub(1);
    newest = again;
  }
}

void VersionBoard::unpin(std::size_t slot, std::size_t buffer) const noexcept {
  readers_[slot].pins[buffer].fetch_sub(1);
}

void VersionBoard::become_writer() const {
  const ProcessWord me = self();
  ProcessWord seen = writer();
  if (seen != me) {
    if (seen != 0 && !is_dead(seen, domain_)) {
      fail(ErrorKind::kInvalidArgument, "publish: these tensors are published by pid ",
           pid_of(seen), ", which runs; there is one writer");
    }
    if (!head_->writer.compare_exchange_strong(seen, me)) {
      fail(ErrorKind::kInvalidArgument, "publish: pid ", pid_of(seen),
           " became the writer at the same time; there can be only one");
    }
  }
  // The writer before may have ended in the middle of it.
  ProcessWord busy = 0;
  if (head_->writing.compare_exchange_strong(busy, me)) return;
  if (busy == me || !is_dead(busy, domain_) || !head_->writing.compare_exchange_strong(busy, me)) {
    fail(ErrorKind::kInvalidArgument, "publish: another thread of pid ", pid_of(busy),
         " is publishing these tensors right now");
  }
}

bool VersionBoard::is_pinned(std::size_t buffer) const {
  return std::any_of(readers_, readers_ + kMostReaders, [&](const BoardReader& reader) {
    return reader.process.load() != 0 && reader.pins[buffer].load() != 0;
  });
}

std::optional<std::size_t> VersionBoard::find_free() const {
  const auto newest = head_->newest.load();
  const std::size_t current = buffer_of(newest);
  for (std::size_t i = 1; i <= buffers_; ++i) {
    const std::size_t buffer = (current + i) % buffers_;
    if (buffer == current && version_of(newest) != 0) continue;
    if (!is_pinned(buffer)) return buffer;
  }
  return std::nullopt;
}

void VersionBoard::drop_dead() const {
  for (std::size_t i = 0; i < kMostReaders; ++i) {
    ProcessWord seen = readers_[i].process.load();
    if (seen != 0 && is_dead(seen, domain_)) readers_[i].process.compare_exchange_strong(seen, 0);
  }
}

std::vector<ProcessWord> VersionBoard::holders() const {
  std::vector<ProcessWord> found;
  for (std::size_t i = 0; i < kMostReaders; ++i) {
    const ProcessWord process = readers_[i].process.load();
    const auto& pins = readers_[i].pins;
    if (process != 0 &&
        std::any_of(pins.begin(), pins.end(), [](const auto& word) { return word.load() != 0; })) {
      found.push_back(process);
    }
  }
  return found;
}

std::size_t VersionBoard::begin(const Deadline& deadline) const {
  become_writer();
  try {
    if (const auto buffer = find_free()) return *buffer;
    for (;;) {
      drop_dead();
      if (const auto buffer = find_free()) return *buffer;
      if (deadline.expired()) break;
      // No event tells of a pin that is gone: readers would have to look for us each time.
      WaitWord nothing;
      wait_until(nothing, {.spins = 0, .yields = 0},
                 sooner(deadline, Deadline::after(std::chrono::milliseconds(1))),
                 [](std::uint32_t) { return false; });
    }
    std::string pids;
    for (const ProcessWord holder : holders())
      pids += concat(pids.empty() ? "" : ", ", pid_of(holder));
    fail(ErrorKind::kResource, "publish: all ", buffers_, " buffers are held by readers (pid ",
         pids, "); nothing was published. Give Published more buffers, or drop snapshots sooner");
  } catch (...) {
    give_up();
    throw;
  }
}

std::uint64_t VersionBoard::publish(std::size_t buffer) const {
  const std::uint64_t version = this->version() + 1;
  states_[buffer].version.store(version, std::memory_order_relaxed);
  states_[buffer].published_ns.store(std::chrono::steady_clock::now().time_since_epoch().count(),
                                     std::memory_order_relaxed);
  head_->newest.store(newest_word(version, buffer));
  head_->news.store_and_wake(static_cast<std::uint32_t>(version));
  head_->writing.store(0, std::memory_order_release);
  return version;
}

void VersionBoard::give_up() const noexcept { head_->writing.store(0, std::memory_order_release); }

}  // namespace convoy::share
