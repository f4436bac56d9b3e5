#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "agent/call.h"

namespace convoy::agent {

// Another layer that lives beside an agent, and hears what happens to it. Calls come from any
// thread, without a lock of the agent's.
class Companion {
 public:
  virtual ~Companion() = default;

  // It is lost, or has left. On the thread that serves.
  virtual void gone(const Worker& worker, const std::string& why) noexcept = 0;

  // The agent shuts down when this is true everywhere: nothing is on its way. Whoever makes it true
  // must Agent::look_if_idle().
  virtual bool idle() = 0;
  // Grows with everything that is sent to, or taken from, other workers.
  virtual std::uint64_t activity() = 0;
  // What keeps it from being idle, and what others still have of it.
  virtual std::vector<std::string> under_way() = 0;
  // All workers have been idle, and shut down: gives up what it has of others. idle() is waited for
  // again.
  virtual void finish() = 0;
  // The session has ended. Once.
  virtual void closed() noexcept = 0;
};

}  // namespace convoy::agent
