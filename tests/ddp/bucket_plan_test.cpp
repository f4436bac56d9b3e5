// Scenarios 1 to 6 of ../shared/reference/ddp.md.
#include "ddp/bucket_plan.h"

#include "ddp/support.h"

namespace convoy::test {
namespace {

using Lists = std::vector<std::vector<std::size_t>>;

std::vector<at::Tensor> floats(const std::vector<std::int64_t>& sizes) {
  std::vector<at::Tensor> tensors;
  for (const auto size : sizes) tensors.push_back(at::empty({size}));
  return tensors;
}

// ComputeBucketAssignmentTest.test_single_limit_single_dtype
TEST(BucketPlanTest, SingleLimitSingleDtype) {
  EXPECT_EQ(compute_bucket_assignment_by_size(floats({100, 200, 100, 50}), {400}),
            (Lists{{0}, {1}, {2}, {3}}));
}

// ComputeBucketAssignmentTest.test_single_limit_multi_dtype
TEST(BucketPlanTest, SingleLimitMultiDtype) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 3; ++i) {
    tensors.push_back(at::empty({50}, at::kFloat));
    tensors.push_back(at::empty({25}, at::kDouble));
  }
  EXPECT_EQ(compute_bucket_assignment_by_size(tensors, {400}), (Lists{{0, 2}, {1, 3}, {4}, {5}}));
}

// ComputeBucketAssignmentTest.test_multi_limit_single_dtype
TEST(BucketPlanTest, MultiLimitSingleDtype) {
  EXPECT_EQ(compute_bucket_assignment_by_size(floats({10, 10, 10, 10}), {40, 80}),
            (Lists{{0}, {1, 2}, {3}}));
}

// test_multi_limit_multi_dtype: each type goes through the limits on its own.
TEST(BucketPlanTest, MultiLimitMultiDtype) {
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 3; ++i) {
    tensors.push_back(at::empty({50}, at::kFloat));
    tensors.push_back(at::empty({25}, at::kDouble));
  }
  EXPECT_EQ(compute_bucket_assignment_by_size(tensors, {200, 400}),
            (Lists{{0}, {1}, {2, 4}, {3, 5}}));
}

// test_compute_bucket_assignment_by_size_sparse_error_without_logger
TEST(BucketPlanTest, SparseTensorsAreRefused) {
  const std::vector<at::Tensor> tensors(6, at::eye(10).to_sparse());
  EXPECT_THAT(text_of([&] { std::ignore = compute_bucket_assignment_by_size(tensors, {400}); }),
              testing::HasSubstr("no sparse tensors"));
}

TEST(BucketPlanTest, LimitsThatAreNoneAreRefused) {
  EXPECT_THROW(std::ignore = compute_bucket_assignment_by_size(floats({1}), {}), Error);
  EXPECT_THROW(std::ignore = compute_bucket_assignment_by_size(floats({1}), {0}), Error);
  for (const double cap : {0.0, -1.0, std::nan(""), 1e300}) {
    EXPECT_THROW(std::ignore = bucket_caps({.bucket_cap_mb = cap}), Error) << cap;
    EXPECT_THROW(std::ignore = bucket_caps({.bucket_cap_mb_list = {25, cap}}), Error) << cap;
  }
}

// TestBucketCapacityConfig: the first bucket is small unless the user has said a size.
TEST(BucketPlanTest, Caps) {
  using Caps = std::vector<std::int64_t>;
  EXPECT_EQ(bucket_caps({}), (Caps{1'048'576, 26'214'400}));
  EXPECT_EQ(bucket_caps({.bucket_cap_mb = 100}), (Caps{104'857'600}));
  EXPECT_EQ(bucket_caps({.bucket_cap_mb = 0.001}), (Caps{1049}));
  EXPECT_EQ(bucket_caps({.bucket_cap_mb = 7, .bucket_cap_mb_list = {10, 25, 50}}),
            (Caps{10'485'760, 26'214'400, 52'428'800}));
}

// 4 x Linear(512, 512): "3 | 2 1 0", and with 2 MiB "3 2 | 1 0" (section 2.6).
TEST(BucketPlanTest, InOrderOfArrival) {
  const std::vector<PlanItem> items(4, {at::kFloat, at::kCPU, 1 << 20});
  EXPECT_EQ(plan_buckets(items, {3, 2, 1, 0}, bucket_caps({}), PlanOrder::kByLastItem),
            (Lists{{3}, {2, 1, 0}}));
  EXPECT_EQ(
      plan_buckets(items, {3, 2, 1, 0}, bucket_caps({.bucket_cap_mb = 2}), PlanOrder::kByLastItem),
      (Lists{{3, 2}, {1, 0}}));
}

// A bucket goes when its last gradient is there: that decides its place.
TEST(BucketPlanTest, ABucketThatIsFullEarlierGoesFirst) {
  const std::vector<PlanItem> items = {{at::kFloat, at::kCPU, 4},
                                       {at::kDouble, at::kCPU, 100},
                                       {at::kFloat, at::kCPU, 4},
                                       {at::kDouble, at::kCPU, 1}};
  EXPECT_EQ(plan_buckets(items, {0, 1, 2, 3}, {100}, PlanOrder::kByLastItem),
            (Lists{{1}, {0, 2}, {3}}));
}

}  // namespace
}  // namespace convoy::test
