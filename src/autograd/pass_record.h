#pragma once

#include <atomic>
#include <cstdint>

#include "agent/call_record.h"
#include "autograd/wire.h"

namespace convoy::autograd::detail {

// What the flight record says of this worker's part in a backward pass. Thread-safe.
class PassRecord {
 public:
  using End = agent::CallRecord::End;

  PassRecord() = default;
  PassRecord(const PassRecord&) = delete;
  PassRecord& operator=(const PassRecord&) = delete;
  // One that nobody has ended has failed.
  ~PassRecord() { ends(End::kFailed); }

  // Once; before, and if nothing is recorded, the rest does nothing.
  void begins(agent::CallRecord& session, const PassId& id, bool is_root) noexcept;
  void runs() noexcept;
  void waits() noexcept;
  // The first one counts.
  void ends(End how) noexcept;

 private:
  std::atomic<std::uint64_t> ticket_{0};
};

}  // namespace convoy::autograd::detail
