// What the flight record has of calls.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <string>
#include <thread>
#include <vector>

#include "agent/gate.h"
#include "agent/support.h"
#include "base/concat.h"
#include "os/flight_calls.h"
#include "os/flight_recorder.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;

using testing::AllOf;
using testing::Contains;

// What it has of calls that were made since this was: "worker0 to worker1 #1 begun".
class FlightReader {
 public:
  std::vector<std::string> of(const std::string& function) const {
    const auto log = read();
    std::vector<std::string> lines;
    for (const auto& call : log.calls) {
      if (call.operation != function || call.ticket <= since_) continue;
      const auto* const session = log.group_of(call);
      constexpr std::array kStates = {"none", "queued", "begun", "answered", "failed"};
      lines.push_back(concat(session ? session->name : "?", call.served ? " for " : " to ",
                             flight::peer_of(log, call), call.peer < 0 ? "" : " #",
                             call.peer < 0 ? "" : std::to_string(call.number), " ",
                             kStates[static_cast<std::size_t>(call.state)]));
      EXPECT_LE(call.created, std::chrono::steady_clock::now().time_since_epoch() + 1ms);
      if (call.over()) {
        EXPECT_GE(call.ended + 2us, call.created);
      }
    }
    std::sort(lines.begin(), lines.end());
    return lines;
  }
  void await(const std::string& function, const std::vector<std::string>& lines) const {
    const auto deadline = Deadline::after(20s);
    while (of(function) != lines && !deadline.expired()) std::this_thread::yield();
    EXPECT_EQ(of(function), lines);
  }

 private:
  static flight::Log read() {
    const auto& recorder = flight::Recorder::instance();
    return flight::read(*recorder.ring(), recorder.bytes()).value();
  }
  static std::uint64_t last_ticket() {
    const auto log = read();
    return log.calls.empty() ? 0 : log.calls.back().ticket;
  }

  const std::uint64_t since_ = last_ticket();
};

TEST(AgentTest, TheFlightRecordHasCallsFromTheirStartToTheirEnd) {
  const FlightReader record;
  Gate gate;
  TextCall first, second, after;
  {
    Session session(2,
                    {gate.function_of("flown"),
                     function("flown_after", [](Request&, const std::string&) { return ""; })},
                    [](AgentOptions& options) { options.threads = 1; });
    start(session[0], first, 1, "flown");
    record.await("flown", {"worker0 to worker1 #1 begun", "worker1 for worker0 #1 begun"});
    start(session[0], second, 1, "flown");
    record.await("flown", {"worker0 to worker1 #1 begun", "worker0 to worker1 #2 begun",
                           "worker1 for worker0 #1 begun", "worker1 for worker0 #2 queued"});
    // Nobody waits for it any more, and it is not begun. (What was sent later has come.)
    EXPECT_TRUE(session[0].cancel(second));
    start(session[0], after, 1, "flown_after");
    record.await("flown_after", {"worker0 to worker1 #3 begun", "worker1 for worker0 #3 queued"});
    record.await("flown", {"worker0 to worker1 #1 begun", "worker0 to worker1 #2 failed",
                           "worker1 for worker0 #1 begun", "worker1 for worker0 #2 queued"});
    gate.open.store(true);
    session[0].wait(first);
    session[0].wait(after);
    record.await("flown", {"worker0 to worker1 #1 answered", "worker0 to worker1 #2 failed",
                           "worker1 for worker0 #1 answered", "worker1 for worker0 #2 failed"});
    // The other way round, and to itself.
    EXPECT_EQ(sync(session[1], 1, "flown"), "");
    EXPECT_THAT(record.of("flown"), AllOf(Contains("worker1 to worker1 #1 answered"),
                                          Contains("worker1 for worker1 #1 answered")));
  }
}

TEST(AgentTest, TheFlightRecordHasErrorsAndLosses) {
  const FlightReader record;
  Gate gate;
  TextCall lost, cut;
  Session session(3, {function("throwing",
                               [](Request&, const std::string&) -> std::string {
                                 throw std::runtime_error("no");
                               }),
                      gate.function_of("kept")});
  error_text(ErrorKind::kRemote, [&] { sync(session[0], 1, "throwing"); });
  record.await("throwing", {"worker0 to worker1 #1 failed", "worker1 for worker0 #1 failed"});
  start(session[0], lost, 2, "kept");
  record.await("kept", {"worker0 to worker2 #1 begun", "worker2 for worker0 #1 begun"});
  std::thread opens([&] {
    while (lost.under_way()) std::this_thread::yield();
    gate.open.store(true);
  });
  session[2].abort();
  session[0].wait(lost);
  opens.join();
  session.end(2);
  record.await("kept", {"worker0 to worker2 #1 failed", "worker2 for worker0 #1 answered"});
  gate.open.store(false);
  start(session[0], cut, 1, "kept");
  session[0].abort();
  EXPECT_THAT(record.of("kept"), Contains("worker0 to worker1 #2 failed"));
  gate.open.store(true);
}

TEST(AgentTest, TheFlightRecordHasWhatWorkersDoTogether) {
  const FlightReader record;
  Session session(2, {});
  const std::vector<WorkerId> all = {0, 1};
  std::thread waits([&] { session[0].barrier(all, Deadline::after(20s)); });
  record.await("barrier", {"worker0 to others begun"});
  session[1].barrier(all, Deadline::after(20s));
  waits.join();
  EXPECT_EQ(record.of("barrier"),
            (std::vector<std::string>{"worker0 to others answered", "worker1 to others answered"}));
  EXPECT_EQ(record.of("all_gather"), std::vector<std::string>{});
}

}  // namespace
}  // namespace convoy::agent::test
