// References to values of other workers. The scenarios of PyTorch's rpc_test.py have its names
// behind them.
#include <signal.h>
#include <torch/torch.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/concat.h"
#include "base/wire.h"
#include "convoy/ddp.h"
#include "convoy/init.h"
#include "convoy/remote_module.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "support/eventually.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

using convoy::test::eventually;
using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using namespace std::chrono_literals;

// --- What workers call ------------------------------------------------------------------------

at::Tensor rref_add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
CONVOY_RPC(rref_add);

int my_function(int a, int b, int c) { return a + b + c; }
CONVOY_RPC(my_function);

int my_rref_function(const RRef<int>& a, const RRef<int>& b) { return a.to_here() + b.to_here(); }
CONVOY_RPC(my_rref_function);

at::Tensor add_rref_to_value(const RRef<at::Tensor>& reference, const at::Tensor& value) {
  return reference.to_here() + value;
}
CONVOY_RPC(add_rref_to_value);

at::Tensor throw_remote(const at::Tensor&) { throw std::invalid_argument("Expected error"); }
CONVOY_RPC(throw_remote);

// Objects of which there may be only so many.
std::atomic<int> alive{0};
struct MyClass {
  explicit MyClass(int start) : a(start) { ++alive; }
  MyClass(MyClass&& other) noexcept : a(other.a) { ++alive; }
  ~MyClass() { --alive; }
  MyClass& operator=(MyClass&&) = delete;

  int my_instance_method(int b) const { return a + b; }
  int increment(int by) { return a += by; }
  int value() const { return a; }
  int slow_value() const;
  int hidden() const { return a; }  // not exported
  Future<int> later(int b) const {
    const int sum = a + b;
    co_return sum;
  }
  void raise() const { throw std::runtime_error(convoy::concat("raised by ", a)); }
  RRef<int> as_reference() const { return current().session().rref(int(a)); }

  int a;
};
CONVOY_RPC(rpc::make<MyClass, int>);
CONVOY_RPC(&MyClass::my_instance_method);
CONVOY_RPC(&MyClass::increment);
CONVOY_RPC(&MyClass::value);
CONVOY_RPC(&MyClass::later);
CONVOY_RPC(&MyClass::raise);
CONVOY_RPC(&MyClass::as_reference);
MyClass throw_object() { throw std::invalid_argument("Expected error"); }
CONVOY_RPC(throw_object);

// A function of an object that is no member.
int twice_of(const MyClass& object, int times) { return object.a * 2 * times; }
CONVOY_RPC(twice_of);

// Bases, one of them virtual, and what points to objects.
struct Named {
  virtual ~Named() = default;
  std::string get_name() const { return name; }
  std::string name = "nobody";
};
struct Numbered {
  int get_number() const { return number; }
  int number = 7;
};
struct Both : Numbered, virtual Named {
  Both() { name = "both"; }
};
struct More final : Both {
  More() { name = "more"; }
  std::int64_t padding[4] = {};
};
CONVOY_RPC(&Named::get_name);
CONVOY_RPC(&Numbered::get_number);
std::shared_ptr<Both> make_both(bool more) {
  return more ? std::make_shared<More>() : std::make_shared<Both>();
}
CONVOY_RPC(make_both);

// One object held by two of its bases, in which another one is at different places.
struct FirstHalf : Numbered {
  FirstHalf() { number = 1; }
  virtual ~FirstHalf() = default;
};
struct Padding {
  std::int64_t padding[4] = {};
};
struct SecondHalf : Padding, Numbered {
  SecondHalf() { number = 2; }
  virtual ~SecondHalf() = default;
};
struct Whole final : FirstHalf, SecondHalf {};

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(double by) { weight = register_parameter("weight", torch::full({2}, by)); }
  at::Tensor forward(const at::Tensor& x) { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Layer);
static_assert(!detail::is_passable<std::tuple<int, LayerImpl>>());  // only its holder is
Layer make_layer(double by) { return Layer(by); }
CONVOY_RPC(make_layer);
CONVOY_RPC(&LayerImpl::forward);

struct TwoImpl : torch::nn::Module {
  TwoImpl(int in, int out) : linear(register_module("linear", torch::nn::Linear(in, out))) {
    counter = register_buffer("counter", torch::zeros({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    counter += 1;
    return is_training() ? linear->forward(x) : torch::zeros({1});
  }
  torch::nn::Linear linear;
  at::Tensor counter;
};
TORCH_MODULE(Two);
CONVOY_REMOTE_MODULE(Two, int, int);

void update_parameter(const RRef<at::Tensor>& parameter, double by) {
  const torch::NoGradGuard no_gradients;
  parameter.local_value().fill_(by);
}
CONVOY_RPC(update_parameter);

// References in structs and containers.
struct Pack {
  std::string name;
  std::vector<RRef<int>> list;
  std::map<std::string, RRef<int>> by_name;
  std::optional<RRef<int>> maybe;
  CONVOY_FIELDS(name, list, by_name, maybe)
};
int sum_of(const Pack& pack) {
  int sum = 0;
  for (const auto& each : pack.list) sum += each.to_here();
  for (const auto& [name, each] : pack.by_name) sum += each.to_here();
  if (pack.maybe) sum += pack.maybe->to_here();
  return sum;
}
CONVOY_RPC(sum_of);

Pack same_pack(const Pack& pack) { return pack; }
CONVOY_RPC(same_pack);

std::vector<RRef<int>> nested_rrefs(const std::string& dst) {
  const auto session = current().session();
  return {session.remote<my_function>(dst, 1, 1, 0), session.remote<my_function>(dst, 1, 2, 0)};
}
CONVOY_RPC(nested_rrefs);

std::vector<RRef<std::shared_ptr<MyClass>>> local_objects(int n) {
  const auto session = current().session();
  std::vector<RRef<std::shared_ptr<MyClass>>> all;
  for (int i = 1; i <= n; ++i) all.push_back(session.rref(std::make_shared<MyClass>(i)));
  return all;
}
CONVOY_RPC(local_objects);

int add_to_reference(const RRef<int>& reference, int n) { return reference.to_here() + n; }
CONVOY_RPC(add_to_reference);

bool is_confirmed_here(const RRef<int>& reference) { return reference.confirmed_by_owner(); }
CONVOY_RPC(is_confirmed_here);

bool is_owner_here(const RRef<int>& reference) { return reference.is_owner(); }
CONVOY_RPC(is_owner_here);

// Passes a reference on, so often; the value in the end.
int forward_around(const RRef<int>& reference, int hops) {
  if (hops == 0) return reference.to_here();
  const auto session = current().session();
  const int next = (session.worker_info().rank + 1) % session.size();
  return session.rpc_sync<forward_around>(next, reference, hops - 1);
}
CONVOY_RPC(forward_around);

// Keeps references, by a number.
std::mutex kept_mutex;
std::map<int, RRef<MyClass>> kept_references;
void keep_reference(int rank, const RRef<MyClass>& reference) {
  const std::scoped_lock lock(kept_mutex);
  kept_references[rank] = reference;
}
CONVOY_RPC(keep_reference);
int use_kept(int rank) {
  RRef<MyClass> reference;
  {
    const std::scoped_lock lock(kept_mutex);
    reference = kept_references.at(rank);
  }
  return reference.rpc_sync<&MyClass::value>();
}
CONVOY_RPC(use_kept);
void drop_kept(int rank) {
  const std::scoped_lock lock(kept_mutex);
  kept_references.erase(rank);
}
CONVOY_RPC(drop_kept);

// What handlers of this process wait for.
struct RRefGate {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = false;
  int waiting = 0;

  void wait() {
    std::unique_lock lock(mutex);
    ++waiting;
    changed.notify_all();
    changed.wait_for(lock, 30s, [&] { return open; });
    --waiting;
  }
  void set(bool value) {
    const std::lock_guard lock(mutex);
    open = value;
    changed.notify_all();
  }
  bool is_waited_at() {
    const std::lock_guard lock(mutex);
    return waiting != 0;
  }
};
RRefGate& rref_gate() {
  static RRefGate one;
  return one;
}
int slow_function(int n) {
  rref_gate().wait();
  return n;
}
CONVOY_RPC(slow_function);
MyClass slow_object(int n) {
  rref_gate().wait();
  return MyClass(n);
}
CONVOY_RPC(slow_object);
int MyClass::slow_value() const {
  rref_gate().wait();
  return a;
}
CONVOY_RPC(&MyClass::slow_value);
RRefGate& second_gate() {
  static RRefGate one;
  return one;
}
void wait_at_second_gate() { second_gate().wait(); }
CONVOY_RPC(wait_at_second_gate);

// test_my_parameter_server
struct MyParameterServer {
  explicit MyParameterServer(int n) : trainers(n) {}
  Future<at::Tensor> average(const at::Tensor& gradient) {
    const std::scoped_lock lock(mutex);
    sum = sum.defined() ? sum + gradient : gradient;
    auto future = promise.future();
    if (++came == trainers) {
      came = 0;
      auto full = std::exchange(promise, Promise<at::Tensor>());
      full.set_value(std::exchange(sum, {}) / trainers);
    }
    return future;
  }

  const int trainers;
  std::mutex mutex;
  int came = 0;
  at::Tensor sum;
  Promise<at::Tensor> promise;
};
CONVOY_RPC(&MyParameterServer::average);
using ServerReference = RRef<std::shared_ptr<MyParameterServer>>;

std::vector<at::Tensor> run_trainer(const ServerReference& server, int trainer) {
  std::vector<at::Tensor> averages;
  for (int i = 0; i < 10; ++i) {
    averages.push_back(
        server.rpc_sync<&MyParameterServer::average>(torch::full({2}, 1.0 * trainer * i)));
  }
  return averages;
}
CONVOY_RPC(run_trainer);

namespace {

void run_workers(int n, const std::function<void(Session&, int rank)>& body,
                 SessionOptions options = {}, RankMode mode = RankMode::kThreads) {
  RankGroup(n, mode).run([&](Rank& r) {
    SessionOptions mine = options;
    mine.name = convoy::concat("worker", r.id());
    mine.store = r.store();
    mine.rank = r.id();
    mine.size = n;
    Session session(mine);
    body(session, r.id());
    session.shutdown();
  });
}
std::string next_of(const Session& session) {
  return convoy::concat("worker", (session.worker_info().rank + 1) % session.size());
}
TEST(RRefTest, RemoteResult) {  // test_builtin_remote_ret, test_builtin_remote_self
  run_workers(4, [](Session& rpc, int) {
    const auto ones = torch::ones({2, 2});
    const auto sum = rpc.remote<rref_add>(next_of(rpc), ones, ones);
    EXPECT_TRUE(torch::equal(sum.to_here(), 2 * ones));
    EXPECT_EQ(sum.owner().name, next_of(rpc));
    EXPECT_FALSE(sum.is_owner());
    const auto own = rpc.remote<rref_add>(rpc.worker_info(), ones, ones);
    EXPECT_TRUE(own.is_owner());
    EXPECT_TRUE(torch::equal(own.local_value(), 2 * ones));
    EXPECT_TRUE(torch::equal(own.to_here(), 2 * ones));
  });
}

TEST(RRefTest,
     References) {  // test_py_rref_args, test_py_rref_args_user_share, test_rpc_return_rref
  run_workers(4, [](Session& rpc, int rank) {
    const auto next = next_of(rpc);
    const auto a = rpc.remote<my_function>(next, 1, 1, 0);
    const auto b = rpc.remote<my_function>(next, 1, 2, 0);
    EXPECT_EQ(rpc.remote<my_rref_function>(next, a, b).to_here(), 5);
    // With a third worker.
    const int third = (rank + 2) % 4;
    const auto c = rpc.remote<my_function>(next, 2, 3, 0);
    const auto d = rpc.remote<my_function>(third, 3, 4, 0);
    EXPECT_EQ(rpc.remote<my_rref_function>((rank + 3) % 4, c, d).to_here(), 12);
    EXPECT_EQ(rpc.rpc_sync<my_rref_function>(third, c, d), 12);
  });
}

TEST(RRefTest, OfOneselfAsArgument) {  // test_self_remote_rref_as_rpc_arg, _as_self_rpc_arg,
                                       // _as_remote_arg
  run_workers(4, [](Session& rpc, int) {
    const auto ones = torch::ones({2, 2});
    const auto mine = rpc.rref(ones + 1 + 3);
    for (const std::string& to : {next_of(rpc), rpc.worker_info().name}) {
      const auto future = rpc.rpc_async<add_rref_to_value>(to, mine, ones);
      EXPECT_TRUE(torch::equal(rpc.rpc_sync<add_rref_to_value>(to, mine, ones * 2), ones * 7));
      EXPECT_TRUE(torch::equal(future.wait(), ones * 6));
      EXPECT_TRUE(torch::equal(rpc.remote<add_rref_to_value>(to, mine, ones).to_here(), ones * 6));
    }
  });
}

TEST(RRefTest, Nested) {  // test_nested_rref, test_nested_rref_stress
  run_workers(4, [](Session& rpc, int rank) {
    const auto far = convoy::concat("worker", (rank + 2) % 4);
    std::vector<RRef<std::vector<RRef<int>>>> all;
    for (int i = 0; i < 20; ++i) all.push_back(rpc.remote<nested_rrefs>(next_of(rpc), far));
    for (const auto& each : all) {
      const auto inner = each.to_here();
      EXPECT_EQ(inner.at(0).to_here(), 2);
      EXPECT_EQ(inner.at(1).to_here(), 3);
    }
  });
}

TEST(RRefTest, OfObjects) {  // test_return_local_rrefs, test_pass_local_rrefs,
                             // test_call_method_on_rref
  run_workers(3, [](Session& rpc, int) {
    const auto next = next_of(rpc);
    const auto objects = rpc.rpc_sync<local_objects>(next, 3);
    for (const auto& each : objects) each.rpc_sync<&MyClass::increment>(10);
    std::vector<int> values;
    for (const auto& each : objects) values.push_back(each.rpc_sync<&MyClass::value>());
    EXPECT_EQ(values, (std::vector<int>{11, 12, 13}));

    const auto forty = rpc.rref(40);
    EXPECT_EQ(rpc.rpc_sync<add_to_reference>(next, forty, 50), 90);
    EXPECT_EQ(rpc.rpc_async<add_to_reference>(next, forty, 50).wait(), 90);
    EXPECT_EQ(rpc.remote<add_to_reference>(next, forty, 50).to_here(), 90);

    const auto object = rpc.remote<make<MyClass, int>>(next, 10);
    object.rpc_sync<&MyClass::increment>(2);
    object.rpc_async<&MyClass::increment>(5).wait();
    object.remote<&MyClass::increment>(7).to_here();
    EXPECT_EQ(object.rpc_sync<&MyClass::value>(), 24);
  });
}

// test_rref_proxy_class, test_rref_proxy_class_self, _reuse, test_rref_proxy_non_exist
TEST(RRefTest, ProxyOfAClass) {
  run_workers(2, [](Session& rpc, int rank) {
    for (const int to : {rank, 1 - rank}) {
      const auto object = rpc.remote<make<MyClass, int>>(to, 7);
      object.rpc_sync<&MyClass::increment>(1);
      object.rpc_async<&MyClass::increment>(1).wait();
      object.remote<&MyClass::increment>(1).to_here();
      EXPECT_EQ(object.rpc_sync<&MyClass::my_instance_method>(2), 12);
      EXPECT_EQ(object.rpc_async<&MyClass::my_instance_method>(3).wait(), 13);
      EXPECT_EQ(object.remote<&MyClass::my_instance_method>(4).to_here(), 14);
      EXPECT_EQ(object.rpc_sync<&MyClass::later>(5), 15);
      EXPECT_EQ(object.remote<&MyClass::later>(6).to_here(), 16);
      EXPECT_EQ(object.rpc_sync<twice_of>(2), 40);
      EXPECT_EQ(object.rpc_sync<&MyClass::as_reference>().to_here(), 10);
      expect_error(ErrorKind::kRemote, "raised by 10", [&] { object.rpc_sync<&MyClass::raise>(); });
      const auto expect_hidden = [](const std::function<void()>& call) {
        expect_error(ErrorKind::kInvalidArgument, "hidden to worker", call);
      };
      expect_hidden([&] { object.rpc_sync<&MyClass::hidden>(); });
      expect_hidden([&] { static_cast<void>(object.rpc_async<&MyClass::hidden>().wait()); });
      expect_hidden([&] { object.remote<&MyClass::hidden>().to_here(); });
    }
  });
}

TEST(RRefTest, FunctionsOfBasesAndOfWhatIsPointedTo) {
  run_workers(2, [](Session& rpc, int) {
    const auto next = next_of(rpc);
    for (const bool more : {false, true, false}) {
      const auto object = rpc.remote<make_both>(next, more);
      EXPECT_EQ(object.rpc_sync<&Named::get_name>(), more ? "more" : "both");
      EXPECT_EQ(object.rpc_sync<&Numbered::get_number>(), 7);
    }
    const auto layer = rpc.remote<make_layer>(next, 3.0);
    const auto x = torch::ones({2});
    EXPECT_TRUE(torch::equal(layer.rpc_sync<&LayerImpl::forward>(x).detach(), 3 * x));
    const RRef<std::shared_ptr<Both>> empty = rpc.rref(std::shared_ptr<Both>());
    expect_error(ErrorKind::kInvalidArgument, "empty", [&] { empty.rpc_sync<&Named::get_name>(); });
  });
}

TEST(RRefTest, InContainersAndStructs) {
  run_workers(3, [](Session& rpc, int rank) {
    Pack pack;
    pack.name = "mixed";
    pack.list = {rpc.rref(1), rpc.remote<my_function>(next_of(rpc), 1, 1, 0)};
    pack.by_name["third"] = rpc.remote<my_function>((rank + 2) % 3, 1, 1, 1);
    EXPECT_EQ(rpc.rpc_sync<sum_of>(next_of(rpc), pack), 6);
    pack.maybe = pack.list[0];
    EXPECT_EQ(rpc.rpc_sync<sum_of>((rank + 2) % 3, pack), 7);
    const Pack back = rpc.rpc_sync<same_pack>(next_of(rpc), pack);
    EXPECT_EQ(back.list.size(), 2u);
    EXPECT_TRUE(back.list[0].is_owner());
    EXPECT_EQ(back.list[0], pack.list[0]);
    EXPECT_EQ(back.by_name.at("third").to_here(), 3);
  });
}

TEST(RRefTest, AroundManyHops) {
  run_workers(4, [](Session& rpc, int) {
    EXPECT_EQ(rpc.rpc_sync<forward_around>(next_of(rpc), rpc.rref(17), 9), 17);
    EXPECT_TRUE(rpc.rpc_sync<is_owner_here>(rpc.worker_info(), rpc.rref(1)));
  });
}

TEST(RRefTest, Confirmed) {  // test_user_rrefs_confirmed, test_user_rrefs_confirmed_remote
  run_workers(3, [](Session& rpc, int rank) {
    const auto value = rpc.remote<my_function>(next_of(rpc), 1, 1, 1);
    EXPECT_TRUE(rpc.rpc_sync<is_confirmed_here>((rank + 2) % 3, value));
    EXPECT_TRUE(rpc.remote<is_confirmed_here>((rank + 2) % 3, value).to_here());
    value.created().wait();
    EXPECT_TRUE(value.confirmed_by_owner());
  });
}

TEST(RRefTest, LocalValueIsOnlyAtTheOwner) {  // test_local_value_not_on_owner
  run_workers(2, [](Session& rpc, int rank) {
    const auto value = rpc.remote<my_function>(1 - rank, 1, 1, 1);
    expect_error(ErrorKind::kInvalidArgument,
                 convoy::concat("worker", rank, " (worker ", rank, ")"),
                 [&] { value.local_value(); });
    expect_error(ErrorKind::kInvalidArgument,
                 convoy::concat("worker", 1 - rank, " (worker ", 1 - rank, ")"),
                 [&] { value.local_value(); });
  });
}

TEST(RRefTest, FailedCreation) {  // test_remote_with_exception, test_remote_throw
  run_workers(3, [](Session& rpc, int rank) {
    const auto bad = rpc.remote<throw_remote>(next_of(rpc), torch::ones({1}));
    expect_error(ErrorKind::kRemote, "Expected error", [&] { bad.to_here(); });
    expect_error(ErrorKind::kRemote, "Expected error", [&] { bad.created().wait(); });
    expect_error(ErrorKind::kRemote, "Expected error",
                 [&] { rpc.rpc_sync<add_rref_to_value>((rank + 2) % 3, bad, torch::ones({1})); });
    const auto own = rpc.remote<throw_remote>(rank, torch::ones({1}));
    expect_error(ErrorKind::kRemote, "Expected error", [&] { own.to_here(); });
    expect_error(ErrorKind::kRemote, "Expected error", [&] { own.local_value(); });
    expect_error(ErrorKind::kRemote, "Expected error", [&] { own.created().wait(); });
  });
}

// The owner forgets it before it looks at the question: the one who asks knows why.
void ask_while_creation_fails(const std::function<void(const RRef<MyClass>&)>& ask) {
  rref_gate().set(false);
  second_gate().set(false);
  run_workers(2,
              [&](Session& rpc, int rank) {
                if (rank == 0) {
                  const auto first = rpc.rpc_async<slow_function>(1, 1);
                  const auto bad = rpc.remote<throw_object>(1);
                  const auto second = rpc.rpc_async<wait_at_second_gate>(1);
                  expect_error(ErrorKind::kRemote, "Expected error", [&] { ask(bad); });
                  first.wait();
                  second.wait();
                  return;
                }
                // All four have come: one runs, the others wait for their turn.
                EXPECT_TRUE(eventually([&] { return rpc.stats().requests == 4; }));
                rref_gate().set(true);
                EXPECT_TRUE(eventually([] { return second_gate().is_waited_at(); }));
                EXPECT_TRUE(eventually([&] { return rpc.rref_info().num_owner_rrefs == 0; }));
                second_gate().set(true);
              },
              {.threads = 1});
}
TEST(RRefTest, FailedCreationWhileTheValueIsAskedFor) {
  ask_while_creation_fails([](const auto& bad) { RRef<int>(bad.handle()).to_here(); });
}
TEST(RRefTest, FailedCreationWhileAFunctionIsCalled) {
  ask_while_creation_fails([](const auto& bad) { bad.template rpc_sync<&MyClass::value>(); });
}

TEST(RRefTest, ReferencesOfAnotherType) {
  run_workers(2, [](Session& rpc, int rank) {
    const auto number = rpc.remote<my_function>(1 - rank, 1, 1, 1);
    const RRef<at::Tensor> wrong(number.handle());
    expect_error(ErrorKind::kInvalidArgument, "type", [&] { wrong.to_here(); });
    // At the owner.
    expect_error(ErrorKind::kInvalidArgument, "which is not a",
                 [&] { rpc.rpc_sync<add_rref_to_value>(1 - rank, wrong, torch::ones({1})); });
    const RRef<at::Tensor> own(rpc.rref(3).handle());
    expect_error(ErrorKind::kInvalidArgument, "which is not a", [&] { own.to_here(); });
    expect_error(ErrorKind::kInvalidArgument, "which is not a", [&] { own.local_value(); });
    EXPECT_EQ(number.to_here(), 3);
  });
}

// test_rref_proxy_timeout, test_remote_message_dropped_*, test_remote_message_delay_timeout,
// test_rref_to_here_timeout
TEST(RRefTest, Timeouts) {
  rref_gate().set(false);
  run_workers(3, [](Session& rpc, int rank) {
    if (rank == 0) {
      const auto late = rpc.to("worker1", {.timeout = 10ms}).remote<slow_function>(1);
      expect_error(ErrorKind::kTimeout, "RRef creation", [&] { late.created().wait(); });
      expect_error(ErrorKind::kTimeout, "RRef creation", [&] { late.to_here(); });
      expect_error(ErrorKind::kTimeout, "RRef creation",
                   [&] { rpc.rpc_sync<add_to_reference>("worker2", late, 1); });
      const auto slow = rpc.remote<slow_function>("worker1", 2);
      expect_error(ErrorKind::kTimeout, "", [&] { slow.to_here(10ms); });
      // A slow method, and a slow constructor.
      const auto object = rpc.remote<make<MyClass, int>>("worker1", 5);
      const auto quick = object.with({.timeout = 20ms});
      const auto expect_late = [](const char* why, const std::function<void()>& call) {
        expect_error(ErrorKind::kTimeout, why, call);
      };
      const char* const long_run = "ran for more than 0.02 s";
      expect_late(long_run, [&] { quick.rpc_sync<&MyClass::slow_value>(); });
      expect_late(long_run,
                  [&] { static_cast<void>(quick.rpc_async<&MyClass::slow_value>().wait()); });
      const auto unfinished = quick.remote<&MyClass::slow_value>();
      expect_late(long_run, [&] { unfinished.created().wait(); });
      expect_late(long_run, [&] { unfinished.to_here(); });
      const auto unmade = rpc.to("worker1", {.timeout = 10ms}).remote<slow_object>(1);
      expect_late("RRef creation", [&] { unmade.created().wait(); });
      expect_late("RRef creation", [&] { unmade.rpc_sync<&MyClass::value>(); });
      rref_gate().set(true);
      EXPECT_EQ(slow.to_here(), 2);
      EXPECT_EQ(object.rpc_sync<&MyClass::slow_value>(), 5);
    }
    rpc.barrier();
    // What was given up is nobody's.
    EXPECT_TRUE(eventually([&] {
      const auto info = rpc.rref_info();
      return info.num_owner_rrefs + info.num_forks + info.num_pending_users == 0;
    }));
    rpc.barrier();
  });
}

// At the owner there is no call to be late.
TEST(RRefTest, TimeoutsAtTheOwner) {
  rref_gate().set(false);
  Session rpc({.name = "me"});
  const auto slow = rpc.remote<slow_function>("me", 3);
  expect_error(ErrorKind::kTimeout, "not there within 0.01 s", [&] { slow.to_here(10ms); });
  expect_error(ErrorKind::kTimeout, "not there within 0.01 s",
               [&] { static_cast<void>(slow.with({.timeout = 10ms}).to_here_async().wait()); });
  expect_error(ErrorKind::kInvalidArgument, "timeout must be >= 0", [&] { slow.to_here(-1us); });
  const auto later = slow.to_here_async();
  rpc.set_timeout(10ms);
  expect_error(ErrorKind::kTimeout, "not there within 0.01 s", [&] { slow.to_here(); });
  expect_error(ErrorKind::kTimeout, "not there in time", [&] { slow.local_value(); });
  EXPECT_FALSE(later.done());
  rref_gate().set(true);
  EXPECT_EQ(later.wait(), 3);
  EXPECT_EQ(slow.to_here(10ms), 3);
  EXPECT_EQ(slow.to_here(0ms), 3);
  rpc.shutdown();
}

// A value lives as long as a reference to it, and no longer.
TEST(RRefTest, LifeOfAValue) {
  ASSERT_EQ(alive.load(), 0);
  run_workers(3, [](Session& rpc, int rank) {
    if (rank == 0) {
      {
        auto object = rpc.remote<make<MyClass, int>>("worker1", 5);
        rpc.rpc_sync<keep_reference>("worker2", 0, object);
        object = {};
        EXPECT_EQ(rpc.rpc_sync<use_kept>("worker2", 0), 5);
        EXPECT_EQ(alive.load(), 1);
        rpc.rpc_sync<drop_kept>("worker2", 0);
      }
      EXPECT_TRUE(eventually([] { return alive.load() == 0; }));
      // One that is dropped at once, and one whose user never waits for it.
      for (int i = 0; i < 100; ++i) static_cast<void>(rpc.remote<make<MyClass, int>>("worker1", i));
      EXPECT_TRUE(eventually([] { return alive.load() == 0; }));
      // At its owner, and passed to nobody.
      { const auto own = rpc.rref(std::make_shared<MyClass>(1)); }
      EXPECT_EQ(alive.load(), 0);
    }
    rpc.barrier();
  });
  EXPECT_EQ(alive.load(), 0);
}

TEST(RRefTest, AfterShutdown) {  // test_use_rref_after_shutdown
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    Session rpc({.rank = r.id(), .size = 2, .store = r.store()});
    const auto value = rpc.remote<my_function>(1 - r.id(), 1, 1, 1);
    const auto own = rpc.rref(1);
    rpc.shutdown();
    expect_error(ErrorKind::kInvalidArgument, "", [&] { value.to_here(); });
    expect_error(ErrorKind::kInvalidArgument, "",
                 [&] { rpc.rpc_sync<add_to_reference>(1 - r.id(), value, 1); });
    rpc = Session({.rank = 0, .size = 1, .store = make_local_store()});
    expect_error(ErrorKind::kInvalidArgument, "deleted", [&] { value.to_here(); });
    expect_error(ErrorKind::kInvalidArgument, "deleted", [&] { own.to_here(); });
    expect_error(ErrorKind::kInvalidArgument, "nothing", [&] { RRef<int>().to_here(); });
  });
}

TEST(RRefTest, ObjectsHeldByDifferentBases) {
  detail::HeldValueOf<std::shared_ptr<FirstHalf>> first(std::make_shared<Whole>());
  detail::HeldValueOf<std::shared_ptr<SecondHalf>> second(std::make_shared<Whole>());
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(detail::object_in<Numbered>(first).number, 1);
    EXPECT_EQ(detail::object_in<Numbered>(second).number, 2);
  }
}

TEST(RRefTest, ParameterServer) {  // test_my_parameter_server
  run_workers(4, [](Session& rpc, int rank) {
    if (rank != 0) return;
    const ServerReference server = rpc.rref(std::make_shared<MyParameterServer>(3));
    std::vector<Future<std::vector<at::Tensor>>> trainers;
    for (int i = 1; i < 4; ++i) trainers.push_back(rpc.rpc_async<run_trainer>(i, server, i));
    for (const auto& averages : wait_all(trainers)) {
      for (int i = 0; i < 10; ++i) {
        EXPECT_TRUE(torch::equal(averages.at(i), torch::full({2}, 2.0 * i)));
      }
    }
  });
}

// test_rref_leak, test_ignore_rref_leak
TEST(RRefTest, Leaks) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    for (const bool ignore : {false, true}) {
      Session rpc({.rank = r.id(), .size = 2, .store = r.store()});
      const auto value = rpc.remote<my_function>(1 - r.id(), 1, 1, 1);
      EXPECT_EQ(value.to_here(), 3);
      rpc.barrier();
      const auto meet = [&](const char* where) {
        r.store()->barrier(convoy::concat(where, ignore), 2, Deadline::after(30s));
      };
      if (r.id() == 0 && ignore) {
        rpc.shutdown({.graceful = false, .ignore_leaks = true});
      } else if (r.id() == 0) {
        expect_error(ErrorKind::kInvalidArgument, "Leaking RRef",
                     [&] { rpc.shutdown({.graceful = false}); });
      }
      meet("first");
      // What the first one had is gone with it.
      if (r.id() == 1) {
        EXPECT_TRUE(eventually([&] { return rpc.view().workers.size() == 1; }));
        rpc.shutdown({.graceful = false});
      }
      meet("second");
    }
  });
}

TEST(RRefTest, CountersAndReports) {  // _rref_context_get_debug_info
  run_workers(2, [](Session& rpc, int rank) {
    if (rank == 0) {
      const auto value = rpc.remote<my_function>("worker1", 1, 1, 1);
      value.created().wait();
      EXPECT_EQ(rpc.rref_info().num_pending_users, 0u);
      const auto own = rpc.rref(3);
      EXPECT_EQ(rpc.rpc_sync<add_to_reference>("worker1", own, 1), 4);
      rpc.barrier();
      rpc.barrier();  // the references live until the other has looked
    } else {
      rpc.barrier();
      EXPECT_EQ(rpc.rref_info().num_owner_rrefs, 1u);
      EXPECT_EQ(rpc.rref_info().num_forks, 1u);
      rpc.barrier();
    }
  });
}

// The future needs no reference.
TEST(RRefTest, CreatedWithoutAReference) {
  run_workers(3, [](Session& rpc, int rank) {
    if (rank != 0) return;
    for (int i = 0; i < 100; ++i) {
      rpc.remote<my_function>("worker1", 1, 1, 1).created().wait();
      rpc.rpc_sync<nested_rrefs>("worker1", "worker2").front().created().wait();
    }
  });
}

// A reference whose owner is killed.
TEST(RRefTest, OwnerIsKilled) {
  RankGroup group(3, RankMode::kProcesses);
  group.start([](Rank& r) {
    Session rpc({.rank = r.id(), .size = 3, .store = r.store()});
    if (r.id() == 1) {
      r.mark("ready");
      r.wait_for("never");
      return;
    }
    const auto value = rpc.remote<my_function>("worker1", 1, 1, 1);
    EXPECT_EQ(value.to_here(), 3);
    std::atomic<int> lost{0};
    value.on_lost([&](const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost);
      lost += 1;
    });
    rpc.on_lost("worker1", [&](const WorkerInfo& worker, const Error&) {
      EXPECT_EQ(worker.name, "worker1");
      lost += 10;
    });
    r.mark("ready");
    EXPECT_TRUE(eventually([&] { return lost == 11; }));
    expect_error(ErrorKind::kPeerLost, "worker1", [&] { value.to_here(); });
    expect_error(ErrorKind::kPeerLost, "worker1",
                 [&] { rpc.rpc_sync<add_to_reference>(2 - r.id(), value, 1); });
    rpc.barrier({"worker0", "worker2"});
    rpc.shutdown({.graceful = false, .ignore_leaks = true});
  });
  group.wait_mark("ready");
  group.kill(1, SIGKILL);
  group.join();
}

TEST(RRefTest, RemoteModules) {
  run_workers(2, [](Session& rpc, int rank) {
    torch::manual_seed(1);
    const RemoteModule<Two> net(rpc, 1 - rank, 3, 2);
    const auto x = torch::rand({4, 3});
    auto state = net.state();
    EXPECT_EQ(state.size(), 3u);
    EXPECT_EQ(state.at("counter").item<double>(), 0);
    Two here(3, 2);
    const torch::NoGradGuard no_gradients;
    here->linear->weight.copy_(state.at("linear.weight"));
    here->linear->bias.copy_(state.at("linear.bias"));
    EXPECT_TRUE(torch::equal(net.forward(x), here->forward(x)));
    EXPECT_TRUE(torch::equal(net.forward_async(x).wait(), here->forward(x)));
    EXPECT_TRUE(torch::equal(net(x), here->forward(x)));

    const auto parameters = net.named_parameters();
    // In the module's order.
    const auto in_order = net.parameters();
    ASSERT_EQ(in_order.size(), 2u);
    EXPECT_TRUE(torch::equal(in_order[0].to_here(), state.at("linear.weight")));
    EXPECT_TRUE(torch::equal(in_order[1].to_here(), state.at("linear.bias")));
    rpc.rpc_sync<update_parameter>(1 - rank, parameters.at("linear.weight"), 0.5);
    EXPECT_TRUE(torch::equal(net.state().at("linear.weight"), torch::full({2, 3}, 0.5)));

    net.eval();
    EXPECT_TRUE(torch::equal(net.forward(x), torch::zeros({1})));
    net.train();
    net.load_state(state);
    EXPECT_TRUE(torch::equal(net.forward(x), here->forward(x)));
    state.erase("counter");
    expect_error(ErrorKind::kRemote, "counter", [&] { net.load_state(state); });
    EXPECT_EQ(net.reference().owner().rank, 1 - rank);
  });
}

struct RefNetImpl : torch::nn::Module {
  explicit RefNetImpl(Session session)
      : weight(register_parameter("weight", torch::ones({2}))), rpc(std::move(session)) {}
  RRef<at::Tensor> forward(const RRef<at::Tensor>& x) { return rpc.rref(x.local_value() * weight); }
  at::Tensor weight;
  Session rpc;
};
TORCH_MODULE(RefNet);

// _tree_flatten_with_rref: gradients of what comes back in a reference are averaged.
TEST(RRefTest, InAModuleOfDistributedDataParallel) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    Session rpc({.rank = r.id(), .size = 2, .store = r.store()});
    const auto world = new_group(
        "convoy", {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = 2, .name = "world"});
    {
      RefNet net(rpc);
      DistributedDataParallel ddp(net, world);
      for (int step = 0; step < 2; ++step) {
        net->weight.mutable_grad() = at::Tensor();
        const auto out = ddp.forward(rpc.rref(torch::full({2}, 1.0 + r.id())));
        EXPECT_TRUE(out.is_owner());
        out.local_value().sum().backward();
        EXPECT_TRUE(torch::equal(net->weight.grad(), torch::full({2}, 1.5)));
      }
    }
    rpc.shutdown();
  });
}

// What a module of DistributedDataParallel's may return: _tree_flatten_with_rref.
static_assert(!convoy::detail::kOwnsItsTensors<RRef<at::Tensor>>);
TEST(RRefTest, TensorsInReferences) {
  run_workers(2, [](Session& rpc, int rank) {
    std::vector<RRef<at::Tensor>> both = {
        rpc.rref(torch::ones({2})),
        rpc.remote<rref_add>(1 - rank, torch::ones({2}), torch::ones({2}))};
    EXPECT_EQ(tensors_in(both), (std::vector<at::Tensor*>{&both[0].local_value()}));
  });
}

}  // namespace

}  // namespace convoy::rpc::test
