#include "group/tcp_store.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "convoy/c10d_store.h"
#include "os/socket.h"

namespace convoy {
namespace {

using std::chrono::milliseconds;

constexpr int kFirstPauseMs = 2;
constexpr int kLongestPauseMs = 100;

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// Empty, with the reason, if the name is not known (yet).
Addresses resolve(const Endpoint& endpoint, std::string& reason) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code =
      ::getaddrinfo(endpoint.host.c_str(), std::to_string(endpoint.port).c_str(), &hints, &found);
  if (code != 0) {
    reason = concat("the host cannot be resolved: ", ::gai_strerror(code));
    found = nullptr;
  }
  return {found, [](addrinfo* list) {
            if (list) ::freeaddrinfo(list);
          }};
}

UniqueFd bind_to(const Endpoint& endpoint) {
  std::string reason;
  const Addresses addresses = resolve(endpoint, reason);
  int code = 0;
  for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
    UniqueFd fd(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol));
    const int on = 1;
    // A restarted job gets the port of the one before, whose connections linger.
    if (fd && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0) {
      return fd;
    }
    code = errno;
    reason = errno_text(code);
  }
  const char* const hint =
      code == EADDRINUSE ? "; choose another port, or end what listens there"
      : code == EADDRNOTAVAIL
          ? "; rank 0 must run on the host that has this address (or say 0.0.0.0 there to listen "
            "on every address)"
          : "";
  fail(ErrorKind::kInvalidArgument, "rendezvous: rank 0 cannot listen at ", to_string(endpoint),
       ": ", reason, hint);
}

// One attempt. Torch would wait half a second and more after each that fails.
bool is_served(const Endpoint& endpoint, const Deadline& deadline, std::string& reason) {
  const Addresses addresses = resolve(endpoint, reason);
  for (const addrinfo* a = addresses.get(); a; a = a->ai_next) {
    const UniqueFd fd(
        ::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    if (!fd) fail_errno("making a TCP socket");
    if (::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0) return true;
    int code = errno;
    if (code == EINPROGRESS) {
      socklen_t length = sizeof code;
      if (!wait_ready(fd.get(), POLLOUT, deadline)) {
        code = ETIMEDOUT;
      } else if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &code, &length) < 0) {
        code = errno;
      }
      if (code == 0) return true;
    }
    reason = errno_text(code);
  }
  return false;
}

void await_server(const Endpoint& endpoint, const Deadline& deadline) {
  std::string reason;
  for (int pause = kFirstPauseMs; !is_served(endpoint, deadline, reason);
       pause = std::min(2 * pause, kLongestPauseMs)) {
    if (deadline.expired()) {
      fail(ErrorKind::kTimeout, "rendezvous: nobody listened at ", to_string(endpoint),
           " by the deadline (", reason, "); is rank 0 running, and is this its address?");
    }
    ::poll(nullptr, 0, std::min(pause, deadline.poll_timeout_ms()));
  }
}

c10d::TCPStoreOptions store_options(const Endpoint& endpoint, const Deadline& deadline) {
  c10d::TCPStoreOptions options;
  options.port = endpoint.port;
  options.waitWorkers = false;  // we wait ourselves, and name who is missing
  // Torch counts whole seconds.
  const auto left = std::chrono::ceil<milliseconds>(deadline.remaining());
  options.timeout = std::clamp<milliseconds>(left, std::chrono::seconds(1), std::chrono::hours(24));
  return options;
}

std::shared_ptr<Store> make_store(const Endpoint& endpoint, const c10d::TCPStoreOptions& options) {
  try {
    return from_c10d(c10::make_intrusive<c10d::TCPStore>(endpoint.host, options));
  } catch (const c10::Error& error) {
    fail(ErrorKind::kPeerLost, "rendezvous: torch's store at ", to_string(endpoint), ": ",
         error.what_without_backtrace());
  } catch (const std::exception& error) {
    fail(ErrorKind::kPeerLost, "rendezvous: torch's store at ", to_string(endpoint), ": ",
         error.what());
  }
}

}  // namespace

std::shared_ptr<Store> serve_tcp_store(const Endpoint& endpoint, const Deadline& deadline) {
  UniqueFd fd = bind_to(endpoint);
  auto options = store_options(endpoint, deadline);
  options.isServer = true;
  options.multiTenant = true;             // a store that the program makes itself may share it
  options.masterListenFd = fd.release();  // torch closes it
  auto store = make_store(endpoint, options);
  log_info("rendezvous: rank 0 serves the store at ", to_string(endpoint));
  return store;
}

std::shared_ptr<Store> connect_tcp_store(const Endpoint& endpoint, const Deadline& deadline) {
  await_server(endpoint, deadline);
  // Torch waits without a limit for the first answer. If something else listens there, only a
  // thread can wait in our stead; it is left behind then.
  std::packaged_task<std::shared_ptr<Store>()> task(
      [endpoint, options = store_options(endpoint, deadline)] {
        return make_store(endpoint, options);
      });
  auto store = task.get_future();
  start_thread(std::move(task)).detach();
  if (!deadline.is_never() && store.wait_until(deadline.when()) != std::future_status::ready) {
    fail(ErrorKind::kTimeout, "rendezvous: what listens at ", to_string(endpoint),
         " did not answer by the deadline; is it rank 0, or another program?");
  }
  return store.get();
}

}  // namespace convoy
