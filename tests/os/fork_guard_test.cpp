#include "os/fork_guard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>

#include "base/loop.h"
#include "os/file.h"
#include "os/process.h"
#include "os/segment.h"
#include "os/socket.h"
#include "store/server.h"
#include "support/deadlines.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

using std::chrono::seconds;
using test::expect_error;
using test::run_in_process;
using test::soon;

// A child made by fork() that runs `function` and then lives until this object ends. To be used in
// a process of its own (run_in_process).
class Fork {
 public:
  template <class Function>
  explicit Fork(Function function) {
    int answers[2];
    EXPECT_EQ(::pipe2(answers, O_CLOEXEC), 0);
    answer_.reset(answers[0]);
    const UniqueFd answer(answers[1]);
    pid_ = ::fork();
    if (pid_ != 0) return;
    const char result = function() ? 'y' : 'n';
    if (::write(answer.get(), &result, 1) != 1) ::_exit(1);
    ::alarm(60);
    for (;;) ::pause();
  }
  Fork(Fork&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)), answer_(std::move(other.answer_)) {}
  ~Fork() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    EXPECT_EQ(::waitpid(pid_, nullptr, 0), pid_);
  }

  // What the function returned, once it has.
  bool answer() const {
    char result = 0;
    EXPECT_TRUE(wait_ready(answer_.get(), POLLIN, soon()));
    EXPECT_EQ(::read(answer_.get(), &result, 1), 1);
    return result == 'y';
  }

 private:
  pid_t pid_ = -1;
  UniqueFd answer_;
};

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

bool sees_end(Socket& socket) {
  std::byte byte{};
  return wait_ready(socket.fd(), POLLIN, Deadline::after(seconds(10))) &&
         !socket.try_receive({&byte, 1});
}

TEST(ForkGuardTest, ForkedChildKeepsNoSocketAlive) {
  run_in_process([] {
    auto [a, b] = Socket::pair();
    const Fork child([] { return true; });
    EXPECT_TRUE(child.answer());
    a.close();
    EXPECT_TRUE(sees_end(b));  // although the child lives
  });
}

TEST(ForkGuardTest, NumbersStayValidAndSayThatThePeerIsGone) {
  run_in_process([] {
    auto pair = Socket::pair();
    const int number = pair.first.fd();
    const Fork child([&] {
      std::byte byte{};
      return is_open(number) && !pair.first.try_receive({&byte, 1}) &&
             !pair.first.try_send({&byte, 1}) && ::poll(nullptr, 0, 0) == 0 &&
             (::fcntl(number, F_GETFD) & FD_CLOEXEC) != 0;
    });
    EXPECT_TRUE(child.answer());
    // The parent's end is untouched.
    const std::byte out{5};
    std::byte in{};
    pair.first.send({&out, 1}, soon());
    pair.second.receive({&in, 1}, soon());
    EXPECT_EQ(in, out);
  });
}

TEST(ForkGuardTest, ChildMayCloseAndReuseTheNumbers) {
  run_in_process([] {
    auto pair = Socket::pair();
    const Fork child([&] {
      pair.first.close();
      pair.second.close();
      auto own = Socket::pair();
      const std::byte out{1};
      return own.first.try_send({&out, 1}) == std::optional<std::size_t>(1);
    });
    EXPECT_TRUE(child.answer());
  });
}

TEST(ForkGuardTest, UnregisteredDescriptorsAreInherited) {
  run_in_process([] {
    auto [a, b] = Socket::pair();
    const UniqueFd given = a.release();
    const UniqueFd file(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
    const Fork child([&] {
      char byte = 1;
      return ::write(given.get(), &byte, 1) == 1 && ::read(file.get(), &byte, 1) == 1 && byte == 0;
    });
    EXPECT_TRUE(child.answer());
    std::byte in{};
    b.receive({&in, 1}, soon());
  });
}

TEST(ForkGuardTest, ListenerInAChildIsDeafAndLeavesThePath) {
  run_in_process([] {
    const TempFolder folder("fork");
    std::optional<Listener> listener(std::in_place, folder.path() + "/sockets", "door");
    const std::string path = listener->path();
    {
      const Fork child([&] {
        listener.reset();
        return true;
      });
      EXPECT_TRUE(child.answer());
      EXPECT_TRUE(std::filesystem::exists(path));
      const Socket client = Socket::connect(path, soon());
      listener->accept(soon());
      listener.reset();
      expect_error(ErrorKind::kPeerLost, path, [&] { Socket::connect(path, soon()); });
    }
  });
}

TEST(ForkGuardTest, GenerationCountsForks) {
  run_in_process([] {
    EXPECT_EQ(fork_generation(), 0u);
    const Fork child([] {
      if (fork_generation() != 1) return false;
      const pid_t grandchild = ::fork();
      if (grandchild == 0) ::_exit(fork_generation() == 2 ? 0 : 1);
      int status = -1;
      return ::waitpid(grandchild, &status, 0) == grandchild && status == 0;
    });
    EXPECT_TRUE(child.answer());
    EXPECT_EQ(fork_generation(), 0u);
  });
}

TEST(ForkGuardTest, FullDescriptorTableInTheChild) {
  run_in_process([] {
    auto [a, b] = Socket::pair();
    auto [c, d] = Socket::pair();
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    const rlimit low{.rlim_cur = 64, .rlim_max = before.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
    std::optional<Fork> child;
    {
      std::vector<UniqueFd> all;
      for (;;) {
        UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
        if (!fd) break;
        all.push_back(std::move(fd));
      }
      ASSERT_GE(all.size(), 2u);
      for (int i = 0; i < 2; ++i) all.pop_back();  // for the pipe of Fork
      child.emplace(
          [&, first = a.fd(), second = c.fd()] { return is_open(first) && is_open(second); });
    }
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_TRUE(child->answer());
    a.close();
    c.close();
    EXPECT_TRUE(sees_end(b));
    EXPECT_TRUE(sees_end(d));
  });
}

// Sockets are made and closed while another thread forks: no child may catch one half registered.
TEST(ForkGuardTest, ForksBesideSocketsThatComeAndGo) {
  run_in_process([] {
    std::atomic<bool> stop = false;
    std::atomic<int> rounds = 0;
    std::jthread maker([&] {
      while (!stop) {
        auto [a, b] = Socket::pair();
        a.close();
        if (!sees_end(b)) {
          ADD_FAILURE() << "a forked child keeps a socket alive";
          return;
        }
        ++rounds;
      }
    });
    {
      std::vector<Fork> children;
      for (int i = 0; i < 30; ++i) {
        const int before = rounds;
        const auto limit = soon();
        while (rounds == before && !limit.expired()) std::this_thread::yield();
        children.emplace_back([] { return true; });
      }
      const int before = rounds;
      const auto limit = soon();
      while (rounds < before + 10 && !limit.expired()) std::this_thread::yield();
      stop = true;
      maker.join();
    }
    EXPECT_GT(rounds, 30);
  });
}

TEST(ForkGuardTest, PauseMayBeNestedAndForkWorksAfterIt) {
  run_in_process([] {
    {
      const ForkPause outer;
      const ForkPause inner;
    }
    const Fork child([] {
      const ForkPause pause;
      return true;
    });
    EXPECT_TRUE(child.answer());
  });
}

TEST(ForkGuardTest, ForkInsideAPauseDoesNotHang) {
  run_in_process([] {
    // As a signal handler might do it.
    const ForkPause pause;
    const Fork child([] {
      const ForkPause again;
      return true;
    });
    EXPECT_TRUE(child.answer());
  });
}

TEST(ForkGuardTest, RegisterRefusesNonsense) {
  expect_error(ErrorKind::kInternal, "descriptor -1", [] { register_fork_closed(-1); });
  expect_error(ErrorKind::kInternal, "descriptor", [] { register_fork_closed(1 << 20); });
  unregister_fork_closed(-1);
  unregister_fork_closed(1 << 20);
}

// Every descriptor that our classes make is close-on-exec.
TEST(ForkGuardTest, ExecutedGrandchildInheritsNothing) {
  run_in_process([] {
    const TempFolder folder("exec");
    auto pair = Socket::pair();
    const Listener listener(folder.path() + "/sockets", "door");
    const Socket client = Socket::connect(listener.path(), soon());
    const Socket server = listener.accept(soon());
    const auto segment = Segment::create(1, "test");
    const UniqueFd copy = duplicate(segment.fd());
    StoreServer store;
    const UniqueFd connection = store.connect();
    const LoopThread loop("loop");
    const auto process = ChildProcess::spawn({.arguments = {"sleep", "1000"}});
    const UniqueFd pidfd = open_pidfd(::getpid());
    const std::string list = folder.path() + "/list";
    const UniqueFd out(::open(list.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));

    // Once through fork and exec by somebody else's code, once through our own.
    const pid_t child = ::fork();
    if (child == 0) {
      ::dup2(out.get(), STDOUT_FILENO);
      ::execlp("ls", "ls", "/proc/self/fd", static_cast<char*>(nullptr));
      ::_exit(127);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    auto spawned =
        ChildProcess::spawn({.arguments = {"ls", "/proc/self/fd"}, .standard_output = out.get()});
    ASSERT_TRUE(spawned.wait(soon()));
    EXPECT_EQ(read_file(list), "0\n1\n2\n3\n0\n1\n2\n3\n");  // 3: the folder that ls reads
  });
}

}  // namespace
}  // namespace convoy
