#include "group/launched_ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>

#include "base/error.h"
#include "os/process.h"
#include "os/socket.h"
#include "support/programs.h"

namespace convoy::test {
namespace {

class RunningProgram {
 public:
  explicit RunningProgram(const Program& program) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("pipe");
    reader_.reset(ends[0]);
    const UniqueFd writer(ends[1]);
    Variables variables = program.variables;
    // OMPI_ALLOW_*: mpirun refuses root otherwise, and some containers have nobody else.
    for (const char* name : {"PATH", "HOME", "TMPDIR", "CONVOY_TEST_TAG", "LD_LIBRARY_PATH"}) {
      if (const char* value = std::getenv(name)) variables.emplace(name, value);
    }
    variables.emplace("OMP_NUM_THREADS", "1");
    variables.emplace("OMPI_ALLOW_RUN_AS_ROOT", "1");
    variables.emplace("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    std::vector<std::string> environment;
    for (const auto& [name, value] : variables) environment.push_back(concat(name, "=", value));
    child_ = ChildProcess::spawn({.arguments = program.arguments,
                                  .environment = environment,
                                  .standard_output = writer.get(),
                                  .standard_error = writer.get()});
  }

  ProgramResult finish(const Deadline& deadline) {
    ProgramResult result;
    std::array<char, 4096> buffer;
    while (wait_ready(reader_.get(), POLLIN, deadline)) {
      const ssize_t n = ::read(reader_.get(), buffer.data(), buffer.size());
      if (n <= 0) break;
      result.output.append(buffer.data(), static_cast<std::size_t>(n));
    }
    const auto status = child_.wait(deadline);
    EXPECT_TRUE(status) << "a program did not end; its output:\n" << result.output;
    result.code = status ? status->shell_code() : -1;
    return result;
  }

 private:
  UniqueFd reader_;
  ChildProcess child_;
};

}  // namespace

std::vector<ProgramResult> run_programs(const std::vector<Program>& programs) {
  const auto deadline = Deadline::after(std::chrono::seconds(60));
  std::vector<RunningProgram> running;
  running.reserve(programs.size());
  for (const auto& program : programs) running.emplace_back(program);
  std::vector<ProgramResult> results;
  for (auto& program : running) results.push_back(program.finish(deadline));
  return results;
}

ProgramResult run_one(std::vector<std::string> arguments, Variables variables) {
  return run_programs({{std::move(arguments), std::move(variables)}})[0];
}

bool on_path(const std::string& name) {
  return run_one({"sh", "-c", "command -v " + name}).code == 0;
}

std::string probe_program() { return sibling_program("rendezvous_probe"); }

Program probe(std::vector<std::string> words, Variables variables) {
  words.insert(words.begin(), probe_program());
  return {std::move(words), std::move(variables)};
}

int free_port() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  if (::bind(fd.get(), raw, length) < 0 || ::getsockname(fd.get(), raw, &length) < 0) {
    fail_errno("finding a free port");
  }
  return ntohs(address.sin_port);
}

int times_in(const std::string& text, const std::string& part) {
  int times = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++times;
  return times;
}

void expect_met(const std::vector<ProgramResult>& results, const std::string& launcher,
                int meetings) {
  const int size = static_cast<int>(results.size());
  for (int rank = 0; rank < size; ++rank) {
    const auto& result = results[static_cast<std::size_t>(rank)];
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_EQ(times_in(result.output, concat("met: rank ", rank, " of ", size, ", local ")),
              meetings)
        << result.output;
    EXPECT_EQ(
        times_in(result.output, concat(", by ", launcher, ", sum ", size * (size + 1) / 2, "\n")),
        meetings)
        << result.output;
  }
}

}  // namespace convoy::test
