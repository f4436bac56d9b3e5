#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convoy/group.h"

namespace convoy {

// Collective: kInvalidArgument on every rank unless all pass the same lines, naming the first
// difference and who has it. Only a digest travels unless they differ. A rank that has an `error`
// instead of lines makes it everyone's. Returns rank 0's `number`.
std::uint64_t agree(const ProcessGroup& group, const std::string& what,
                    const std::vector<std::string>& lines, const std::string& error,
                    std::uint64_t number);

}  // namespace convoy
