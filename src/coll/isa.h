#pragma once

#include <string_view>

namespace convoy::coll {

// Instruction sets that the kernels are compiled for. All give the same bits.
enum class Isa {
  kPortable,  // what every CPU of the architecture has
  kAvx2,      // with F16C
  kAvx512,    // F, BW, DQ, VL
};

// "portable", "avx2", "avx512".
std::string_view to_string(Isa isa);

// True if this build has kernels for it and this CPU and kernel can run them.
bool is_supported(Isa isa);

// The one to use: the named one, or the best supported for nullptr or "". Throws kInvalidArgument
// for an unknown name and kUnsupported for one this CPU cannot run.
Isa choose_isa(const char* name);

// The one in use: choose_isa(CONVOY_ISA), read from the environment at the first call, which throws
// as that does.
Isa active_isa();

// Overrides it for the whole process; for tests and benchmarks. Throws kUnsupported.
void select_isa(Isa isa);

}  // namespace convoy::coll
