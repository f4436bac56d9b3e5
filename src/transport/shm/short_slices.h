#pragma once

namespace convoy::shm {

// For a thread that sleeps most of the time and has little to do when it is woken: asks the
// scheduler for short slices of time, and so to be run soon, also where others keep all cores busy
// (Linux 6.12; before that nothing changes).
void ask_for_short_slices() noexcept;

}  // namespace convoy::shm
