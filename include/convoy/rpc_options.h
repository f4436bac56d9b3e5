#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/store.h"

// Workers, and the options of sessions and calls (convoy/rpc.h).
namespace convoy::rpc {

struct WorkerInfo {
  std::string name;
  int rank = 0;

  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
};

// The target of a call: a name, a rank, or a WorkerInfo. Does not copy the name.
class To {
 public:
  To(const char* name) : name_(name) {}
  To(std::string_view name) : name_(name) {}
  To(const std::string& name) : name_(name) {}
  To(const WorkerInfo& worker) : rank_(worker.rank) {}
  template <std::integral Rank>
  To(Rank rank) : rank_(static_cast<std::int64_t>(rank)) {}

  std::string_view name() const { return name_; }  // empty: the target is a rank
  const std::optional<std::int64_t>& rank() const { return rank_; }

 private:
  std::string_view name_;
  std::optional<std::int64_t> rank_;
};

// Whether all workers of a session are known from the beginning.
enum class Members {
  kFixed,  // all workers make and shut down their sessions together
  // Workers join and leave at any time.
  kComeAndGo,
};

// The workers of a session at one time. Views are numbered. With kComeAndGo all workers see the
// same views.
struct View {
  std::uint64_t version = 0;
  std::vector<WorkerInfo> workers = {};  // by rank
  // Changes since the previous version.
  std::vector<WorkerInfo> joined = {};
  std::vector<WorkerInfo> left = {};
  std::vector<WorkerInfo> failed = {};
};

// Numbers of references, with PyTorch's names.
struct RRefInfo {
  std::uint64_t num_owner_rrefs = 0;      // values of this worker that have references
  std::uint64_t num_pending_users = 0;    // references here, not yet confirmed by the owner
  std::uint64_t num_pending_futures = 0;  // waits for a value of this worker
  std::uint64_t num_forks = 0;            // references of others to values of this worker
};

// What a call does if too many calls or bytes are under way to its worker.
enum class WhenFull {
  kWait,   // blocks until there is room, at most until its deadline
  kThrow,  // throws kResource
};

struct SessionOptions {
  // At most 127 letters, digits, '_', ':' and '-'. Empty: "worker<rank>".
  std::string name = {};
  std::string method = "env://";  // how workers meet: convoy/rendezvous.h
  std::optional<int> rank = {};   // overrides the launcher
  std::optional<int> size = {};
  // If set, workers meet through this store. `rank` and `size` are required then.
  std::shared_ptr<Store> store = nullptr;
  // With kComeAndGo the session joins the workers that are there. A worker that comes back gets a
  // new rank. `size` is not used; `rank` only tells who serves a tcp:// store.
  Members members = Members::kFixed;
  // Timeout of calls that have none of their own. 0: no limit.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  std::chrono::milliseconds start_timeout = Store::kDefaultTimeout;  // timeout of meeting

  int threads = 16;  // handlers that run at once, except those that wait in calls of this library
  std::size_t most_calls = 8192;                  // calls under way to one worker
  std::size_t most_bytes = std::size_t{1} << 30;  // bytes under way to one worker
  WhenFull when_full = WhenFull::kWait;
  // Operators of torch that other workers may call by name ("aten::add"). None by default.
  std::vector<std::string> operators = {};
};

struct CallOptions {
  // Time until the result must be there: a duration (0: no limit) or a Deadline. Not set: the
  // session's timeout.
  Timeout timeout = {};
  // Do not copy tensors that are in shared memory already (convoy/share.h). The callee gets the
  // same memory: what it writes there is visible here.
  bool lend = false;
  // The caller promises not to write to the tensors until the call has ended. rpc_async() then
  // copies large ones once instead of twice. rpc_sync() always assumes it.
  bool stays = false;
};

struct ShutdownOptions {
  // True: waits until no worker has calls under way, so all workers must call shutdown(). Then all
  // references of the session end. With kComeAndGo this worker leaves alone, once it has no calls
  // under way and no worker refers to its values. False: ends at once; calls under way end with
  // kCancelled here, with kPeerLost on other workers.
  bool graceful = true;
  // Only without `graceful`: no error if others still refer to values here. Otherwise shutdown()
  // throws kInvalidArgument ("Leaking RRef") after it has ended the session.
  bool ignore_leaks = false;
  // A duration (0: no limit) or a Deadline, at which shutdown() throws kTimeout, naming the workers
  // that it waited for. The session is still open then. Not set: 5 minutes.
  Timeout timeout = Store::kDefaultTimeout;
};

}  // namespace convoy::rpc
