#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "os/segment.h"

namespace convoy::shm {

// Shared memory that endpoints tell each other by. Both ends may be in one process; there it is
// mapped once, so that what threads tell each other is ordered at one address, as the language and
// ThreadSanitizer see it.
using Mapping = std::shared_ptr<const Segment>;

// Cleared; and its descriptor, to be passed on.
std::pair<Mapping, UniqueFd> make_mapping(std::size_t bytes, const std::string& label);
// Throws as Segment::adopt.
Mapping adopt_mapping(UniqueFd fd, std::size_t bytes);

}  // namespace convoy::shm
