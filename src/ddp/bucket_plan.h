#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "convoy/ddp_options.h"

namespace convoy {

inline constexpr std::int64_t kDefaultFirstBucketBytes = 1 << 20;
inline constexpr std::int64_t kDefaultBucketBytes = 25 << 20;

// The caps of the buckets one after the other; the last repeats. kInvalidArgument for a cap that is
// no size.
std::vector<std::int64_t> bucket_caps(const DdpOptions& options);

struct PlanItem {
  c10::ScalarType type;
  c10::Device device;
  std::int64_t bytes;
};

// Lists of items of one type and device. Each type fills one list at a time, in the given order of
// items (which need not name all of them); a list that reaches its cap is closed, and each type
// goes through the caps on its own.
enum class PlanOrder { kByFirstItem, kByLastItem };  // by its place in `order`
std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<PlanItem>& items,
                                                   const std::vector<std::size_t>& order,
                                                   const std::vector<std::int64_t>& caps,
                                                   PlanOrder by);

}  // namespace convoy
