#include "programs.h"

#include <deque>
#include <map>

#include "agent/letters.h"
#include "base/concat.h"
#include "base/random.h"
#include "support.h"
#include "transport/faulty.h"
#include "transport/simulation.h"

namespace convoy::agent::test {
namespace {

using namespace std::chrono_literals;
using transport::Endpoint;
using transport::Fault;
using transport::World;

// What one program does.
class Program {
 public:
  explicit Program(std::uint64_t seed) : seed_(seed), random_(seed), world_({.seed = seed}) {
    workers_ = 2 + random_.below(3);
    const auto chance = [&](std::uint32_t most) {
      return random_.below(2) == 0 ? 0 : static_cast<std::uint32_t>(random_.below(most));
    };
    fault_ = {.drop = chance(100'000),
              .duplicate = chance(200'000),
              .reorder = chance(200'000),
              .delay = chance(200'000),
              .cut = chance(2'000),
              .most_delay = 5ms};
    crashes_ = random_.below(4) == 0;
  }

  void run() {
    SCOPED_TRACE(concat("seed ", seed_));
    make_workers();
    for (std::size_t worker = 0; worker < workers_; ++worker) {
      for (int thread = 0; thread < 2; ++thread) {
        world_.start([this, worker] { use(worker); });
      }
    }
    if (crashes_) {
      world_.call_after(std::chrono::microseconds(random_.below(20'000)), [this] {
        crashed_ = static_cast<int>(random_.below(workers_));
        world_.crash(*inner_[static_cast<std::size_t>(crashed_)]);
      });
    }
    world_.run([this] { return world_.running() == 0; }, 2'000'000);
    ASSERT_EQ(world_.running(), 0u) << "somebody waits for ever";
    check();
  }

 private:
  void make_workers() {
    for (std::size_t worker = 0; worker < workers_; ++worker) {
      AgentOptions options{.name = concat("worker", worker), .rank = static_cast<WorkerId>(worker)};
      options.call_timeout = 100ms;
      options.threads = 1 + static_cast<int>(random_.below(3));
      options.most_calls = 1 + random_.below(20);
      options.make_endpoint = [&, worker](transport::Inbox& inbox) {
        return transport::make_faulty(inbox, {.seed = seed_ + worker, .rules = {fault_}},
                                      [&](transport::Inbox& inner) {
                                        auto endpoint = world_.join(inner, options.name);
                                        inner_.push_back(endpoint.get());
                                        return endpoint;
                                      });
      };
      options.start_thread = [this](std::function<void()> run) { world_.start(std::move(run)); };
      agents_.push_back(std::make_unique<TestAgent>(
          options, std::vector<TestFunction>{
                       function("work", [this](Request& request, const std::string& text) {
                         return work(request, text);
                       })}));
    }
    std::vector<Agent*> all;
    for (const auto& agent : agents_) all.push_back(&**agent);
    admit(all);
  }

  // "<number of the call> <depth>": answers with the number.
  std::string work(Request& request, const std::string& text) {
    ++executions_[text];
    const std::size_t space = text.find(' ');
    std::string number = text.substr(0, space);
    const std::uint64_t depth = std::stoull(text.substr(space + 1));
    Agent& agent = request.agent();
    if (random_.below(3) == 0) {
      agent.wait(Deadline::at(agent.now() + std::chrono::microseconds(random_.below(3000))),
                 [] { return false; });
    }
    if (depth != 0 && random_.below(2) == 0) {
      const std::string nested = concat(next_call_++, " ", depth - 1);
      const auto to = static_cast<WorkerId>(random_.below(workers_));
      TextCall call;
      try {
        start(agent, call, to, "work", nested);
        agent.wait(call);
        judge(call, nested);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument) << error.what();
      }
    }
    if (random_.below(20) == 0) throw std::runtime_error("by chance");
    return number;
  }

  void use(std::size_t worker) {
    Agent& agent = **agents_[worker];
    std::deque<std::pair<TextCall, std::string>> calls;
    const std::uint64_t count = 1 + random_.below(12);
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto to = static_cast<WorkerId>(random_.below(workers_));
      auto& [call, text] = calls.emplace_back();
      text = concat(next_call_++, " ", random_.below(4));
      CallOptions options;
      if (random_.below(5) == 0)
        options.timeout = std::chrono::microseconds(random_.below(5000) + 1);
      std::vector<std::byte> large;
      std::vector<Piece> pieces;
      if (random_.below(6) == 0) {
        large.resize(random_.below(20'000));
        pieces.push_back({large});
      }
      agent.start(call, to, id_of("work"),
                  {.body = std::as_bytes(std::span(text)), .pieces = pieces}, options);
      if (random_.below(3) == 0) agent.wait(call);
      if (random_.below(10) == 0) agent.cancel(call);
    }
    for (auto& [call, text] : calls) {
      agent.wait(call);
      judge(call, text);
    }
  }

  void judge(const TextCall& call, const std::string& text) {
    ++ended_;
    EXPECT_TRUE(call.over());
    if (!call.failure) {
      EXPECT_EQ(call.text, text.substr(0, text.find(' '))) << "the answer of another call";
      EXPECT_EQ(executions_[text], 1) << text;
      return;
    }
    EXPECT_TRUE(call.failure->worker.starts_with("worker")) << call.failure->text;
    EXPECT_NE(call.failure->kind, ErrorKind::kInternal) << call.failure->text;
    EXPECT_NE(call.failure->kind, ErrorKind::kInvalidArgument) << call.failure->text;
    if (call.failure->kind == ErrorKind::kRemote) {
      EXPECT_NE(call.failure->text.find("by chance"), std::string::npos);
    }
  }

  void check() {
    for (const auto& [text, times] : executions_) EXPECT_EQ(times, 1) << text;
    for (std::size_t worker = 0; worker < workers_; ++worker) {
      const AgentStats stats = (*agents_[worker])->stats();
      EXPECT_EQ(stats.outstanding, 0u);
      EXPECT_EQ(stats.requests, 0u);
      EXPECT_EQ(stats.executor.running, 0);
      EXPECT_EQ(stats.executor.waiting, 0);
      EXPECT_EQ(stats.executor.queued, 0u);
    }
  }

  const std::uint64_t seed_;
  Random random_;
  World world_;
  std::size_t workers_ = 0;
  Fault fault_;
  bool crashes_ = false;
  int crashed_ = -1;
  std::vector<Endpoint*> inner_;
  std::vector<std::unique_ptr<TestAgent>> agents_;
  std::map<std::string, int> executions_;
  std::uint64_t next_call_ = 1;
  std::uint64_t ended_ = 0;
};

}  // namespace

void run_programs(std::uint64_t first_seed, std::uint64_t count) {
  for (std::uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    Program(seed).run();
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace convoy::agent::test
