#include "support.h"

#include <algorithm>

#include "base/random.h"
#include "support/leak_oracle.h"
#include "transport/shm/fabric.h"

namespace convoy::transport::test {
namespace {

using convoy::test::Holding;
using convoy::test::HoldingKind;
using convoy::test::LeakOracle;

// The Fabric lives as long as the process; what it holds for peers goes when its thread comes by.
[[maybe_unused]] const bool kRegistered = [] {
  LeakOracle::warm_up([] { shm::Fabric::instance(); });
  LeakOracle::ignore([](const Holding& holding) {
    if (holding.kind != HoldingKind::kDescriptor) return false;
    const auto held = shm::Fabric::instance().descriptors();
    return std::find(held.begin(), held.end(), static_cast<int>(holding.number)) != held.end();
  });
  return true;
}();

class ShmNet : public Net {
 public:
  std::unique_ptr<Party> join(const std::string&) override {
    auto party = std::make_unique<Party>();
    party->endpoint = make(party->inbox);
    party->inbox.wakes = party->endpoint.get();
    return party;
  }
  bool until(Party& party, const std::function<bool()>& ready) override {
    return party.endpoint->wait(Deadline::after(std::chrono::seconds(30)), ready);
  }

 protected:
  virtual std::unique_ptr<Endpoint> make(Inbox& inbox) { return shm::make_shm_endpoint(inbox); }
};

class FaultyShmNet final : public ShmNet {
  std::unique_ptr<Endpoint> make(Inbox& inbox) override {
    return make_faulty(inbox, {}, [](Inbox& inner) { return shm::make_shm_endpoint(inner); });
  }
};

class SimulatedNet : public Net {
 public:
  explicit SimulatedNet(std::uint64_t seed, bool faulty)
      : world_({.seed = seed, .lose_tails = false}), faulty_(faulty) {}

  std::unique_ptr<Party> join(const std::string& name) override {
    auto party = std::make_unique<Party>();
    const auto make = [&](Inbox& inbox) { return world_.join(inbox, name); };
    party->endpoint = faulty_ ? make_faulty(party->inbox, {}, make) : make(party->inbox);
    return party;
  }
  bool until(Party&, const std::function<bool()>& ready) override { return world_.run(ready); }

 private:
  World world_;
  bool faulty_;
};

}  // namespace

Bytes some_bytes(std::size_t count, std::uint64_t seed) {
  Bytes bytes(count);
  Random random(seed);
  std::size_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const std::uint64_t next = random.next();
    std::memcpy(bytes.data() + at, &next, 8);
  }
  for (; at < count; ++at) bytes[at] = static_cast<std::byte>(random.next());
  return bytes;
}

Bytes to_bytes(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string to_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<std::byte> Recorder::place(Remote& from, const Arrival& arrival, std::size_t piece,
                                     std::size_t bytes) noexcept {
  if (!places) return {};
  auto state = state_.lock();
  state->order += "placed ";
  Bytes& memory = state->placed[{&from, arrival.kind, piece}];
  memory.assign(bytes, std::byte{});
  return memory;
}

void Recorder::arrived(Remote& from, Arrival&& arrival) noexcept {
  if (on_arrived) on_arrived(from, arrival);
  {
    auto state = state_.lock();
    state->order += "arrived ";
    state->letters.push_back(
        {&from, arrival.kind, arrival.reply, to_text(arrival.head), std::move(arrival.parts)});
  }
  wake();
}

void Recorder::lost(Remote& remote, const Error& error) noexcept {
  state_.lock()->lost.emplace_back(&remote, error.what());
  wake();
}

void Recorder::joined(Remote& remote) noexcept {
  state_.lock()->joined.push_back(&remote);
  wake();
}

void Recorder::room(Remote& remote) noexcept {
  ++state_.lock()->rooms[&remote];
  wake();
}

void Recorder::wake() {
  if (Endpoint* const endpoint = wakes) endpoint->wake();
}

Party::~Party() {
  inbox.wakes = nullptr;
  endpoint.reset();
}

std::string to_name(NetKind kind) {
  switch (kind) {
    case NetKind::kShm: return "Shm";
    case NetKind::kSimulated: return "Simulated";
    case NetKind::kFaultyShm: return "FaultyShm";
    case NetKind::kFaultySimulated: return "FaultySimulated";
  }
  return "?";
}

std::unique_ptr<Net> make_net(NetKind kind, std::uint64_t seed) {
  switch (kind) {
    case NetKind::kShm: return std::make_unique<ShmNet>();
    case NetKind::kFaultyShm: return std::make_unique<FaultyShmNet>();
    case NetKind::kSimulated: return std::make_unique<SimulatedNet>(seed, false);
    case NetKind::kFaultySimulated: return std::make_unique<SimulatedNet>(seed, true);
  }
  return nullptr;
}

void send(Net& net, Party& from, Remote& to, const Letter& letter, const Sent& on_sent) {
  for (;;) {
    const int rooms = from.inbox.state().rooms[&to];
    const SendResult result = to.try_send(letter, on_sent);
    if (result == SendResult::kSent) return;
    ASSERT_EQ(result, SendResult::kWouldBlock);
    ASSERT_TRUE(net.until(from, [&] { return from.inbox.state().rooms[&to] != rooms; }))
        << "no room came";
  }
}

}  // namespace convoy::transport::test
