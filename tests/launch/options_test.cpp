#include "launch/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "convoy/error.h"
#include "convoy/version.h"
#include "launch/launched.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

using Words = std::vector<std::string>;

RunOptions parse_run(Words words) {
  words.insert(words.begin(), "run");
  const auto line = parse_command_line(words, 6);
  EXPECT_EQ(line.command, CommandLine::Command::kRun);
  return line.run;
}

// The message for arguments that are wrong; one line.
std::string complaint(const Words& words) {
  try {
    parse_command_line(words, 6);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << testing::PrintToString(words);
  return "";
}

TEST(Options, Defaults) {
  const auto run = parse_run({"-n", "4", "prog", "a", "-b"});
  EXPECT_EQ(run.ranks, 4);
  EXPECT_THAT(run.program, ElementsAre("prog", "a", "-b"));
  EXPECT_EQ(run.grace, 5s);
  EXPECT_FALSE(run.timeout);
  EXPECT_EQ(run.stdin_mode, StdinMode::kNone);
  EXPECT_FALSE(run.shown);
  EXPECT_TRUE(run.prefix);
  EXPECT_TRUE(run.tune);
  EXPECT_FALSE(run.pin);
}

TEST(Options, AllOfThem) {
  const auto run =
      parse_run({"--ranks=3",   "--env",    "A=1",     "-e",      "B=x=y",     "--workdir",
                 "/w",          "--job-id", "a.b-c_1", "--grace", "500ms",     "--timeout=2m",
                 "--stdin",     "1",        "--show",  "0,2",     "--log-dir", "logs",
                 "--no-prefix", "--pin",    "--",      "--weird"});
  EXPECT_EQ(run.ranks, 3);
  EXPECT_THAT(run.environment, ElementsAre(Pair("A", "1"), Pair("B", "x=y")));
  EXPECT_EQ(run.working_folder, "/w");
  EXPECT_EQ(run.job_id, "a.b-c_1");
  EXPECT_EQ(run.grace, 500ms);
  EXPECT_EQ(run.timeout, 2min);
  EXPECT_EQ(run.stdin_mode, StdinMode::kRank);
  EXPECT_EQ(run.stdin_rank, 1);
  EXPECT_EQ(run.shown, (std::set<int>{0, 2}));
  EXPECT_EQ(run.log_folder, "logs");
  EXPECT_FALSE(run.prefix);
  EXPECT_TRUE(run.pin);
  EXPECT_THAT(run.program, ElementsAre("--weird"));
}

TEST(Options, SpellingsOfRanks) {
  EXPECT_EQ(parse_run({"-n4", "p"}).ranks, 4);
  EXPECT_EQ(parse_run({"-n", "auto", "p"}).ranks, 6);
  EXPECT_EQ(parse_run({"-n", "4096", "p"}).ranks, 4096);
}

// Who comes from mpirun or torchrun types what they take.
TEST(Options, SpellingsOfOtherLaunchers) {
  EXPECT_EQ(parse_run({"-np", "3", "p"}).ranks, 3);
  EXPECT_EQ(parse_run({"--np=3", "p"}).ranks, 3);
  for (const std::string name : {"--nproc-per-node", "--nproc_per_node"}) {
    EXPECT_EQ(parse_run({name, "3", "p"}).ranks, 3);
    EXPECT_EQ(parse_run({name + "=auto", "p"}).ranks, 6);
  }
  // Behind the program they are the program's.
  EXPECT_THAT(parse_run({"-n2", "mpirun", "-np", "3", "p"}).program,
              ElementsAre("mpirun", "-np", "3", "p"));
}

TEST(Options, ValuesOfShowAndStdin) {
  EXPECT_FALSE(parse_run({"-n2", "--show", "all", "p"}).shown);
  EXPECT_EQ(parse_run({"-n2", "--show", "none", "p"}).shown, std::set<int>{});
  EXPECT_EQ(parse_run({"-n9", "--show", "1-3,8", "p"}).shown, (std::set<int>{1, 2, 3, 8}));
  EXPECT_EQ(parse_run({"-n2", "--stdin", "all", "p"}).stdin_mode, StdinMode::kAll);
  EXPECT_EQ(parse_run({"-n2", "--stdin", "none", "p"}).stdin_mode, StdinMode::kNone);
}

TEST(Options, OnlyTheFirstDoubleDashIsOurs) {
  EXPECT_THAT(parse_run({"-n2", "--", "p", "--", "q"}).program, ElementsAre("p", "--", "q"));
  EXPECT_THAT(parse_run({"-n2", "p", "--", "q"}).program, ElementsAre("p", "--", "q"));
}

TEST(Options, EachMistakeGetsALineThatHelps) {
  const std::vector<std::pair<Words, const char*>> cases = {
      {{}, "convoy run -n 4 ./program"},
      {{"rnu"}, "did you mean 'convoy run'?"},
      {{"./train"}, "to start a program: convoy run -n 4 ./train"},
      {{"--rank"}, "a command comes first"},
      {{"run"}, "how many ranks? Give -n 4"},
      {{"run", "./p", "-n", "4"}, "it must stand before the program './p'"},
      {{"run", "./p", "-np", "4"}, "it must stand before the program './p'"},
      {{"run", "--standalone", "-n2", "p"}, "--standalone is torchrun's"},
      {{"run", "--nnodes=1", "-n2", "p"}, "leave it out"},
      {{"run", "-n"}, "-n needs a value: -n N|auto"},
      {{"run", "-n", "0", "p"}, "'0' is not a number of ranks; give 1 to 4096, or 'auto'"},
      {{"run", "-n", "-3", "p"}, "'-3' is not a number of ranks"},
      {{"run", "-n", "x", "p"}, "'x' is not a number of ranks"},
      {{"run", "-n", "5000", "p"}, "'5000' is not a number of ranks"},
      {{"run", "-n", "2"}, "no program to run"},
      {{"run", "-n", "2", "--"}, "no program to run"},
      {{"run", "-n", "2", ""}, "no program to run"},
      {{"run", "--grce", "5", "-n", "2", "p"}, "unknown option '--grce'; did you mean '--grace'?"},
      {{"run", "-x", "p"}, "unknown option '-x'"},
      {{"run", "--quux", "p"}, "'convoy run --help' lists them"},
      {{"run", "-n2", "--grace", "5y", "p"}, "--grace '5y' is not a time; give one such as 5s"},
      {{"run", "-n2", "--grace=", "p"}, "'--grace=' gives no value"},
      {{"run", "-n2", "--timeout", "0", "p"}, "--timeout 0 would end the job at once"},
      {{"run", "-n2", "--pin=1", "p"}, "--pin takes no value"},
      {{"run", "-n2", "--pin", "--no-tune", "p"}, "contradict each other"},
      {{"run", "-n2", "--stdin", "some", "p"}, "--stdin 'some' is not none, all or a rank"},
      {{"run", "-n2", "--stdin", "2", "p"}, "this job has ranks 0 to 1"},
      {{"run", "-n1", "--stdin", "1", "p"}, "this job has rank 0 only"},
      {{"run", "-n2", "--show", "0,5", "p"}, "--show '5' names no rank"},
      {{"run", "-n4", "--show", "3-1", "p"}, "write it as 1-3"},
      {{"run", "-n2", "--env", "NAME", "p"}, "--env 'NAME' is not NAME=VALUE"},
      {{"run", "-n2", "--env", "=x", "p"}, "--env '=x' is not NAME=VALUE"},
      {{"run", "-n2", "--env", "RANK=1", "p"}, "the launcher sets this variable"},
      {{"run", "-n2", "--job-id", "a/b", "p"}, "--job-id 'a/b' is not a valid job name"},
      {{"doctor", "now"}, "unexpected argument 'now'"},
      {{"doctor", "--jsn"}, "did you mean '--json'?"},
      {{"record", "--json"}, "no job given"},
      {{"record", ""}, "no job given"},
      {{"record", "a", "b"}, "one job at a time"},
      {{"record", "--last", "0", "a"}, "--last"},
      {{"recrod", "a"}, "did you mean 'convoy record'?"},
      {{"help", "rum"}, "did you mean 'convoy run'?"}};
  for (const auto& [words, said] : cases) {
    EXPECT_THAT(complaint(words), HasSubstr(said)) << testing::PrintToString(words);
  }
}

TEST(Options, Texts) {
  for (const Words& words : {Words{"--help"}, Words{"-h"}, Words{"help"}}) {
    EXPECT_THAT(parse_command_line(words, 1).text, HasSubstr("convoy doctor"));
  }
  for (const Words& words : {Words{"run", "--help"}, Words{"help", "run"}}) {
    EXPECT_THAT(parse_command_line(words, 1).text,
                testing::AllOf(HasSubstr("Usage: convoy run -n RANKS"), HasSubstr("--grace TIME")));
  }
  EXPECT_THAT(parse_command_line({"doctor", "-h"}, 1).text, HasSubstr("--json"));
  EXPECT_THAT(parse_command_line({"record", "-h"}, 1).text, HasSubstr("torchfrtrace"));
  EXPECT_EQ(parse_command_line({"--version"}, 1).text, std::string("convoy ") + version() + "\n");
}

TEST(Usage, ExitCodesAndStreams) {
  const auto version = run_convoy({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_THAT(version.out, HasSubstr("convoy "));
  const auto help = run_convoy({"run", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, HasSubstr("Usage: convoy run"));
  const auto wrong = run_convoy({"run", "-n", "0", "x"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_EQ(wrong.out, "");
  EXPECT_EQ(lines_of(wrong.err).size(), 1U);
  EXPECT_EQ(run_convoy({"run", "-n", "2", "no-such-program-here"}).code, 127);
  EXPECT_EQ(run_convoy({"run", "-n", "2", "/etc/passwd"}).code, 126);
  EXPECT_EQ(run_convoy({"run", "-n", "2", "--log-dir", "/proc/nowhere", "true"}).code, 2);
}

TEST(Usage, AScriptWithoutItsFirstLine) {
  const TempFolder folder("launch-test");
  write_file(folder.path() + "/script", "echo hello\n", 0755);
  write_file(folder.path() + "/lost", "#!/no/such/interpreter\n", 0755);
  const auto script = run_convoy({"run", "-n", "2", folder.path() + "/script"});
  EXPECT_EQ(script.code, 126);
  EXPECT_THAT(script.err, HasSubstr("a script needs a first line such as #!/bin/sh"));
  const auto lost = run_convoy({"run", "-n", "2", folder.path() + "/lost"});
  EXPECT_EQ(lost.code, 126);
  EXPECT_THAT(lost.err, HasSubstr("interpreter"));
}

TEST(Options, OfRecord) {
  EXPECT_EQ(parse_command_line({"record"}, 1).record.job, "");
  const auto line = parse_command_line({"record", "-o", "traces", "--last=7", "my-job"}, 1);
  EXPECT_EQ(line.command, CommandLine::Command::kRecord);
  EXPECT_EQ(line.record.job, "my-job");
  EXPECT_EQ(line.record.folder, "traces");
  EXPECT_EQ(line.record.last, 7);
  EXPECT_FALSE(line.record.json);
}

}  // namespace
}  // namespace convoy::launch
