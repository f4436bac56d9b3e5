// References as arguments and as roots of passes. Names of PyTorch's scenarios stand behind those
// of the tests.
#include <optional>
#include <string>
#include <thread>

#include "base/concat.h"
#include "support.h"

namespace convoy::autograd::references_test {

using namespace test;
using namespace std::chrono_literals;

at::Tensor sum_of(const at::Tensor& t) { return t.sum(); }
CONVOY_RPC(sum_of);
// A leaf that takes its time.
Signal& is_made() {
  static Signal one;
  return one;
}
at::Tensor make_slowly() {
  EXPECT_TRUE(is_made().wait());
  return leaf(5);
}
CONVOY_RPC(make_slowly);
at::Tensor make_scalar() { return torch::ones({}).requires_grad_(true); }
CONVOY_RPC(make_scalar);
at::Tensor make_leaf() { return torch::full({3, 3}, 2.0).requires_grad_(true); }
CONVOY_RPC(make_leaf);
at::Tensor of_reference(const rpc::RRef<at::Tensor>& a, const at::Tensor& b) {
  return a.to_here() * b;
}
CONVOY_RPC(of_reference);
// At the owner, of its value.
at::Tensor gradient_of(const rpc::RRef<at::Tensor>& a) {
  const auto gradients = current().gradients();
  const auto& leaf = a.local_value();
  return gradients.contains(leaf) ? gradients.at(leaf).clone() : at::Tensor();
}
CONVOY_RPC(gradient_of);

namespace {

template <class Thrown, class Function>
void expect_thrown(const std::string& text, Function&& function) {
  try {
    function();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Thrown& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(AutogradReferenceTest, References) {  // test_backward_rref, ..._nested
  run_root(3, [](Session& session) {
    const auto t2 = random_leaf();
    for (const int owner : {0, 1}) {
      for (const int caller : {0, 1, 2}) {
        const Context context(session);
        const auto reference = session.remote<make_leaf>(owner);
        const auto loss = session.rpc_sync<of_reference>(caller, reference, t2).sum();
        context.backward({loss});
        expect_close(context.gradients().at(t2), torch::full({3, 3}, 2.0));
        expect_close(session.rpc_sync<gradient_of>(owner, reference), t2);
      }
    }
    // One that was made without a context.
    const auto before = session.remote<make_leaf>(1);
    const Context context(session);
    const auto remote = session.remote<of_reference>(2, before, t2);
    const auto seen = before.to_here();  // S10: twice, one of them is not used
    context.backward({(remote.to_here() * before.to_here()).sum()});
    expect_close(context.gradients().at(t2), torch::full({3, 3}, 4.0));
    expect_close(session.rpc_sync<gradient_of>(1, before), 4 * t2.detach());
  });
}

TEST(AutogradReferenceTest, ThreeCallersAtOnce) {  // test_backward_rref_multi
  run_all(4, [](Session& session, int rank) {
    if (rank == 0) return;  // the callee, and the owner
    for (int i = 0; i < 20; ++i) {
      const auto t2 = random_leaf();
      const Context context(session);
      const auto reference = session.remote<make_leaf>(0);
      const auto sum = session.remote<of_reference>(0, reference, t2);
      context.backward({sum.to_here().sum()});
      expect_close(context.gradients().at(t2), torch::full({3, 3}, 2.0));
      EXPECT_EQ(context.gradients().size(), 1U);
      expect_close(session.rpc_sync<gradient_of>(0, reference), t2);
    }
  });
}

// Made outside of all contexts by a slow function: its thread, which has none, goes on with what
// was asked in one. test_thread_local_context_id
TEST(AutogradReferenceTest, SlowReferences) {
  run_root(2, [](Session& session) {
    is_made().set(false);
    const auto slow = session.remote<make_slowly>(1);
    const Context context(session);
    std::thread maker([] {
      Signal never;
      never.wait(50ms);  // to_here() is there before it
      is_made().set(true);
    });
    const auto loss = slow.to_here().sum();
    maker.join();
    context.backward({loss});
    expect_close(session.rpc_sync<gradient_of>(1, slow), torch::ones({3, 3}));
    EXPECT_TRUE(context.gradients().empty());
  });
}

TEST(AutogradReferenceTest,
     BackwardOfReferences) {  // test_owner_rref_backward, test_user_rref_backward
  run_root(2, [](Session& session) {
    const auto t = torch::ones({2}).requires_grad_(true);
    const auto own = session.rref(t * t * 1);
    const auto scalar = session.rref((t * t).sum());
    scalar.backward();
    expect_close(t.grad(), torch::full({2}, 2.0));
    t.mutable_grad() = at::Tensor();
    expect_error(ErrorKind::kInvalidArgument, "not a scalar", [&] {
      const Context context(session);
      own.backward(context);
    });
    // PyTorch's four texts. The last one is that of a static_assert: "RRef should contain a tensor
    // for .backward()".
    expect_thrown<c10::Error>("tensors does not require grad and does not have a grad_fn",
                              [&] { session.rref(torch::rand({10})).backward(); });
    expect_thrown<c10::Error>("grad can be implicitly created only for scalar outputs",
                              [&] { session.rref(random_leaf({10})).backward(); });
    {
      const auto stranger = session.remote<make_leaf>(1);
      stranger.created().wait();
      const Context context(session);
      expect_error(ErrorKind::kInvalidArgument,
                   concat("Could not find autograd context with id: ", context.id()),
                   [&] { stranger.backward(context); });
    }
    {
      const auto there = session.remote<sum_of>(1, t);
      std::optional<ContextRef> released;
      {
        const Context context(session);
        released = context;
      }
      expect_error(ErrorKind::kInvalidArgument, "Could not find autograd context with id",
                   [&] { there.backward(*released); });
      expect_error(ErrorKind::kInvalidArgument, "has been released",
                   [&] { scalar.backward(*released); });
    }
    {
      const Context context(session);
      const auto sum = session.rref((t * t).sum());
      sum.backward(context, BackwardOptions{.retain_graph = true});
      expect_close(context.gradients().at(t), torch::full({2}, 2.0));
      sum.backward(context);
      expect_close(context.gradients().at(t), torch::full({2}, 4.0));
    }
    const auto elsewhere = session.remote<make_leaf>(1);
    expect_error(ErrorKind::kInvalidArgument, "User RRefs require", [&] { elsewhere.backward(); });
    const Context context(session);
    const auto root = session.remote<sum_of>(1, t);
    root.backward(context);
    expect_close(context.gradients().at(t), torch::ones({2}));
    expect_error(ErrorKind::kInvalidArgument, "does not have a valid gradient function",
                 [&] { session.remote<make_scalar>(1).backward(context); });
  });
}

}  // namespace
}  // namespace convoy::autograd::references_test
