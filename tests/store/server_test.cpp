#include "store/server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <future>
#include <random>

#include "base/concat.h"
#include "raw_peer.h"
#include "store/socket_store.h"
#include "support/file_mode.h"
#include "support/rank_group.h"

namespace convoy::test {
namespace {

TEST(StoreServer, CountsWhatItHolds) {
  StoreServer server;
  const auto store = client_of(server);
  store->set("key", "value");
  RawPeer waiting(server);
  waiting.send(StoreOp::kGet, {"late"}, 1, UINT64_MAX);
  EXPECT_TRUE(eventually([&] { return server.stats().waiting == 1; }));
  const auto stats = server.stats();
  EXPECT_EQ(stats.clients, 2u);
  EXPECT_EQ(stats.keys, 1u);
  EXPECT_EQ(stats.bytes, 8u);
  EXPECT_EQ(stats.rejected, 0u);
  waiting.socket.close();
  EXPECT_TRUE(eventually([&] { return server.stats().waiting == 0; }));
  EXPECT_EQ(server.stats().clients, 1u);
}

TEST(StoreServer, DestructionWakesEveryWaiter) {
  auto server = std::make_unique<StoreServer>();
  const auto store = client_of(*server);
  const auto other = client_of(*server);
  std::vector<std::future<std::optional<Error>>> waiting;
  for (int i = 0; i < 6; ++i) {
    waiting.push_back(std::async(std::launch::async, [&, i] {
      return error_of([&] { (i < 3 ? store : other)->get("k", Deadline::never()); });
    }));
  }
  EXPECT_TRUE(eventually([&] { return server->stats().waiting == 6; }));
  server.reset();
  for (auto& each : waiting) {
    const auto error = each.get();
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->kind(), ErrorKind::kPeerLost) << error->what();
  }
  EXPECT_ERROR(kPeerLost, "server closed the connection", store->set("k", "v"));
}

TEST(StoreServer, WhatWasAskedBeforeHangingUpCounts) {
  StoreServer server;
  const auto store = client_of(server);
  for (int i = 0; i < 20; ++i) {
    RawPeer hasty(server);
    hasty.send(StoreOp::kSet, {concat("k", i), "v"});
    hasty.socket.close();
    EXPECT_EQ(store->get(concat("k", i), soon()), "v");
  }
  // Also behind replies that it never read and that fill its connection.
  store->set("large", std::string(std::size_t{3} << 20, 'x'));
  RawPeer hasty(server);
  for (int i = 0; i < 10; ++i) hasty.send(StoreOp::kTryGet, {"large"});
  hasty.send(StoreOp::kSet, {"last", "word"});
  hasty.socket.close();
  EXPECT_EQ(store->get("last", soon()), "word");
  EXPECT_TRUE(eventually([&] { return server.stats().clients == 1; }));
}

TEST(StoreServer, HalfClosedConnectionEnds) {
  StoreServer server;
  RawPeer peer(server);
  peer.send(StoreOp::kSet, {"k", "v"});
  ::shutdown(peer.socket.fd(), SHUT_WR);
  EXPECT_TRUE(peer.closed_by_peer());
  EXPECT_EQ(client_of(server)->get("k"), "v");
}

// --- Bytes that are no request --------------------------------------------------------------

struct Garbage {
  const char* name;
  std::string bytes;
};

std::string request_with(std::size_t offset, char byte) {
  std::string bytes = encode({.code = 1, .id = 1, .parts = {"k", "v"}});
  bytes[offset] = byte;
  return bytes;
}

std::vector<Garbage> garbage() {
  std::mt19937 random(7);
  std::string noise = "x";
  for (int i = 0; i < 100'000; ++i) noise.push_back(static_cast<char>(random()));
  return {{"noise", noise},
          {"one byte", "x"},
          {"http", "GET / HTTP/1.1\r\n\r\n"},
          {"zeros", std::string(4096, '\0')},
          {"wrong version", request_with(3, '2')},
          {"reserved bits", request_with(14, 1)},
          {"part beyond the body", request_with(32, 100)},
          {"huge part", request_with(35, '\x7f')},
          {"a request and then noise", request_with(32, 1) + noise}};
}

TEST(StoreServer, GarbageClosesOnlyItsOwnConnection) {
  StoreServer server;
  const auto store = client_of(server);
  auto bystander = std::async(std::launch::async, [&] { return store->get("late", soon()); });
  EXPECT_TRUE(eventually([&] { return server.stats().waiting == 1; }));
  std::size_t rejected = 0;
  for (const auto& [name, bytes] : garbage()) {
    SCOPED_TRACE(name);
    RawPeer stranger(server);
    stranger.try_send(bytes);  // the server may close before it has taken all
    std::optional<StoreMessage> last;
    while (auto reply = stranger.receive()) last = std::move(reply);
    ASSERT_TRUE(last.has_value());
    EXPECT_EQ(last->id, kConnectionId);
    EXPECT_EQ(last->code, 1 + static_cast<int>(ErrorKind::kInvalidArgument));
    EXPECT_EQ(server.stats().rejected, ++rejected);
    EXPECT_EQ(server.stats().clients, 1u);
  }
  store->set("late", "unharmed");
  EXPECT_EQ(bystander.get(), "unharmed");
}

TEST(StoreServer, DescriptorsAreNotAccepted) {
  StoreServer server;
  RawPeer peer(server);
  const int fd = STDERR_FILENO;
  const std::string request = encode({.code = 2, .id = 1, .parts = {"k"}});
  peer.socket.send(std::as_bytes(std::span(request)), soon(), std::span(&fd, 1));
  EXPECT_TRUE(peer.closed_by_peer());
  EXPECT_EQ(server.stats().rejected, 1u);
}

TEST(StoreServer, WellFormedNonsenseIsAnsweredAndTheConnectionStays) {
  StoreServer server;
  RawPeer peer(server);
  peer.send(static_cast<StoreOp>(12), {"k"}, 5);
  auto reply = peer.receive();
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->id, 5u);
  EXPECT_EQ(reply->code, 1 + static_cast<int>(ErrorKind::kInvalidArgument));
  EXPECT_NE(reply->parts[0].find("unknown operation 12"), std::string::npos) << reply->parts[0];
  peer.send(StoreOp::kSet, {"only a key"});
  EXPECT_EQ(peer.receive_error(), ErrorKind::kInvalidArgument);
  peer.send(StoreOp::kSet, {"k", "v"});
  EXPECT_EQ(peer.receive()->code, kReplyOk);
  EXPECT_EQ(server.stats().rejected, 0u);
}

TEST(StoreServer, SlowRequestHoldsUpNobody) {
  StoreServer server;
  const auto store = client_of(server);
  RawPeer slow(server);
  const std::string request = encode({.code = 1, .id = 1, .parts = {"slow", "v"}});
  for (const char byte : request) {
    EXPECT_FALSE(store->check(std::vector<std::string>{"slow"}));
    slow.send({&byte, 1});
  }
  EXPECT_EQ(slow.receive()->code, kReplyOk);
  EXPECT_EQ(store->get("slow"), "v");
  // A header that never gets its body, and a piece of a header.
  slow.send(request.substr(0, 33));
  RawPeer shorter(server);
  shorter.send(request.substr(0, 10));
  store->set("k", "v");
  EXPECT_EQ(server.stats().clients, 3u);
  shorter.socket.close();
  EXPECT_TRUE(eventually([&] { return server.stats().clients == 2; }));
  EXPECT_EQ(server.stats().rejected, 0u);  // hanging up is no offence
}

// --- The named socket -----------------------------------------------------------------------

TEST(StoreServer, NamedSocketIsPrivateAndGoesAway) {
  const TempFolder parent("server");
  const std::string folder = parent.path() + "/private";
  StoreServer server;
  const std::string path = server.listen(folder, "socket");
  EXPECT_EQ(path, folder + "/socket");
  EXPECT_EQ(mode_of(folder), 0700u);
  EXPECT_EQ(mode_of(path), 0600u);
  const auto store = connect_store(path, soon());
  store->set("k", "v");
  EXPECT_ERROR(kInvalidArgument, "listens at", server.listen(folder, "other"));
  server.unlink();
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(std::filesystem::exists(folder));
  EXPECT_EQ(store->get("k"), "v");  // connections stay
  EXPECT_ERROR(kPeerLost, path, connect_store(path, soon()));
  server.unlink();
  // One may listen again, and the destructor cleans up as well.
  EXPECT_EQ(server.listen(folder, "again"), folder + "/again");
  EXPECT_EQ(connect_store(folder + "/again", soon())->get("k"), "v");
}

TEST(StoreServer, WhoHasConnectedIsInWhenThePathGoes) {
  const TempFolder parent("server");
  StoreServer server;
  const std::string path = server.listen(parent.path() + "/private", "socket");
  std::vector<std::shared_ptr<Store>> stores;
  for (int i = 0; i < 50; ++i) stores.push_back(connect_store(path, soon()));
  server.unlink();
  for (const auto& store : stores) store->add("count", 1);
  EXPECT_EQ(stores[0]->get("count"), "50");
}

TEST(StoreServer, DestructorRemovesThePath) {
  const TempFolder parent("server");
  std::string path;
  {
    StoreServer server;
    path = server.listen(parent.path() + "/private", "socket");
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(parent.path()));
}

TEST(StoreServer, UnsafeOrImpossiblePathsAreRefused) {
  const TempFolder parent("server");
  StoreServer server;
  const std::string open_folder = parent.path() + "/open";
  std::filesystem::create_directory(open_folder);
  ::chmod(open_folder.c_str(), 0755);
  EXPECT_ERROR(kInvalidArgument, "not safe", server.listen(open_folder, "socket"));
  EXPECT_ERROR(kInvalidArgument, "takes 1 to 107",
               server.listen(parent.path(), std::string(120, 'n')));
  EXPECT_ERROR(kInvalidArgument, "making folder",
               server.listen(parent.path() + "/no/such", "socket"));
  const std::string path = server.listen(parent.path(), "socket");  // none of these got in the way
  StoreServer second;
  EXPECT_ERROR(kInvalidArgument, path, second.listen(parent.path(), "socket"));
  EXPECT_EQ(connect_store(path, soon())->add("n", 1), 1);  // and it did not take the path away
}

TEST(StoreServer, OtherUsersAreRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  constexpr uid_t kNobody = 65534;
  RankGroup group(1, RankMode::kProcesses);
  group.start([](Rank& r) {
    r.wait_for("listening");
    // Inside the folder: nobody may not walk there.
    EXPECT_EQ(::chdir(r.store()->get("folder", r.deadline()).c_str()), 0);
    ASSERT_EQ(::seteuid(kNobody), 0);
    const auto intruder = connect_store("./socket", r.deadline());
    ASSERT_EQ(::seteuid(0), 0);
    ::prctl(PR_SET_DUMPABLE, 1);
    EXPECT_ERROR(kInvalidArgument, "of user 65534 refused: this process belongs to user 0",
                 intruder->set("k", "v"));
    EXPECT_ERROR(kInvalidArgument, "refused", intruder->try_get("k"));
    // The same process as the server's user is welcome.
    EXPECT_EQ(connect_store("./socket", r.deadline())->try_get("k"), std::nullopt);
  });
  const TempFolder parent("server");
  const std::string folder = parent.path() + "/private";
  StoreServer server;
  const std::string path = server.listen(folder, "socket");
  // The modes keep others out already: take them away to see the check of the user itself.
  EXPECT_EQ(::chmod(folder.c_str(), 0755), 0);
  EXPECT_EQ(::chmod(path.c_str(), 0666), 0);
  group.store()->set("folder", folder);
  group.post("listening");
  group.join();
  EXPECT_EQ(server.stats().rejected, 1u);
  EXPECT_EQ(server.stats().keys, 0u);
}

// --- Circumstances --------------------------------------------------------------------------

TEST(StoreServer, ForkedChildLeavesTheServerAlone) {
  const TempFolder parent("server");
  auto server = std::make_unique<StoreServer>();
  const std::string path = server->listen(parent.path() + "/private", "socket");
  const auto store = connect_store(path, soon());
  const pid_t child = ::fork();
  if (child == 0) {
    server.reset();  // neither hangs nor removes the parent's path
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(store->add("n", 1), 1);
  EXPECT_EQ(connect_store(path, soon())->add("n", 1), 2);
}

// Lowers the limit on open files to what is open now.
class NoMoreDescriptors {
 public:
  NoMoreDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const int next = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
    ::close(next);
    rlimit now = before_;
    now.rlim_cur = static_cast<rlim_t>(next);
    ::setrlimit(RLIMIT_NOFILE, &now);
  }
  ~NoMoreDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

// A socket that exists before the descriptors are used up, and connects when they are.
class LateClient {
 public:
  RawPeer connect(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return RawPeer{Socket(std::move(fd_))};
  }

 private:
  UniqueFd fd_{::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
};

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

constexpr auto kSomePauses = std::chrono::milliseconds(250);  // the server looks every 100 ms

TEST(StoreServer, RunningOutOfDescriptorsIsNoEnd) {
  const TempFolder parent("server");
  StoreServer server;
  const std::string path = server.listen(parent.path() + "/private", "socket");
  const auto store = client_of(server);
  LateClient late;
  std::optional<NoMoreDescriptors> none(std::in_place);
  EXPECT_ERROR(kResource, "socket pair", server.connect());
  RawPeer peer = late.connect(path);
  peer.send(StoreOp::kTryGet, {"k"});

  // Nothing comes, and the server does not burn a core over it.
  const double before = cpu_seconds();
  EXPECT_FALSE(wait_ready(peer.socket.fd(), POLLIN, Deadline::after(kSomePauses)));
  EXPECT_LT(cpu_seconds() - before, 0.1);
  store->set("k", "v");  // others are served

  none.reset();
  EXPECT_EQ(peer.receive()->code, kReplyOk);  // it was only late
}

TEST(StoreServer, PathMayGoWhileDescriptorsAreUsedUp) {
  const TempFolder parent("server");
  StoreServer server;
  const std::string path = server.listen(parent.path() + "/private", "socket");
  const auto store = client_of(server);
  LateClient late;
  const NoMoreDescriptors none;
  RawPeer peer = late.connect(path);
  EXPECT_FALSE(wait_ready(peer.socket.fd(), POLLIN, Deadline::after(kSomePauses)));
  server.unlink();
  EXPECT_TRUE(peer.closed_by_peer());
  // The server lives on, past the time when it would have looked again.
  EXPECT_ERROR(kTimeout, "no key", store->get("k", Deadline::after(kSomePauses)));
}

}  // namespace
}  // namespace convoy::test
