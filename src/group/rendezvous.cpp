#include "convoy/rendezvous.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "base/error.h"
#include "base/guarded.h"
#include "base/log.h"
#include "base/unique_fd.h"
#include "convoy/c10d_store.h"
#include "group/job_socket.h"
#include "group/launch_claims.h"
#include "group/launch_environment.h"
#include "group/open_store.h"
#include "group/rendezvous_url.h"
#include "group/tcp_store.h"
#include "os/fork_guard.h"

namespace convoy {
namespace {

// Only this process and those it meets now can have written to the store.
enum class Freshness { kNew, kInherited };

// A rank's way to one meeting place. It is kept for later meetings: if rank 0 served each of them
// anew, a rank that is ahead could find the server of the meeting before.
struct Link {
  std::timed_mutex mutex;
  ServedStore connection;  // no server except in rank 0 of a job socket
  Freshness freshness = Freshness::kNew;
  std::int64_t meetings = 0;
  bool has_met = false;
  unsigned generation = fork_generation();

  void forget() {
    connection = {};
    meetings = 0;
    has_met = false;
  }
};

// Never destroyed: the servers in it live as long as the process.
using Links = std::map<std::string, std::shared_ptr<Link>>;
Guarded<Links>& all_links() {
  static auto* const links = new Guarded<Links>;
  return *links;
}

std::shared_ptr<Link> link_to(const std::string& place, int rank) {
  auto links = all_links().lock();
  auto& link = (*links)[concat(place, " rank ", rank)];
  if (!link) link = std::make_shared<Link>();
  return link;
}

std::string missing_ranks(Store& store, const std::string& prefix, int size) {
  std::string list;
  int missing = 0;
  for (int rank = 0; rank < size; ++rank) {
    const std::string key = concat(prefix, "/here/", rank);
    if (store.check({&key, 1})) continue;
    if (++missing <= 16) list += concat(missing == 1 ? "" : ", ", rank);
  }
  return concat(missing == 1 ? "rank " : "ranks ", list, missing > 16 ? ", ..." : "", " of ", size,
                " did not come");
}

// Waits for all ranks at the next meeting of this link; returns the meeting's own store.
std::shared_ptr<Store> meet(Link& link, const LaunchEnvironment& self, const std::string& place,
                            const Deadline& deadline) {
  const auto& store = link.connection.store;
  const std::string base =
      self.restart.empty() ? "convoy" : concat("convoy/restart-", self.restart);
  // Ranks count their meetings in the store, not in themselves: a script may run one program after
  // another on the same store.
  const std::string counter = concat(base, "/meetings-of/", self.rank);
  const std::int64_t number = store->add(counter, 1);
  ++link.meetings;
  if (link.freshness == Freshness::kNew && number != link.meetings) {
    store->add(counter, -1);  // the other one's count must stay right
    --link.meetings;
    fail(ErrorKind::kInvalidArgument, "rendezvous: another process came to ", place, " as rank ",
         self.rank, " already: two processes have the same rank, or something of an earlier job ",
         "is still there; end it, or choose another place");
  }
  const std::string prefix = concat(base, "/meeting-", number);
  store->set(concat(prefix, "/here/", self.rank), "");
  try {
    store->barrier(concat(prefix, "/all"), self.size, deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) {
      fail(ErrorKind::kTimeout, "rendezvous at ", place, ", rank ", self.rank, ": ",
           missing_ranks(*store, prefix, self.size), " by the deadline");
    }
    fail(error.kind(), "rendezvous at ", place, ", rank ", self.rank, " of ", self.size, ": ",
         error.what());
  }
  return with_prefix(store, concat(prefix, "/keys"));
}

// `open` connects (or serves) where this is the rank's first meeting there.
template <class Open>
std::shared_ptr<Store> meet_at(const std::string& place, const LaunchEnvironment& self,
                               Freshness freshness, const Deadline& deadline, Open open) {
  const auto link = link_to(place, self.rank);
  // Before the lock, which a thread may hold that does not exist here.
  if (link->generation != fork_generation()) {
    fail(ErrorKind::kUnsupported, "rendezvous at ", place,
         ": this is a forked child of a process that has met; execute a program instead");
  }
  std::unique_lock lock(link->mutex, std::defer_lock);
  if (deadline.is_never()) {
    lock.lock();
  } else if (!lock.try_lock_until(deadline.when())) {
    fail(ErrorKind::kTimeout, "rendezvous at ", place, ", rank ", self.rank,
         ": another thread is at a meeting there");
  }
  if (!link->connection.store) {
    link->connection = open();
    link->freshness = freshness;
  }
  try {
    auto store = meet(*link, self, place, deadline);
    if (link->connection.server) link->connection.server->unlink();
    link->has_met = true;
    return store;
  } catch (const Error& error) {
    // A lost connection is of no use. The path of a first meeting that failed must not stay, and
    // who comes late must not find a server that nobody waits at.
    const bool listening = link->connection.server && !link->has_met;
    if (listening || error.kind() == ErrorKind::kPeerLost) link->forget();
    throw;
  } catch (const std::exception& error) {  // of torch's stores
    link->forget();
    fail(ErrorKind::kPeerLost, "rendezvous at ", place, ", rank ", self.rank, " of ", self.size,
         ": ", error.what());
  }
}

// Torch makes its file readable for everybody.
void prepare_file(const std::string& path) {
  const UniqueFd fd(
      ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0600));
  if (!fd) {
    const int code = errno;
    fail(ErrorKind::kInvalidArgument, "rendezvous: file ", path, ": ", errno_text(code),
         code == ENOENT ? "; its folder must exist" : "");
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) < 0) fail_errno("looking at file ", path);
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 022) != 0) {
    fail(ErrorKind::kInvalidArgument, "rendezvous: ", path,
         " is not safe to meet at: it must be a regular file that user ", ::geteuid(),
         " owns and nobody else can write; name one that does not exist yet");
  }
}

constexpr std::string_view kFileScheme = "file://";

// Held by one process at a time, by a lock on the file's folder. A process that keeps it for long
// (stopped, for example) does not keep others from ending.
UniqueFd lock_folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const auto deadline = Deadline::after(std::chrono::seconds(1));
  while (fd && ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && !deadline.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return fd;
}

// Torch removes the file with the last rank's store, so ours must go when the process does. Not
// those of a parent. One after the other: a store counts down two numbers as it goes, and if two
// do so at once, each may find that it is not the last.
void close_files() noexcept try {
  const auto links = *all_links().lock();
  for (const auto& [place, link] : links) {
    if (!place.starts_with(kFileScheme) || link->generation != fork_generation()) continue;
    const UniqueFd folder = lock_folder_of(place.substr(kFileScheme.size()));
    const std::unique_lock lock(link->mutex, std::try_to_lock);
    if (lock) link->forget();
  }
} catch (const std::exception& error) {
  log_warn("rendezvous: ", error.what());
}

std::shared_ptr<Store> open_file(const std::string& path, int size, const Deadline& deadline) {
  prepare_file(path);
  try {
    auto store = c10::make_intrusive<c10d::FileStore>(path, size);
    // Never 0, which is no limit to it.
    store->setTimeout(std::chrono::ceil<std::chrono::milliseconds>(
        std::max<std::chrono::nanoseconds>(deadline.remaining(), std::chrono::milliseconds(1))));
    static const int registered = std::atexit(close_files);
    CONVOY_CHECK(registered == 0);
    return from_c10d(std::move(store));
  } catch (const std::exception& error) {
    fail(ErrorKind::kInvalidArgument, "rendezvous: file ", path, ": ", error.what());
  }
}

std::shared_ptr<Store> meet_at_tcp(const Endpoint& endpoint, const LaunchEnvironment& self,
                                   const Deadline& deadline) {
  return meet_at(concat("tcp://", to_string(endpoint)), self,
                 self.agent_store ? Freshness::kInherited : Freshness::kNew, deadline, [&] {
                   const bool serve = self.rank == 0 && !self.agent_store;
                   return ServedStore{nullptr, serve ? serve_tcp_store(endpoint, deadline)
                                                     : connect_tcp_store(endpoint, deadline)};
                 });
}

Meeting to_meeting(const LaunchEnvironment& self, const std::string& launcher,
                   std::shared_ptr<Store> store) {
  return {std::move(store), self.rank, self.size, self.local_rank, self.local_size, launcher};
}

Meeting meet_by_environment(const GivenRank& given, const Deadline& deadline) {
  const auto launcher = launcher_store();
  const Variables variables = current_variables();
  auto self = read_launch_environment(variables, given, launcher != nullptr);
  const bool mpi = self.launcher == "MPICH" || self.launcher == "Open MPI";
  if (mpi && self.job.empty()) self.job = job_of_parent();
  std::shared_ptr<Store> store;
  switch (meeting_place(self, variables)) {
    case MeetingPlace::kAlone: store = make_local_store(); break;
    case MeetingPlace::kLauncherStore:
      store = meet_at("the store of convoy run", self, Freshness::kInherited, deadline,
                      [&] { return ServedStore{nullptr, launcher}; });
      break;
    case MeetingPlace::kTcp: store = meet_at_tcp(*read_master(variables), self, deadline); break;
    case MeetingPlace::kJobSocket:
      store = meet_at(concat(self.launcher, "'s job on this host"), self, Freshness::kNew, deadline,
                      [&] {
                        return self.rank == 0 ? serve_job_socket(self.job)
                                              : connect_job_socket(self.job, deadline);
                      });
      break;
  }
  return to_meeting(self, self.launcher, std::move(store));
}

// Rank and size of a method that does not depend on a launcher, but may be used under one.
LaunchEnvironment read_self(const std::string& method, const GivenRank& given) {
  auto self = read_launch_environment(current_variables(), given, false);
  if (self.launcher == "none" && !given.complete()) {
    fail(ErrorKind::kInvalidArgument, "rendezvous: method ", in_quotes(method),
         ": rank and size are missing; add ?rank=0&world_size=2, or set RANK and WORLD_SIZE");
  }
  self.restart.clear();
  self.agent_store = false;
  return self;
}

// A file that no number of ranks removes.
constexpr int kOpenFile = -1;

OpenStore open_tcp(const Endpoint& endpoint, std::optional<int> rank, bool served_by_launcher,
                   const Deadline& deadline) {
  const bool serve = rank == 0 && !served_by_launcher;
  try {
    return {serve ? serve_tcp_store(endpoint, deadline) : connect_tcp_store(endpoint, deadline),
            rank, serve};
  } catch (const Error& error) {
    if (serve || served_by_launcher) throw;
    fail(error.kind(), error.what(),
         "; the store is served by the process with rank 0, and lives as long as that does");
  }
}

// Nobody need say how many there will be.
std::optional<int> rank_of_newcomer(const Variables& variables, const GivenRank& given,
                                    bool launched_by_us) {
  if (given.rank) return given.rank;
  const VariableReader reader(variables, given);
  if (!reader.find("WORLD_SIZE") && reader.find("RANK")) return reader.number("RANK");
  const auto self = read_launch_environment(variables, {}, launched_by_us);
  return self.launcher == "none" ? std::nullopt : std::optional<int>(self.rank);
}

OpenStore open_by_environment(const GivenRank& given, const Deadline& deadline) {
  const auto launcher = launcher_store();
  const Variables variables = current_variables();
  const auto rank = rank_of_newcomer(variables, given, launcher != nullptr);
  if (launcher) return {launcher, rank};
  if (const auto master = read_master(variables)) {
    const auto agent_store = variables.find("TORCHELASTIC_USE_AGENT_STORE");
    const bool served = agent_store != variables.end() && agent_store->second == "True";
    return open_tcp(*master, rank, served, deadline);
  }
  const auto self = read_launch_environment(variables, {}, false);
  if (self.size == 1) return {make_local_store(), rank};  // nobody can come to it
  fail(
      ErrorKind::kUnsupported, "rendezvous: ", self.launcher,
      " has no store that is there before all ranks are; name one: method \"file:///path\", or set "
      "MASTER_ADDR and MASTER_PORT");
}

}  // namespace

OpenStore open_store(const RendezvousOptions& options) {
  const auto deadline = options.timeout.deadline(Store::kDefaultTimeout);
  const auto url = parse_rendezvous_url(options.method);
  const GivenRank given = {options.rank ? options.rank : url.given.rank,
                           options.size ? options.size : url.given.size};
  switch (url.scheme) {
    case RendezvousUrl::Scheme::kEnvironment: return open_by_environment(given, deadline);
    case RendezvousUrl::Scheme::kTcp: return open_tcp(url.endpoint, given.rank, false, deadline);
    case RendezvousUrl::Scheme::kFile:
      return {open_file(url.path, kOpenFile, deadline), given.rank};
  }
  fail(ErrorKind::kInternal, "rendezvous: unknown scheme");
}

Meeting rendezvous(const RendezvousOptions& options) {
  const auto deadline = options.timeout.deadline(Store::kDefaultTimeout);
  const auto url = parse_rendezvous_url(options.method);
  const GivenRank given = {options.rank ? options.rank : url.given.rank,
                           options.size ? options.size : url.given.size};
  switch (url.scheme) {
    case RendezvousUrl::Scheme::kEnvironment: return meet_by_environment(given, deadline);
    case RendezvousUrl::Scheme::kTcp: {
      const auto self = read_self(options.method, given);
      return to_meeting(self, "tcp", meet_at_tcp(url.endpoint, self, deadline));
    }
    case RendezvousUrl::Scheme::kFile: {
      const auto self = read_self(options.method, given);
      auto store = meet_at(concat(kFileScheme, url.path), self, Freshness::kNew, deadline, [&] {
        return ServedStore{nullptr, open_file(url.path, self.size, deadline)};
      });
      return to_meeting(self, "file", std::move(store));
    }
  }
  fail(ErrorKind::kInternal, "rendezvous: unknown scheme");
}

}  // namespace convoy
