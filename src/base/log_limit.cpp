#include "base/log_limit.h"

#include <algorithm>
#include <utility>

#include "base/concat.h"

namespace convoy {

bool LogLimit::allow(std::string& note, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (refilled_ == Clock::time_point{}) refilled_ = now;
  const auto more = (now - refilled_) / kRefill;
  if (more > 0) {
    left_ = static_cast<int>(std::min<decltype(more)>(kBurst, left_ + more));
    refilled_ += more * kRefill;
  }
  if (left_ == 0) {
    ++omitted_;
    return false;
  }
  --left_;
  if (omitted_ != 0) note = concat(" (", std::exchange(omitted_, 0), " such lines were left out)");
  return true;
}

}  // namespace convoy
