#include "os/flight_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <new>
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
  const auto bytes = static_cast<std::size_t>(info.st_size);
  if (bytes < sizeof(Ring)) return {};
  Segment memory = Segment::adopt(UniqueFd(fd), bytes);
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

// A thread that was kept from running in the middle of writing for a whole round of the ring still
// has the record, or a later one has written it: then (false) this operation is left out, because
// two writers would leave parts of both.
bool claim(RecordHead& record, std::uint64_t ticket) {
  std::uint64_t before = record.word.load(std::memory_order_relaxed);
  return before % 2 == 0 && before <= 2 * ticket &&
         record.word.compare_exchange_strong(before, 2 * ticket + 1, std::memory_order_acq_rel,
                                             std::memory_order_relaxed);
}

// All stores are of release order, which costs nothing on x86: who reads one of them also sees that
// the record was being written.
constexpr auto kRelease = std::memory_order_release;

void write_head(RecordHead& record, std::uint64_t group, std::uint64_t number, std::uint64_t place,
                Clock::time_point now, bool started) {
  const std::uint64_t time = nanoseconds_of(now);
  record.state.store(static_cast<std::uint64_t>(started ? State::kStarted : State::kScheduled),
                     kRelease);
  record.started.store(started ? time : 0, kRelease);
  record.ended.store(0, kRelease);
  record.created.store(time, kRelease);
  record.group.store(group, kRelease);
  record.number.store(number, kRelease);
  record.place.store(place, kRelease);
}

void write_start(RecordHead& record, Clock::time_point now) {
  record.started.store(nanoseconds_of(now), kRelease);
  record.state.store(static_cast<std::uint64_t>(State::kStarted), kRelease);
}

void write_end(RecordHead& record, State state, Clock::time_point now) {
  record.ended.store(nanoseconds_of(now), kRelease);
  record.state.store(static_cast<std::uint64_t>(state), kRelease);
}

bool is_under_way(const RecordHead& record) {
  const auto state = static_cast<State>(record.state.load(std::memory_order_relaxed));
  return state == State::kScheduled || state == State::kStarted;
}

}  // namespace

std::string memory_label(const std::string& job, int rank) {
  return concat("flight:", job, ":", rank);
}

Segment make_memory(const std::string& job, int rank, std::size_t calls) {
  return Segment::create(sizeof(Ring) + calls * sizeof(RecordHead), memory_label(job, rank));
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
      calls_(ring_ ? calls_in(memory_.size()) : 0),
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
  const bool session = member.session != 0;
  std::vector<std::uint64_t> names;
  for (std::size_t i = 0; session && i < std::min(kMembers, member.workers.size()); ++i) {
    names.push_back(text(member.workers[i]));
  }
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
      const auto number = [&](std::size_t r) -> std::uint64_t {
        if (session) return r < names.size() ? names[r] : 0;
        return r < member.processes.size() ? static_cast<std::uint32_t>(member.processes[r]) : 0;
      };
      group.members[i / 2].store(number(i) | number(i + 1) << 32, std::memory_order_release);
    }
    group.session.store(member.session, std::memory_order_release);
    const std::uint64_t id = slot + kGroups * ++uses_[slot];
    group.id.store(id, std::memory_order_release);
    return id;
  }
  return 0;
}

// What was written of it stays until the place is needed: its last operations may be what somebody
// wants to see.
void Recorder::remove_group(std::uint64_t id) noexcept {
  if (id == 0 || fork_generation() != generation_) return;
  if (ring_->groups[id % kGroups].session.load(std::memory_order_relaxed) != 0) end_calls_of(id);
  const std::lock_guard lock(mutex_);
  taken_[id % kGroups] = false;
}

void Recorder::name_worker(std::uint64_t id, std::size_t rank, const std::string& name) noexcept {
  if (id == 0 || rank >= kMembers || fork_generation() != generation_) return;
  const std::uint64_t site = text(name);
  const std::lock_guard lock(mutex_);
  Group& group = ring_->groups[id % kGroups];
  const std::size_t shift = rank % 2 * 32;
  const std::uint64_t before = group.members[rank / 2].load(std::memory_order_relaxed);
  group.members[rank / 2].store((before & ~(std::uint64_t{UINT32_MAX} << shift)) | site << shift,
                                std::memory_order_release);
  if (rank >= group.size.load(std::memory_order_relaxed)) {
    group.size.store(rank + 1, std::memory_order_release);
  }
}

std::uint64_t Recorder::text(std::string_view text) noexcept {
  if (!ring_ || fork_generation() != generation_) return 0;
  try {
    const std::lock_guard lock(mutex_);
    auto found = texts_.find(text);
    if (found == texts_.end()) found = texts_.emplace(text).first;
    return site_of(CallSite(found->c_str(), nullptr, 0));
  } catch (const std::bad_alloc&) {
    return 0;
  }
}

// A site gets its number without a lock: its place in an open hash table.
std::uint64_t Recorder::site_of(const CallSite& where) noexcept {
  if (!where.file) return 0;
  constexpr std::size_t kProbes = 16;
  const std::uint64_t key =
      reinterpret_cast<std::uintptr_t>(where.file) ^ (std::uint64_t{where.line} << 48);
  std::size_t at = (key * 0x9e3779b97f4a7c15) >> 54;
  static_assert(kSites == std::size_t{1} << (64 - 54));
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

Recorder::Ticket Recorder::begin(const Operation& operation, const CallSite& where,
                                 Clock::time_point now, bool started) noexcept {
  if (!ring_) return 0;
  const std::uint64_t ticket = ring_->head.next.fetch_add(1, std::memory_order_relaxed) + 1;
  Record& record = ring_->records[(ticket - 1) % kRecords];
  if (!claim(record, ticket)) return 0;
  write_head(record, operation.group, operation.number,
             site_of(where) << 32 | static_cast<std::uint32_t>(operation.peer + 1), now, started);
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
  if (Record* const record = find(ticket)) write_start(*record, now);
}

void Recorder::end(Ticket ticket, State state, Clock::time_point now) noexcept {
  if (Record* const record = find(ticket)) write_end(*record, state, now);
}

// --- calls ---

Recorder::Ticket Recorder::begin_call(const Call& call, Clock::time_point now,
                                      bool started) noexcept {
  if (calls_ == 0) return 0;
  // Some that are under way are easily stepped over; if all are, looking further is of no use.
  constexpr int kTries = 2;
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t ticket = ring_->head.next_call.fetch_add(1, std::memory_order_relaxed) + 1;
    RecordHead& record = calls_of(*ring_)[(ticket - 1) & (calls_ - 1)];
    if (is_under_way(record) || !claim(record, ticket)) continue;
    write_head(record, call.group, call.number,
               call.function << 32 | (call.served ? kServed : 0) | (call.pass ? kPass : 0) |
                   static_cast<std::uint32_t>(call.peer + 1),
               now, started);
    record.word.store(2 * ticket, kRelease);
    return ticket;
  }
  return 0;
}

RecordHead* Recorder::find_call(Ticket ticket) noexcept {
  if (ticket == 0) return nullptr;
  RecordHead& record = calls_of(*ring_)[(ticket - 1) & (calls_ - 1)];
  return record.word.load(std::memory_order_relaxed) == 2 * ticket ? &record : nullptr;
}

void Recorder::start_call(Ticket ticket, Clock::time_point now) noexcept {
  if (RecordHead* const record = find_call(ticket)) write_start(*record, now);
}

void Recorder::end_call(Ticket ticket, State state, Clock::time_point now) noexcept {
  if (RecordHead* const record = find_call(ticket)) write_end(*record, state, now);
}

void Recorder::delay_call(Ticket ticket) noexcept {
  RecordHead* const record = find_call(ticket);
  if (!record) return;
  record->started.store(0, kRelease);
  record->state.store(static_cast<std::uint64_t>(State::kScheduled), kRelease);
}

void Recorder::end_calls_of(std::uint64_t group) noexcept {
  const std::uint64_t used = ring_->head.next_call.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < std::min<std::uint64_t>(used, calls_); ++i) {
    RecordHead& record = calls_of(*ring_)[i];
    if (is_under_way(record) && record.group.load(std::memory_order_relaxed) == group) {
      write_end(record, State::kFailed, Clock::now());
    }
  }
}

}  // namespace convoy::flight
