#include "launch/launched.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <sstream>

#include "base/error.h"
#include "base/id.h"
#include "launch/environment.h"
#include "launch/text.h"
#include "os/file.h"
#include "support/programs.h"

namespace convoy::launch {
namespace {

constexpr std::chrono::seconds kPatience{40};

std::array<UniqueFd, 2> make_pipe() {
  std::array<int, 2> ends{};
  if (pipe2(ends.data(), O_CLOEXEC) < 0) fail_errno("pipe");
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

void append_from(UniqueFd& fd, std::string& text) {
  std::array<char, 65536> buffer;
  const ssize_t n = ::read(fd.get(), buffer.data(), buffer.size());
  if (n > 0) text.append(buffer.data(), static_cast<std::size_t>(n));
  if (n == 0) fd.reset();
}

// Until `ready`, looking again every few milliseconds.
bool poll_until(const std::function<bool()>& ready) {
  const auto deadline = Deadline::after(kPatience);
  while (!ready()) {
    if (deadline.expired()) return false;
    ::poll(nullptr, 0, 5);
  }
  return true;
}

}  // namespace

std::string convoy_program() { return test::sibling_program("convoy"); }
std::string rank_probe() { return test::sibling_program("rank_probe"); }

Launched::Launched(Options options) {
  auto [out_read, out_write] = make_pipe();
  auto [err_read, err_write] = make_pipe();
  SpawnOptions spawn;
  spawn.arguments = std::move(options.wrapper);
  spawn.arguments.push_back(convoy_program());
  spawn.arguments.insert(spawn.arguments.end(), options.arguments.begin(), options.arguments.end());
  Environment environment = current_environment();
  // What the test itself was started with must not matter.
  for (const char* name : {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"}) {
    environment.erase(name);
  }
  for (const auto& [name, value] : options.environment) environment.insert_or_assign(name, value);
  spawn.environment = to_list(environment);
  spawn.standard_input = options.standard_input;
  spawn.standard_output = out_write.get();
  spawn.standard_error = options.same_pipe ? out_write.get() : err_write.get();
  child_ = ChildProcess::spawn(spawn);
  out_fd_ = std::move(out_read);
  err_fd_ = std::move(err_read);
}

Launched Launched::run(std::vector<std::string> options, std::vector<std::string> script) {
  const std::string id = "test-" + Id::random().to_string();
  std::vector<std::string> arguments = {"run", "--job-id", id};
  arguments.insert(arguments.end(), options.begin(), options.end());
  arguments.push_back("--");
  arguments.push_back(rank_probe());
  arguments.insert(arguments.end(), script.begin(), script.end());
  Launched launched({.arguments = std::move(arguments)});
  launched.job_id_ = id;
  return launched;
}

bool Launched::read_some(const Deadline& deadline) {
  std::array<pollfd, 2> items = {pollfd{out_fd_.get(), POLLIN, 0},
                                 pollfd{err_fd_.get(), POLLIN, 0}};
  if (!out_fd_ && !err_fd_) return false;
  if (::poll(items.data(), items.size(), deadline.poll_timeout_ms()) <= 0) return false;
  if (items[0].revents != 0) append_from(out_fd_, out_);
  if (items[1].revents != 0) append_from(err_fd_, err_);
  return true;
}

bool Launched::wait_until(const std::function<bool()>& ready) {
  const auto deadline = Deadline::after(kPatience);
  while (!ready()) {
    if (!read_some(deadline)) {
      ADD_FAILURE() << "the expected output did not come\nstdout:\n"
                    << out_ << "\nstderr:\n"
                    << err_;
      return false;
    }
  }
  return true;
}

bool Launched::wait_for(const std::string& text, int times) {
  return wait_until([&] { return count_of(out_, text) >= times; });
}

bool Launched::wait_for_error(const std::string& text) {
  return wait_until([&] { return count_of(err_, text) >= 1; });
}

pid_t Launched::pid_of_rank(int rank) const {
  const std::string start = concat("[", rank, "] pid ");
  for (const auto& line : lines_of(out_)) {
    if (line.starts_with(start)) return parse_int(line.substr(start.size())).value_or(0);
  }
  return 0;
}

std::vector<pid_t> Launched::numbers_behind(const std::string& word) const {
  std::vector<pid_t> numbers;
  for (const auto& line : lines_of(out_)) {
    const auto at = line.find(word + " ");
    if (at == std::string::npos) continue;
    if (const auto number = parse_int(line.substr(at + word.size() + 1)))
      numbers.push_back(*number);
  }
  return numbers;
}

pid_t Launched::supervisor() const {
  const auto children = children_of(pid());
  return children.size() == 1 ? children[0] : 0;
}

ExitStatus Launched::finish() {
  const auto deadline = Deadline::after(kPatience);
  while (read_some(deadline)) {
  }
  EXPECT_FALSE(out_fd_ || err_fd_) << "somebody still holds convoy's output";
  const auto status = child_.wait(deadline);
  EXPECT_TRUE(status) << "convoy did not end";
  return status.value_or(ExitStatus{.code = -1});
}

Finished run_convoy(std::vector<std::string> arguments) {
  Launched launched({.arguments = std::move(arguments)});
  const int code = launched.finish().shell_code();
  return {code, launched.out(), launched.err()};
}

std::vector<pid_t> processes_of_job(const std::string& id) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const auto pid = parse_int(entry.path().filename().string());
    if (!pid) continue;
    const auto environment = read_file(entry.path().string() + "/environ");
    if (environment && environment->find("CONVOY_JOB_ID=" + id) != std::string::npos) {
      found.push_back(*pid);
    }
  }
  return found;
}

void expect_nothing_left(const std::string& job_id) {
  ASSERT_FALSE(job_id.empty());
  EXPECT_TRUE(poll_until([&] { return processes_of_job(job_id).empty(); }))
      << "processes of the job are left, the first is "
      << process_name(processes_of_job(job_id).front());
}

bool wait_gone(pid_t pid) {
  return poll_until([pid] {
    const auto state = process_state(pid);
    return !state || *state == 'Z' || *state == 'X';
  });
}

std::vector<std::string> lines_of(const std::string& text) {
  auto lines = split(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace convoy::launch
