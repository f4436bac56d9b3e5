// References to values of other workers: what can be done with them. The scenarios of PyTorch's
// rpc_test.py have its names behind them.
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/concat.h"
#include "convoy/rpc.h"
#include "convoy/rref.h"
#include "rpc/rref_functions.h"
#include "rpc/workers.h"
#include "support/expect_error.h"

namespace convoy::rpc::test {

using convoy::test::expect_error;

int my_rref_function(const RRef<int>& a, const RRef<int>& b) { return a.to_here() + b.to_here(); }
CONVOY_RPC(my_rref_function);

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

std::vector<RRef<std::shared_ptr<MyClass>>> local_objects(int n) {
  const auto session = current().session();
  std::vector<RRef<std::shared_ptr<MyClass>>> all;
  for (int i = 1; i <= n; ++i) all.push_back(session.rref(std::make_shared<MyClass>(i)));
  return all;
}
CONVOY_RPC(local_objects);

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

}  // namespace
}  // namespace convoy::rpc::test
