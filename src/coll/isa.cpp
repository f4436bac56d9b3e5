#include "coll/isa.h"

#include <array>
#include <atomic>
#include <cstdlib>

#include "base/error.h"
#include "coll/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace convoy::coll {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"portable", "avx2", "avx512"};

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows f16c. It uses ymm registers, whose support by
// the kernel the test for avx2 includes.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") != 0 && has_f16c(); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0;
}

const KernelTable* table_of(Isa isa) {
  switch (isa) {
    case Isa::kPortable: return &kPortableKernels;
    case Isa::kAvx2: return has_avx2() ? &kAvx2Kernels : nullptr;
    case Isa::kAvx512: return has_avx512() ? &kAvx512Kernels : nullptr;
  }
  return nullptr;
}
#else
const KernelTable* table_of(Isa isa) { return isa == Isa::kPortable ? &kPortableKernels : nullptr; }
#endif

constexpr std::array<Isa, 3> kBestFirst = {Isa::kAvx512, Isa::kAvx2, Isa::kPortable};

// Null until the first use. Two threads that come first at once compute the same.
std::atomic<const KernelTable*> g_active{nullptr};

}  // namespace

std::string_view to_string(Isa isa) { return kNames.at(static_cast<std::size_t>(isa)); }

bool is_supported(Isa isa) { return table_of(isa) != nullptr; }

Isa choose_isa(const char* name) {
  const bool any = name == nullptr || *name == '\0';
  for (const Isa isa : kBestFirst) {
    if (any ? is_supported(isa) : name == to_string(isa)) {
      kernels_of(isa);  // throws if there is none
      return isa;
    }
  }
  fail(ErrorKind::kInvalidArgument, "CONVOY_ISA is '", name,
       "'; known: portable, avx2, avx512. Unset it to use the best this CPU has.");
}

const KernelTable& kernels_of(Isa isa) {
  const KernelTable* table = table_of(isa);
  if (table == nullptr) {
    fail(ErrorKind::kUnsupported, "reduce kernels for ", to_string(isa),
         " were asked for, which this CPU cannot run; unset CONVOY_ISA to use the best it has");
  }
  return *table;
}

const KernelTable& active_kernels() {
  const KernelTable* table = g_active.load(std::memory_order_relaxed);
  if (table == nullptr) [[unlikely]] {
    table = &kernels_of(choose_isa(std::getenv("CONVOY_ISA")));
    g_active.store(table, std::memory_order_relaxed);
  }
  return *table;
}

Isa active_isa() {
  const KernelTable* active = &active_kernels();
  for (const Isa isa : kBestFirst) {
    if (table_of(isa) == active) return isa;
  }
  return Isa::kPortable;
}

void select_isa(Isa isa) { g_active.store(&kernels_of(isa), std::memory_order_relaxed); }

}  // namespace convoy::coll
