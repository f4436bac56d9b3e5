#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/call.h"
#include "agent/executor.h"

namespace convoy::agent {

class Agent;
struct AgentLife;
struct Function;
struct Peer;
class RequestRef;
struct RequestList;
class SpareRequests;

// A call, on the side of who is called. It lives until it is answered and nobody refers to it; that
// may be after the agent. Its methods may be called from any thread.
class Request final : private Task {
 public:
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  // These only in the handler, or while the agent is known to live.
  Agent& agent() const;
  const Worker& caller() const;
  std::uint32_t function() const;  // FunctionId
  std::string_view function_name() const;
  std::uint64_t number() const { return number_; }  // of the caller's calls to this worker
  std::uint32_t flags() const { return flags_; }    // CallFlags
  // The caller's, by the clock of this host.
  const Deadline& deadline() const { return deadline_; }
  // The caller has given up, or is gone: nobody waits for the answer.
  bool cancelled() const noexcept { return cancelled_.load(std::memory_order_relaxed); }

  // Until the handler returns.
  std::span<const std::byte> body() const { return body_; }
  // May be moved from, and kept.
  std::vector<Part>& parts() { return parts_; }

  // Whatever the layer above keeps with it; gone when nobody refers to it any more. Set in the
  // handler, before anybody else has it.
  std::shared_ptr<void>& attached() { return attached_; }

  // One of these, once; false: it was answered before. A reply that cannot be sent becomes an
  // error. Nothing is sent to who has gone, or has given up. False also for a reply that does not
  // go.
  bool reply(Outgoing outgoing) noexcept;
  bool fail(ErrorKind kind, std::string_view type, std::string_view text) noexcept;

  // That whose handler runs on this thread; nullptr elsewhere.
  static Request* current() noexcept;

 private:
  friend class Agent;
  friend class RequestRef;
  friend class SpareRequests;
  friend struct RequestList;
  friend class CurrentScope;

  explicit Request(std::shared_ptr<AgentLife> life);
  ~Request() = default;
  void drop() noexcept;
  void run_task() noexcept override;
  void discard() noexcept override;
  void refuse(const Error& error) noexcept override;

  const std::shared_ptr<AgentLife> life_;
  std::atomic<int> references_{0};
  std::atomic<bool> cancelled_{false};
  std::atomic<bool> answered_{false};
  const Function* function_ = nullptr;
  std::uint64_t number_ = 0;
  std::uint32_t slot_ = 0;
  std::uint32_t flags_ = 0;
  Deadline deadline_ = Deadline::never();
  Deadline::Clock::time_point arrived_;
  std::size_t received_ = 0;  // bytes
  std::uint64_t ticket_ = 0;  // in the flight record
  std::span<const std::byte> body_;
  std::vector<std::byte> kept_;  // the body, for a handler that runs later
  std::vector<Part> parts_;
  std::shared_ptr<void> attached_;
  // Guarded by the peer's mutex, until it is answered:
  Peer* peer_ = nullptr;
  Request* before_ = nullptr;
  Request* after_ = nullptr;
};

// Refers to a request. When the last one goes and it was not answered, the caller is told so.
class RequestRef {
 public:
  struct Adopt {};

  RequestRef() = default;
  // Takes over a reference.
  RequestRef(Request* request, Adopt) noexcept : request_(request) {}
  explicit RequestRef(Request* request) noexcept : request_(request) {
    if (request_) request_->references_.fetch_add(1, std::memory_order_relaxed);
  }
  RequestRef(const RequestRef& other) noexcept : RequestRef(other.request_) {}
  RequestRef(RequestRef&& other) noexcept : request_(std::exchange(other.request_, nullptr)) {}
  RequestRef& operator=(RequestRef other) noexcept {
    std::swap(request_, other.request_);
    return *this;
  }
  ~RequestRef() {
    if (request_ && request_->references_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      request_->drop();
    }
  }

  Request* get() const noexcept { return request_; }
  Request* operator->() const noexcept { return request_; }
  Request& operator*() const noexcept { return *request_; }
  explicit operator bool() const noexcept { return request_ != nullptr; }

 private:
  Request* request_ = nullptr;
};

// While one lives, this thread goes on with that request (a continuation of its handler, say).
class CurrentScope {
 public:
  explicit CurrentScope(Request* request) noexcept;
  CurrentScope(const CurrentScope&) = delete;
  CurrentScope& operator=(const CurrentScope&) = delete;
  ~CurrentScope();

 private:
  Request* const before_;
};

}  // namespace convoy::agent
