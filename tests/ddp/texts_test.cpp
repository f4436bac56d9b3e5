// The rule for the texts of errors, over public entry points and bad arguments: one exception, one
// line, who and where, nothing of ours inside.
#include "convoy/nn.h"
#include "convoy/optimizer_in_backward.h"
#include "convoy/queue.h"
#include "convoy/rendezvous.h"
#include "convoy/sharded_optimizer.h"
#include "convoy/share.h"
#include "convoy/slots.h"
#include "convoy/sync_batch_norm.h"
#include "convoy/window.h"
#include "ddp/support.h"

namespace convoy::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using torch::nn::Linear;

struct BadCall {
  std::string name;
  std::function<void()> call;
};

enum class Has { kGroup, kNoGroup };

// `call` throws an Error that keeps to the rule.
void expect_rule(const BadCall& one, Has has) {
  SCOPED_TRACE(one.name);
  try {
    one.call();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(error.kind(), ErrorKind::kInternal) << text;
    for (const char* const ours :
         {"\n", "frame #", ".cpp", ".h:", "Exception raised", "ConvoyBackend", "c10", "verdict",
          "Impl", "is no time", "abort() was called"}) {
      EXPECT_THAT(text, Not(HasSubstr(ours)));
    }
    EXPECT_GE(text.size(), 20U) << text;
    if (has == Has::kNoGroup) return;
    EXPECT_THAT(text, HasSubstr("group \""));
    EXPECT_THAT(text, testing::ContainsRegex("rank [0-9]+ of [0-9]+"));
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another exception: " << error.what();
  }
}

void expect_rule(const std::vector<BadCall>& calls, Has has = Has::kGroup) {
  for (const BadCall& one : calls) expect_rule(one, has);
}

at::Tensor meta() { return at::empty({2}, at::TensorOptions().device(at::kMeta)); }

TEST(TextsTest, Collectives) {
  run_ranks(2, [](Rank&, const ProcessGroup& group) {
    const at::Tensor none, x = at::ones({2}), longs = at::ones({2}, at::kLong);
    const at::Tensor overlapping = at::ones({1}).expand({2});
    const std::vector<at::Tensor> two = {at::ones({2}), at::ones({2})}, one = {at::ones({2})};
    for (const at::Tensor& bad : {none, meta(), overlapping}) {
      expect_rule({{"all_reduce", [&] { group.all_reduce(bad); }},
                   {"all_reduce_async", [&] { group.all_reduce_async(bad).wait(); }},
                   {"all_reduce_coalesced", [&] { group.all_reduce_coalesced({x, bad}); }},
                   {"recv", [&] { group.recv(bad, 0); }},
                   {"all_gather_single", [&] { group.all_gather_single(bad, x); }}});
    }
    for (const at::Tensor& bad : {none, meta()}) {
      expect_rule({{"reduce", [&] { group.reduce(bad); }},
                   {"broadcast", [&] { group.broadcast(bad); }},
                   {"all_gather", [&] { group.all_gather(bad); }},
                   {"all_gather of a list", [&] { group.all_gather(two, bad); }},
                   {"gather", [&] { group.gather({}, bad, {.root = 1}); }},
                   {"scatter", [&] { group.scatter(bad, {}, {.root = 1}); }},
                   {"reduce_scatter", [&] { group.reduce_scatter(bad, two); }},
                   {"reduce_scatter_single", [&] { group.reduce_scatter_single(bad, x); }},
                   {"all_to_all", [&] { group.all_to_all(two, {x, bad}); }},
                   {"all_to_all_single", [&] { group.all_to_all_single(x, bad); }},
                   {"send", [&] { group.send(bad, 1 - group.rank()); }},
                   {"send_async", [&] { group.send_async(bad, 1 - group.rank()).wait(); }},
                   {"batch", [&] { group.batch().send(bad, 1 - group.rank()).run(); }}});
    }
    for (const int root : {-1, 2, 7}) {
      expect_rule(
          {{"reduce", [&] { group.reduce(x, {.root = root}); }},
           {"broadcast", [&] { group.broadcast(x, {.root = root}); }},
           {"gather", [&] { group.gather({}, x, {.root = root}); }},
           {"scatter", [&] { group.scatter(x, {}, {.root = root}); }},
           {"broadcast_object", [&] { group.broadcast_object(std::string("a"), {.root = root}); }},
           {"broadcast_coalesced", [&] { broadcast_coalesced(group, {x}, {.root = root}); }},
           {"send", [&] { group.send(x, root); }},
           {"batch", [&] { group.batch().send(x, root).run(); }},
           {"split", [&] { group.split({root}); }},
           {"shrink", [&] { group.shrink({group.rank(), root}); }}});
    }
    expect_rule(
        {{"recv of nobody", [&] { group.recv(x, 9); }},
         {"band of floats", [&] { group.all_reduce(x, {.op = ReduceOp::kBand}); }},
         {"band of floats, reduce", [&] { group.reduce(x, {.op = ReduceOp::kBor}); }},
         {"no such operation", [&] { group.all_reduce(x, {.op = static_cast<ReduceOp>(99)}); }},
         {"rounded integers", [&] { group.all_reduce(longs, {.rounding = Rounding::kF16}); }},
         {"sizes", [&] { group.all_gather_single(at::ones({3}), x); }},
         {"types", [&] { group.all_gather_single(at::ones({4}, at::kLong), x); }},
         {"sizes, scattered", [&] { group.reduce_scatter_single(x, at::ones({3})); }},
         {"a list too short", [&] { group.all_gather(one, x); }},
         {"a list too short, scattered", [&] { group.reduce_scatter(x, one); }},
         {"a list too short, exchanged", [&] { group.all_to_all(one, one); }},
         {"outputs of others", [&] { group.gather(two, x, {.root = 1 - group.rank()}); }},
         {"no outputs", [&] { group.gather({}, x, {.root = group.rank()}); }},
         {"no inputs", [&] { group.scatter(x, {}, {.root = group.rank()}); }},
         {"splits", [&] { group.all_to_all_single(x, x, {.output_splits = {5, 5}}); }},
         {"no tensors", [&] { group.all_reduce_coalesced({}); }},
         {"types of a list", [&] { group.all_reduce_coalesced({x, longs}); }},
         {"a type that cannot travel", [&] { group.all_reduce(at::empty({2}, at::kQInt8)); }},
         {"negative sizes", [&] { group.allocate({-1}); }},
         {"memory of meta", [&] { group.allocate({1}, at::TensorOptions().device(at::kMeta)); }},
         {"split of nobody", [&] { group.split({}); }},
         {"split twice", [&] { group.split({0, 0}); }},
         {"merge without a store", [&] { group.merge(nullptr, 4); }},
         {"merge of too few", [&] { group.merge(make_local_store(), 1); }},
         {"set_timeout", [&] { group.set_timeout(-5ms); }},
         {"nn, root", [&] { nn::broadcast(x, group, {.root = 7}); }}});
    const std::chrono::milliseconds past(-5);
    expect_rule(
        {{"all_reduce, time-out", [&] { group.all_reduce(x, {.timeout = past}); }},
         {"barrier, time-out", [&] { group.barrier({.timeout = past}); }},
         {"monitored_barrier, time-out", [&] { group.monitored_barrier({.timeout = past}); }},
         {"broadcast, time-out", [&] { group.broadcast(x, {.timeout = past}); }},
         {"send, time-out", [&] { group.send(x, 0, {.timeout = past}); }},
         {"recv, time-out", [&] { group.recv(x, 0, {.timeout = past}); }}});
    group.barrier();  // nothing of this was sent
    group.shutdown();
    expect_rule({{"closed, all_reduce", [&] { group.all_reduce(x); }},
                 {"closed, barrier", [&] { group.barrier(); }},
                 {"closed, async", [&] { group.all_reduce_async(x).wait(); }},
                 {"closed, send", [&] { group.send(x, 1 - group.rank()); }},
                 {"closed, batch", [&] { group.batch().recv(x, 0).run(); }}});
  });
}

TEST(TextsTest, NoGroup) {
  const ProcessGroup none;
  const auto store = make_local_store();
  expect_rule({{"rank", [&] { none.rank(); }},
               {"all_reduce", [&] { none.all_reduce(at::ones({1})); }},
               {"can_round", [&] { none.can_round(); }},
               {"batch", [&] { none.batch(); }},
               {"from", [&] { ProcessGroup::from(nullptr); }},
               {"scope", [&] { GroupScope scope(none); }},
               {"backend", [&] { new_group("telepathy", {.store = store, .rank = 0, .size = 1}); }},
               {"rank of", [&] { new_group("convoy", {.store = store, .rank = 3, .size = 2}); }},
               {"option",
                [&] {
                  new_group("convoy",
                            {.store = store, .rank = 0, .size = 1, .options = {{"speed", "high"}}});
                }},
               {"no rank", [&] { new_group("convoy", {.store = store}); }},
               {"method", [&] { rendezvous({.method = "pigeon://loft"}); }},
               {"a model", [&] { DistributedDataParallel(Linear(1, 1), none); }},
               {"a reducer", [&] { Reducer({at::ones({1}).requires_grad_()}, none); }},
               {"broadcast_coalesced", [&] { broadcast_coalesced(none, {}); }}},
              Has::kNoGroup);
}

TEST(TextsTest, Windows) {
  run_ranks(2, [](Rank&, const ProcessGroup& group) {
    const at::Tensor mine = group.allocate({4});
    const auto window = group.window(mine);
    expect_rule({{"undefined", [&] { group.window({}); }},
                 {"private", [&] { group.window(at::ones({4})); }},
                 {"meta", [&] { group.window(meta()); }},
                 {"strided", [&] { group.window(group.allocate({4, 4}).t()); }},
                 {"at", [&] { window.at(7); }},
                 {"put, rank", [&] { window.put(-1, at::ones({1})); }},
                 {"put, type", [&] { window.put(0, at::ones({1}, at::kLong)); }},
                 {"put, size", [&] { window.put(0, at::ones({9})); }},
                 {"put, offset", [&] { window.put(0, at::ones({1}), -2); }},
                 {"put, nothing", [&] { window.put(0, {}); }},
                 {"signal", [&] { window.signal(7); }},
                 {"wait_signal", [&] { window.wait_signal(7, Deadline::after(1s)); }}});
    window.fence();
  });
  expect_rule({"none", [] { Window().at(0); }}, Has::kNoGroup);
}

TEST(TextsTest, Models) {
  run_ranks(2, [](Rank&, const ProcessGroup& group) {
    struct OnMeta : torch::nn::Module {
      OnMeta() : weight(register_parameter("weight", meta())) {}
      at::Tensor forward(const at::Tensor& x) { return weight * x; }
      at::Tensor weight;
    };
    struct BufferOnMeta : torch::nn::Module {
      BufferOnMeta() : fc(register_module("fc", Linear(2, 2))) { register_buffer("mean", meta()); }
      at::Tensor forward(const at::Tensor& x) { return fc(x); }
      Linear fc;
    };
    const auto make = [&](const DdpOptions& options) {
      DistributedDataParallel model(Linear(2, 2), group, options);
    };
    DistributedDataParallel model(Linear(2, 2), group), begun(Linear(2, 2), group);
    begun(at::ones({1, 2})).sum().backward();
    OptimizerInBackward taken(begun.reducer(), Sgd{.lr = 0.1});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto again = [&] { OptimizerInBackward(begun.reducer(), Sgd{.lr = 0.1}); };
    expect_rule(
        {{"no module",
          [&] { DistributedDataParallel(std::shared_ptr<torch::nn::LinearImpl>(), group); }},
         {"a model on meta", [&] { DistributedDataParallel(std::make_shared<OnMeta>(), group); }},
         {"a buffer on meta",
          [&] { DistributedDataParallel(std::make_shared<BufferOnMeta>(), group); }},
         {"cap", [&] { make({.bucket_cap_mb = -1}); }},
         {"name", [&] { make({.ignore = {"wieght"}}); }},
         {"delayed", [&] { make({.delay_all_reduce_named_params = {"wieght"}}); }},
         {"weights", [&] { make({.reduce = GradReduce::weighted(nan)}); }},
         {"precision",
          [&] { make({.mixed_precision = MixedPrecision{.param_dtype = at::kLong}}); }},
         {"no parameters", [&] { Reducer({}, group); }},
         {"undefined parameters", [&] { Reducer({at::Tensor()}, group); }},
         {"names",
          [&] { Reducer({at::ones({1}).requires_grad_()}, group, {}, {.names = {"a", "b"}}); }},
         {"options of a module",
          [&] { Reducer({at::ones({1}).requires_grad_()}, group, {.ignore = {"a"}}); }},
         {"hook", [&] { model.register_comm_hook(nullptr); }},
         {"late hook", [&] { begun.register_comm_hook(hooks::all_reduce); }},
         {"buffer hook", [&] { model.register_buffer_hook(nullptr); }},
         {"set_reduce", [&] { model.set_reduce(GradReduce::weighted(-1)); }},
         {"set_static_graph", [&] { begun.set_static_graph(); }},
         {"rows", [&] { model.set_sparse_metadata({{"weight", at::ones({1}, at::kLong)}}); }},
         {"sample rate", [&] { model.set_runtime_logging_sample_rate(0); }},
         {"another group", [&] { model.update_process_group({}); }},
         {"consumer", [&] { model.reducer().register_consumer({}); }},
         {"taken", again},
         {"sharded, taken",
          [&] {
            ShardedOptimizer<torch::optim::SGD>(begun.reducer(), torch::optim::SGDOptions(0.1));
          }},
         {"sharded, norm",
          [&] {
            ShardedOptimizer<torch::optim::SGD>(model.reducer(), torch::optim::SGDOptions(0.1),
                                                {.max_norm = -1});
          }},
         {"chunks", [&] { broadcast_coalesced(group, {at::ones({1})}, {.chunk_bytes = 0}); }},
         {"sparse", [&] { broadcast_coalesced(group, {at::ones({1}).to_sparse()}); }}});
    group.barrier();
  });
}

TEST(TextsTest, SharingAndStores) {
  const auto store = make_local_store();
  const Deadline soon = Deadline::after(1ms);
  expect_rule({{"share nothing", [] { share::share_memory_({}); }},
               {"bytes of nothing", [] { share::to_bytes({}); }},
               {"bytes that are none", [] { share::from_bytes("nonsense"); }},
               {"memory of meta", [] { share::empty({1}, at::TensorOptions().device(at::kMeta)); }},
               {"negative sizes", [] { share::empty({-1}); }},
               {"queue of nothing", [] { share::Queue({.capacity = 0}); }},
               {"no queue", [] { share::Queue().put(at::ones({1})); }},
               {"queue, deadline", [&] { share::Queue({.capacity = 1}).get(soon); }},
               {"barrier of nobody", [] { share::Barrier(0); }},
               {"no socket", [&] { share::connect("/nonexistent/convoy.sock", soon); }},
               {"store, key", [&] { store->get("not there", soon); }},
               {"store, number",
                [&] {
                  store->set("word", "abc");
                  store->add("word", 1);
                }},
               {"no store", [&] { connect_store("/nonexistent/convoy.sock", soon); }},
               {"prefix of nothing", [] { with_prefix(nullptr, "a"); }}},
              Has::kNoGroup);
}

// More than four ranks with one cause are one phrase.
TEST(TextsTest, ManyRanksAreOnePhrase) {
  run_ranks(6, [](Rank& r, const ProcessGroup& group) {
    const auto text = text_of([&] {
      DistributedDataParallel model(Linear(2, 2), group, {.bucket_cap_mb = r.id() == 3 ? 25 : -1});
    });
    EXPECT_THAT(text, HasSubstr("ranks 0, 1, 2, 4 and 5: the bucket cap must be > 0 MB, got -1"));
    const auto all =
        text_of([&] { DistributedDataParallel model(Linear(2, 2), group, {.bucket_cap_mb = -1}); });
    EXPECT_THAT(all, HasSubstr("ranks 0 to 5: the bucket cap must be > 0 MB, got -1"));
  });
}

}  // namespace
}  // namespace convoy::test
