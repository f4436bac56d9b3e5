#include "store/socket_store.h"

#include <poll.h>
#include <sys/stat.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "base/error.h"
#include "base/guarded.h"
#include "os/fork_guard.h"
#include "store/request_store.h"
#include "store/server.h"
#include "store/table.h"

namespace convoy {
namespace {

// How long after a request's deadline the server's own "timed out, missing: ..." may take to come.
constexpr auto kAnswerGrace = std::chrono::seconds(2);

constexpr FrameLimits kReplyLimits{.body_bytes = UINT32_MAX, .parts = SIZE_MAX};

// Any number of threads may have requests under way. There is no receiving thread: one of the
// waiting callers reads the socket for all of them; when it has its own reply it hands the task on.
class SocketStore final : public RequestStore {
 public:
  explicit SocketStore(Socket socket)
      : socket_(std::move(socket)), generation_(fork_generation()) {}

 protected:
  StoreMessage exchange(StoreMessage request, const Deadline& deadline) override {
    if (fork_generation() != generation_) {
      fail(ErrorKind::kUnsupported,
           "store: this connection belongs to the parent process; a forked child cannot use it");
    }
    const Deadline answer_by =
        deadline.is_never() ? deadline : Deadline::at(deadline.when() + kAnswerGrace);
    const std::uint32_t id = request.id = expect_reply();
    try {
      send(request, answer_by);
      return checked_reply(await(id, answer_by));
    } catch (...) {
      state_.lock()->pending.erase(id);
      throw;
    }
  }

 private:
  struct State {
    std::map<std::uint32_t, std::optional<StoreMessage>> pending;
    std::uint32_t next_id = 1;
    bool reading = false;         // some caller reads the socket
    std::optional<Error> broken;  // sticks: the connection is of no use any more
  };

  std::uint32_t expect_reply() {
    auto state = state_.lock();
    if (state->broken) throw *state->broken;
    const std::uint32_t id = state->next_id++;
    state->pending[id];
    return id;
  }

  void send(const StoreMessage& request, const Deadline& deadline) {
    const std::string bytes = encode(request);
    const std::lock_guard lock(send_mutex_);
    try {
      socket_.send(std::as_bytes(std::span(bytes)), deadline);
    } catch (const Error& error) {
      throw break_with(error);  // part of the request may be out: nothing can follow it
    }
  }

  StoreMessage await(std::uint32_t id, const Deadline& deadline) {
    auto state = state_.lock();
    for (;;) {
      auto& reply = state->pending.at(id);
      if (reply) {
        StoreMessage message = std::move(*reply);
        state->pending.erase(id);
        return message;
      }
      if (state->broken) throw *state->broken;
      if (deadline.expired()) {
        fail(ErrorKind::kTimeout, "store: the server did not answer by the deadline");
      }
      if (state->reading) {
        state.wait(deadline, [&] {
          return !state->reading || state->pending.at(id).has_value() || state->broken;
        });
        continue;
      }
      state->reading = true;
      state.unlock();
      read_some(deadline);
      state.relock();
      state->reading = false;
      state_.notify();
    }
  }

  // Receives once and files what came. Only the caller that set `reading`.
  void read_some(const Deadline& deadline) {
    try {
      if (!wait_ready(socket_.fd(), POLLIN, deadline)) return;
      const auto got = socket_.try_receive(read_buffer_);
      if (!got) {
        fail(ErrorKind::kPeerLost,
             "store: the server closed the connection; read the launcher's (or rank 0's) log");
      }
      decoder_.feed(std::span(read_buffer_).first(*got));
      while (auto reply = decoder_.next()) {
        auto state = state_.lock();
        const auto found = state->pending.find(reply->id);
        if (found != state->pending.end()) found->second = std::move(*reply);
      }
    } catch (const Error& error) {
      break_with(error);
    }
  }

  Error break_with(const Error& error) {
    auto state = state_.lock();
    if (!state->broken) state->broken = error;
    state_.notify();
    return *state->broken;
  }

  Socket socket_;
  const unsigned generation_;
  std::mutex send_mutex_;
  Guarded<State> state_;
  // Used by whoever reads.
  StoreDecoder decoder_{kReplyLimits};
  std::array<std::byte, std::size_t{64} << 10> read_buffer_;
};

std::uint64_t inode_of(int fd) {
  struct stat info {};
  if (fstat(fd, &info) < 0) return 0;
  return info.st_ino;
}

std::shared_ptr<Store> store_from_environment() {
  const char* text = std::getenv(kStoreFdVariable);
  if (!text) return nullptr;
  char* end = nullptr;
  const long fd = std::strtol(text, &end, 10);
  if (*end != ':' || fd < 0 || fd > INT32_MAX) {
    fail(ErrorKind::kInvalidArgument, kStoreFdVariable, "='", text,
         "' is not of the form descriptor:inode; do not set it by hand, use `convoy run`");
  }
  const std::uint64_t inode = std::strtoull(end + 1, &end, 10);
  if (*end != '\0' || inode == 0 || inode_of(static_cast<int>(fd)) != inode) {
    fail(ErrorKind::kPeerLost, "the store connection of this rank (descriptor ", fd,
         ") is not open here: only the program that `convoy run` starts has it, not that program's "
         "children, and a program that closes all descriptors at its start loses it");
  }
  return make_socket_store(Socket(UniqueFd(static_cast<int>(fd))));
}

}  // namespace

std::string store_environment(int fd) {
  return concat(kStoreFdVariable, "=", fd, ":", inode_of(fd));
}

std::shared_ptr<Store> make_socket_store(Socket socket) {
  return std::make_shared<SocketStore>(std::move(socket));
}

std::shared_ptr<Store> connect_store(const std::string& socket_path, const Deadline& deadline) {
  Socket socket = Socket::connect(socket_path, deadline);
  socket.require_same_user();
  return make_socket_store(std::move(socket));
}

std::shared_ptr<Store> launcher_store() {
  // Never destroyed: ranks may use it until they exit. A failure is not kept: the next call tries
  // again and throws again.
  static auto* const store = new std::shared_ptr<Store>(store_from_environment());
  return *store;
}

}  // namespace convoy
