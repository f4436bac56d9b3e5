#include "os/quick_clock.h"

#include <exception>

#include "os/file.h"

namespace convoy {

using std::chrono::steady_clock;

constinit QuickClock::Anchor QuickClock::anchor;

#if defined(__x86_64__)
namespace {

// The kernel has found out whether the ticks of all cores agree and never stop: it uses them only
// then.
bool ticks_are_time() noexcept {
  static const bool yes = [] {
    try {
      return read_file("/sys/devices/system/clocksource/clocksource0/current_clocksource")
          .value_or("")
          .starts_with("tsc");
    } catch (const std::exception&) {
      return false;
    }
  }();
  return yes;
}

}  // namespace

QuickClock::TimePoint QuickClock::look() noexcept {
  using namespace std::chrono_literals;
  // Between these two ticks lies the look; a thread that was interrupted there knows nothing.
  constexpr std::uint64_t kMostTicksOfALook = 2000;
  // How long it takes to learn the rate: an error of a look is then less than 100 millionths.
  constexpr std::uint64_t kLeastSpan = std::chrono::nanoseconds(10ms).count();
  constexpr std::uint64_t kMostSpan = std::chrono::nanoseconds(1s).count();
  // Guarded by the odd version: where the rate is measured from.
  static constinit std::uint64_t first_tick = 0, first_time = 0;

  const std::uint64_t before = __rdtsc();
  const TimePoint now = steady_clock::now();
  const std::uint64_t tick = __rdtsc();
  if (tick - before > kMostTicksOfALook || !ticks_are_time()) return now;
  std::uint64_t version = anchor.version.load(std::memory_order_relaxed);
  if (version % 2 != 0 ||
      !anchor.version.compare_exchange_strong(version, version + 1, std::memory_order_acquire)) {
    return now;  // another thread does it
  }
  const auto time = static_cast<std::uint64_t>(now.time_since_epoch().count());
  const std::uint64_t known = anchor.rate.load(std::memory_order_relaxed);
  std::uint64_t rate = known;
  bool restart = first_time == 0;
  if (!restart && time - first_time >= kLeastSpan) {
    // At most kMostSpan and a pause; longer than that it is not the same machine state any more.
    restart = time - first_time >= kMostSpan;
    const std::uint64_t ticks = tick - first_tick;
    rate = time - first_time < 8 * kMostSpan && ticks != 0
               ? static_cast<std::uint64_t>(
                     (static_cast<unsigned __int128>(time - first_time) << kShift) / ticks)
               : known;
    // Clocks are corrected by less than one in a thousand. This one stood still or jumped, while
    // the machine slept or was moved: learn it anew.
    if (known != 0 && (rate > known + known / 256 || rate < known - known / 256)) {
      rate = 0;
      restart = true;
    }
  }
  if (restart) {
    first_tick = tick;
    first_time = time;
  }
  // Release stores: whoever sees one of them also sees the odd version.
  anchor.tick.store(tick, std::memory_order_release);
  anchor.time.store(time, std::memory_order_release);
  anchor.rate.store(rate, std::memory_order_release);
  anchor.version.store(version + 2, std::memory_order_release);
  return now;
}
#endif

}  // namespace convoy
