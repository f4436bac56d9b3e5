#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "coll/call.h"
#include "coll/messages.h"
#include "convoy/error.h"

namespace convoy::coll {

// What the operations of a group travel through, on one rank: shared memory (shared_memory.h) or an
// MPI (mpi/). The group in front of it checks arguments, keeps the order and never calls run()
// twice at once; everything else may be called from any thread meanwhile.
class Medium {
 public:
  virtual ~Medium() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::string& name() const = 0;

  // Runs operation `number` (1, 2, 3, ... in every rank) to its end on this thread. Throws Error
  // that begins with operation_prefix(); docs/internals/collectives.md tells what each kind leaves.
  virtual void run(const Call& call, std::uint64_t number) = 0;
  virtual Messages& messages() = 0;

  // Breaks the group, on all ranks where that is possible.
  virtual void abort(const std::string& why) noexcept = 0;
  // Wakes a run() of this rank and lets it fail; the rank then leaves the group. Idempotent.
  virtual void close() noexcept = 0;

  // What broke the group; nullopt while it works.
  virtual std::optional<ErrorKind> failure() const = 0;
  virtual bool broken() const = 0;
  virtual std::vector<int> lost_ranks() const = 0;
  virtual std::vector<int> late_ranks() = 0;
  virtual std::uint64_t last_completed() const = 0;

  // True: an operation that failed may still read and write its buffers, and will for as long as
  // the process lives. Whoever owns them must not free them.
  virtual bool holds_buffers() const = 0;
};

}  // namespace convoy::coll
