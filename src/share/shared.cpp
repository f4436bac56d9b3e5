// Objects that processes use together: who has them, and how others get them by name.
#include "share/shared.h"

#include <dirent.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <span>
#include <thread>

#include "base/error.h"
#include "base/id.h"
#include "base/log.h"
#include "convoy/queue.h"
#include "os/fork_guard.h"

namespace convoy::share {
namespace {

using Objects = std::map<Segment::Key, std::weak_ptr<Shared::Impl>>;

Guarded<Objects>& objects() {
  static auto* const known = new Guarded<Objects>;
  return *known;
}

constexpr std::size_t kMostDescriptors = 8;
constexpr auto kOfferPatience = std::chrono::seconds(2);  // with who accepts and says nothing
constexpr std::uint64_t kOfferMagic = 0x315245464f5643;   // "CVOFER1"

// What follows a connection to an offer, with the descriptors.
struct OfferFrame {
  std::uint64_t magic = kOfferMagic;
  std::uint64_t descriptors = 0;
};

}  // namespace

std::shared_ptr<Shared::Impl> SharedObjects::find_or(const Segment::Key& key, const Make& make) {
  auto known = objects().lock();
  auto& place = (*known)[key];
  if (auto there = place.lock()) return there;
  auto made = make();
  place = made;
  return made;
}

void SharedObjects::end(const Segment::Key& key, const std::function<void()>& finish) {
  auto known = objects().lock();
  const auto found = known->find(key);
  if (found != known->end() && !found->second.expired()) return;
  if (found != known->end()) known->erase(found);
  finish();
}

// A thread that gives the object to who connects.
class Shared::Impl::Offer {
 public:
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
    for (;;) {
      std::array<pollfd, 2> items{pollfd{stop_.get(), POLLIN, 0},
                                  pollfd{listener_.fd(), POLLIN, 0}};
      ::poll(items.data(), items.size(), -1);
      if (items[0].revents != 0) return;
      try {
        if (auto socket = listener_.try_accept()) give(*socket);
      } catch (const Error& error) {
        log_warn("offer ", path_, ": ", error.what());
      }
    }
  }
  void give(Socket& socket) const {
    socket.require_same_user();
    const OfferFrame frame{.descriptors = descriptors_.size()};
    socket.send(std::as_bytes(std::span(&frame, 1)), Deadline::after(std::chrono::seconds(1)),
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

Shared Shared::adopt(const std::vector<int>& descriptors) {
  std::vector<UniqueFd> owned;
  for (const int descriptor : descriptors) owned.emplace_back(descriptor);
  if (owned.size() != 1 && owned.size() != 3) {
    fail(ErrorKind::kInvalidArgument, owned.size(),
         " descriptors are no queue, event, barrier or lock");
  }
  if (owned.size() == 3) return Shared(adopt_queue(std::move(owned)));
  return Shared(adopt_small(std::move(owned[0])));
}

Shared::Impl& Shared::impl() const {
  if (!impl_) {
    fail(ErrorKind::kInvalidArgument, "this object is no queue, event, barrier or lock yet");
  }
  return *impl_;
}

std::vector<int> Shared::descriptors() const { return impl().descriptors(); }
Shared::Kind Shared::kind() const { return impl().kind; }

void require(const Shared& object, Shared::Kind kind) {
  static constexpr std::array kNames = {"", "a queue", "an event", "a barrier", "a lock"};
  if (object.kind() != kind) {
    fail(ErrorKind::kInvalidArgument, "this is ", kNames[static_cast<std::size_t>(object.kind())],
         ", not ", kNames[static_cast<std::size_t>(kind)]);
  }
}

Segment adopt_segment(UniqueFd descriptor) {
  struct stat info {};
  if (::fstat(descriptor.get(), &info) < 0) fail_errno("looking at memory of another process");
  return Segment::adopt(std::move(descriptor), static_cast<std::size_t>(info.st_size),
                        Segment::Warm::kYes);
}

namespace {

std::string folder_of_names() {
  const char* const base = std::getenv("CONVOY_SHARE_FOLDER");
  return concat(base && *base ? base : "/dev/shm", "/convoy-", ::geteuid());
}

void check_name(const char* operation, const std::string& name) {
  if (name.empty() || name.size() > 60 || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    fail(ErrorKind::kInvalidArgument, operation, ": ", in_quotes(name),
         " is no name: 1 to 60 characters without a slash");
  }
}

std::optional<Socket> try_connect(const std::string& path) {
  if (::access(path.c_str(), F_OK) != 0) return std::nullopt;
  try {
    return Socket::connect(path, Deadline::after(std::chrono::seconds(5)));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout || error.kind() == ErrorKind::kResource) throw;
    return std::nullopt;
  }
}

// False: whoever listened is gone. kTimeout.
bool receive_offer(Socket& socket, const Deadline& deadline, OfferFrame& frame,
                   std::vector<UniqueFd>& received) {
  try {
    socket.require_same_user();
    socket.receive(std::as_writable_bytes(std::span(&frame, 1)), deadline, &received);
    return true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kPeerLost) return false;
    throw;
  }
}

// Somebody offers something there, or will not say so in time. A process that is killed may accept
// connections for a moment more.
bool is_offered(const std::string& path) {
  try {
    auto socket = try_connect(path);
    OfferFrame frame;
    std::vector<UniqueFd> received;
    return socket && receive_offer(*socket, Deadline::after(kOfferPatience), frame, received);
  } catch (const Error&) {
    return true;
  }
}

// Names that nobody listens behind.
void sweep(const std::string& folder) {
  DIR* const open = ::opendir(folder.c_str());
  if (!open) return;
  std::vector<std::string> paths;
  while (const dirent* item = ::readdir(open)) {
    const std::string name = item->d_name;
    if (name.starts_with("n-")) paths.push_back(concat(folder, "/", name));
  }
  ::closedir(open);
  for (const std::string& path : paths) {
    if (is_offered(path)) continue;
    log_info("removed ", path, ": no process offers it");
    ::unlink(path.c_str());
  }
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
      made = std::make_shared<Shared::Impl::Offer>(folder, name, descriptors);
    } catch (const Error&) {
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
    auto socket = try_connect(path);
    OfferFrame frame;
    std::vector<UniqueFd> received;
    if (socket && receive_offer(*socket, Deadline::after(kOfferPatience), frame, received)) {
      if (frame.magic != kOfferMagic || frame.descriptors != received.size() ||
          received.size() > kMostDescriptors) {
        fail(ErrorKind::kInvalidArgument, "open: what is offered as ", in_quotes(name),
             " is no object of this version");
      }
      std::vector<int> descriptors;
      for (UniqueFd& descriptor : received) descriptors.push_back(descriptor.release());
      return Shared::adopt(descriptors);
    }
    if (deadline.expired()) {
      fail(ErrorKind::kTimeout, "open: nobody offers ", in_quotes(name), " by the deadline");
    }
    ::poll(nullptr, 0, std::min(deadline.poll_timeout_ms() & 0x7fffffff, 5));
  }
}

}  // namespace convoy::share
