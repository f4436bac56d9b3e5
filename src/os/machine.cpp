#include "os/machine.h"

#include <sched.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "os/file.h"
#include "os/wait.h"

namespace convoy {
namespace {

// The folder of this process in the unified hierarchy (cgroup v2), "" if there is none.
std::string cgroup_folder() {
  std::istringstream lines(read_file("/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("0::")) return "/sys/fs/cgroup" + line.substr(3);
  }
  return "";
}

std::vector<std::string> cgroup_chain() {
  std::vector<std::string> folders;
  std::string folder = cgroup_folder();
  while (folder.size() >= std::string_view("/sys/fs/cgroup").size()) {
    if (folder.ends_with('/')) folder.pop_back();
    folders.push_back(folder);
    const auto slash = folder.rfind('/');
    folder.resize(slash);
  }
  return folders;
}

std::optional<std::uint64_t> read_number(const std::string& path) {
  const auto text = read_file(path);
  if (!text || text->empty() || !std::isdigit(static_cast<unsigned char>((*text)[0]))) {
    return std::nullopt;  // absent, or "max"
  }
  return std::stoull(*text);
}

// The value behind `key` in a file of "key value" lines, such as memory.stat and /proc/meminfo.
std::uint64_t field(const std::string& text, std::string_view key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    std::istringstream rest(line.substr(key.size()));
    std::uint64_t value = 0;
    if (rest >> value) return value;
  }
  return 0;
}

int quota_cores() {
  int cores = 1 << 20;
  for (const auto& folder : cgroup_chain()) {
    std::istringstream text(read_file(folder + "/cpu.max").value_or(""));
    std::string quota;
    double period = 0;
    if (!(text >> quota >> period) || quota == "max" || period <= 0) continue;
    cores = std::min(cores, static_cast<int>((std::stod(quota) + period - 1) / period));
  }
  return std::max(cores, 1);
}

int affinity_cores() {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) return std::max(1, CPU_COUNT(&mask));
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

void pin_to_nth_usable_core(int n) {
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &mask) || n-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);  // best effort: the probe is then merely noisier
    return;
  }
}

}  // namespace

int usable_cores() { return std::min(affinity_cores(), quota_cores()); }

MemoryState memory_state() {
  MemoryState state{};
  state.available = field(read_file("/proc/meminfo").value_or(""), "MemAvailable:") * 1024;
  for (const auto& folder : cgroup_chain()) {
    const auto limit = read_number(folder + "/memory.max");
    const auto used = read_number(folder + "/memory.current");
    if (!limit || !used) continue;
    const auto cache = field(read_file(folder + "/memory.stat").value_or(""), "inactive_file ");
    const std::uint64_t busy = *used - std::min(*used, cache);
    if (!state.limit || *limit - std::min(*limit, busy) < *state.limit - *state.used) {
      state.limit = limit;
      state.used = std::min(busy, *limit);
    }
  }
  return state;
}

std::uint64_t MemoryState::headroom() const {
  return limit ? std::min(available, *limit - *used) : available;
}

CoreDistance measure_core_distance() {
  constexpr int kRounds = 5;
  constexpr std::uint32_t kTrips = 500;
  struct alignas(128) Line {
    std::atomic<std::uint32_t> value{0};
  };
  // Each line has one writer; the other side reads it with acquire.
  std::array<Line, 2> lines;
  const auto pass = [&](std::size_t mine, std::size_t theirs, std::uint32_t from,
                        std::uint32_t to) {
    for (std::uint32_t i = from; i < to; ++i) {
      if (mine == 0) lines[0].value.store(i + 1, std::memory_order_release);
      for (int spins = 0; lines[theirs].value.load(std::memory_order_acquire) < i + 1; ++spins) {
        if (spins % 1024 == 1023) yield_cpu();
        cpu_relax();
      }
      if (mine == 1) lines[1].value.store(i + 1, std::memory_order_release);
    }
  };
  auto best = std::chrono::nanoseconds::max();
  {
    const std::jthread echo([&] {
      pin_to_nth_usable_core(1);
      pass(1, 0, 0, kRounds * kTrips);
    });
    const std::jthread timer([&] {
      pin_to_nth_usable_core(0);
      for (std::uint32_t round = 0; round < kRounds; ++round) {
        const auto start = std::chrono::steady_clock::now();
        pass(0, 1, round * kTrips, (round + 1) * kTrips);
        best = std::min(best, (std::chrono::steady_clock::now() - start) / kTrips);
      }
    });
  }
  return {best};
}

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

std::string boot_id() {
  std::string id = read_file("/proc/sys/kernel/random/boot_id").value_or("");
  while (!id.empty() && std::isspace(static_cast<unsigned char>(id.back()))) id.pop_back();
  return id;
}

}  // namespace convoy
