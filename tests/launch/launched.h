#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "os/process.h"

namespace convoy::launch {

std::string convoy_program();
std::string rank_probe();

// `convoy` as a user would run it, with its two outputs in pipes.
class Launched {
 public:
  struct Options {
    std::vector<std::string> arguments;                   // of convoy
    std::map<std::string, std::string> environment = {};  // added to ours
    std::vector<std::string> wrapper = {};  // a program that starts convoy, such as nohup
    bool same_pipe = false;                 // 2>&1
    int standard_input = -1;                // -1: /dev/null
  };
  explicit Launched(Options options);

  // `convoy run --job-id <unique> <options> -- rank_probe <script>`.
  static Launched run(std::vector<std::string> options, std::vector<std::string> script);

  pid_t pid() const { return child_.pid(); }
  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }
  const std::string& job_id() const { return job_id_; }

  void kill(int signal) { child_.kill(signal); }
  // Reads until the text appeared `times` times in the standard output (or error); fails the test
  // at the deadline or when the output ends first.
  bool wait_for(const std::string& text, int times = 1);
  bool wait_for_error(const std::string& text);
  // "pid 4711" of the given rank in the output so far; 0 if it is not there.
  pid_t pid_of_rank(int rank) const;
  // Numbers behind a word in all lines of the output.
  std::vector<pid_t> numbers_behind(const std::string& word) const;
  // The convoy process that does the work.
  pid_t supervisor() const;

  void close_output() { out_fd_.reset(); }
  // Reads both outputs to their ends (nobody holds them any more) and reaps convoy itself.
  ExitStatus finish();

 private:
  bool read_some(const Deadline& deadline);  // false: all ended, or the deadline passed
  bool wait_until(const std::function<bool()>& ready);

  std::string job_id_;
  UniqueFd out_fd_;
  UniqueFd err_fd_;
  std::string out_;
  std::string err_;
  ChildProcess child_;
};

struct Finished {
  int code;  // as a shell shows it
  std::string out;
  std::string err;
};
// Runs convoy with these arguments to its end.
Finished run_convoy(std::vector<std::string> arguments);

// Processes whose environment has CONVOY_JOB_ID=<id>.
std::vector<pid_t> processes_of_job(const std::string& id);
// Fails the test unless they are all gone within ten seconds.
void expect_nothing_left(const std::string& job_id);
// Waits until the process is gone (or a zombie); false after ten seconds.
bool wait_gone(pid_t pid);

std::vector<std::string> lines_of(const std::string& text);
int count_of(const std::string& text, const std::string& part);

}  // namespace convoy::launch
