#include "transport/shm/short_slices.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace convoy::shm {
namespace {

// The kernel's struct sched_attr, which glibc 2.36 does not have and whose header does not go with
// <sched.h>.
struct SchedulingAttributes {
  std::uint32_t size;
  std::uint32_t policy;
  std::uint64_t flags;
  std::int32_t nice;
  std::uint32_t priority;
  std::uint64_t runtime;
  std::uint64_t deadline;
  std::uint64_t period;
};

constexpr std::uint64_t kLeastSlice = 100'000;  // nanoseconds; the kernel takes no less

}  // namespace

void ask_for_short_slices() noexcept {
  SchedulingAttributes attributes{};
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.size = sizeof attributes;
  attributes.runtime = kLeastSlice;
  ::syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace convoy::shm
