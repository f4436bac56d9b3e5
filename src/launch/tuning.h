#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace convoy::launch {

// One of the cores that this process may run on, and where it sits.
struct CoreSite {
  int core = 0;
  int package = 0;   // processor socket
  int physical = 0;  // cores with equal package and physical are hardware threads of one core
};

// What a CPU job wants of libraries: as many threads as the rank has cores, huge pages for large
// tensors. Without what is set already, as `is_set` tells, and without MKL_NUM_THREADS where
// OMP_NUM_THREADS is: libtorch would prefer the former.
std::vector<std::pair<std::string, std::string>> tuned_variables(
    int cores, int ranks, const std::function<bool(const std::string&)>& is_set);

// Cores in this process's affinity mask.
std::vector<CoreSite> usable_core_sites();

// Cores of each rank, disjoint and in equal parts (but for one), hardware threads of one core
// together. More ranks than cores: ranks take turns, one core each.
std::vector<std::vector<int>> pin_plan(std::vector<CoreSite> sites, int ranks);

}  // namespace convoy::launch
