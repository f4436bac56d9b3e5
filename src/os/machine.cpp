#include "os/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"
#include "os/file.h"
#include "os/wait.h"

namespace convoy {
namespace {

// An affinity mask of any number of cores: cpu_set_t ends at 1024.
class CoreMask {
 public:
  // Of the calling thread; empty if it cannot be read.
  static CoreMask of_thread() {
    for (std::size_t words = 16; words <= 4096; words *= 2) {
      CoreMask mask(words);
      if (sched_getaffinity(0, mask.bytes(), mask.set()) == 0) return mask;
    }
    return CoreMask(0);
  }
  static CoreMask of_core(int core) {
    CoreMask mask(static_cast<std::size_t>(core) / kBits + 1);
    CPU_SET_S(static_cast<std::size_t>(core), mask.bytes(), mask.set());
    return mask;
  }

  int count() const { return words_.empty() ? 0 : CPU_COUNT_S(bytes(), set()); }
  // The n-th core of the mask, the last one if it has fewer; -1 if it is empty.
  int nth(int n) const {
    int last = -1;
    for (std::size_t core = 0; core < words_.size() * kBits; ++core) {
      if (!CPU_ISSET_S(core, bytes(), set())) continue;
      last = static_cast<int>(core);
      if (n-- == 0) break;
    }
    return last;
  }
  // Best effort: a probe is then merely noisier.
  void pin_thread() const {
    if (!words_.empty()) sched_setaffinity(0, bytes(), set());
  }

 private:
  static constexpr std::size_t kBits = 8 * sizeof(unsigned long);

  explicit CoreMask(std::size_t words) : words_(words) {}
  std::size_t bytes() const { return words_.size() * sizeof(unsigned long); }
  cpu_set_t* set() { return reinterpret_cast<cpu_set_t*>(words_.data()); }
  const cpu_set_t* set() const { return reinterpret_cast<const cpu_set_t*>(words_.data()); }

  std::vector<unsigned long> words_;
};

// Two lines; each has one writer, and the other side reads it with acquire.
class PingPong {
 public:
  // The side that answers, until stop().
  void echo() {
    for (std::uint32_t i = 1;; ++i) {
      const std::uint32_t seen = await(ping_, i);
      pong_.value.store(seen, std::memory_order_release);
      if (seen == kStop) return;
    }
  }
  // One round trip. Numbers begin at 1.
  void trip(std::uint32_t i) {
    ping_.value.store(i, std::memory_order_release);
    await(pong_, i);
  }
  void stop() { ping_.value.store(kStop, std::memory_order_release); }

 private:
  static constexpr std::uint32_t kStop = UINT32_MAX;
  struct alignas(128) Line {
    std::atomic<std::uint32_t> value{0};
  };

  // Until the line has reached `i`. Yields at times: the other side may need this core.
  static std::uint32_t await(const Line& line, std::uint32_t i) {
    for (int spins = 1;; ++spins) {
      const std::uint32_t seen = line.value.load(std::memory_order_acquire);
      if (seen >= i) return seen;
      if (spins % 256 == 0) yield_cpu();
      cpu_relax();
    }
  }

  Line ping_;
  Line pong_;
};

std::jthread start_echo(PingPong& lines, int core) {
  try {
    return std::jthread([&lines, core] {
      if (core >= 0) CoreMask::of_core(core).pin_thread();
      lines.echo();
    });
  } catch (const std::system_error& error) {
    fail(ErrorKind::kResource, "starting a thread: ", error.what());
  }
}

}  // namespace

int usable_cores() {
  int cores = CoreMask::of_thread().count();
  if (cores == 0) cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, std::min(cores, cgroup_cores().value_or(cores)));
}

CoreDistance measure_core_distance() {
  constexpr std::uint32_t kRounds = 50;
  constexpr std::uint32_t kTrips = 20;
  // Not on the stack: there AddressSanitizer does not keep such an alignment.
  const auto memory = std::make_unique<PingPong>();
  PingPong& lines = *memory;
  const auto before = CoreMask::of_thread();
  auto echo = start_echo(lines, before.nth(1));
  if (const int core = before.nth(0); core >= 0) CoreMask::of_core(core).pin_thread();
  lines.trip(1);  // the other side runs now
  auto best = std::chrono::nanoseconds::max();
  const auto limit = Deadline::after(std::chrono::milliseconds(50));
  for (std::uint32_t round = 0; round < kRounds && !(round > 0 && limit.expired()); ++round) {
    const auto start = Deadline::Clock::now();
    for (std::uint32_t i = 0; i < kTrips; ++i) lines.trip(2 + round * kTrips + i);
    best = std::min<std::chrono::nanoseconds>(best, (Deadline::Clock::now() - start) / kTrips);
  }
  lines.stop();
  echo.join();
  before.pin_thread();
  return {best};
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

std::string boot_id() {
  std::string id = read_file("/proc/sys/kernel/random/boot_id").value_or("");
  while (!id.empty() && (id.back() == '\n' || id.back() == ' ')) id.pop_back();
  return id;
}

}  // namespace convoy
