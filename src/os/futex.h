#pragma once

#include <atomic>
#include <cstdint>

#include "convoy/deadline.h"

namespace convoy {

// Sleeps while `word` holds `expected`, until a wake or the deadline. Works between processes on
// shared memory. Returns early for no reason at times: callers loop over their own condition.
// False: the deadline passed.
bool futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                const Deadline& deadline);

// Wakes up to `count` sleepers (all by default).
void futex_wake(const std::atomic<std::uint32_t>& word, int count = 0x7fffffff) noexcept;

}  // namespace convoy
