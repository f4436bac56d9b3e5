#include "os/machine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "os/file.h"
#include "os/wait.h"

namespace convoy {
namespace {

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
  return start_thread<std::jthread>([&lines, core] {
    if (core >= 0) CoreSet::of_core(core).pin_thread();
    lines.echo();
  });
}

}  // namespace

CoreSet CoreSet::of_thread() {
  for (std::size_t words = 16; words <= 4096; words *= 2) {
    CoreSet set(words);
    if (sched_getaffinity(0, set.bytes(), set.mask()) == 0) return set;
  }
  return {};
}

CoreSet CoreSet::of_core(int core) {
  CoreSet set(static_cast<std::size_t>(core) / kBits + 1);
  CPU_SET_S(static_cast<std::size_t>(core), set.bytes(), set.mask());
  return set;
}

int CoreSet::count() const { return words_.empty() ? 0 : CPU_COUNT_S(bytes(), mask()); }

int CoreSet::nth(int n) const {
  int last = -1;
  for (std::size_t core = 0; core < words_.size() * kBits; ++core) {
    if (!CPU_ISSET_S(core, bytes(), mask())) continue;
    last = static_cast<int>(core);
    if (n-- == 0) break;
  }
  return last;
}

void CoreSet::add(const CoreSet& other) {
  if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
  for (std::size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
}

void CoreSet::pin_thread() const {
  if (!words_.empty()) sched_setaffinity(0, bytes(), mask());
}

std::string CoreSet::to_string() const {
  std::string text;
  for (std::size_t first = 0; first < words_.size() * kBits; first += 4) {
    unsigned digit = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      digit |= static_cast<unsigned>(words_[(first + i) / kBits] >> (first + i) % kBits & 1) << i;
    }
    text += "0123456789abcdef"[digit];
  }
  while (text.size() > 1 && text.back() == '0') text.pop_back();
  return text.empty() ? "0" : text;
}

CoreSet CoreSet::parse(std::string_view text) {
  constexpr std::size_t kMostDigits = 4096 * kBits / 4;
  const auto hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (text.empty() || text.size() > kMostDigits || !std::all_of(text.begin(), text.end(), hex)) {
    fail(ErrorKind::kInvalidArgument, "not a set of cores");
  }
  CoreSet set((text.size() * 4 + kBits - 1) / kBits);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto digit =
        static_cast<unsigned long>(text[i] <= '9' ? text[i] - '0' : text[i] - 'a' + 10);
    set.words_[4 * i / kBits] |= digit << 4 * i % kBits;
  }
  return set;
}

int usable_cores(const CoreSet& set) {
  int cores = set.count();
  if (cores == 0) cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, std::min(cores, cgroup_cores().value_or(cores)));
}

int usable_cores() { return usable_cores(CoreSet::of_thread()); }

CoreDistance measure_core_distance(const CoreSet& cores) {
  constexpr std::uint32_t kRounds = 50;
  constexpr std::uint32_t kTrips = 20;
  // Not on the stack: there AddressSanitizer does not keep such an alignment.
  const auto memory = std::make_unique<PingPong>();
  PingPong& lines = *memory;
  const auto before = CoreSet::of_thread();
  auto echo = start_echo(lines, cores.nth(1));
  if (const int core = cores.nth(0); core >= 0) CoreSet::of_core(core).pin_thread();
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
  constexpr const char* kFile = "/proc/sys/kernel/random/boot_id";
  const auto text = read_file(kFile);
  if (!text) {
    const int code = errno;
    fail(errno_kind(code) == ErrorKind::kResource ? ErrorKind::kResource : ErrorKind::kUnsupported,
         "reading ", kFile, ", by which processes of one host know each other: ", errno_text(code));
  }
  std::string id = *text;
  while (!id.empty() && (id.back() == '\n' || id.back() == ' ')) id.pop_back();
  return id;
}

}  // namespace convoy
