#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "convoy/call_site.h"
#include "convoy/deadline.h"
#include "convoy/error.h"
#include "transport/endpoint.h"

// What a call is made of, on the side of the caller.
namespace convoy::agent {

using transport::Part;
using transport::Piece;

// A worker's rank in its session.
using WorkerId = std::uint32_t;

struct Worker {
  std::string name;
  WorkerId id = 0;
};

// What goes with a call, a reply or another letter. Refers to what it was made of: use it up at
// once.
struct Outgoing {
  // Larger bodies have their bytes in a piece.
  static constexpr std::size_t kMostBody = transport::Letter::kMostHead - 64;
  static constexpr std::size_t kMostPieces = 250;

  transport::Head body = {};
  std::span<const Piece> pieces = {};
  // See transport::Sent. Called or dropped when the pieces are free again.
  transport::Sent on_sent = nullptr;
};

// Why a call went wrong.
struct Failure {
  ErrorKind kind = ErrorKind::kInternal;
  std::string text;         // complete: function, worker, cause
  std::string worker;       // whose fault it is
  std::string remote_type;  // of what its function threw; else empty
};

struct Outcome {
  const Failure* failure = nullptr;  // nullptr: it went well
  std::span<const std::byte> body = {};
  std::vector<Part> parts = {};
};

struct CallList;
struct Peer;

// One call. Derived by who makes calls, who also owns it: on the stack for one that is waited for.
// From Agent::start() to ended() it must stay where it is. It may be used again then.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // The last thing of an implementation of ended() that touches this object has been done.
  bool over() const noexcept { return over_.load(std::memory_order_acquire); }

 protected:
  ~Call() = default;

  // Once for each start(), by any thread, without a lock. It must neither throw nor wait, and must
  // call mark_over(): from then on the object may go away, if nothing else keeps it. outcome.body
  // is there only for the time of this call.
  virtual void ended(Outcome&& outcome) noexcept = 0;
  void mark_over() noexcept { over_.store(true, std::memory_order_release); }

 private:
  friend class Agent;
  friend struct CallList;
  friend struct Peer;

  std::atomic<bool> over_{true};
  // Guarded by the peer's mutex, between start() and ended():
  Peer* peer_ = nullptr;
  Call* before_ = nullptr;  // of calls to the same peer, by number
  Call* after_ = nullptr;
  std::uint64_t number_ = 0;
  std::uint32_t slot_ = 0;
  std::uint32_t function_ = 0;
  std::uint32_t flags_ = 0;
  std::size_t bytes_ = 0;
  std::uint64_t ticket_ = 0;  // in the flight record
  Deadline deadline_ = Deadline::never();
  std::chrono::nanoseconds timeout_{};
  std::chrono::nanoseconds timeout_left_{};  // when it is sent
  Deadline::Clock::time_point started_;
};

// What a layer above tells the other side of a call. Others are refused.
enum CallFlags : std::uint32_t {
  kKeepsResult = 1,  // the result stays with the callee: the body begins with what it is called
  kOnReference = 2,  // the function is one of an object: the body begins with a reference to it
  kAllCallFlags = 3,
};

struct CallOptions {
  // nullopt: the session's; 0: none.
  std::optional<std::chrono::nanoseconds> timeout = std::nullopt;
  CallSite where = {};
  std::uint32_t flags = 0;  // CallFlags
};

}  // namespace convoy::agent
