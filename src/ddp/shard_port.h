#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "convoy/reducer.h"

namespace convoy {

// What a reducer needs to know of a sharded optimizer. Buckets whose parameters are all taken by
// one are *deferred*, where ranks share memory and nothing else has to be done with them (a comm
// hook, weights): they do not travel. Their gradients stay this rank's own, and the optimizer adds
// up those of all ranks where it needs them. All calls are in the thread of the backward.
class ShardPort {
 public:
  virtual ~ShardPort() = default;
  // By number of the parameter.
  virtual const std::vector<bool>& takes() const = 0;
  // Rounds end with a step; gradients are undefined afterwards.
  virtual bool is_in_backward() const = 0;
  // Steps are made while a backward goes on, bucket by bucket.
  virtual bool overlaps() const = 0;

  // Deferred gradients may lie anywhere in shared memory, not only in their buckets.
  virtual bool reads_in_place() const = 0;

  // Gradients of this bucket are there; with overlaps() only, in the buckets' order. `good`:
  // nothing has gone wrong on this rank so far. `used` by place in the bucket.
  virtual void launched(std::size_t bucket, bool good, const std::vector<bool>& used) = 0;
  // All were launched: waits until what was begun is done. Rethrows what went wrong.
  virtual void drain() = 0;
  // All ranks are fine. With is_in_backward() the step is made now, as far as it was not before.
  virtual void finish(const std::vector<bool>& used) = 0;
  // The round is over, however it ended. Does not throw.
  virtual void closed() noexcept = 0;

  // --- change of group: see ShardedOptimizer ---
  // What must be the same on all ranks of the next one.
  virtual std::vector<std::string> description() const = 0;
  // What dead ranks have left is taken over. Does not communicate; the living do nothing with their
  // shards any more.
  virtual void leave_group() = 0;
  // Collective; `reducer` has the new group. The rank `root` has made most steps.
  virtual void enter_group(const std::shared_ptr<Reducer::Impl>& reducer, int root) = 0;
};

}  // namespace convoy
