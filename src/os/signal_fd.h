#pragma once

#include <optional>
#include <vector>

#include "base/unique_fd.h"

namespace convoy {

// Signals as events of a descriptor: for poll and Loop. Not thread-safe.
//
// The constructor blocks the signals in the calling thread, and so in threads and processes that
// are started from it later (ChildProcess unblocks them in its child). Make it before any thread,
// or another thread receives them.
class SignalFd {
 public:
  explicit SignalFd(const std::vector<int>& signals);

  int fd() const { return fd_.get(); }
  // The next one that came; nullopt if none did. Equal signals that come close together are one.
  std::optional<int> next();

 private:
  UniqueFd fd_;
};

// Whether this process was started to ignore the signal (nohup, `&` in a script). A blocked signal
// is queued even then: do not put an ignored one into a SignalFd.
bool is_ignored(int signal);

}  // namespace convoy
