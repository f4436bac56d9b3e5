#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

#include "base/concat.h"
#include "os/process.h"
#include "raw_peer.h"
#include "support/programs.h"

namespace convoy::test {
namespace {

struct Pipe {
  Pipe() {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
    reader.reset(ends[0]);
    writer.reset(ends[1]);
  }
  UniqueFd reader;
  UniqueFd writer;
};

std::string read_line(int fd) {
  std::string line;
  char byte = 0;
  while (wait_ready(fd, POLLIN, soon()) && ::read(fd, &byte, 1) == 1 && byte != '\n') line += byte;
  return line;
}

// launcher_program with the given variable and descriptors.
class Program {
 public:
  Program(const std::string& what, const std::optional<std::string>& variable,
          std::vector<int> inherited = {}) {
    std::vector<std::string> environment;
    if (variable) environment.push_back(*variable);
    child_ = ChildProcess::spawn({.arguments = {sibling_program("store_launcher_program"), what},
                                  .environment = environment,
                                  .inherited = std::move(inherited),
                                  .standard_input = input_.reader.get(),
                                  .standard_output = output_.writer.get()});
    output_.writer.reset();
  }

  std::string line() { return read_line(output_.reader.get()); }
  void end_input() { input_.writer.reset(); }
  ExitStatus wait() {
    const auto status = child_.wait(soon());
    EXPECT_TRUE(status.has_value());
    return status.value_or(ExitStatus{});
  }
  pid_t pid() const { return child_.pid(); }

 private:
  Pipe input_;
  Pipe output_;
  ChildProcess child_;
};

std::string said(const std::optional<std::string>& variable, std::vector<int> inherited = {}) {
  Program program("say", variable, std::move(inherited));
  const std::string line = program.line();
  program.end_input();
  program.wait();
  return line;
}

TEST(LauncherStore, NoneWithoutALauncher) { EXPECT_EQ(said(std::nullopt), "none"); }

TEST(LauncherStore, InheritedConnection) {
  StoreServer server;
  UniqueFd fd = server.connect();
  Program rank("set", store_environment(fd.get()), {fd.get()});
  fd.reset();
  EXPECT_EQ(rank.line(), "store");
  EXPECT_TRUE(rank.wait().success());
  RawPeer peer(server);
  peer.send(StoreOp::kTryGet, {"said"});
  EXPECT_EQ(peer.receive()->parts.at(0), std::to_string(rank.pid()));
  EXPECT_TRUE(eventually([&] { return server.stats().clients == 1; }));  // nothing keeps it open
}

TEST(LauncherStore, TextThatIsNoDescriptor) {
  for (const std::string text : {"", "x", "7", "7:", ":7", "-1:7", "7:x", "7:8x", "7:0", " 7:8",
                                 "7 :8", "99999999999:8", "7:99999999999999999999", "+7:8"}) {
    const std::string line = said(concat(kStoreFdVariable, "=", text));
    EXPECT_EQ(line.find("invalid argument: CONVOY_STORE_FD='" + text + "' is not of the form"), 0u)
        << line;
  }
}

TEST(LauncherStore, DescriptorThatIsNotThere) {
  StoreServer server;
  const UniqueFd fd = server.connect();
  // Closed, as in a grandchild.
  const std::string line = said(store_environment(fd.get()));
  EXPECT_EQ(line.find("peer lost: the store connection of this rank"), 0u) << line;
  // Another socket under the number.
  const UniqueFd other = server.connect();
  struct stat info {};
  ASSERT_EQ(::fstat(fd.get(), &info), 0);
  const std::string wrong =
      said(concat(kStoreFdVariable, "=", other.get(), ":", info.st_ino), {other.get()});
  EXPECT_EQ(wrong.find("peer lost: the store connection of this rank"), 0u) << wrong;
}

// The number may name a file whose inode has the socket's number by chance.
TEST(LauncherStore, FileIsNotTakenForTheSocket) {
  const TempFolder folder("launcher");
  const UniqueFd file(
      ::open((folder.path() + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  struct stat info {};
  ASSERT_EQ(::fstat(file.get(), &info), 0);
  const std::string line =
      said(concat(kStoreFdVariable, "=", file.get(), ":", info.st_ino), {file.get()});
  EXPECT_EQ(line.find("peer lost: the store connection of this rank"), 0u) << line;
}

TEST(LauncherStore, SocketOfAnotherKind) {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const std::string line = said(store_environment(fd.get()), {fd.get()});
  EXPECT_NE(line.find("is not a Unix stream socket"), std::string::npos) << line;
}

TEST(LauncherStore, FailureIsNotKept) {
  Program program("twice", concat(kStoreFdVariable, "=nonsense"));
  const std::string first = program.line();
  EXPECT_NE(first, "");
  EXPECT_EQ(program.line(), first);
  EXPECT_EQ(program.wait().code, 1);
}

// Programs that a script starts one after another share the connection; two at once would take each
// other's replies.
TEST(LauncherStore, OneProgramAtATime) {
  StoreServer server;
  const UniqueFd fd = server.connect();
  Program first("hold", store_environment(fd.get()), {fd.get()});
  EXPECT_EQ(first.line(), "store");
  const std::string second = said(store_environment(fd.get()), {fd.get()});
  EXPECT_EQ(second, concat("invalid argument: the store connection of this rank is in use by "
                           "process ",
                           first.pid(),
                           ": one program at a time can be the rank that `convoy run` started"));
  first.end_input();
  EXPECT_TRUE(first.wait().success());
  Program third("set", store_environment(fd.get()), {fd.get()});
  EXPECT_EQ(third.line(), "store");
  EXPECT_TRUE(third.wait().success());
}

TEST(LauncherStore, ForkedChildMayComeFirst) {
  StoreServer server;
  const UniqueFd fd = server.connect();
  Program program("fork", store_environment(fd.get()), {fd.get()});
  EXPECT_EQ(program.line(), "store");
  EXPECT_EQ(program.line(), "store");
  EXPECT_TRUE(program.wait().success());
}

TEST(LauncherStore, LauncherThatDied) {
  auto server = std::make_unique<StoreServer>();
  const UniqueFd fd = server->connect();
  server.reset();
  Program program("set", store_environment(fd.get()), {fd.get()});
  EXPECT_EQ(program.line().find("peer lost: store: the server closed the connection"), 0u);
  EXPECT_EQ(program.wait().code, 1);
}

}  // namespace
}  // namespace convoy::test
