#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "transport/endpoint.h"

namespace convoy::agent::test {

// What a test does to an endpoint from below. Functions may throw, as the endpoint's would.
struct Hooks {
  std::function<void(const transport::Address&)> connect = nullptr;  // before it
  // Instead of sending, if it returns something.
  std::function<std::optional<transport::SendResult>(transport::Remote&, const transport::Letter&)>
      send = nullptr;
  transport::Inbox* inbox = nullptr;  // whose endpoint it is: set when that is made
};

// Passes everything on but for what the hooks do.
class HookedEndpoint final : public transport::Endpoint, private transport::Inbox {
 public:
  HookedEndpoint(transport::Inbox& inbox, Hooks& hooks,
                 const std::function<std::unique_ptr<Endpoint>(transport::Inbox&)>& make)
      : inbox_(inbox), hooks_(hooks) {
    hooks.inbox = &inbox;
    inner_ = make(*this);
  }

  const transport::Address& address() const override { return inner_->address(); }
  transport::Remote& remote(const transport::Address& address) override {
    if (hooks_.connect) hooks_.connect(address);
    return of(inner_->remote(address));
  }
  bool poll(Serve serve) override { return inner_->poll(serve); }
  bool wait(const Deadline& deadline, FunctionRef<bool()> ready) override {
    return inner_->wait(deadline, ready);
  }
  bool wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) override {
    return inner_->wait_aside(deadline, ready);
  }
  void wake() noexcept override { inner_->wake(); }
  void hand_over() noexcept override { inner_->hand_over(); }
  Clock::time_point now() const override { return inner_->now(); }
  TimerId call_at(Clock::time_point when, std::function<void()> function) override {
    return inner_->call_at(when, std::move(function));
  }
  bool cancel(TimerId id) override { return inner_->cancel(id); }

 private:
  class HookedRemote final : public transport::Remote {
   public:
    HookedRemote(HookedEndpoint& owner, Remote& inner)
        : Remote(inner.address(), inner.name()), owner_(owner), inner_(inner) {}

    transport::SendResult try_send(const transport::Letter& letter,
                                   transport::Sent on_sent) override {
      if (owner_.hooks_.send) {
        if (const auto result = owner_.hooks_.send(*this, letter)) return *result;
      }
      return inner_.try_send(letter, std::move(on_sent));
    }
    bool lost() const override { return inner_.lost(); }
    void cut() noexcept override { inner_.cut(); }

   private:
    HookedEndpoint& owner_;
    Remote& inner_;
  };

  HookedRemote& of(transport::Remote& inner) {
    const std::scoped_lock lock(mutex_);
    auto& found = remotes_[&inner];
    if (!found) found = std::make_unique<HookedRemote>(*this, inner);
    return *found;
  }

  std::span<std::byte> place(transport::Remote& remote, const transport::Arrival& arrival,
                             std::size_t piece, std::size_t bytes) noexcept override {
    return inbox_.place(of(remote), arrival, piece, bytes);
  }
  void arrived(transport::Remote& remote, transport::Arrival&& arrival) noexcept override {
    inbox_.arrived(of(remote), std::move(arrival));
  }
  void lost(transport::Remote& remote, const Error& error) noexcept override {
    inbox_.lost(of(remote), error);
  }
  void joined(transport::Remote& remote) noexcept override { inbox_.joined(of(remote)); }
  void room(transport::Remote& remote) noexcept override { inbox_.room(of(remote)); }

  transport::Inbox& inbox_;
  Hooks& hooks_;
  std::mutex mutex_;
  std::unordered_map<transport::Remote*, std::unique_ptr<HookedRemote>> remotes_;
  std::unique_ptr<Endpoint> inner_;  // destroyed first: its calls end
};

}  // namespace convoy::agent::test
