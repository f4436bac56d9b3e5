// Meetings of processes that a test starts itself, with the variables of each launcher.
#include "convoy/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <filesystem>

#include "base/concat.h"
#include "base/unique_fd.h"
#include "group/launch_variables.h"
#include "group/launched_ranks.h"
#include "os/file.h"
#include "support/test_names.h"

namespace convoy::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

Variables variables_of(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

template <class MakeVariables>
std::vector<ProgramResult> run_ranks(int size, const std::vector<std::string>& words,
                                     MakeVariables variables) {
  std::vector<Program> programs;
  for (int rank = 0; rank < size; ++rank) programs.push_back(probe(words, variables(rank)));
  return run_programs(programs);
}

int entries(const std::string& folder) {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

TEST(RendezvousTest, NobodyLaunchedIt) {
  const auto results = run_programs({probe({"meetings=2", "show=listening"})});
  expect_met(results, "none", 2);
  EXPECT_THAT(results[0].output, Not(HasSubstr("listens")));
}

TEST(RendezvousTest, VariablesSetByHand) {
  const int port = free_port();
  expect_met(run_ranks(3, {"meetings=3"}, [&](int rank) { return variables_of(rank, 3, port); }),
             "environment", 3);
}

TEST(RendezvousTest, RankZeroListensAtTheAddressAskedForOnly) {
  const int port = free_port();
  const auto results =
      run_ranks(2, {"show=listening"}, [&](int rank) { return variables_of(rank, 2, port); });
  expect_met(results, "environment");
  EXPECT_EQ(times_in(results[0].output, "listens "), 1) << results[0].output;
  EXPECT_THAT(results[0].output, HasSubstr("listens 0100007F:"));  // 127.0.0.1
  EXPECT_THAT(results[1].output, Not(HasSubstr("listens")));
}

TEST(RendezvousTest, IPv6) {
  const UniqueFd fd(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  if (!fd || ::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) < 0) {
    GTEST_SKIP() << "this host has no IPv6";
  }
  const std::string method = concat("method=tcp://[::1]:", free_port());
  const auto results = run_programs(
      {probe({method, "rank=0", "size=2", "show=listening"}), probe({method, "rank=1", "size=2"})});
  expect_met(results, "tcp");
  EXPECT_EQ(times_in(results[0].output, "listens "), 1) << results[0].output;
  EXPECT_THAT(results[0].output, HasSubstr("listens 00000000000000000000000001000000:"));
}

TEST(RendezvousTest, TcpWithEverythingInTheUrl) {
  const std::string method = concat("method=tcp://localhost:", free_port(), "?world_size=2&rank=");
  // The URL wins over variables, garbage and half of them included.
  expect_met(run_programs({probe({method + "0"}, {{"RANK", "x"}, {"MASTER_PORT", "1"}}),
                           probe({method + "1"}, variables_of(5, 7, 1))}),
             "tcp");
}

TEST(RendezvousTest, ArgumentsWinOverUrlAndVariables) {
  const std::string method = concat("method=tcp://127.0.0.1:", free_port(), "?rank=7&world_size=9");
  expect_met(run_programs({probe({method, "rank=0", "size=2"}, variables_of(3, 4, 1)),
                           probe({method, "rank=1", "size=2"})}),
             "tcp");
}

TEST(RendezvousTest, TcpUnderALauncher) {
  const std::string method = concat("method=tcp://127.0.0.1:", free_port());
  expect_met(run_ranks(2, {method}, [](int rank) { return open_mpi(rank, 2, rank, 2); }), "tcp");
}

TEST(RendezvousTest, File) {
  const TempFolder folder("file");
  const std::string path = folder.path() + "/meet";
  const auto results =
      run_programs({probe({"method=file://" + path, "rank=0", "size=3", "meetings=2"}),
                    probe({"method=file://" + path + "?rank=1&world_size=3", "meetings=2"}),
                    probe({"method=file://" + path, "meetings=2"}, variables_of(2, 3, 1))});
  expect_met(results, "file", 2);
  EXPECT_EQ(entries(folder.path()), 0) << "the last rank removes the file";
}

TEST(RendezvousTest, AFileThatWasUsedBefore) {
  const TempFolder folder("file");
  const std::string path = folder.path() + "/meet";
  const std::string method = "method=file://" + path;
  // Rank 0 gives up, and leaves the file.
  auto results = run_programs({probe({method, "rank=0", "size=2", "timeout=50"})});
  EXPECT_THAT(results[0].output, HasSubstr("error (timeout): rendezvous at file://" + path));
  EXPECT_THAT(results[0].output, HasSubstr("rank 1 of 2 did not come"));
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  results = run_programs({probe({method, "rank=0", "size=2"})});
  EXPECT_EQ(results[0].code, 1);
  EXPECT_THAT(results[0].output,
              HasSubstr("error (invalid argument): rendezvous: another process"));
  EXPECT_THAT(results[0].output, HasSubstr("an earlier job"));
}

TEST(RendezvousTest, FilesThatCannotBe) {
  const TempFolder folder("file");
  const std::string open = folder.path() + "/open";
  write_file(open, "", 0666);
  const auto results =
      run_programs({probe({"method=file:///does/not/exist", "rank=0", "size=1"}),
                    probe({"method=file://" + folder.path(), "rank=0", "size=1"}),
                    probe({"method=file://" + open, "rank=0", "size=1"}),
                    probe({"method=file:///tmp/x"}), probe({"method=file:///tmp/x?rank=0"})});
  EXPECT_THAT(results[0].output, HasSubstr("its folder must exist"));
  EXPECT_THAT(results[1].output, HasSubstr("Is a directory"));
  EXPECT_THAT(results[2].output, HasSubstr("not safe to meet at"));
  EXPECT_THAT(results[3].output, HasSubstr("rank and size are missing"));
  EXPECT_THAT(results[4].output, HasSubstr("rank 0 is given"));
  for (const auto& result : results) {
    EXPECT_EQ(result.code, 1);
    EXPECT_THAT(result.output, HasSubstr("error (invalid argument)"));
  }
}

class OneHostTest : public testing::TestWithParam<std::string> {
 protected:
  Variables variables(int rank, int size) const {
    const std::string& launcher = GetParam();
    auto result = launcher == "Slurm"   ? slurm_one_host(rank, size)
                  : launcher == "MPICH" ? mpich(rank, size, rank, size)
                                        : open_mpi(rank, size, rank, size);
    result["TMPDIR"] = folder_.path();
    return result;
  }
  std::string folder() const { return concat(folder_.path(), "/convoy-", ::geteuid()); }

  TempFolder folder_{"host"};
};
INSTANTIATE_TEST_SUITE_P(Launchers, OneHostTest, testing::Values("Open MPI", "MPICH", "Slurm"),
                         convoy::test::text_name);

TEST_P(OneHostTest, MeetsWithoutAPort) {
  const auto results =
      run_ranks(3, {"meetings=2", "show=listening"}, [&](int rank) { return variables(rank, 3); });
  expect_met(results, GetParam(), 2);
  for (const auto& result : results) EXPECT_THAT(result.output, Not(HasSubstr("listens")));
  EXPECT_EQ(entries(folder()), 0);
}

TEST_P(OneHostTest, NamesWhoDidNotCome) {
  const auto results = run_programs(
      {probe({"timeout=3000"}, variables(0, 3)), probe({"timeout=9000"}, variables(2, 3))});
  EXPECT_THAT(results[0].output, HasSubstr("error (timeout): rendezvous at"));
  // On a busy machine rank 2 may come too late, too.
  EXPECT_THAT(results[0].output, AnyOf(HasSubstr("rank 1 of 3 did not come by the deadline"),
                                       HasSubstr("ranks 1, 2 of 3 did not come")));
  // Told the same, unless rank 0 and its store were gone before.
  EXPECT_THAT(
      results[1].output,
      AnyOf(HasSubstr("rank 1 of 3 did not come by the deadline"), HasSubstr("error (peer lost)"),
            HasSubstr("error (timeout): rendezvous: rank 0 did not open")));
  EXPECT_EQ(entries(folder()), 0);
}

TEST_P(OneHostTest, StoresOutliveALaterMeetingThatFails) {
  const auto results =
      run_ranks(2, {"meetings=0", "fail-between"}, [&](int rank) { return variables(rank, 2); });
  EXPECT_THAT(results[0].output, HasSubstr("alone: rendezvous at"));
  for (const auto& result : results) {
    EXPECT_THAT(result.output, HasSubstr("used after a failure"));
    EXPECT_EQ(result.code, 0) << result.output;
  }
}

TEST(RendezvousTest, NamesWhoDidNotComeToTcp) {
  const int port = free_port();
  auto results = run_programs({probe({"timeout=500"}, variables_of(0, 4, port))});
  EXPECT_THAT(results[0].output, HasSubstr("ranks 1, 2, 3 of 4 did not come"));
  results = run_programs({probe({"timeout=500"}, variables_of(1, 2, port))});
  EXPECT_THAT(results[0].output, HasSubstr("error (timeout): rendezvous: nobody listened at"));
  EXPECT_THAT(results[0].output, HasSubstr("Connection refused"));
}

TEST(RendezvousTest, RanksThatContradictEachOther) {
  int port = free_port();
  auto results = run_programs({probe({"timeout=20000"}, variables_of(0, 2, port)),
                               probe({"timeout=20000"}, variables_of(1, 3, port))});
  EXPECT_THAT(results[0].output + results[1].output, HasSubstr("callers, another one"));
  port = free_port();
  // Whoever of the two comes second is told; rank 2 never comes.
  results = run_programs({probe({"timeout=8000"}, variables_of(0, 3, port)),
                          probe({"timeout=8000"}, variables_of(1, 3, port)),
                          probe({"timeout=8000"}, variables_of(1, 3, port))});
  EXPECT_THAT(results[1].output + results[2].output, HasSubstr("two processes have the same rank"));
  EXPECT_THAT(results[0].output, HasSubstr("rank 2 of 3 did not come"));
}

TEST(RendezvousTest, AddressesThatCannotBe) {
  const int port = free_port();
  UniqueFd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  ASSERT_EQ(::bind(taken.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(taken.get(), 5), 0);
  const auto results = run_programs(
      {probe({concat("method=tcp://127.0.0.1:", port), "rank=0", "size=2", "timeout=2000"}),
       probe({"method=tcp://192.0.2.77:1", "rank=0", "size=2", "timeout=2000"}),
       probe({"method=tcp://no.such.host.invalid:1", "rank=0", "size=2", "timeout=500"}),
       probe({"method=tcp://no.such.host.invalid:1", "rank=1", "size=2", "timeout=500"}),
       // Somebody listens, but never answers.
       probe({concat("method=tcp://127.0.0.1:", port), "rank=1", "size=2", "timeout=2000"})});
  EXPECT_THAT(results[0].output, HasSubstr("choose another port"));
  EXPECT_THAT(results[1].output, HasSubstr("rank 0 must run on the host"));
  EXPECT_THAT(results[2].output, HasSubstr("cannot be resolved"));
  EXPECT_THAT(results[3].output, HasSubstr("cannot be resolved"));
  for (const auto& result : results) EXPECT_EQ(result.code, 1) << result.output;
}

TEST(RendezvousTest, AnEnvironmentThatSaysTooLittle) {
  const auto results =
      run_programs({probe({}, {{"RANK", "1"}}), probe({"method=mpi://"}), probe({"rank=1"})});
  EXPECT_THAT(results[0].output, HasSubstr("RANK=1 is set but WORLD_SIZE is not"));
  EXPECT_THAT(results[1].output, HasSubstr("known: env://, file://, tcp://"));
  EXPECT_THAT(results[2].output, HasSubstr("rank 1 is given"));
  for (const auto& result : results) EXPECT_EQ(result.code, 1) << result.output;
}

TEST(RendezvousTest, AForkedChildIsTold) {
  const std::string method = concat("method=tcp://127.0.0.1:", free_port());
  const auto results = run_programs({probe({method, "rank=0", "size=1", "fork"})});
  EXPECT_EQ(times_in(results[0].output, "met: "), 1) << results[0].output;
  EXPECT_THAT(results[0].output, HasSubstr("error (unsupported)"));
}

}  // namespace
}  // namespace convoy::test
