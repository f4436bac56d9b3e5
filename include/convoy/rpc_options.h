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

  std::string_view name() const { return name_; }  // empty: by rank
  const std::optional<std::int64_t>& rank() const { return rank_; }

 private:
  std::string_view name_;
  std::optional<std::int64_t> rank_;
};

// Whether the workers of a session are known from the beginning.
enum class Members {
  kFixed,  // all of them make their sessions, and shut them down, together
  kComeAndGo,
};

// Who is in a session. Views are numbered; where workers come and go, all workers see the same
// ones.
struct View {
  std::uint64_t version = 0;
  std::vector<WorkerInfo> workers = {};  // by rank
  // What is new since the version before.
  std::vector<WorkerInfo> joined = {};
  std::vector<WorkerInfo> left = {};
  std::vector<WorkerInfo> failed = {};
};

// How many references there are, by PyTorch's names.
struct RRefInfo {
  std::uint64_t num_owner_rrefs = 0;      // values here that others may refer to
  std::uint64_t num_pending_users = 0;    // references here that their owners have not confirmed
  std::uint64_t num_pending_futures = 0;  // that wait for a value here
  std::uint64_t num_forks = 0;            // references of others to values here
};

// What a call does if too many calls or bytes are under way to one worker.
enum class WhenFull {
  kWait,   // until there is room, at most until the call's deadline
  kThrow,  // kResource
};

struct SessionOptions {
  // At most 127 of letters, digits, '_', ':' and '-'; empty: "worker<rank>".
  std::string name = {};
  std::string method = "env://";  // how workers meet: see convoy/rendezvous.h
  std::optional<int> rank = {};   // instead of what the launcher says
  std::optional<int> size = {};
  // Meet through this instead: `rank` and `size` must be given.
  std::shared_ptr<Store> store = nullptr;
  // kComeAndGo: joins whoever is there; a worker that comes back has a new rank. `size` is not
  // used, `rank` only to find who serves a tcp:// store.
  Members members = Members::kFixed;
  // Of calls that do not say their own; 0: never.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  std::chrono::milliseconds start_timeout = Store::kDefaultTimeout;  // of meeting

  int threads = 16;  // handlers that run at once; those that wait in our calls do not count
  std::size_t most_calls = 8192;                  // under way to one worker
  std::size_t most_bytes = std::size_t{1} << 30;  // likewise
  WhenFull when_full = WhenFull::kWait;
  // Operators that others may call by name ("aten::add"); none by default.
  std::vector<std::string> operators = {};
};

struct CallOptions {
  // Until there is a result: a duration (0: never) or a Deadline; not set: the session's.
  Timeout timeout = {};
  // Tensors that are in shared memory already (convoy/share.h) are not copied: the callee gets the
  // same memory, and what it writes there is seen here.
  bool lend = false;
  // Tensors are not written to until the call has ended: rpc_async() then copies large ones once
  // instead of twice. rpc_sync() always does.
  bool stays = false;
};

struct ShutdownOptions {
  // Waits until no worker has calls under way; all workers must call shutdown(). All references
  // end. If false, calls under way end with kCancelled. With Members::kComeAndGo, this worker
  // leaves once it has no calls under way and nobody refers to its values.
  bool graceful = true;
  // Without `graceful`: others may still refer to values here. Otherwise that is kInvalidArgument
  // ("Leaking RRef"), thrown when the session has ended.
  bool ignore_leaks = false;
  // kTimeout, with who is waited for; the session is still open then. 0: never.
  std::chrono::milliseconds timeout = Store::kDefaultTimeout;
};

}  // namespace convoy::rpc
