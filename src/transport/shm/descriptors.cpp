#include "transport/shm/descriptors.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace convoy::shm {
namespace {

constexpr Descriptors::Id kWakerId = 0;

// A descriptor is reported once, until it is armed again.
void set_interest(int epoll, int operation, int fd, std::uint32_t events, Descriptors::Id id) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll, operation, fd, &event) == 0) return;
  const int code = errno;
  const bool unfit = code == EBADF || code == EPERM || code == EEXIST;
  fail(unfit ? ErrorKind::kInvalidArgument : errno_kind(code), "watching descriptor ", fd, ": ",
       errno_text(code));
}

// Rounds up: who wakes too early would wait in turns.
int milliseconds_until(const Deadline& deadline) {
  if (deadline.is_never()) return -1;
  const auto left = deadline.when() - Deadline::Clock::now();
  const auto whole = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::clamp<std::int64_t>(whole, 0, 3'600'000));
}

// Finer than milliseconds where the kernel can (Linux 5.11).
int wait_for_events(int epoll, std::span<epoll_event> events, const Deadline& deadline) {
  const auto most = static_cast<int>(events.size());
  static std::atomic<bool> fine{true};
  if (!deadline.is_never() && fine.load(std::memory_order_relaxed)) {
    const std::chrono::nanoseconds left = deadline.when() - Deadline::Clock::now();
    const std::int64_t count = std::max<std::int64_t>(left.count(), 0);
    const timespec limit{static_cast<time_t>(count / 1'000'000'000),
                         static_cast<long>(count % 1'000'000'000)};
    const int found = ::epoll_pwait2(epoll, events.data(), most, &limit, nullptr);
    if (found >= 0 || (errno != ENOSYS && errno != EPERM)) return found;
    fine.store(false, std::memory_order_relaxed);
  }
  return ::epoll_wait(epoll, events.data(), most, milliseconds_until(deadline));
}

}  // namespace

Descriptors::Descriptors()
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), waker_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !waker_) {
    const int code = errno;
    fail(errno_kind(code), "making an endpoint's epoll: ", errno_text(code));
  }
  set_interest(epoll_.get(), EPOLL_CTL_ADD, waker_.get(), EPOLLIN, kWakerId);
}

Descriptors::Id Descriptors::add(int fd, std::uint32_t events, Ready ready) {
  auto state = state_.lock();
  const Id id = state->next++;
  set_interest(epoll_.get(), EPOLL_CTL_ADD, fd, events | EPOLLONESHOT, id);
  state->watched[id] = std::make_shared<Watched>(Watched{fd, events, std::move(ready)});
  return id;
}

bool Descriptors::remove(Id id) {
  auto state = state_.lock();
  const auto found = state->watched.find(id);
  if (found == state->watched.end()) return false;
  const bool runs = found->second->runs;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second->fd, nullptr);
  state->watched.erase(found);
  std::erase_if(state->queue, [&](const auto& entry) { return entry.first == id; });
  count_.store(state->queue.size());
  return !runs;
}

void Descriptors::wait(const Deadline& deadline) {
  std::array<epoll_event, 64> events;
  const int found = wait_for_events(epoll_.get(), events, deadline);
  if (found < 0) {
    CONVOY_CHECK(errno == EINTR, "epoll: ", errno_text(errno));
    return;
  }
  auto state = state_.lock();
  for (int i = 0; i < found; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.u64 == kWakerId) {
      std::uint64_t written = 0;
      static_cast<void>(!::read(waker_.get(), &written, sizeof written));
    } else if (state->watched.contains(event.data.u64)) {
      state->queue.emplace_back(event.data.u64, event.events);
    }
  }
  count_.store(state->queue.size());
}

bool Descriptors::run_one() {
  Id id = 0;
  std::uint32_t events = 0;
  std::shared_ptr<Watched> watched;
  {
    auto state = state_.lock();
    if (state->queue.empty()) return false;
    std::tie(id, events) = state->queue.front();
    state->queue.pop_front();
    count_.store(state->queue.size());
    watched = state->watched.at(id);
    watched->runs = true;
  }
  watched->ready(events);
  auto state = state_.lock();
  watched->runs = false;
  if (!state->watched.contains(id)) return true;
  // Whoever has closed it without remove() hears no more of it.
  epoll_event event{};
  event.events = watched->events | EPOLLONESHOT;
  event.data.u64 = id;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, watched->fd, &event);
  return true;
}

void write_waker(int waker) noexcept {
  const int before = errno;
  const std::uint64_t one = 1;
  // A full counter wakes, too.
  static_cast<void>(!::write(waker, &one, sizeof one));
  errno = before;
}

bool is_waker(int descriptor) noexcept {
  std::array<char, 64> name{};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t length = ::readlink(link.c_str(), name.data(), name.size());
  if (length < 0 ||
      std::string_view(name.data(), static_cast<std::size_t>(length)) != "anon_inode:[eventfd]") {
    return false;
  }
  const int flags = ::fcntl(descriptor, F_GETFL);
  return flags >= 0 && (flags & O_NONBLOCK) != 0;
}

}  // namespace convoy::shm
