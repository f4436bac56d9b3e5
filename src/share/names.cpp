// How objects that processes share are found by name: a socket in a folder of this user's, behind
// which the process that offers one gives its descriptors away.
//
//   <folder>/n-<name>    as long as it is offered; or left by a process that was killed
//
// Who removes what the dead have left, and who adds a name, holds the lock of the folder: a name
// that was looked at without it may be another's by the time that it is removed.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <span>
#include <thread>

#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "convoy/queue.h"
#include "os/fork_guard.h"
#include "os/frame_socket.h"
#include "os/process.h"
#include "share/shared.h"

namespace convoy::share {
namespace {

constexpr std::uint64_t kMostDescriptors = 8;
constexpr auto kOfferPatience = std::chrono::seconds(2);  // with who accepts and says nothing
constexpr auto kLockPatience = std::chrono::seconds(10);
constexpr int kPauseMs = 100;  // after a shortage of descriptors

// What follows a connection to an offer, with the descriptors.
struct OfferFrame {
  static constexpr std::uint64_t kMagic = 0x315245464f5643;  // "CVOFER1"

  std::uint64_t magic = kMagic;
  std::uint64_t descriptors = 0;
};

Deadline at_most(const Deadline& deadline, std::chrono::milliseconds patience) {
  return std::min(deadline, Deadline::after(patience));
}

std::string folder_of_names() {
  const char* const base = std::getenv("CONVOY_SHARE_FOLDER");
  return concat(base && *base ? base : "/dev/shm", "/convoy-", ::geteuid());
}

// One process at a time. The folder is made if it is missing. Held for a few system calls.
class FolderLock {
 public:
  explicit FolderLock(const std::string& folder) {
    const auto until = Deadline::after(kLockPatience);
    while (!try_lock(folder)) {
      if (until.expired()) {
        fail(ErrorKind::kTimeout, "a process holds the lock of folder ", folder,
             " and does not go on: is one stopped?");
      }
      ::poll(nullptr, 0, 1);
    }
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() { ::flock(fd_.get(), LOCK_UN); }  // a child that was forked may have it too

 private:
  bool try_lock(const std::string& folder) {
    if (::mkdir(folder.c_str(), 0700) < 0 && errno != EEXIST) fail_errno("making folder ", folder);
    fd_.reset(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW));
    if (!fd_ && errno == ENOENT) return false;  // its last user has just removed it
    if (!fd_) fail_errno("opening folder ", folder);
    if (::flock(fd_.get(), LOCK_EX | LOCK_NB) < 0) {
      if (errno == EWOULDBLOCK || errno == EINTR) return false;
      fail_errno("locking folder ", folder);
    }
    struct stat there {};
    struct stat here {};
    return ::stat(folder.c_str(), &there) == 0 && ::fstat(fd_.get(), &here) == 0 &&
           there.st_ino == here.st_ino && there.st_dev == here.st_dev;
  }

  UniqueFd fd_;
};

}  // namespace

// A thread that gives the object to who connects.
class Shared::Impl::Offer {
 public:
  // With the lock of the folder.
  Offer(const std::string& folder, const std::string& name, std::vector<int> descriptors)
      : folder_(folder),
        path_(concat(folder, "/n-", name)),
        // Under another name until somebody listens: until then it looks like one of the dead.
        listener_(folder, concat("o-", Id::random().to_string().substr(0, 12))),
        descriptors_(std::move(descriptors)) {
    const int result = ::link(listener_.path().c_str(), path_.c_str());
    const int code = errno;
    ::unlink(listener_.path().c_str());
    if (result < 0) {
      fail(ErrorKind::kInvalidArgument, "offer: the name ", path_, " is taken: ", errno_text(code));
    }
    stop_.reset(::eventfd(0, EFD_CLOEXEC));
    if (!stop_) {
      ::unlink(path_.c_str());
      fail_errno("offering an object by name");
    }
    thread_ = std::jthread([this] { serve(); });
  }
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;
  ~Offer() {
    if (generation_ != fork_generation()) {  // a forked child's copy: there is no thread
      thread_.detach();
      return;
    }
    ::unlink(path_.c_str());
    ::rmdir(folder_.c_str());  // fails while others are in it
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
  }

 private:
  void serve() {
    bool short_of_descriptors = false;
    for (;;) {
      std::array<pollfd, 2> items{pollfd{stop_.get(), POLLIN, 0},
                                  pollfd{listener_.fd(), POLLIN, 0}};
      // Who could not be accepted still waits: without a pause this would not sleep any more.
      if (short_of_descriptors) {
        ::poll(items.data(), 1, kPauseMs);
      } else {
        ::poll(items.data(), items.size(), -1);
      }
      if (items[0].revents != 0) return;
      try {
        if (auto socket = listener_.try_accept()) give(std::move(*socket));
        short_of_descriptors = false;
      } catch (const Error& error) {
        if (error.kind() == ErrorKind::kPeerLost) continue;  // it only looked whether this lives
        const bool again = short_of_descriptors;
        short_of_descriptors = error.kind() == ErrorKind::kResource;
        if (!again || !short_of_descriptors) log_warn("offer ", path_, ": ", error.what());
      }
    }
  }
  void give(Socket socket) const {
    socket.require_same_user();
    FrameSocket<OfferFrame>(std::move(socket))
        .send({.descriptors = descriptors_.size()}, Deadline::after(std::chrono::seconds(1)),
              descriptors_);
  }

  const std::string folder_;
  const std::string path_;
  Listener listener_;
  const std::vector<int> descriptors_;  // the object's, which outlives this
  const unsigned generation_ = fork_generation();
  UniqueFd stop_;
  std::jthread thread_;  // last: joined first
};

Shared::Impl::~Impl() = default;
void Shared::Impl::end_offers() { offers.lock()->clear(); }

namespace {

void check_name(const char* operation, const std::string& name) {
  if (name.empty() || name.size() > 60 || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    fail(ErrorKind::kInvalidArgument, operation, ": ", in_quotes(name),
         " is not a valid name: use 1 to 60 characters without a slash");
  }
}

// nullopt: nobody listens there. kTimeout, kResource.
std::optional<Socket> try_connect(const std::string& path, const Deadline& deadline) {
  if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
  try {
    return Socket::connect(path, deadline);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout || error.kind() == ErrorKind::kResource) throw;
    return std::nullopt;
  }
}

// The object's descriptors. nullopt: whoever listened is gone. kTimeout.
std::optional<std::vector<UniqueFd>> receive_offer(Socket socket, const Deadline& deadline) try {
  socket.require_same_user();
  FrameSocket<OfferFrame> frames(std::move(socket));
  const std::uint64_t count = frames.receive(deadline).descriptors;
  return frames.take_descriptors(count, std::min(count, kMostDescriptors));
} catch (const Error& error) {
  if (error.kind() == ErrorKind::kPeerLost) return std::nullopt;
  if (error.kind() != ErrorKind::kInvalidArgument) throw;
  fail(error.kind(), "open: what is offered is not an object of this version: ", error.what());
}

// Nobody listens there. A process that is killed may accept connections for a moment more.
bool is_dead(const std::string& path) {
  const auto until = Deadline::after(kOfferPatience);
  try {
    for (;;) {
      auto socket = try_connect(path, until);
      if (!socket) return true;
      if (receive_offer(std::move(*socket), until) || until.expired()) return false;
      ::poll(nullptr, 0, 1);
    }
  } catch (const Error&) {
    return false;
  }
}

// Removes names that nobody listens behind.
void sweep(const std::string& folder) {
  DIR* const open = ::opendir(folder.c_str());
  if (!open) return;
  std::vector<std::string> paths;
  while (const dirent* item = ::readdir(open)) {
    const std::string name = item->d_name;
    if (name.starts_with("n-")) paths.push_back(concat(folder, "/", name));
  }
  ::closedir(open);
  // Who waits for an answer does so without the lock.
  std::erase_if(paths, [](const std::string& path) { return !is_dead(path); });
  if (paths.empty()) return;
  const FolderLock lock(folder);
  for (const std::string& path : paths) {
    try {
      if (try_connect(path, Deadline::after(std::chrono::seconds(0)))) continue;  // a new one
    } catch (const Error&) {
      continue;
    }
    log_info("removed ", path, ": no process offers it");
    ::unlink(path.c_str());
  }
}

// "pid 12 offers ... but": for whoever had the name at the end.
[[noreturn]] void fail_open(const std::string& name, const std::string& silent) {
  if (silent.empty()) {
    fail(ErrorKind::kTimeout, "open: nobody offers ", in_quotes(name), " by the deadline");
  }
  fail(ErrorKind::kTimeout, "open: ", silent, " offers ", in_quotes(name),
       " but gave no answer by the deadline: is it stopped?");
}

}  // namespace

void offer(const Shared& object, const std::string& name) {
  check_name("offer", name);
  const auto descriptors = object.descriptors();
  const std::string folder = folder_of_names();
  sweep(folder);
  std::shared_ptr<Shared::Impl::Offer> made;
  for (int attempt = 0; !made; ++attempt) {
    try {
      const FolderLock lock(folder);
      made = std::make_shared<Shared::Impl::Offer>(folder, name, descriptors);
    } catch (const Error&) {
      ::rmdir(folder.c_str());
      // The folder may go with its last user just now.
      if (attempt == 10 || ::access(folder.c_str(), F_OK) == 0) throw;
    }
  }
  object.impl().offers.lock()->push_back(std::move(made));
}

Shared open(const std::string& name, const Deadline& deadline) {
  check_name("open", name);
  const std::string path = concat(folder_of_names(), "/n-", name);
  for (;;) {
    std::string silent;  // who has the name and says nothing
    pid_t owner = 0;
    std::optional<std::vector<UniqueFd>> received;
    try {
      const auto patience = at_most(deadline, kOfferPatience);
      auto socket = try_connect(path, patience);
      if (socket) owner = socket->peer().pid;
      silent = socket ? concat("pid ", owner) : "";
      if (socket) received = receive_offer(std::move(*socket), patience);
      if (!received) silent.clear();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      if (silent.empty()) silent = "a process with a long queue of others that open it";
    }
    if (received) {
      std::vector<int> descriptors;
      for (UniqueFd& descriptor : *received) descriptors.push_back(descriptor.release());
      return Shared::adopt(descriptors);
    }
    if (deadline.expired()) {
      // A process that was killed may accept connections for a moment more.
      if (owner != 0 && liveness_of_any(owner) == Liveness::kDead) silent.clear();
      fail_open(name, silent);
    }
    ::poll(nullptr, 0, std::min(deadline.poll_timeout_ms() & 0x7fffffff, 5));
  }
}

}  // namespace convoy::share
