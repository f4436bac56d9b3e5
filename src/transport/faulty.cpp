#include "transport/faulty.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "base/error.h"
#include "base/random.h"

namespace convoy::transport {
namespace faulty {

// How long a letter waits for one to overtake it.
constexpr auto kMostReorder = std::chrono::milliseconds(1);

enum class Fate { kPass, kDrop, kDuplicate, kReorder, kDelay, kCut };

class FaultyEndpoint;

class FaultyRemote final : public Remote {
 public:
  FaultyRemote(FaultyEndpoint& owner, Remote& inner, std::uint64_t number)
      : Remote(inner.address(), inner.name()), owner_(owner), inner_(inner), number_(number) {}

  SendResult try_send(const Letter& letter, Sent on_sent) override;
  bool lost() const override { return inner_.lost(); }
  void cut() noexcept override { inner_.cut(); }

  // Letters that were held back, when there is room for them, or their time has come.
  void release(std::uint64_t held);
  void flush();

 private:
  struct Held {
    std::uint64_t number;
    std::shared_ptr<const KeptLetter> letter;
    bool overtaken;  // the next letter lets it go
  };

  Fate draw(const Letter& letter, std::chrono::nanoseconds& delay);
  std::uint64_t hold(const Letter& letter, bool overtaken, std::chrono::nanoseconds delay);

  FaultyEndpoint& owner_;
  Remote& inner_;
  const std::uint64_t number_;
  std::mutex mutex_;
  std::uint64_t letters_ = 0;
  std::uint64_t next_held_ = 0;
  std::deque<Held> held_;
  std::deque<std::shared_ptr<const KeptLetter>> due_;  // that only wait for room
};

class FaultyEndpoint final : public Endpoint, private Inbox {
 public:
  FaultyEndpoint(Inbox& inbox, const Faults& faults,
                 const std::function<std::unique_ptr<Endpoint>(Inbox&)>& make)
      : inbox_(inbox), faults_(faults), inner_(make(*this)) {
    made_.store(inner_.get(), std::memory_order_release);
    made_.notify_all();
  }

  const Address& address() const override { return inner().address(); }
  Remote& remote(const Address& address) override { return of(inner().remote(address)); }
  bool poll(Serve serve) override { return inner().poll(serve); }
  bool wait(const Deadline& deadline, FunctionRef<bool()> ready) override {
    return inner().wait(deadline, ready);
  }
  bool wait_aside(const Deadline& deadline, FunctionRef<bool()> ready) override {
    return inner().wait_aside(deadline, ready);
  }
  void wake() noexcept override { inner().wake(); }
  void hand_over() noexcept override { inner().hand_over(); }
  Clock::time_point now() const override { return inner().now(); }
  TimerId call_at(Clock::time_point when, std::function<void()> function) override {
    return inner().call_at(when, std::move(function));
  }
  bool cancel(TimerId id) override { return inner().cancel(id); }

  const Faults& faults() const { return faults_; }

 private:
  // Calls of the inbox may come, and send, before `make` has returned.
  Endpoint& inner() const {
    made_.wait(nullptr, std::memory_order_acquire);
    return *made_.load(std::memory_order_acquire);
  }
  FaultyRemote& of(Remote& inner) {
    const std::scoped_lock lock(mutex_);
    auto& found = remotes_[&inner];
    if (!found) found = std::make_unique<FaultyRemote>(*this, inner, remotes_.size());
    return *found;
  }

  std::span<std::byte> place(Remote& remote, const Arrival& arrival, std::size_t piece,
                             std::size_t bytes) noexcept override {
    return inbox_.place(of(remote), arrival, piece, bytes);
  }
  void arrived(Remote& remote, Arrival&& arrival) noexcept override {
    inbox_.arrived(of(remote), std::move(arrival));
  }
  void lost(Remote& remote, const Error& error) noexcept override {
    inbox_.lost(of(remote), error);
  }
  void joined(Remote& remote) noexcept override { inbox_.joined(of(remote)); }
  void room(Remote& remote) noexcept override {
    of(remote).flush();
    inbox_.room(of(remote));
  }

  Inbox& inbox_;
  const Faults faults_;
  std::mutex mutex_;
  std::unordered_map<Remote*, std::unique_ptr<FaultyRemote>> remotes_;
  std::atomic<Endpoint*> made_{nullptr};
  std::unique_ptr<Endpoint> inner_;  // destroyed first: its calls end
};

Fate FaultyRemote::draw(const Letter& letter, std::chrono::nanoseconds& delay) {
  const Faults& faults = owner_.faults();
  Random random(faults.seed ^ Random(number_ << 32 ^ letters_++).next());
  for (const Fault& rule : faults.rules) {
    if (letter.kind < rule.first_kind || letter.kind > rule.last_kind) continue;
    const auto most =
        static_cast<std::uint64_t>(std::max<std::int64_t>(rule.most_delay.count(), 1));
    delay = std::chrono::nanoseconds(random.below(most) + 1);
    if (random.chance(rule.cut)) return Fate::kCut;
    if (random.chance(rule.drop)) return Fate::kDrop;
    if (random.chance(rule.duplicate)) return Fate::kDuplicate;
    if (random.chance(rule.reorder)) return Fate::kReorder;
    if (random.chance(rule.delay)) return Fate::kDelay;
    break;
  }
  return Fate::kPass;
}

// The mutex is held.
std::uint64_t FaultyRemote::hold(const Letter& letter, bool overtaken,
                                 std::chrono::nanoseconds delay) {
  const std::uint64_t held = next_held_++;
  held_.push_back({held, std::make_shared<const KeptLetter>(letter), overtaken});
  owner_.call_at(owner_.now() + delay, [this, held] { release(held); });
  return held;
}

SendResult FaultyRemote::try_send(const Letter& letter, Sent on_sent) {
  check_letter(letter, SIZE_MAX);
  if (inner_.lost()) return SendResult::kLost;
  std::unique_lock lock(mutex_);
  // Those that wait for room go first, or their number would grow without end.
  if (!due_.empty()) {
    lock.unlock();
    flush();
    lock.lock();
    if (!due_.empty()) return SendResult::kWouldBlock;
  }
  std::chrono::nanoseconds delay{};
  const std::uint64_t before = letters_;
  const Fate fate = draw(letter, delay);
  std::uint64_t second = UINT64_MAX;
  const auto taken = [&] {
    lock.unlock();
    if (on_sent) on_sent(nullptr);
    return SendResult::kSent;
  };
  switch (fate) {
    case Fate::kDrop: return taken();
    case Fate::kCut: {
      const auto result = taken();
      inner_.cut();
      return result;
    }
    case Fate::kDelay: hold(letter, false, delay); return taken();
    case Fate::kReorder: hold(letter, true, kMostReorder); return taken();
    case Fate::kDuplicate: second = hold(letter, false, delay); break;
    case Fate::kPass: break;
  }
  lock.unlock();
  const SendResult result = inner_.try_send(letter, std::move(on_sent));
  lock.lock();
  if (result != SendResult::kSent) {
    // Nothing was done: the next try meets the same fate.
    letters_ = before;
    std::erase_if(held_, [&](const Held& held) { return held.number == second; });
    return result;
  }
  for (auto i = held_.begin(); i != held_.end();) {
    if (!i->overtaken) {
      ++i;
      continue;
    }
    due_.push_back(std::move(i->letter));
    i = held_.erase(i);
  }
  lock.unlock();
  flush();
  return result;
}

void FaultyRemote::release(std::uint64_t held) {
  {
    const std::scoped_lock lock(mutex_);
    for (auto i = held_.begin(); i != held_.end(); ++i) {
      if (i->number != held) continue;
      due_.push_back(std::move(i->letter));
      held_.erase(i);
      break;
    }
  }
  flush();
}

void FaultyRemote::flush() {
  for (;;) {
    std::shared_ptr<const KeptLetter> next;
    {
      const std::scoped_lock lock(mutex_);
      if (due_.empty()) return;
      next = std::move(due_.front());
      due_.pop_front();
    }
    if (inner_.try_send(next->letter()) != SendResult::kWouldBlock) continue;
    const std::scoped_lock lock(mutex_);
    due_.push_front(std::move(next));
    return;
  }
}

}  // namespace faulty

std::unique_ptr<Endpoint> make_faulty(
    Inbox& inbox, const Faults& faults,
    const std::function<std::unique_ptr<Endpoint>(Inbox&)>& make) {
  return std::make_unique<faulty::FaultyEndpoint>(inbox, faults, make);
}

}  // namespace convoy::transport
