#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include "os/file.h"
#include "os/socket.h"
#include "support/deadlines.h"
#include "support/expect_error.h"
#include "support/file_mode.h"
#include "support/rank_group.h"

namespace convoy {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using test::expect_error;
using test::mode_of;
using test::soon;

class ListenerTest : public testing::Test {
 protected:
  TempFolder temp_{"listener"};
  std::string folder_ = temp_.path() + "/sockets";
};

TEST_F(ListenerTest, AcceptsConnections) {
  const Listener listener(folder_, "door");
  EXPECT_EQ(listener.path(), folder_ + "/door");
  EXPECT_EQ(mode_of(folder_), 0700u);
  EXPECT_EQ(mode_of(listener.path()), 0600u);
  EXPECT_TRUE(::fcntl(listener.fd(), F_GETFD) & FD_CLOEXEC);
  EXPECT_FALSE(listener.try_accept());
  Socket client = Socket::connect(listener.path(), soon());
  Socket server = listener.accept(soon());
  EXPECT_EQ(server.peer().pid, ::getpid());
  EXPECT_NO_THROW(server.require_same_user());
  EXPECT_NO_THROW(client.require_same_user());
  const std::byte out{7};
  std::byte in{};
  client.send({&out, 1}, soon());
  server.receive({&in, 1}, soon());
  EXPECT_EQ(in, out);
}

TEST_F(ListenerTest, LeavesNothingBehind) {
  { const Listener listener(folder_, "door"); }
  EXPECT_FALSE(fs::exists(folder_));
}

TEST_F(ListenerTest, KeepsAFolderThatWasThere) {
  fs::create_directory(folder_);
  fs::permissions(folder_, fs::perms::owner_all);
  { const Listener listener(folder_, "door"); }
  EXPECT_TRUE(fs::exists(folder_));
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(ListenerTest, UnlinkKeepsConnections) {
  Listener listener(folder_, "door");
  const std::string path = listener.path();
  Socket client = Socket::connect(path, soon());
  listener.unlink();
  listener.unlink();
  EXPECT_FALSE(fs::exists(folder_));
  Socket server = listener.accept(soon());
  const std::byte out{7};
  std::byte in{};
  server.send({&out, 1}, soon());
  client.receive({&in, 1}, soon());
  EXPECT_EQ(in, out);
  expect_error(ErrorKind::kPeerLost, path, [&] { Socket::connect(path, soon()); });
}

TEST_F(ListenerTest, AcceptGivesUpAtTheDeadline) {
  const Listener listener(folder_, "door");
  expect_error(ErrorKind::kTimeout, "nobody connected to " + listener.path(),
               [&] { listener.accept(Deadline::after(milliseconds(10))); });
}

TEST_F(ListenerTest, RefusesFoldersThatOthersCanEnter) {
  fs::create_directory(folder_);
  for (const auto more : {fs::perms::group_read, fs::perms::others_exec, fs::perms::group_write}) {
    fs::permissions(folder_, fs::perms::owner_all | more);
    expect_error(ErrorKind::kInvalidArgument, "is not safe for a socket",
                 [&] { Listener listener(folder_, "door"); });
  }
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(ListenerTest, RefusesSymlinksFilesAndMissingParents) {
  const std::string real = temp_.path() + "/real";
  fs::create_directory(real);
  fs::permissions(real, fs::perms::owner_all);
  fs::create_directory_symlink(real, folder_);
  expect_error(ErrorKind::kInvalidArgument, "is not safe for a socket",
               [&] { Listener listener(folder_, "door"); });
  fs::remove(folder_);
  write_file(folder_, "");
  expect_error(ErrorKind::kInvalidArgument, "is not safe for a socket",
               [&] { Listener listener(folder_, "door"); });
  expect_error(ErrorKind::kInvalidArgument, "making folder",
               [&] { Listener listener(temp_.path() + "/a/b", "door"); });
}

TEST_F(ListenerTest, RefusesSomebodyElsesFolder) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make one";
  fs::create_directory(folder_);
  fs::permissions(folder_, fs::perms::owner_all);
  ASSERT_EQ(::chown(folder_.c_str(), 65534, 65534), 0);
  expect_error(ErrorKind::kInvalidArgument, "must be a folder of user 0",
               [&] { Listener listener(folder_, "door"); });
}

TEST_F(ListenerTest, RefusesANameThatIsTaken) {
  const Listener listener(folder_, "door");
  expect_error(ErrorKind::kInvalidArgument, "Address already in use",
               [&] { Listener again(folder_, "door"); });
  EXPECT_TRUE(fs::exists(listener.path()));
}

TEST_F(ListenerTest, FailureRemovesTheFolderItMade) {
  expect_error(ErrorKind::kInvalidArgument, "binding",
               [&] { Listener listener(folder_, "no/such/folder"); });
  EXPECT_FALSE(fs::exists(folder_));
}

TEST_F(ListenerTest, PathsHaveAtMost107Bytes) {
  const std::string base = "/tmp/";
  expect_error(ErrorKind::kInvalidArgument, "has 108 bytes; a Unix socket takes 1 to 107",
               [&] { Listener listener("/tmp", std::string(108 - base.size(), 'x')); });
  expect_error(ErrorKind::kInvalidArgument, "has 200 bytes",
               [] { Socket::connect(std::string(200, 'x'), soon()); });
  expect_error(ErrorKind::kInvalidArgument, "has 0 bytes", [] { Socket::connect("", soon()); });
  const std::string name(107 - folder_.size() - 1, 'x');
  const Listener longest(folder_, name);
  EXPECT_EQ(longest.path().size(), 107u);
  EXPECT_NO_THROW(Socket::connect(longest.path(), soon()));
}

TEST_F(ListenerTest, ConnectToNobody) {
  expect_error(ErrorKind::kPeerLost, folder_, [&] { Socket::connect(folder_ + "/door", soon()); });
  const std::string file = temp_.path() + "/file";
  write_file(file, "");
  expect_error(ErrorKind::kPeerLost, "Connection refused", [&] { Socket::connect(file, soon()); });
  // A socket whose process was killed: the file is there, nobody listens.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string stale = temp_.path() + "/stale";
  std::memcpy(address.sun_path, stale.c_str(), stale.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  fd.reset();
  expect_error(ErrorKind::kPeerLost, "Connection refused", [&] { Socket::connect(stale, soon()); });
}

TEST_F(ListenerTest, ConnectToAnotherKindOfSocket) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = temp_.path() + "/datagrams";
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  expect_error(ErrorKind::kInvalidArgument, "wrong type", [&] { Socket::connect(path, soon()); });
}

TEST_F(ListenerTest, FullQueueIsWaitedForUntilTheDeadline) {
  const Listener listener(folder_, "door");
  std::vector<Socket> clients;
  for (int i = 0; i < 129; ++i) clients.push_back(Socket::connect(listener.path(), soon()));
  expect_error(ErrorKind::kTimeout, "queue was full",
               [&] { Socket::connect(listener.path(), Deadline::after(milliseconds(20))); });
  std::atomic<bool> connected = false;
  std::jthread late([&] {
    Socket::connect(listener.path(), soon());
    connected = true;
  });
  listener.accept(soon());
  late.join();
  EXPECT_TRUE(connected);
}

// As root: a process of another user that gets past the folder (by a descriptor of the socket's
// file, as one could hand it over) is refused by the check of its user.
TEST(PeerUserTest, AnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  test::RankGroup group(1, test::RankMode::kProcesses);
  group.start([](test::Rank& r) {
    const std::string path = r.store()->get("path", r.deadline());
    const UniqueFd door(::open(path.c_str(), O_PATH | O_CLOEXEC));
    ASSERT_TRUE(door);
    ASSERT_EQ(::setresgid(65534, 65534, 65534), 0);
    ASSERT_EQ(::setresuid(65534, 65534, 65534), 0);
    ::prctl(PR_SET_DUMPABLE, 1);  // a change of user takes /proc/self away
    const Socket socket = Socket::connect(concat("/proc/self/fd/", door.get()), r.deadline());
    EXPECT_NO_THROW(socket.require_same_user());  // root may serve everybody
    r.mark("connected");
    r.wait_for("end");
  });
  const TempFolder temp("listener");
  const Listener listener(temp.path() + "/sockets", "door");
  ASSERT_EQ(::chmod(listener.path().c_str(), 0666), 0);
  group.store()->set("path", listener.path());
  const Socket socket = listener.accept(soon());
  group.wait_mark("connected");
  EXPECT_EQ(socket.peer().uid, 65534u);
  EXPECT_EQ(socket.peer().pid, group.pid(0));
  expect_error(ErrorKind::kInvalidArgument,
               concat("connection from pid ", group.pid(0),
                      " of user 65534 refused: this process belongs to user 0"),
               [&] { socket.require_same_user(); });
  group.post("end");
  group.join();
}

}  // namespace
}  // namespace convoy
