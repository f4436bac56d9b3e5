// What should not be done with gradients, roots and exceptions: it has a meaning, or fails as a
// whole.
#include <string>
#include <vector>

#include "support.h"

namespace convoy::autograd::odd_uses_test {

using namespace test;
using namespace std::chrono_literals;

// What its backward gives, for each way of being odd.
enum class Odd { kNothing, kZeros, kOtherSizes, kNumber };
struct OddBackward : torch::autograd::Function<OddBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            std::int64_t odd) {
    ctx->saved_data["odd"] = odd;
    return x * 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    const at::Tensor none;
    switch (static_cast<Odd>(ctx->saved_data["odd"].toInt())) {
      case Odd::kNothing: break;
      case Odd::kZeros: return {at::_efficientzerotensor(g[0].sizes(), g[0].options()), none};
      case Odd::kOtherSizes: return {torch::ones({7}), none};
      case Odd::kNumber: throw 42;  // NOLINT(bugprone-std-exception-baseclass): somebody may
    }
    return {none, none};
  }
};
at::Tensor odd_backward(const at::Tensor& x, Odd odd) {
  return OddBackward::apply(x * 1, static_cast<std::int64_t>(odd));
}
CONVOY_RPC(odd_backward);

namespace {

// Gradients that are undefined, or zeros without memory (ZeroTensor).
TEST(AutogradOddUseTest, OddGradients) {
  run_root(2, [](Session& session) {
    for (const int to : {0, 1}) {
      for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
        for (const Odd odd : {Odd::kNothing, Odd::kZeros}) {
          const auto x = random_leaf(), y = random_leaf();
          const Context context(session);
          const auto odd_one = session.rpc_sync<odd_backward>(to, x, odd);
          const auto loss =
              (odd_one + odd_backward(y, odd) + session.rpc_sync<square>(to, y)).sum();
          for (int i = 0; i < 2; ++i)
            context.backward({loss}, {.mode = mode, .retain_graph = true});
          expect_close(context.gradients().at(y), 4 * y);
          const bool has_zeros = odd == Odd::kZeros || (mode == Mode::kFast && to == 1);
          EXPECT_EQ(context.gradients().contains(x), has_zeros || mode == Mode::kFast);
          if (has_zeros) expect_close(context.gradients().at(x), torch::zeros({3, 3}));
        }
      }
    }
    // Only zeros, which add up.
    const auto x = random_leaf();
    const Context context(session);
    const auto loss = odd_backward(x, Odd::kZeros).sum();
    for (int i = 0; i < 2; ++i) context.backward({loss}, {.retain_graph = true});
    expect_close(context.gradients().at(x), torch::zeros({3, 3}));
  });
}

// Texts say which node it was, and no names of ours.
TEST(AutogradOddUseTest, WhereItFailed) {
  run_root(2, [](Session& session) {
    for (const int to : {0, 1}) {
      for (const Mode mode : {Mode::kSmart, Mode::kFast}) {
        const auto x = random_leaf();
        const auto fails = [&](const at::Tensor& loss, const std::vector<std::string>& texts) {
          try {
            current().backward({loss}, {.mode = mode, .retain_graph = true, .timeout = 20s});
            ADD_FAILURE() << "it did not fail";
          } catch (const rpc::RemoteError& error) {
            EXPECT_EQ(error.kind(), ErrorKind::kRemote) << error.what();
            const std::string what = error.what();
            for (const auto& text : texts) EXPECT_NE(what.find(text), std::string::npos) << what;
            EXPECT_EQ(what.find("convoy::Gate"), std::string::npos) << what;
            EXPECT_EQ(error.remote_type().find("anonymous"), std::string::npos);
          }
        };
        {
          const Context context(session);
          fails(session.rpc_sync<odd_backward>(to, x, Odd::kOtherSizes).sum(),
                {"returned an invalid gradient at index 0", "(in torch::autograd::CppNode<"});
        }
        {
          const Context context(session);
          fails(session.rpc_sync<odd_backward>(to, x, Odd::kNumber).sum(),
                {"an exception not derived from std::exception", "OddBackward>)"});
          EXPECT_TRUE(context.gradients().empty());
        }
        // The engine of this thread goes on.
        const auto other = random_leaf();
        other.square().sum().backward();
        expect_close(other.grad(), 2 * other);
        const Context context(session);
        const auto loss = session.rpc_sync<square>(to, x).sum();
        bool throws_here = true;
        x.register_hook([&throws_here](const at::Tensor& g) {
          if (throws_here) throw std::runtime_error("of the leaf");
          return g * 1;
        });
        fails(loss, {"of the leaf", "in a hook"});
        throws_here = false;
        context.backward({loss}, {.mode = mode});
        expect_close(context.gradients().at(x), 2 * x);
      }
    }
  });
}

// One process would refuse them, too.
TEST(AutogradOddUseTest, ComplexRoots) {
  run_root(2, [](Session& session) {
    const auto x = torch::full({3}, 2.0, torch::kComplexFloat).requires_grad_(true);
    const Context context(session);
    const auto root = session.rpc_sync<square>("worker1", x).sum();
    expect_error(ErrorKind::kInvalidArgument,
                 "only for real scalar outputs: root 0 is ComplexFloat",
                 [&] { context.backward({root}); });
    expect_error(ErrorKind::kInvalidArgument, "gradient 0 is Float, but its root is ComplexFloat",
                 [&] { context.backward({root}, {.gradients = {torch::ones({})}}); });
    context.backward({root}, {.gradients = {torch::ones({}, torch::kComplexFloat)}});
    expect_close(context.gradients().at(x), torch::full({3}, 4.0, torch::kComplexFloat));
  });
}

// A leaf gets other data between two passes: nothing is added anywhere.
TEST(AutogradOddUseTest, LeavesThatChange) {
  run_root(2, [](Session& session) {
    const auto x = random_leaf(), other = random_leaf();
    const Context context(session);
    const auto pass = [&] {
      context.backward({x.square().sum() + session.rpc_sync<square>("worker1", other).sum()});
    };
    pass();
    const auto first = context.gradients().at(other).clone();
    x.set_data(torch::ones({5}));
    expect_error(ErrorKind::kRemote, "a gradient is Float of sizes [5], but context", pass);
    expect_close(context.gradients().at(other), first);
    x.set_data(torch::ones({3, 3}));
    pass();
    expect_close(context.gradients().at(other), 2 * first);
  });
}

}  // namespace
}  // namespace convoy::autograd::odd_uses_test
