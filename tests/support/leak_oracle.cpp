#include "support/leak_oracle.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <thread>
#include <tuple>

#include "base/concat.h"
#include "base/guarded.h"
#include "os/process.h"

namespace convoy::test {

// holdings.cpp
std::vector<Holding> all_holdings(LeakScope scope);

namespace {

constexpr std::chrono::milliseconds kLongestPause(50);

struct Hooks {
  std::vector<std::function<bool(const Holding&)>> ignored;
  std::vector<std::function<void()>> warm_ups;
};
Guarded<Hooks>& hooks() {
  static auto* const hooks = new Guarded<Hooks>();  // outlives other globals that use it
  return *hooks;
}

std::string_view name_of(HoldingKind kind) {
  switch (kind) {
    case HoldingKind::kDescriptor: return "descriptor";
    case HoldingKind::kMapping: return "mapped memory";
    case HoldingKind::kThread: return "thread";
    case HoldingKind::kChild: return "child process";
    case HoldingKind::kStray: return "stray process";
    case HoldingKind::kSharedFile: return "shared memory file";
    case HoldingKind::kTempFile: return "temporary file";
  }
  return "?";
}

std::string address_text(const sockaddr_storage& address, socklen_t size) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (address.ss_family == AF_UNIX) {
    const auto& path = reinterpret_cast<const sockaddr_un&>(address).sun_path;
    const auto used = static_cast<std::size_t>(size) - offsetof(sockaddr_un, sun_path);
    return used > 0 ? ", bound to " + std::string(path, used) : "";
  }
  if (address.ss_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &in.sin_addr, text.data(), text.size());
    return concat(", bound to ", text.data(), ":", ntohs(in.sin_port));
  }
  if (address.ss_family == AF_INET6) {
    const auto& in = reinterpret_cast<const sockaddr_in6&>(address);
    ::inet_ntop(AF_INET6, &in.sin6_addr, text.data(), text.size());
    return concat(", bound to [", text.data(), "]:", ntohs(in.sin6_port));
  }
  return concat(", of address family ", address.ss_family);
}

// What a socket is, for the reader of a report.
std::string socket_text(int fd) {
  int listening = 0;
  socklen_t size = sizeof listening;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0) return "";
  std::string text = listening ? ", listening" : "";
  sockaddr_storage address{};
  size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return text;
  return text + address_text(address, size);
}

class LeakListener : public testing::EmptyTestEventListener {
  void OnTestProgramStart(const testing::UnitTest&) override { LeakOracle::run_warm_ups(); }
  void OnTestSuiteStart(const testing::TestSuite&) override {
    before_suite_ = take_holdings(LeakScope::kMachine);
  }
  void OnTestSuiteEnd(const testing::TestSuite& suite) override {
    check(before_suite_, concat("test suite ", suite.name()));
  }
  void OnTestStart(const testing::TestInfo&) override {
    before_test_ = take_holdings(LeakScope::kMachine);
  }
  void OnTestEnd(const testing::TestInfo& info) override {
    const std::string name = concat(info.test_suite_name(), ".", info.name());
    // What one test leaked is in the suite's balance too: report it once.
    if (!check(before_test_, name)) before_suite_ = take_holdings(LeakScope::kMachine);
  }

  static bool check(const std::vector<Holding>& before, const std::string& who) {
    const auto diff =
        settled_difference(before, LeakScope::kMachine, Deadline::after(settle_time()));
    if (diff.empty()) return true;
    ADD_FAILURE() << who << " did not leave things as it found them:\n" << diff.to_string();
    end_processes(diff);
    return false;
  }

  std::vector<Holding> before_suite_;
  std::vector<Holding> before_test_;
};

}  // namespace

std::strong_ordering operator<=>(const Holding& a, const Holding& b) {
  return std::tie(a.kind, a.number, a.key) <=> std::tie(b.kind, b.number, b.key);
}

std::string Holding::to_string() const {
  std::string text(name_of(kind));
  if (kind == HoldingKind::kMapping)
    text += concat(" ", number, " bytes");
  else if (number != 0 || kind == HoldingKind::kDescriptor)
    text += concat(" ", number);
  if (!key.empty()) text += " " + key;
  if (!note.empty()) text += " (" + note + ")";
  if (kind == HoldingKind::kDescriptor && key.starts_with("socket:")) {
    text += socket_text(static_cast<int>(number));
  }
  return text;
}

std::vector<Holding> take_holdings(LeakScope scope) {
  auto found = all_holdings(scope);
  const auto ignored = hooks().lock()->ignored;
  std::erase_if(found, [&](const Holding& holding) {
    return std::any_of(ignored.begin(), ignored.end(),
                       [&](const auto& predicate) { return predicate(holding); });
  });
  std::sort(found.begin(), found.end());
  return found;
}

LeakDiff difference(const std::vector<Holding>& before, const std::vector<Holding>& after) {
  LeakDiff diff;
  std::set_difference(after.begin(), after.end(), before.begin(), before.end(),
                      std::back_inserter(diff.gained));
  std::set_difference(before.begin(), before.end(), after.begin(), after.end(),
                      std::back_inserter(diff.lost));
  // Threads, processes and files may end by themselves; that is no fault of this test.
  std::erase_if(diff.lost, [](const Holding& holding) {
    return holding.kind != HoldingKind::kDescriptor && holding.kind != HoldingKind::kMapping;
  });
  return diff;
}

std::chrono::milliseconds settle_time() {
  const char* text = std::getenv("CONVOY_TEST_SETTLE_MS");
  return std::chrono::milliseconds(text ? std::atoi(text) : 2000);
}

LeakDiff settled_difference(const std::vector<Holding>& before, LeakScope scope,
                            const Deadline& deadline) {
  for (std::chrono::milliseconds pause(1);; pause = std::min(2 * pause, kLongestPause)) {
    auto diff = difference(before, take_holdings(scope));
    if (diff.empty() || deadline.expired()) return diff;
    std::this_thread::sleep_for(pause);  // /proc gives no event: a bounded poll
  }
}

std::string LeakDiff::to_string() const {
  std::string text;
  for (const auto& holding : gained) text += "  left behind: " + holding.to_string() + "\n";
  for (const auto& holding : lost) text += "  gone:        " + holding.to_string() + "\n";
  return text;
}

void end_processes(const LeakDiff& diff) {
  for (const auto& holding : diff.gained) {
    const auto pid = static_cast<pid_t>(holding.number);
    if (holding.kind == HoldingKind::kChild || holding.kind == HoldingKind::kStray) {
      ::kill(pid, SIGKILL);
    }
    if (holding.kind == HoldingKind::kChild) ::waitpid(pid, nullptr, 0);
  }
}

void LeakOracle::ignore(std::function<bool(const Holding&)> predicate) {
  hooks().lock()->ignored.push_back(std::move(predicate));
}

void LeakOracle::warm_up(std::function<void()> function) {
  hooks().lock()->warm_ups.push_back(std::move(function));
}

void LeakOracle::run_warm_ups() {
  // ThreadSanitizer starts a thread of its own with the program's first.
  std::thread([] {}).join();
  const auto warm_ups = hooks().lock()->warm_ups;
  for (const auto& function : warm_ups) function();
}

void LeakOracle::install() {
  testing::UnitTest::GetInstance()->listeners().Append(new LeakListener);
}

}  // namespace convoy::test
