#include "support.h"

namespace convoy::autograd::test {

at::Tensor mul(const at::Tensor& a, const at::Tensor& b) { return a * b; }
CONVOY_RPC(mul);
at::Tensor square(const at::Tensor& t) { return t * t; }
CONVOY_RPC(square);
bool has_context(ContextId id) {
  try {
    find(rpc::current().session(), id);
    return true;
  } catch (const Error&) {
    return false;
  }
}
CONVOY_RPC(has_context);
std::size_t count_contexts() { return stats(rpc::current().session()).contexts; }
CONVOY_RPC(count_contexts);
std::size_t count_passes() { return stats(rpc::current().session()).passes; }
CONVOY_RPC(count_passes);

void run_all(int n, const std::function<void(Session&, int rank)>& function,
             const rpc::SessionOptions& more) {
  RankGroup(n, RankMode::kThreads).run([&](Rank& r) {
    rpc::SessionOptions options = more;
    options.rank = r.id();
    options.size = r.size();
    options.store = r.store();
    Session session(options);
    function(session, r.id());
    session.shutdown();
    EXPECT_EQ(stats(session).passes, 0U);
    EXPECT_EQ(stats(session).contexts, 0U);
  });
}

void run_root(int n, const std::function<void(Session&)>& function,
              const rpc::SessionOptions& more) {
  run_all(n, [&](Session& session, int rank) { rank == 0 ? function(session) : void(); }, more);
}

at::Tensor leaf(double value, at::IntArrayRef sizes) {
  return torch::full(sizes, value).requires_grad_(true);
}

at::Tensor random_leaf(at::IntArrayRef sizes) {
  return (torch::rand(sizes) + 0.5).requires_grad_(true);
}

void expect_close(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_TRUE(got.defined() && at::allclose(got, wanted)) << got << "\n instead of\n" << wanted;
}

}  // namespace convoy::autograd::test
