#include "ddp/bucket_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>

#include "base/error.h"

namespace convoy {
namespace {

std::int64_t bytes_of(double megabytes) {
  constexpr double kMost = 1 << 30;  // a petabyte: far beyond any bucket, far below overflow
  if (!(megabytes > 0 && megabytes <= kMost)) {
    fail(ErrorKind::kInvalidArgument, "the bucket cap must be > 0 MB, got ", megabytes);
  }
  return std::max<std::int64_t>(1, std::llround(megabytes * (1 << 20)));
}

// One list while it is being filled, and what was closed before it.
struct Filling {
  std::vector<std::size_t> list;
  std::int64_t bytes = 0;
  std::size_t cap = 0;  // its index
  std::size_t first = 0, last = 0;
};

struct Closed {
  std::vector<std::size_t> list;
  std::size_t place;  // in `order`, by which lists are sorted
};

}  // namespace

std::vector<std::int64_t> bucket_caps(const DdpOptions& options) {
  if (!options.bucket_cap_mb_list.empty()) {
    std::vector<std::int64_t> caps;
    for (const double cap : options.bucket_cap_mb_list) caps.push_back(bytes_of(cap));
    return caps;
  }
  if (options.bucket_cap_mb) return {bytes_of(*options.bucket_cap_mb)};
  return {kDefaultFirstBucketBytes, kDefaultBucketBytes};
}

std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<PlanItem>& items,
                                                   const std::vector<std::size_t>& order,
                                                   const std::vector<std::int64_t>& caps,
                                                   PlanOrder by) {
  CONVOY_CHECK(!caps.empty());
  std::map<std::tuple<int, int, int>, Filling> open;
  std::vector<Closed> closed;
  const auto close = [&](Filling& filling) {
    const auto place = by == PlanOrder::kByFirstItem ? filling.first : filling.last;
    closed.push_back({std::exchange(filling.list, {}), place});
    filling.bytes = 0;
    filling.cap = std::min(filling.cap + 1, caps.size() - 1);
  };
  for (std::size_t place = 0; place < order.size(); ++place) {
    const PlanItem& item = items.at(order[place]);
    Filling& filling = open[{static_cast<int>(item.type), static_cast<int>(item.device.type()),
                             item.device.index()}];
    if (filling.list.empty()) filling.first = place;
    filling.list.push_back(order[place]);
    filling.last = place;
    filling.bytes += item.bytes;
    if (filling.bytes >= caps[filling.cap]) close(filling);
  }
  for (auto& [key, filling] : open) {
    if (!filling.list.empty()) close(filling);
  }
  std::sort(closed.begin(), closed.end(),
            [](const Closed& a, const Closed& b) { return a.place < b.place; });
  std::vector<std::vector<std::size_t>> lists;
  lists.reserve(closed.size());
  for (Closed& one : closed) lists.push_back(std::move(one.list));
  return lists;
}

std::vector<std::vector<std::size_t>> compute_bucket_assignment_by_size(
    at::TensorList tensors, const std::vector<std::int64_t>& caps) {
  if (caps.empty()) fail(ErrorKind::kInvalidArgument, "bucket assignment: no cap was given");
  for (const std::int64_t cap : caps) {
    if (cap <= 0) fail(ErrorKind::kInvalidArgument, "the bucket cap must be > 0 bytes, got ", cap);
  }
  std::vector<PlanItem> items;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() != c10::kStrided) {
      fail(ErrorKind::kInvalidArgument, "bucket assignment: tensor ", items.size(),
           " is sparse; buckets hold no sparse tensors");
    }
    items.push_back({tensor.scalar_type(), tensor.device(),
                     tensor.numel() * static_cast<std::int64_t>(tensor.element_size())});
  }
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  return plan_buckets(items, order, caps, PlanOrder::kByFirstItem);
}

}  // namespace convoy
