#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <string>

#include "base/error.h"
#include "os/segment.h"

namespace convoy::test {

// What another process of the same user finds the segment by, as long as this one lives.
inline std::string address_of(const Segment& segment) {
  return concat("/proc/", ::getpid(), "/fd/", segment.fd(), " ", segment.size());
}

inline Segment segment_at(const std::string& address) {
  const auto space = address.find(' ');
  UniqueFd fd(::open(address.substr(0, space).c_str(), O_RDWR | O_CLOEXEC));
  return Segment::adopt(std::move(fd), std::stoul(address.substr(space + 1)));
}

}  // namespace convoy::test
