#include "tensor/vector_math.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>

#include <latch>
#include <thread>
#include <vector>

#include "support/rank_group.h"

namespace convoy::test {
namespace {

// In fresh processes, where nobody has called one of the functions: threads that all make their
// first call at once get the digits of later calls. Without the warming it fails in a few runs of a
// thousand, where oneMKL has this bug.
TEST(VectorMathTest, ThreadsAgreeFromTheFirstCall) {
  RankGroup(2, RankMode::kProcesses).run([](Rank&) {
    warm_vector_math();
    constexpr int kThreads = 4;
    const at::Tensor values = at::arange(1, 10, at::kFloat) * 0.017F;
    std::vector<at::Tensor> first(kThreads);
    std::latch together(kThreads);
    std::vector<std::jthread> threads;
    for (at::Tensor& result : first) {
      threads.emplace_back([&] {
        together.arrive_and_wait();
        result = at::stack({values.sqrt(), values.exp(), values.tanh(), values.log()});
      });
    }
    threads.clear();
    const at::Tensor later = at::stack({values.sqrt(), values.exp(), values.tanh(), values.log()});
    for (const at::Tensor& result : first) EXPECT_TRUE(result.equal(later)) << result - later;
  });
}

}  // namespace
}  // namespace convoy::test
