#include "os/flight_log.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>

#include "base/concat.h"
#include "base/duration.h"
#include "base/unique_fd.h"
#include "os/process.h"

namespace convoy::flight {
namespace {

using std::chrono::nanoseconds;

constexpr std::uint32_t kMostRanks = 1 << 16;

std::uint64_t load(const Word& word) { return word.load(std::memory_order_acquire); }

// Such that the sum of two is a time as well.
nanoseconds time_of(const Word& word) {
  const std::uint64_t value = load(word);
  return nanoseconds(value >= std::uint64_t{1} << 62 ? 0 : static_cast<std::int64_t>(value));
}

int small(std::uint64_t value) {
  return static_cast<int>(std::min<std::uint64_t>(value, INT32_MAX));
}

// What all records have; `more(entry)` reads the rest. `place` is that word.
template <class More>
std::optional<Entry> read_record(const RecordHead& record, std::size_t slot, std::size_t slots,
                                 std::uint64_t& place, const More& more) {
  const std::uint64_t word = load(record.word);
  if (word == 0 || word % 2 != 0) return std::nullopt;
  Entry entry;
  entry.ticket = word / 2;
  const std::uint64_t state = load(record.state);
  entry.started = time_of(record.started);
  entry.ended = time_of(record.ended);
  entry.created = time_of(record.created);
  entry.group = load(record.group);
  entry.number = load(record.number);
  place = load(record.place);
  more(entry);
  if (load(record.word) != word) return std::nullopt;
  if ((entry.ticket - 1) % slots != slot) return std::nullopt;
  if (state == 0 || state > static_cast<std::uint64_t>(State::kFailed)) return std::nullopt;
  entry.state = static_cast<State>(state);
  return entry;
}

int peer_in(std::uint64_t number) {
  return number <= kMostRanks ? static_cast<int>(number) - 1 : -1;
}

// nullptr: there is none.
const Site* site_at(const Ring& ring, std::uint64_t number) {
  if (number == 0 || number >= kSites || load(ring.sites[number].ready) != 1) return nullptr;
  return &ring.sites[number];
}

std::optional<Entry> read_entry(const Ring& ring, std::size_t slot) {
  const Record& record = ring.records[slot];
  std::uint64_t place = 0;
  auto entry = read_record(record, slot, kRecords, place, [&](Entry& rest) {
    rest.input = load(record.input);
    rest.output = load(record.output);
    rest.bytes = load(record.bytes);
    rest.message = load(record.message) != 0;
    rest.operation = record.operation.load();
    rest.type = record.type.load();
  });
  if (!entry) return std::nullopt;
  entry->peer = peer_in(static_cast<std::uint32_t>(place));
  if (const Site* const site = site_at(ring, place >> 32)) {
    entry->file = site->file.load();
    entry->function = site->function.load();
    entry->line = static_cast<unsigned>(load(site->line));
  }
  return entry;
}

std::optional<Entry> read_call(const Ring& ring, std::size_t slot, std::size_t slots) {
  std::uint64_t place = 0;
  auto entry = read_record(calls_of(ring)[slot], slot, slots, place, [](Entry&) {});
  if (!entry) return std::nullopt;
  entry->served = (place & kServed) != 0;
  entry->pass = (place & kPass) != 0;
  entry->peer = peer_in(place & (kPass - 1));
  const Site* const site = site_at(ring, place >> 32);
  entry->operation = site ? site->file.load() : "a function";
  return entry;
}

void read_group(const Ring& ring, const Group& group, Log& log) {
  const std::uint64_t id = load(group.id);
  if (id == 0) return;
  GroupEntry entry;
  entry.name = group.name.load();
  entry.rank = small(load(group.rank));
  entry.size = small(load(group.size));
  entry.session = load(group.session);
  for (std::size_t r = 0; r < std::min<std::size_t>(kMembers, static_cast<std::size_t>(entry.size));
       ++r) {
    const std::uint64_t member = load(group.members[r / 2]) >> (r % 2 * 32) & 0x7fff'ffff;
    if (entry.session == 0) {
      entry.processes.push_back(static_cast<pid_t>(member));
      continue;
    }
    const Site* const site = site_at(ring, member);
    entry.workers.push_back(site ? site->file.load() : "");
  }
  if (entry.size > static_cast<int>(kMostRanks) || entry.rank >= entry.size) return;
  if (load(group.id) == id) log.groups.emplace(id, std::move(entry));
}

// Memory of another process, to be read only.
class Mapping {
 public:
  explicit Mapping(const std::string& path) {
    // The number may be another's, of something that waits when it is opened.
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (!fd) return;
    struct stat info {};
    // Sealed: it cannot shrink under us.
    const int seals = fcntl(fd.get(), F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || fstat(fd.get(), &info) != 0) return;
    bytes_ = static_cast<std::size_t>(info.st_size);
    inode_ = info.st_ino;
    void* const memory = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (memory != MAP_FAILED) data_ = static_cast<const std::byte*>(memory);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data_) munmap(const_cast<std::byte*>(data_), bytes_);
  }

  std::uint64_t inode() const { return inode_; }
  std::optional<Log> read() const {
    if (!data_) return std::nullopt;
    return flight::read(data_, bytes_);
  }

 private:
  const std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::uint64_t inode_ = 0;
};

// "/memfd:convoy:flight:JOB:RANK (deleted)" -> JOB; nullopt for any other link.
std::optional<std::string> job_of(const std::string& link) {
  constexpr std::string_view kBefore = "/memfd:convoy:flight:";
  if (!link.starts_with(kBefore)) return std::nullopt;
  const auto end = link.rfind(':');
  if (end < kBefore.size()) return std::nullopt;
  return link.substr(kBefore.size(), end - kBefore.size());
}

// The process whose folder it is may go meanwhile: what could not be read is not there.
template <class Use>
void for_each_in(const std::string& folder, const Use& use) {
  std::error_code error;
  std::filesystem::directory_iterator it(folder, error);
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    use(it->path());
  }
}

// The flight records that a process holds: use(job, path).
template <class Use>
void for_each_held(const std::string& process, const Use& use) {
  for_each_in(process + "/fd", [&](const std::filesystem::path& fd) {
    std::error_code error;
    const auto link = std::filesystem::read_symlink(fd, error);
    if (const auto job = error ? std::nullopt : job_of(link.string())) use(*job, fd.string());
  });
}

// Those of one job, or all.
void read_held(const std::string& process, const std::optional<std::string>& job,
               std::set<std::uint64_t>& seen, std::vector<Log>& logs) {
  for_each_held(process, [&](const std::string& found, const std::string& path) {
    if (job && found != *job) return;
    const Mapping mapping(path);
    if (!seen.insert(mapping.inode()).second) return;
    if (auto log = mapping.read()) logs.push_back(std::move(*log));
  });
}

bool is_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char c) { return c >= '0' && c <= '9'; });
}

template <class Use>
void for_each_process(const Use& use) {
  for_each_in("/proc", [&](const std::filesystem::path& process) {
    if (is_number(process.filename().string())) use(process.string());
  });
}

void sort_by_rank(std::vector<Log>& logs) {
  std::stable_sort(logs.begin(), logs.end(), [](const Log& a, const Log& b) {
    return a.rank.value_or(0) < b.rank.value_or(0);
  });
}

}  // namespace

const GroupEntry* Log::group_of(const Entry& entry) const {
  const auto found = groups.find(entry.group);
  return found == groups.end() ? nullptr : &found->second;
}

const Entry* Log::latest(const std::optional<std::pair<std::string, int>>& rank_of) const {
  const Entry* under_way = nullptr;
  const Entry* ended = nullptr;
  for (const Entry& entry : entries) {
    if (rank_of) {
      const GroupEntry* group = group_of(entry);
      if (!group || group->name != rank_of->first || group->rank != rank_of->second) continue;
    }
    if (entry.under_way() && (!under_way || entry.started >= under_way->started)) {
      under_way = &entry;
    }
    if (entry.over() && (!ended || entry.ended >= ended->ended)) ended = &entry;
  }
  return under_way ? under_way : ended;
}

std::optional<Log> read(const Ring& ring, std::size_t bytes) {
  if (load(ring.head.magic) != kMagic) return std::nullopt;
  Log log;
  log.pid = small(load(ring.head.pid));
  const std::uint64_t rank = load(ring.head.rank);
  if (rank != 0) log.rank = small(rank - 1);
  log.size = small(load(ring.head.size));
  log.steady = time_of(ring.head.steady);
  log.wall = time_of(ring.head.wall);
  for (const Group& group : ring.groups) read_group(ring, group, log);
  for (std::size_t slot = 0; slot < kRecords; ++slot) {
    if (auto entry = read_entry(ring, slot)) log.entries.push_back(std::move(*entry));
  }
  const std::size_t calls = calls_in(bytes);
  for (std::size_t slot = 0; slot < calls; ++slot) {
    if (auto entry = read_call(ring, slot, calls)) log.calls.push_back(std::move(*entry));
  }
  for (auto* const entries : {&log.entries, &log.calls}) {
    std::sort(entries->begin(), entries->end(),
              [](const Entry& a, const Entry& b) { return a.ticket < b.ticket; });
  }
  return log;
}

std::optional<Log> read(const std::byte* memory, std::size_t bytes) {
  if (bytes < sizeof(Ring)) return std::nullopt;
  return read(*reinterpret_cast<const Ring*>(memory), bytes);
}

std::optional<Log> read_process(pid_t pid, int fd, std::uint64_t inode) {
  const Mapping mapping(concat("/proc/", pid, "/fd/", fd));
  return mapping.inode() == inode ? mapping.read() : std::nullopt;
}

std::vector<Log> read_job(const std::string& job) {
  std::vector<Log> logs;
  std::set<std::uint64_t> seen;  // the launcher and the ranks hold the same memory
  for_each_process([&](const std::string& process) { read_held(process, job, seen, logs); });
  if (logs.empty() && is_number(job) && job.size() < 10) {
    read_held("/proc/" + job, std::nullopt, seen, logs);
    // The command `convoy run` has a child that holds them.
    for (const pid_t child : children_of(std::stoi(job))) {
      read_held(concat("/proc/", child), std::nullopt, seen, logs);
    }
  }
  sort_by_rank(logs);
  return logs;
}

std::map<std::string, std::vector<Log>> read_all_jobs() {
  std::map<std::string, std::vector<Log>> jobs;
  std::set<std::uint64_t> seen;
  for_each_process([&](const std::string& process) {
    for_each_held(process, [&](const std::string& job, const std::string& path) {
      auto& logs = jobs[job];
      const Mapping mapping(path);
      if (!seen.insert(mapping.inode()).second) return;
      if (auto log = mapping.read()) logs.push_back(std::move(*log));
    });
  });
  for (auto& [job, logs] : jobs) sort_by_rank(logs);
  return jobs;
}

std::string describe(const Log& log, const Entry& entry) {
  const GroupEntry* group = log.group_of(entry);
  std::string text = entry.operation;
  if (entry.message && entry.peer >= 0) {
    text += concat(entry.operation == "send" ? " to rank " : " from rank ", entry.peer);
  } else if (!entry.message) {
    text += concat(" #", entry.number);
  }
  if (group) text += concat(" of group \"", group->name, "\"");
  return text;
}

std::string describe_place(const Entry& entry) {
  if (entry.line == 0) return entry.file;  // not a place, but a purpose: "backward"
  const auto slash = entry.file.rfind('/');
  return concat(slash == std::string::npos ? entry.file : entry.file.substr(slash + 1), ":",
                entry.line);
}

std::string describe_activity(const Log& log, const Entry* latest, nanoseconds now) {
  if (!latest) return "it has called nothing yet";
  const std::string place = describe_place(*latest);
  const std::string behind = place.empty() ? "" : concat(" (", place, ")");
  const auto since =
      std::max(nanoseconds::zero(), now - (latest->under_way() ? latest->started : latest->ended));
  if (latest->under_way()) {
    return concat("it is in ", describe(log, *latest), behind, " for ", format_duration(since));
  }
  return concat("it is in user code for ", format_duration(since), ", since ",
                describe(log, *latest), behind,
                latest->state == State::kFailed ? " failed" : " ended");
}

}  // namespace convoy::flight
