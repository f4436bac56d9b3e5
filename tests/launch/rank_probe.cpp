// A program to launch: does what its arguments say, one after the other.
//
//   rank_probe barrier up  only 2 exit 3  all wait
//
// `only R` skips what follows in other ranks, until `all`. Lives a minute at most.
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "base/call_scope.h"
#include "coll/group.h"
#include "convoy/store.h"
#include "os/file.h"
#include "os/process.h"
#include "os/socket.h"

namespace {

using namespace convoy;
using Arguments = std::vector<std::string>;

extern "C" void tell_and_exit(int number) {
  const std::string text = "caught " + std::to_string(number) + "\n";
  if (::write(1, text.data(), text.size()) < 0) _exit(98);
  _exit(40);
}
extern "C" void tell(int number) {
  const std::string text = "got " + std::to_string(number) + "\n";
  if (::write(1, text.data(), text.size()) < 0) _exit(98);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int number_of(const std::string& text) { return parse_signal(text).value(); }

// Until a handler has run. Noted signals are blocked elsewhere, so that none comes too early.
void wait_once() {
  sigset_t none;
  sigemptyset(&none);
  sigsuspend(&none);
}

[[noreturn]] void wait_for_ever() {
  for (;;) wait_once();
}

void note_signal(const std::string& name) {
  sigset_t one;
  sigemptyset(&one);
  sigaddset(&one, number_of(name));
  sigprocmask(SIG_BLOCK, &one, nullptr);
  signal(number_of(name), tell);
}

// A child that outlives the rank unless somebody ends it.
void background(bool daemon, bool stubborn) {
  const pid_t pid = fork();
  if (pid < 0) std::abort();
  if (pid > 0) {
    if (daemon) return;
    std::cout << "child " << pid << std::endl;
    return;
  }
  if (daemon) {
    setsid();
    if (fork() != 0) _exit(0);
  }
  if (stubborn) signal(SIGTERM, SIG_IGN);
  alarm(60);
  if (daemon) std::cout << "daemon " << getpid() << std::endl;
  wait_for_ever();
}

void print_cores() {
  cpu_set_t mask;
  sched_getaffinity(0, sizeof mask, &mask);
  std::cout << "cores";
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &mask)) std::cout << " " << core;
  }
  std::cout << std::endl;
}

void flood(std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i) std::cout << "line " << i << "\n";
  std::cout.flush();
}

// The group of all ranks, made by its first use.
coll::Group& world() {
  static const auto group =
      coll::Group::create(with_prefix(launcher_store(), "world"), std::stoi(variable("RANK")),
                          std::stoi(variable("WORLD_SIZE")), {.timeout = std::chrono::seconds(50)});
  return *group;
}

// --- calls between the ranks, which are worker0, worker1, ... ---

struct ProbeCall final : agent::Call {
  void ended(agent::Outcome&& outcome) noexcept override {
    if (outcome.failure) std::cout << "error: " << outcome.failure->text << std::endl;
    mark_over();
  }
};

const agent::FunctionKey kEcho = {"echo", "()", 1};
const agent::FunctionKey kTrainStep = {"train_step", "()", 2};

void answer(void*, agent::RequestRef request) noexcept {
  const auto kept = std::move(request);
  kept->reply({});
}
void never_answer(void*, agent::RequestRef request) noexcept {
  const auto kept = std::move(request);
  wait_for_ever();
}

agent::Agent& workers() {
  static auto* const made = [] {
    agent::AgentOptions options;
    options.name = "worker" + variable("RANK");
    options.rank = static_cast<agent::WorkerId>(std::stoi(variable("RANK")));
    options.handlers = {{.key = kEcho, .run = &answer}, {.key = kTrainStep, .run = &never_answer}};
    auto* const agent = new agent::Agent(options);
    agent->meet(*with_prefix(launcher_store(), "rpc"), std::stoi(variable("WORLD_SIZE")),
                Deadline::after(std::chrono::seconds(50)));
    return agent;
  }();
  return *made;
}

void call(const std::string& rank, const agent::FunctionKey& function) {
  ProbeCall call;
  workers().start(call, static_cast<agent::WorkerId>(std::stoi(rank)),
                  agent::declare_function(function), {});
  workers().wait(call);
}

void all_reduce(int times) {
  const CallScope scope(CallSite("/src/probe.cpp", "main", 40));
  std::vector<float> data(4);
  for (int i = 0; i < times; ++i) {
    try {
      world().all_reduce(data.data(), data.data(), data.size(), coll::DataType::kF32);
    } catch (const Error& error) {
      std::cout << "error: " << error.what() << std::endl;
    }
  }
}

// Commands with one argument.
const std::map<std::string, std::function<void(const std::string&)>> kWithValue = {
    {"say", [](const std::string& text) { std::cout << text << std::endl; }},
    {"err", [](const std::string& text) { std::cerr << text << std::endl; }},
    {"part", [](const std::string& text) { std::cout << text << std::flush; }},
    {"var",
     [](const std::string& name) {
       std::cout << name << "=" << variable(name.c_str()) << std::endl;
     }},
    {"exit", [](const std::string& code) { std::exit(std::stoi(code)); }},
    {"raise",
     [](const std::string& name) {
       signal(number_of(name), SIG_DFL);  // sanitizers put handlers of their own
       raise(number_of(name));
     }},
    {"throw", [](const std::string& text) { throw std::runtime_error(text); }},
    {"ignore", [](const std::string& name) { signal(number_of(name), SIG_IGN); }},
    {"catch", [](const std::string& name) { signal(number_of(name), tell_and_exit); }},
    {"note", note_signal},
    {"barrier",
     [](const std::string& name) {
       launcher_store()->barrier(name, std::stoi(variable("WORLD_SIZE")),
                                 Deadline::after(std::chrono::seconds(50)));
     }},
    {"await",
     [](const std::string& key) {
       launcher_store()->get(key, Deadline::after(std::chrono::seconds(50)));
     }},
    {"all-reduce", [](const std::string& times) { all_reduce(std::stoi(times)); }},
    {"call-echo", [](const std::string& rank) { call(rank, kEcho); }},
    {"call-often",
     [](const std::string& times) {
       for (int i = std::stoi(times); i > 0; --i) call("0", kEcho);
     }},
    {"call-train-step", [](const std::string& rank) { call(rank, kTrainStep); }},
    {"announce", [](const std::string& key) { launcher_store()->set(key, "1"); }},
    {"flood", [](const std::string& lines) { flood(std::stoul(lines)); }},
    {"long",
     [](const std::string& bytes) {
       std::cout << std::string(std::stoul(bytes), 'x') << std::endl;
     }},
    {"announce-pid",
     [](const std::string& key) { launcher_store()->set(key, std::to_string(getpid())); }},
    // Until the process that announced itself has ended.
    {"outlive",
     [](const std::string& key) {
       const auto deadline = Deadline::after(std::chrono::seconds(50));
       const UniqueFd pidfd = open_pidfd(std::stoi(launcher_store()->get(key, deadline)));
       if (pidfd) wait_ready(pidfd.get(), POLLIN, deadline);
     }},
    {"error-file",
     [](const std::string& text) { write_file(variable("TORCHELASTIC_ERROR_FILE"), text); }},
};

const std::map<std::string, std::function<void()>> kWithout = {
    {"pid", [] { std::cout << "pid " << getpid() << std::endl; }},
    {"meet", [] { workers(); }},
    {"shutdown", [] { workers().shutdown(Deadline::after(std::chrono::seconds(50))); }},
    {"cwd", [] { std::cout << "cwd " << std::filesystem::current_path().string() << std::endl; }},
    {"cores", print_cores},
    {"wait", [] { wait_for_ever(); }},
    {"wait-once", wait_once},
    {"child", [] { background(false, false); }},
    {"daemon", [] { background(true, false); }},
    {"stubborn-daemon", [] { background(true, true); }},
    {"close-stdin", [] { ::close(0); }},
    {"cat",
     [] {
       for (std::string line; std::getline(std::cin, line);) std::cout << line << "\n";
       std::cout << "end of input" << std::endl;
     }},
    {"echo",
     [] {
       for (std::string line; std::getline(std::cin, line);) std::cout << line << std::endl;
     }},
    {"count",
     [] {
       std::size_t bytes = 0;
       std::vector<char> buffer(65536);
       while (std::cin.read(buffer.data(), 65536) || std::cin.gcount() > 0) {
         bytes += static_cast<std::size_t>(std::cin.gcount());
       }
       std::cout << "bytes " << bytes << std::endl;
     }},
};

int run(const Arguments& words) {
  const std::string rank = variable("RANK");
  bool active = true;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "all") {
      active = true;
    } else if (word == "only" && i + 1 < words.size()) {
      active = words[++i] == rank;
    } else if (const auto found = kWithValue.find(word);
               found != kWithValue.end() && i + 1 < words.size()) {
      ++i;
      if (active) found->second(words[i]);
    } else if (const auto plain = kWithout.find(word); plain != kWithout.end()) {
      if (active) plain->second();
    } else {
      std::cerr << "rank_probe: what is '" << word << "'?" << std::endl;
      return 99;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  alarm(60);
  return run({argv + 1, argv + argc});
}
