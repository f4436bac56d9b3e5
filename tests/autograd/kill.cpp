#include "kill.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/autograd.h>
#include <torch/types.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <string>

#include "../agent/hooked_endpoint.h"
#include "agent/agent.h"
#include "autograd/lineage.h"
#include "base/concat.h"
#include "convoy/autograd.h"
#include "rpc/session_impl.h"
#include "support/rank_group.h"
#include "transport/shm/shm_endpoint.h"

namespace convoy::autograd::kill_test {

using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using rpc::Session;
using namespace std::chrono_literals;

// --- what workers call ---

at::Tensor& weight_here() {
  static at::Tensor one =
      torch::full({2}, rpc::current().session().worker_info().rank + 1.0).requires_grad_(true);
  return one;
}
at::Tensor weigh(const at::Tensor& x) { return x * weight_here(); }
CONVOY_RPC(weigh);
// Through this worker to another, and back.
at::Tensor relay(const std::string& worker, const at::Tensor& x) {
  const auto there = rpc::current().session().rpc_sync<weigh>(worker, x * weight_here());
  return there * weight_here();
}
CONVOY_RPC(relay);
// Of this worker's weight; undefined: the context has none.
at::Tensor gradient_of_weight(ContextId id) {
  const auto gradients = find(rpc::current().session(), id).gradients();
  return gradients.contains(weight_here()) ? gradients.at(weight_here()).clone() : at::Tensor();
}
CONVOY_RPC(gradient_of_weight);
std::size_t left_here() {
  const auto now = stats(rpc::current().session());
  return now.contexts + now.passes;
}
CONVOY_RPC(left_here);
void set_lineages(bool on) { detail::set_most_upstream(on ? detail::Lineage::kMost : 0); }
CONVOY_RPC(set_lineages);

// So many letters go from here; 0: all.
std::atomic<int>& letters_left() {
  static std::atomic<int> count{0};
  return count;
}
void stop_after(int letters) { letters_left() = letters; }
CONVOY_RPC(stop_after);

namespace {

// A session whose worker says so when no more letters go, and is killed then.
Session join(const Rank& r, agent::test::Hooks& hooks) {
  hooks.send = [&r](transport::Remote&,
                    const transport::Letter&) -> std::optional<transport::SendResult> {
    const int before = letters_left().load();
    if (before == 0) return std::nullopt;
    const int left = before < 0 ? before : --letters_left();
    if (left > 0) return std::nullopt;
    if (left == 0) {
      letters_left() = -1;
      r.mark("dying");
    }
    for (;;) ::pause();
  };
  const auto impl = rpc::detail::SessionImpl::make_apart(
      {.rank = r.id()}, [&hooks](agent::AgentOptions& options) {
        options.make_endpoint = [&hooks](transport::Inbox& inbox) {
          return std::make_unique<agent::test::HookedEndpoint>(
              inbox, hooks, [](transport::Inbox& inner) { return shm::make_shm_endpoint(inner); });
        };
      });
  impl->agent().meet(*r.store(), r.size(), r.deadline());
  return Session(impl);
}

void expect_times(const at::Tensor& got, int times, const at::Tensor& one) {
  if (times == 0) {
    EXPECT_FALSE(got.defined()) << got;
  } else {
    EXPECT_TRUE(got.defined() && at::equal(got, one * times)) << got << " after " << times;
  }
}

// The victim's last letter is one of a pass.
void lose(const Session& session, int victim, int letters, bool lineages) {
  SCOPED_TRACE(concat("worker", victim, ", letter ", letters, lineages ? ", lineages" : ""));
  set_lineages(lineages);
  for (const int worker : {1, victim}) session.rpc_sync<set_lineages>(worker, lineages);
  const auto x = torch::full({2}, 3.0).requires_grad_(true);
  const double weight = victim + 1;
  {
    const Context context(session);
    const auto loss = session.rpc_sync<relay>(victim, "worker1", x).sum();
    session.rpc_sync<stop_after>(victim, letters + 1);  // its answer is the first
    int passes = 0;
    try {
      for (; passes < 100; ++passes) {
        context.backward({loss}, {.retain_graph = true, .timeout = 30s});
      }
      ADD_FAILURE() << "it did not die";
    } catch (const rpc::RemoteError& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kPeerLost) << error.what();
      EXPECT_EQ(error.worker(), concat("worker", victim)) << error.what();
    }
    const auto mine = context.gradients();
    expect_times(mine.contains(x) ? mine.at(x) : at::Tensor(), passes,
                 torch::full({2}, weight * 2 * weight));
    expect_times(session.rpc_sync<gradient_of_weight>("worker1", context.id()), passes,
                 torch::full({2}, 3 * weight * weight));
  }
  const auto deadline = Deadline::after(30s);
  while (session.rpc_sync<left_here>("worker1") != 0 && !deadline.expired()) {
  }
  EXPECT_EQ(session.rpc_sync<left_here>("worker1"), 0U);
  const auto here = stats(session);
  EXPECT_EQ(here.contexts + here.passes, 0U);
  // The others go on.
  const Context context(session);
  context.backward({session.rpc_sync<weigh>("worker1", x).sum()});
  EXPECT_TRUE(at::equal(context.gradients().at(x), torch::full({2}, 2.0)));
  expect_times(session.rpc_sync<gradient_of_weight>("worker1", context.id()), 1,
               torch::full({2}, 3.0));
}

}  // namespace

void kill_workers_with_letters(int first, int last) {
  const int kinds = last - first + 1;
  RankGroup group(2 + 2 * kinds, RankMode::kProcesses, {.limit = 120s});
  group.start([&](Rank& r) {
    agent::test::Hooks hooks;
    const Session session = join(r, hooks);
    if (r.id() == 0) {
      for (int i = 0; i < 2 * kinds; ++i) lose(session, 2 + i, first + i / 2, i % 2 == 0);
      r.mark("done");
    }
    r.wait_for("end");
    session.shutdown({.graceful = false, .ignore_leaks = true});
  });
  for (int i = 0; i < 2 * kinds; ++i) {
    group.wait_mark("dying", 2 + i);
    group.kill(2 + i, SIGKILL);
  }
  group.wait_mark("done", 0);
  group.post("end");
  group.join();
}

}  // namespace convoy::autograd::kill_test
