#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "convoy/deadline.h"
#include "os/segment.h"
#include "transport/shm/peer.h"

namespace convoy::shm {

// The name of a mapping that a process with a Fabric has, and that nobody else gets but its forked
// children: by it /proc/<pid>/maps tells whose memory a process has inherited.
std::string marker_label(const Id& process);

// When it returns, neither these processes nor what they have forked can write into memory(): those
// that run are killed, and so is every process with the marker of one of them that maps some of it.
// What counts is the kernel's own list of mappings. `why` goes to the log.
//
// Throws kTimeout for a process that does not end (a frozen cgroup, a file system that hangs), and
// kUnsupported or kResource if it cannot be killed, or its mappings cannot be listed: the memory is
// not safe then.
void fence(std::span<const std::shared_ptr<Peer>> outsiders, const Id& self,
           const std::function<std::vector<Segment::Key>()>& memory, const std::string& why,
           const Deadline& deadline);

}  // namespace convoy::shm
