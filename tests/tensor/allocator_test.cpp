#include "convoy/allocator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "os/memory_pool.h"
#include "support/expect_error.h"

namespace convoy {
namespace {

bool is_pooled(const at::Tensor& tensor) {
  return MemoryPool::instance().owns(tensor.storage().data());
}

class AllocatorTest : public testing::Test {
 protected:
  AllocatorTest() { install_allocator(); }
  ~AllocatorTest() override { uninstall_allocator(); }
};

TEST_F(AllocatorTest, TensorsComeFromThePoolWhileItIsInstalled) {
  install_allocator();  // nothing happens
  EXPECT_TRUE(is_allocator_installed());
  const auto inside = at::arange(1000);
  EXPECT_TRUE(is_pooled(inside));
  EXPECT_EQ(at::empty({0}).storage().nbytes(), 0u);
  uninstall_allocator();
  EXPECT_FALSE(is_allocator_installed());
  const auto outside = at::arange(1000);
  EXPECT_FALSE(is_pooled(outside));
  EXPECT_TRUE(inside.equal(outside));
  uninstall_allocator();  // nothing happens
  EXPECT_EQ(c10::GetCPUAllocator(), c10::GetDefaultCPUAllocator());
}

TEST_F(AllocatorTest, TensorsOutliveIt) {
  auto tensor = at::ones({100});
  uninstall_allocator();
  EXPECT_EQ(tensor.sum().item<float>(), 100);
  tensor.resize_({100'000});  // by the storage's own allocator
  EXPECT_TRUE(is_pooled(tensor));
  EXPECT_EQ(tensor.narrow(0, 0, 100).sum().item<float>(), 100);
  const auto used = allocator_stats().used_bytes;
  tensor.reset();
  EXPECT_LT(allocator_stats().used_bytes, used);
}

TEST_F(AllocatorTest, ATemporaryIsUsedAgain) {
  const void* const first = at::zeros({3 << 20}).storage().data();
  trim_allocator();
  const auto before = allocator_stats();
  for (int i = 0; i < 10; ++i) at::zeros({3 << 20});
  const auto after = allocator_stats();
  EXPECT_EQ(after.allocations - before.allocations, 10u);
  EXPECT_EQ(after.used_bytes, before.used_bytes);
  EXPECT_GE(after.cached_bytes, std::size_t{12} << 20);
  EXPECT_NE(first, nullptr);
  EXPECT_GE(trim_allocator(), std::size_t{12} << 20);
}

TEST_F(AllocatorTest, RawMemoryAndClones) {
  auto* const allocator = c10::GetCPUAllocator();
  void* const data = allocator->raw_allocate(1000);
  EXPECT_TRUE(MemoryPool::instance().owns(data));
  allocator->raw_deallocate(data);
  auto whole = allocator->allocate(8);
  *static_cast<double*>(whole.get()) = 2.5;
  EXPECT_EQ(*static_cast<double*>(allocator->clone(whole.get(), 8).get()), 2.5);
  EXPECT_TRUE(allocator->is_simple_data_ptr(whole));
}

TEST_F(AllocatorTest, TooMuchIsAnErrorAndNothingElse) {
  const auto used = allocator_stats().used_bytes;
  test::expect_error(ErrorKind::kResource, "the step allocator cannot get",
                     [] { at::empty({std::int64_t{1} << 50}); });
  EXPECT_EQ(allocator_stats().used_bytes, used);
}

TEST_F(AllocatorTest, TensorsWanderBetweenThreads) {
  at::Tensor tensor;
  std::thread([&] { tensor = at::ones({1000}); }).join();
  EXPECT_EQ(tensor.sum().item<float>(), 1000);
  std::thread([tensor = std::move(tensor)]() mutable { tensor.reset(); }).join();
}

// A child has a copy of everything, and nothing that it writes comes back.
TEST_F(AllocatorTest, AForkedChildHasMemoryOfItsOwn) {
  auto tensor = at::ones({100'000});
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(20);
    tensor.fill_(2);
    const auto mine = at::ones({200'000});
    ::_exit(is_pooled(mine) && mine.sum().item<float>() == 200'000 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(tensor.sum().item<float>(), 100'000);
}

TEST(AllocatorVariableTest, AsksForIt) {
  const auto with = [](const char* text) {
    ::setenv("CONVOY_ALLOCATOR", text, 1);
    install_allocator_if_asked();
    const bool installed = is_allocator_installed();
    uninstall_allocator();
    return installed;
  };
  EXPECT_TRUE(with("1"));
  EXPECT_FALSE(with("0"));
  EXPECT_FALSE(with(""));
  test::expect_error(ErrorKind::kInvalidArgument, "CONVOY_ALLOCATOR is 'yes', not 0 or 1",
                     [&] { with("yes"); });
  ::unsetenv("CONVOY_ALLOCATOR");
  install_allocator_if_asked();
  EXPECT_FALSE(is_allocator_installed());
}

}  // namespace
}  // namespace convoy
