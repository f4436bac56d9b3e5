// Going on without a rank that is a thread of the same process: it cannot be fenced, but it is out
// of its operation when settle() returns.
#include <gmock/gmock.h>

#include <semaphore>

#include "coll/kernel_table.h"
#include "support.h"

namespace convoy::coll::test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

thread_local bool held = false;  // this thread stops in a kernel
std::binary_semaphore in_kernel{0}, may_leave{0};
ReduceFunction real_sum = nullptr;

void held_sum(const ReduceJob& job) {
  if (held) {
    held = false;
    in_kernel.release();
    may_leave.acquire();
  }
  real_sum(job);
}

TEST(SettleTest, WaitsForAThreadInsideAnOperation) {
  const KernelTable& before = active_kernels();
  static KernelTable table;
  table = before;
  auto& sum = table.reduce[static_cast<int>(DataType::kF32)][static_cast<int>(ReduceOp::kSum)];
  real_sum = std::exchange(sum, held_sum);
  select_kernels(table);
  RankGroup(3, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r, "world");
    constexpr std::size_t kCount = 200'000;
    std::vector<float> data(kCount);
    ReduceOptions options;
    options.timeout = 300ms;
    held = r.id() == 2;
    const auto text = error_of(
        [&] { group->all_reduce(data.data(), data.data(), kCount, DataType::kF32, options); });
    EXPECT_THAT(text, HasSubstr("imed out"));
    if (r.id() == 0) {
      in_kernel.acquire();
      group->abort("for the test");
      EXPECT_THAT(error_of([&] { group->settle(Deadline::after(20ms)); }),
                  HasSubstr("an operation of rank 2 is still under way"));
      may_leave.release();
      group->settle(r.deadline());
    }
    r.barrier();
  });
  select_kernels(before);
}

}  // namespace
}  // namespace convoy::coll::test
