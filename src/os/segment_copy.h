#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "os/segment.h"

namespace convoy {

// A new segment of at least `size` bytes, of which those from `at` on (a whole number of pages) are
// a copy of `content` and the rest is zero. Takes half of the time of a new segment and a copy into
// it: pages are not cleared before they are written. They are huge where the kernel has huge pages
// at hand; one that would take longer than small ones is not waited for. Page tables are filled on
// first touch. Throws as Segment::create().
Segment create_segment_with(std::size_t size, const std::string& label, std::size_t at,
                            std::span<const std::byte> content);

}  // namespace convoy
