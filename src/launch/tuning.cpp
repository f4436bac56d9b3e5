#include "launch/tuning.h"

#include <sched.h>

#include <algorithm>
#include <tuple>

#include "base/concat.h"
#include "launch/text.h"
#include "os/file.h"

namespace convoy::launch {
namespace {

int read_topology(int core, const char* name) {
  auto text =
      read_file(concat("/sys/devices/system/cpu/cpu", core, "/topology/", name)).value_or("");
  if (text.ends_with('\n')) text.pop_back();
  return parse_int(text).value_or(-1);
}

}  // namespace

std::vector<std::pair<std::string, std::string>> tuned_variables(
    int cores, int ranks, const std::function<bool(const std::string&)>& is_set) {
  const std::string threads = std::to_string(std::max(1, cores / ranks));
  std::vector<std::pair<std::string, std::string>> variables;
  if (!is_set("OMP_NUM_THREADS")) {
    variables.emplace_back("OMP_NUM_THREADS", threads);
    if (!is_set("MKL_NUM_THREADS")) variables.emplace_back("MKL_NUM_THREADS", threads);
  }
  if (!is_set("THP_MEM_ALLOC_ENABLE")) variables.emplace_back("THP_MEM_ALLOC_ENABLE", "1");
  return variables;
}

std::vector<CoreSite> usable_core_sites() {
  std::vector<CoreSite> sites;
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return sites;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &mask)) continue;
    const int physical = read_topology(core, "core_id");
    // Without topology each core counts as one of its own.
    sites.push_back({.core = core,
                     .package = read_topology(core, "physical_package_id"),
                     .physical = physical < 0 ? core : physical});
  }
  return sites;
}

std::vector<std::vector<int>> pin_plan(std::vector<CoreSite> sites, int ranks) {
  std::sort(sites.begin(), sites.end(), [](const CoreSite& a, const CoreSite& b) {
    return std::tie(a.package, a.physical, a.core) < std::tie(b.package, b.physical, b.core);
  });
  std::vector<std::vector<int>> plan(static_cast<std::size_t>(ranks));
  const auto cores = static_cast<int>(sites.size());
  if (cores == 0) return plan;
  for (int rank = 0; rank < ranks; ++rank) {
    auto& mine = plan[static_cast<std::size_t>(rank)];
    if (ranks > cores) {
      mine.push_back(sites[static_cast<std::size_t>(rank % cores)].core);
      continue;
    }
    for (int i = rank * cores / ranks; i < (rank + 1) * cores / ranks; ++i) {
      mine.push_back(sites[static_cast<std::size_t>(i)].core);
    }
  }
  return plan;
}

}  // namespace convoy::launch
