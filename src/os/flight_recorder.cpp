#include "os/flight_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "base/concat.h"
#include "base/log.h"
#include "os/fork_guard.h"

namespace convoy::flight {
namespace {

std::uint64_t nanoseconds_of(std::chrono::nanoseconds time) {
  return static_cast<std::uint64_t>(time.count());
}
std::uint64_t nanoseconds_of(Clock::time_point when) {
  return nanoseconds_of(when.time_since_epoch());
}

std::optional<std::uint64_t> number_in(const char* name) {
  const char* const text = std::getenv(name);
  if (!text) return std::nullopt;
  std::uint64_t value = 0;
  const char* const end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value > 0x7fff'ffff) return std::nullopt;
  return value;
}

std::size_t memory_bytes() {
  const std::size_t page = page_size();
  return (sizeof(Ring) + page - 1) / page * page;
}

// One program at a time can be the rank that the launcher started: a script may start several.
bool claim(int fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return fcntl(fd, F_SETLK, &lock) == 0;
}

// The launcher's memory, if this process has inherited it.
Segment inherited_memory() {
  const char* const text = std::getenv(kFlightFdVariable);
  if (!text) return {};
  int fd = -1;
  std::uint64_t inode = 0;
  const char* const end = text + std::strlen(text);
  const auto number = std::from_chars(text, end, fd);
  if (number.ec != std::errc() || fd < 0 || number.ptr == end || *number.ptr != ':') return {};
  const auto rest = std::from_chars(number.ptr + 1, end, inode);
  struct stat info {};
  if (rest.ec != std::errc() || fstat(fd, &info) != 0 || info.st_ino != inode) return {};
  if (!claim(fd)) return {};
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  Segment memory = Segment::adopt(UniqueFd(fd), memory_bytes());
  // A program before this one may have used it: its places and groups are not ours.
  if (reinterpret_cast<const Ring*>(memory.data())->head.pid.load() != 0) {
    std::memset(memory.data(), 0, memory.size());
  }
  return memory;
}

Segment process_memory() {
  const char* const wish = std::getenv("CONVOY_FLIGHT");
  if (wish && std::string_view(wish) == "off") return {};
  try {
    if (auto memory = inherited_memory()) return memory;
    return make_memory(concat("pid-", getpid()), static_cast<int>(number_in("RANK").value_or(0)));
  } catch (const std::exception& error) {
    log_warn("no flight record is written: ", error.what());
    return {};
  }
}

}  // namespace

std::string memory_label(const std::string& job, int rank) {
  return concat("flight:", job, ":", rank);
}

Segment make_memory(const std::string& job, int rank) {
  return Segment::create(sizeof(Ring), memory_label(job, rank));
}

std::string flight_environment(int fd) {
  return concat(kFlightFdVariable, "=", fd, ":", Segment::key_of(fd).inode);
}

Recorder& Recorder::instance() {
  static auto* const recorder = new Recorder(process_memory());
  return *recorder;
}

Recorder::Recorder(Segment memory)
    : memory_(std::move(memory)),
      ring_(memory_.size() >= sizeof(Ring) ? reinterpret_cast<Ring*>(memory_.data()) : nullptr),
      generation_(fork_generation()) {
  if (!ring_) return;
  Head& head = ring_->head;
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  head.pid.store(static_cast<std::uint64_t>(getpid()), std::memory_order_release);
  head.rank.store(number_in("RANK").value_or(~std::uint64_t{0}) + 1, std::memory_order_release);
  head.size.store(number_in("WORLD_SIZE").value_or(0), std::memory_order_release);
  head.steady.store(nanoseconds_of(Clock::now()), std::memory_order_release);
  head.wall.store(nanoseconds_of(wall), std::memory_order_release);
  head.magic.store(kMagic, std::memory_order_release);
}

std::uint64_t Recorder::add_group(const GroupMember& member) noexcept {
  if (!ring_ || fork_generation() != generation_) return 0;
  const std::lock_guard lock(mutex_);
  // The one that has been free for longest, so that names last.
  for (std::size_t tried = 0; tried < kGroups; ++tried) {
    const std::size_t slot = next_group_;
    next_group_ = (next_group_ + 1) % kGroups;
    if (taken_[slot]) continue;
    taken_[slot] = true;
    Group& group = ring_->groups[slot];
    group.id.store(0, std::memory_order_release);
    group.rank.store(static_cast<std::uint64_t>(member.rank), std::memory_order_release);
    group.size.store(static_cast<std::uint64_t>(member.size), std::memory_order_release);
    group.name.store(Text<64>::pack(member.name));
    for (std::size_t i = 0; i < kMembers; i += 2) {
      const auto pid = [&](std::size_t r) {
        return r < member.processes.size() ? static_cast<std::uint32_t>(member.processes[r]) : 0U;
      };
      group.members[i / 2].store(pid(i) | std::uint64_t{pid(i + 1)} << 32,
                                 std::memory_order_release);
    }
    const std::uint64_t id = slot + kGroups * ++uses_[slot];
    group.id.store(id, std::memory_order_release);
    return id;
  }
  return 0;
}

// What was written of it stays until the place is needed: its last operations may be what somebody
// wants to see.
void Recorder::remove_group(std::uint64_t id) noexcept {
  if (id == 0) return;
  const std::lock_guard lock(mutex_);
  taken_[id % kGroups] = false;
}

// A site gets its number without a lock: its place in an open hash table.
std::uint64_t Recorder::site_of(const CallSite& where) noexcept {
  if (!where.file) return 0;
  constexpr std::size_t kProbes = 16;
  const std::uint64_t key =
      reinterpret_cast<std::uintptr_t>(where.file) ^ (std::uint64_t{where.line} << 48);
  std::size_t at = (key * 0x9e3779b97f4a7c15) >> 55;
  static_assert(kSites == std::size_t{1} << (64 - 55));
  for (std::size_t probe = 0; probe < kProbes; ++probe, at = (at + 1) % kSites) {
    if (at == 0) continue;
    std::uint64_t seen = keys_[at].load(std::memory_order_relaxed);
    if (seen == key) return at;
    if (seen != 0) continue;
    if (!keys_[at].compare_exchange_strong(seen, key, std::memory_order_relaxed)) {
      if (seen == key) return at;
      continue;
    }
    Site& site = ring_->sites[at];
    const std::string_view file = where.file;
    constexpr std::size_t kFile = 80;
    site.line.store(where.line, std::memory_order_release);
    site.function.store(Text<32>::pack(where.function ? where.function : ""));
    site.file.store(Text<80>::pack(file.substr(file.size() > kFile ? file.size() - kFile : 0)));
    site.ready.store(1, std::memory_order_release);
    return at;
  }
  return 0;
}

// All stores are of release order, which costs nothing on x86: who reads one of them also sees that
// the record was being written.
Recorder::Ticket Recorder::begin(const Operation& operation, const CallSite& where,
                                 Clock::time_point now, bool started) noexcept {
  if (!ring_) return 0;
  constexpr auto kRelease = std::memory_order_release;
  const std::uint64_t ticket = ring_->head.next.fetch_add(1, std::memory_order_relaxed) + 1;
  Record& record = ring_->records[(ticket - 1) % kRecords];
  const std::uint64_t time = nanoseconds_of(now);
  // A thread that was kept from running in the middle of this function for a whole round of the
  // ring still has the record, or a later one has written it: then this operation is left out,
  // because two writers would leave parts of both.
  std::uint64_t before = record.word.load(std::memory_order_relaxed);
  if (before % 2 != 0 || before > 2 * ticket ||
      !record.word.compare_exchange_strong(before, 2 * ticket + 1, std::memory_order_acq_rel,
                                           std::memory_order_relaxed)) {
    return 0;
  }
  record.state.store(static_cast<std::uint64_t>(started ? State::kStarted : State::kScheduled),
                     kRelease);
  record.started.store(started ? time : 0, kRelease);
  record.ended.store(0, kRelease);
  record.created.store(time, kRelease);
  record.group.store(operation.group, kRelease);
  record.number.store(operation.number, kRelease);
  record.place.store(site_of(where) << 32 | static_cast<std::uint32_t>(operation.peer + 1),
                     kRelease);
  record.input.store(operation.input, kRelease);
  record.output.store(operation.output, kRelease);
  record.bytes.store(operation.bytes, kRelease);
  record.message.store(operation.message ? 1 : 0, kRelease);
  record.operation.store(operation.name);
  record.type.store(operation.type);
  record.word.store(2 * ticket, kRelease);
  return ticket;
}

Record* Recorder::find(Ticket ticket) noexcept {
  if (ticket == 0) return nullptr;
  Record& record = ring_->records[(ticket - 1) % kRecords];
  return record.word.load(std::memory_order_relaxed) == 2 * ticket ? &record : nullptr;
}

void Recorder::start(Ticket ticket, Clock::time_point now) noexcept {
  Record* const record = find(ticket);
  if (!record) return;
  record->started.store(nanoseconds_of(now), std::memory_order_release);
  record->state.store(static_cast<std::uint64_t>(State::kStarted), std::memory_order_release);
}

void Recorder::end(Ticket ticket, State state, Clock::time_point now) noexcept {
  Record* const record = find(ticket);
  if (!record) return;
  record->ended.store(nanoseconds_of(now), std::memory_order_release);
  record->state.store(static_cast<std::uint64_t>(state), std::memory_order_release);
}

}  // namespace convoy::flight
