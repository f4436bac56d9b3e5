// Processes that run a function of this program: the scenarios of PyTorch's
// test_multiprocessing_spawn.py under their names, and what it does not test.
#include <signal.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <unistd.h>

#include <fstream>
#include <numeric>
#include <random>
#include <thread>

#include "base/concat.h"
#include "convoy/process_pool.h"
#include "convoy/queue.h"
#include "convoy/spawn.h"
#include "os/process.h"
#include "share/book.h"
#include "support.h"

namespace convoy::share::test {
namespace {

using convoy::test::error_of;

class SpawnTest : public ShareTest {};
class ProcessPoolTest : public ShareTest {};

// Until it is ended.
[[noreturn]] void wait_forever() {
  for (;;) ::pause();
}

void nothing(int) {}
void check_index(int index, int count, const std::string& text) {
  const Spawned* const self = spawned();
  if (!self || self->index != index || self->count != count)
    throw std::runtime_error("wrong index");
  if (text != "text") throw std::runtime_error("wrong text");
}
void fail_one(int index, int failing) {
  if (index == failing)
    throw std::runtime_error(concat("legitimate exception from process ", index));
  wait_forever();
}
void fail_all(int index) {
  throw std::runtime_error(concat("legitimate exception from process ", index));
}
void signal_one(int index) {
  if (index == 0) ::raise(SIGABRT);
  wait_forever();
}
void exit_one(int index) {
  if (index == 0) std::exit(123);
  wait_forever();
}
void succeed_then_fail(int index) {
  if (index == 0) return;
  // Not before process 0 has ended.
  spawned()->parent.receive_message();
  fail_all(index);
}
void wait_for_word(int) { spawned()->parent.receive_message(); }
void ignore_sigterm(int) {
  ::signal(SIGTERM, SIG_IGN);
  spawned()->parent.send(Message{"ignores"});
  wait_forever();
}

// test_success, test_first_argument_index
TEST_F(SpawnTest, FirstArgumentIndex) {
  EXPECT_EQ(spawned(), nullptr);
  auto processes = spawn<check_index>(2, 2, "text");
  EXPECT_TRUE(processes.join(soon()));
}

// test_success_non_blocking, pids
TEST_F(SpawnTest, SuccessNonBlocking) {
  auto processes = spawn<wait_for_word>(2);
  EXPECT_FALSE(processes.join(std::chrono::milliseconds(0)));
  const auto pids = processes.pids();
  ASSERT_EQ(pids.size(), 2U);
  for (const int pid : pids) EXPECT_EQ(parent_of(pid), ::getpid());
  EXPECT_FALSE(processes.join(std::chrono::milliseconds(1)));
  for (int i = 0; i < 2; ++i) processes.channel(i).send(Message{"go"});
  EXPECT_TRUE(processes.join(soon()));
  EXPECT_TRUE(processes.join(std::chrono::milliseconds(0)));
  EXPECT_TRUE(processes.join(soon()));
  EXPECT_EQ(processes.pids(), pids);
  EXPECT_TRUE(processes.failures().empty());
}

// test_exception_single
TEST_F(SpawnTest, ExceptionSingle) {
  for (const int failing : {0, 1}) {
    auto processes = spawn<fail_one>(2, failing);
    const std::string text = concat("legitimate exception from process ", failing);
    expect_error(ErrorKind::kRemote, text, [&] { processes.join(soon()); });
    expect_error(ErrorKind::kRemote, text, [&] { processes.join(soon()); });  // again
    const auto failures = processes.failures();
    ASSERT_EQ(failures.size(), 1U);
    EXPECT_EQ(failures[0].index, failing);
    EXPECT_EQ(failures[0].exception, text);
    for (const int pid : processes.pids()) EXPECT_FALSE(process_state(pid).has_value());
  }
}

// test_exception_all
TEST_F(SpawnTest, ExceptionAll) {
  auto processes = spawn<fail_all>(2);
  expect_error(ErrorKind::kRemote, "legitimate exception from process ",
               [&] { processes.join(soon()); });
}

// test_terminate_signal
TEST_F(SpawnTest, TerminateSignal) {
  auto processes = spawn<signal_one>(2);
  expect_error(ErrorKind::kPeerLost, "process 0", [&] { processes.join(soon()); });
  const auto failures = processes.failures();
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_EQ(failures[0].signal, SIGABRT);
  EXPECT_NE(failures[0].to_string().find("(SIGABRT)"), std::string::npos);
}

// test_terminate_exit
TEST_F(SpawnTest, TerminateExit) {
  auto processes = spawn<exit_one>(2);
  expect_error(ErrorKind::kPeerLost, "exit code 123", [&] { processes.join(soon()); });
  EXPECT_EQ(processes.failures().at(0).exit_code, 123);
}

// test_success_first_then_exception
TEST_F(SpawnTest, SuccessFirstThenException) {
  auto processes = spawn<succeed_then_fail>(2);
  const auto limit = soon();
  while (process_state(processes.pids()[0]) && !limit.expired()) {
    EXPECT_FALSE(processes.join(std::chrono::milliseconds(10)));
  }
  EXPECT_FALSE(process_state(processes.pids()[0]).has_value());
  processes.channel(1).send(Message{"go"});
  expect_error(ErrorKind::kRemote, "legitimate exception from process 1",
               [&] { processes.join(soon()); });
}

TEST_F(SpawnTest, TerminateWithGraceThenKill) {
  auto processes = spawn<ignore_sigterm>(1);
  EXPECT_EQ(processes.channel(0).receive_message(soon()).text(0), "ignores");
  processes.terminate(std::chrono::milliseconds(50));
  EXPECT_FALSE(process_state(processes.pids()[0]).has_value());
  EXPECT_TRUE(processes.failures().empty());  // it was ended by us
  EXPECT_TRUE(processes.join(soon()));
}

void add_one(int, const at::Tensor& tensor, const std::vector<at::Tensor>& weights,
             const std::map<std::string, double>& numbers, std::optional<int> none) {
  tensor.add_(numbers.at("one"));
  if (none || !weights.at(1).requires_grad()) throw std::runtime_error("wrong arguments");
  weights[1].detach().fill_(7);
}

// Tensors are shared, not copied.
TEST_F(SpawnTest, ArgumentsOfManyKinds) {
  auto tensor = at::zeros({5});
  const torch::nn::Linear net(3, 2);
  auto processes = spawn<add_one>(1, tensor, net->parameters(),
                                  std::map<std::string, double>{{"one", 1.0}}, std::nullopt);
  EXPECT_TRUE(processes.join(soon()));
  EXPECT_EQ(tensor.sum().item<float>(), 5);
  EXPECT_EQ(net->bias[1].item<float>(), 7);
}

// A function without a name, and an object that processes use together.
TEST_F(SpawnTest, LambdasAndQueues) {
  const Queue queue(QueueOptions{.capacity = 4});
  constexpr auto kPut = [](int index, const Queue& to) { to.put(Message{std::int64_t{index}}); };
  auto processes = spawn<kPut>(2, queue);
  EXPECT_TRUE(processes.join(soon()));
  EXPECT_EQ(queue.get(soon()).integer(0) + queue.get(soon()).integer(0), 1);
}

TEST_F(SpawnTest, WrongUse) {
  expect_error(ErrorKind::kInvalidArgument, "count must be >= 1, got -1",
               [] { (void)spawn<nothing>(-1); });
  expect_error(ErrorKind::kInvalidArgument, "NAME=value",
               [] { (void)spawn<nothing>(ProcessOptions{.environment = {"x"}}); });
  expect_error(ErrorKind::kInvalidArgument, "detach", [] {
    const auto result = at::ones({2}).set_requires_grad(true) * 2;
    (void)spawn<add_one>(1, result, std::vector<at::Tensor>{}, std::map<std::string, double>{}, 1);
  });
  expect_error(ErrorKind::kInvalidArgument, "not a ticket",
               [] { adopt_ticket("--convoy-spawned=1,2"); });
  expect_error(ErrorKind::kInvalidArgument, "not that of a parent",
               [] { adopt_ticket("--convoy-spawned=0,1,2,0,1"); });
  EXPECT_EQ(spawned(), nullptr);
  Message another{std::string("another program's")};
  auto processes = start_processes(convoy::detail::this_program(), {}, another);
  expect_error(ErrorKind::kRemote, "has no function", [&] { processes.join(soon()); });
}

void show_environment(int) {
  const char* const value = std::getenv("CONVOY_SPAWN_TEST");
  spawned()->parent.send(Message{std::string(value ? value : "")});
}

TEST_F(SpawnTest, Environment) {
  auto processes = spawn<show_environment>(ProcessOptions{.environment = {"CONVOY_SPAWN_TEST=5"}});
  EXPECT_EQ(processes.channel(0).receive_message(soon()).text(0), "5");
  EXPECT_TRUE(processes.join(soon()));
}

void count_up(int, const at::Tensor& counter) {
  counter.add_(1);
  if (counter.item<float>() < 3) ::raise(SIGKILL);
}

TEST_F(SpawnTest, RestartFailed) {
  const auto counter = share_memory_(at::zeros({1}));
  auto processes = spawn<count_up>(1, counter);
  const auto limit = soon();
  std::size_t restarted = 0;
  while (counter.item<float>() < 3 && !limit.expired()) {
    for (const auto& failure : processes.restart_failed()) {
      EXPECT_EQ(failure.signal, SIGKILL);
      ++restarted;
    }
  }
  EXPECT_EQ(restarted, 2U);
  EXPECT_TRUE(processes.join(soon()));
}

// --- The death of the parent ------------------------------------------------------------------

void grandchild(int) {
  spawned()->parent.send(Message{static_cast<std::int64_t>(::getpid())});
  wait_forever();
}

// Has two children by spawn, one of which is stopped, and one that is no program of ours.
void middle(int) {
  auto children = spawn<grandchild>(2);
  Message pids;
  for (int i = 0; i < 2; ++i) pids.add(children.channel(i).receive_message(soon())[0]);
  auto other = ChildProcess::spawn({.arguments = {"sleep", "1000"}});
  pids.add(static_cast<std::int64_t>(other.pid()));
  ::kill(children.pids()[1], SIGSTOP);
  spawned()->parent.send(pids);
  wait_forever();
}

TEST_F(SpawnTest, TheDeathOfTheParentEndsItsChildrenAndTheirs) {
  for (const int signal : {SIGKILL, SIGTERM}) {
    auto processes = spawn<middle>(1);
    const Message pids = processes.channel(0).receive_message(soon());
    ASSERT_EQ(pids.size(), 3U);
    std::vector<ProcessWord> words;
    for (std::size_t i = 0; i < 3; ++i) {
      const auto pid = static_cast<pid_t>(pids.integer(i));
      words.push_back(process_word(pid, process_start_time(pid)));
      EXPECT_FALSE(is_dead(words.back(), own_domain()));
    }
    if (signal == SIGKILL) {
      ::kill(processes.pids()[0], signal);
      expect_error(ErrorKind::kPeerLost, "SIGKILL", [&] { processes.join(soon()); });
    } else {
      processes.terminate();
    }
    const auto limit = soon();
    for (const ProcessWord word : words) {
      while (!is_dead(word, own_domain()) && !limit.expired()) std::this_thread::yield();
      EXPECT_TRUE(is_dead(word, own_domain())) << "pid " << pid_of(word);
    }
  }
}

// --- Pool -------------------------------------------------------------------------------------

double scaled(const at::Tensor& values, int factor) { return values.sum().item<double>() * factor; }
int square(int x) {
  if (x == 13) throw std::runtime_error("thirteen is not squared");
  return x * x;
}
at::Tensor filled(int x) { return at::full({100}, x); }
int die_once(const at::Tensor& deaths, int x) {
  if (x == 2 && deaths.item<float>() < 1) {
    deaths.add_(1);
    ::raise(SIGKILL);
  }
  return x + 100;
}
int hang(int x) {
  if (x == 0) wait_forever();
  return x;
}

int wait_for_turn(const at::Tensor& turn, int x) {
  turn.fill_(1);
  while (turn.item<float>() < 2) std::this_thread::yield();
  return x;
}

TEST_F(ProcessPoolTest, OrderedResults) {
  ProcessPool pool(2);
  std::vector<int> items(50);
  std::iota(items.begin(), items.end(), 20);
  const auto squares = pool.map<square>(items);
  ASSERT_EQ(squares.size(), items.size());
  for (std::size_t i = 0; i < items.size(); ++i) EXPECT_EQ(squares[i], items[i] * items[i]);

  const std::vector<std::tuple<at::Tensor, int>> pairs = {{at::ones({3}), 2}, {at::ones({5}), 10}};
  EXPECT_EQ(pool.map<scaled>(pairs), (std::vector<double>{6, 50}));
  const auto tensors = pool.map<filled>(std::vector<int>{4, 5});
  EXPECT_TRUE(at::equal(tensors[1], at::full({100}, 5)));
  EXPECT_TRUE(pool.map<square>(std::vector<int>{}).empty());
  EXPECT_EQ(pool.replaced(), 0U);
}

TEST_F(ProcessPoolTest, ExceptionsAreOfTheirItem) {
  ProcessPool pool(2);
  expect_error(ErrorKind::kRemote, "item 1: thirteen is not squared",
               [&] { pool.map<square>(std::vector<int>{12, 13, 14}); });
  const auto outcomes = pool.try_map<square>(std::vector<int>{12, 13, 14});
  EXPECT_EQ(outcomes[0].value, 144);
  EXPECT_FALSE(outcomes[1].value);
  EXPECT_EQ(outcomes[2].value, 196);
  EXPECT_EQ(pool.replaced(), 0U);
}

TEST_F(ProcessPoolTest, ADeadWorkerIsReplaced) {
  for (const int retries : {0, 1}) {
    ProcessPool pool(2, {.retries = retries});
    const auto before = pool.pids();
    const auto deaths = share_memory_(at::zeros({1}));
    std::vector<std::tuple<at::Tensor, int>> items;
    for (int i = 0; i < 6; ++i) items.emplace_back(deaths, i);
    const auto outcomes = pool.try_map<die_once>(items);
    for (int i = 0; i < 6; ++i) {
      const auto& outcome = outcomes[static_cast<std::size_t>(i)];
      if (i == 2 && retries == 0) {
        ASSERT_TRUE(outcome.error);
        EXPECT_EQ(outcome.error->kind(), ErrorKind::kPeerLost);
        EXPECT_NE(std::string(outcome.error->what()).find("SIGKILL"), std::string::npos)
            << outcome.error->what();
      } else {
        EXPECT_EQ(outcome.value, i + 100);
      }
    }
    EXPECT_EQ(pool.replaced(), 1U);
    EXPECT_NE(pool.pids(), before);
    EXPECT_EQ(pool.map<square>(std::vector<int>{3}), std::vector<int>{9});
  }
}

TEST_F(ProcessPoolTest, AHangingItemTimesOut) {
  ProcessPool pool(2);
  pool.map<hang>(std::vector<int>{1, 2});  // both run
  const auto outcomes =
      pool.try_map<hang>(std::vector<int>{0, 1}, Deadline::after(std::chrono::seconds(1)));
  ASSERT_TRUE(outcomes[0].error);
  EXPECT_EQ(outcomes[0].error->kind(), ErrorKind::kTimeout);
  EXPECT_EQ(outcomes[1].value, 1);
  EXPECT_EQ(pool.replaced(), 1U);
}

// Past the deadline nothing is begun, and no process is started for it.
TEST_F(ProcessPoolTest, WhatIsNotBegunByTheDeadline) {
  ProcessPool pool(1);
  pool.map<hang>(std::vector<int>{1});  // it runs
  const auto outcomes =
      pool.try_map<hang>(std::vector<int>(20, 0), Deadline::after(std::chrono::milliseconds(100)));
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    ASSERT_TRUE(outcomes[i].error);
    EXPECT_EQ(outcomes[i].error->kind(), ErrorKind::kTimeout);
    const std::string text = outcomes[i].error->what();
    EXPECT_EQ(text.find("not begun") != std::string::npos, i > 0) << text;
  }
  EXPECT_EQ(pool.replaced(), 1U);
  EXPECT_EQ(pool.map<hang>(std::vector<int>{7}), std::vector<int>{7});
}

// map() of another thread: its turn comes, or its deadline.
TEST_F(ProcessPoolTest, ThreadsTakeTurnsUntilTheirDeadlines) {
  ProcessPool pool(1);
  const auto turn = share_memory_(at::zeros({1}));
  std::jthread other([&] {
    const std::vector<std::tuple<at::Tensor, int>> items{{turn, 1}};
    EXPECT_EQ(pool.map<wait_for_turn>(items), std::vector<int>{1});
  });
  while (turn.item<float>() == 0) std::this_thread::yield();  // it runs
  expect_error(ErrorKind::kTimeout, "other threads", [&] {
    pool.map<hang>(std::vector<int>{1}, Deadline::after(std::chrono::milliseconds(10)));
  });
  turn.fill_(2);
  other.join();
  EXPECT_EQ(pool.replaced(), 0U);
}

}  // namespace
}  // namespace convoy::share::test
