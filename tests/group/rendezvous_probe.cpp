// A program to launch: comes to meetings as its arguments say, and tells what it found.
//
//   rendezvous_probe method=tcp://127.0.0.1:29500 rank=0 size=2 timeout=5000 meetings=2
//   show=listening
//
// Lives a minute at most.
#include "convoy/rendezvous.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "convoy/error.h"

namespace {

using namespace convoy;
using Words = std::map<std::string, std::string>;

Words words_of(int argc, char** argv) {
  Words words = {{"meetings", "1"}, {"timeout", "40000"}};
  for (int i = 1; i < argc; ++i) {
    const std::string text = argv[i];
    const auto equals = text.find('=');
    words[text.substr(0, equals)] = equals == std::string::npos ? "" : text.substr(equals + 1);
  }
  return words;
}

RendezvousOptions options_of(Words& words) {
  RendezvousOptions options;
  if (words.contains("method")) options.method = words["method"];
  if (words.contains("rank")) options.rank = std::stoi(words["rank"]);
  if (words.contains("size")) options.size = std::stoi(words["size"]);
  options.timeout = std::chrono::milliseconds(std::stoi(words["timeout"]));
  return options;
}

// The addresses, as /proc has them, at which this process accepts TCP connections.
void print_listening() {
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >> retransmits >> uid >>
          timeout >> inode;
      if (state != "0A") continue;
      std::error_code error;
      for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        const auto target = std::filesystem::read_symlink(entry.path(), error).string();
        if (target == "socket:[" + inode + "]") std::cout << "listens " << local << std::endl;
      }
    }
  }
}

// In one piece: ranks share their output.
void say(const std::string& line) { std::cout << line + "\n" << std::flush; }

void meet(const RendezvousOptions& options) {
  const Meeting meeting = rendezvous(options);
  const auto deadline = Deadline::after(std::chrono::seconds(40));
  if (meeting.store->try_get("sum")) throw Error(ErrorKind::kInternal, "the store is not fresh");
  meeting.store->barrier("fresh", meeting.size, deadline);
  meeting.store->add("sum", meeting.rank + 1);
  meeting.store->barrier("added", meeting.size, deadline);
  std::ostringstream line;
  line << "met: rank " << meeting.rank << " of " << meeting.size << ", local " << meeting.local_rank
       << " of " << meeting.local_size << ", by " << meeting.launcher << ", sum "
       << meeting.store->get("sum");
  say(line.str());
  meeting.store->barrier("done", meeting.size, deadline);
}

// Rank 0 comes to a meeting at which it is alone; what it serves must outlive that.
void fail_between(RendezvousOptions options) {
  const Meeting meeting = rendezvous(options);
  if (meeting.rank == 0) {
    options.timeout = Deadline::after(std::chrono::milliseconds(200));
    try {
      rendezvous(options);
    } catch (const Error& error) {
      say(std::string("alone: ") + error.what());
    }
    meeting.store->set("after", "");
  }
  const auto deadline = Deadline::after(std::chrono::seconds(40));
  meeting.store->get("after", deadline);
  meeting.store->barrier("used after a failure", meeting.size, deadline);
  say("used after a failure");
  meeting.store->barrier("done", meeting.size, deadline);
}

int run(Words words) {
  const auto options = options_of(words);
  try {
    for (int i = 0; i < std::stoi(words["meetings"]); ++i) meet(options);
    if (words.contains("fail-between")) fail_between(options);
    if (words["show"] == "listening") print_listening();
    // As a rank that fails until torchrun has started it again.
    const char* const restart = std::getenv("TORCHELASTIC_RESTART_COUNT");
    if (words.contains("fail-first") && restart && restart == std::string("0")) return 3;
    if (words.contains("fork")) {
      const pid_t child = fork();
      if (child == 0) {
        words.erase("fork");
        _exit(run(words));
      }
      int status = 0;
      waitpid(child, &status, 0);
    }
    return 0;
  } catch (const Error& error) {
    say("error (" + std::string(to_string(error.kind())) + "): " + error.what());
  } catch (const std::exception& error) {
    say(std::string("exception: ") + error.what());
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  alarm(60);
  return run(words_of(argc, argv));
}
