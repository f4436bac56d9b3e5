#include "kill.h"

#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <deque>
#include <optional>
#include <thread>

#include "base/concat.h"
#include "base/random.h"
#include "support.h"
#include "support/rank_group.h"
#include "transport/shm/fabric.h"
#include "trip_wire.h"

namespace convoy::transport::test {
namespace {

using namespace std::chrono_literals;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using testing::AllOf;
using testing::HasSubstr;

enum class Point { kInWriter, kInPlace, kInArrived, kAfterLetter, kOutside, kInStream };

struct Plan {
  int victim;
  Point point;
  std::uint64_t count;  // of such points before it
  bool star;

  Plan(int ranks, std::uint64_t seed) {
    Random random(seed);
    victim = static_cast<int>(random.below(static_cast<std::uint64_t>(ranks)));
    point = static_cast<Point>(random.below(6));
    count = random.below(point == Point::kInPlace || point == Point::kInStream ? 20 : 200);
    star = ranks > 8;
  }
};

class Letters final : public Inbox {
 public:
  explicit Letters(const Plan* mine) : mine_(mine) {}

  std::atomic<Endpoint*> endpoint{nullptr};
  std::atomic<bool> told{false};
  std::string victim_address;
  std::string text;  // once it is told

  void reach(Point point) {
    if (is_time(point)) die();
  }
  bool is_time(Point point) {
    return mine_ && mine_->point == point && points_.fetch_add(1) == mine_->count;
  }
  static void die() { ::kill(::getpid(), SIGKILL); }

  std::span<std::byte> place(Remote&, const Arrival&, std::size_t,
                             std::size_t bytes) noexcept override {
    reach(Point::kInPlace);
    if (bytes % 2 == 0) return {};
    auto places = places_.lock();
    places->emplace_back(bytes);
    return places->back();
  }
  void arrived(Remote&, Arrival&& arrival) noexcept override {
    reach(Point::kInArrived);
    std::uint64_t seed = 0;
    ASSERT_GE(arrival.head.size(), sizeof seed);
    std::memcpy(&seed, arrival.head.data(), sizeof seed);
    EXPECT_TRUE(
        std::ranges::equal(arrival.head.subspan(8), some_bytes(arrival.head.size() - 8, seed)));
    for (const Part& part : arrival.parts) {
      EXPECT_TRUE(std::ranges::equal(part.bytes, some_bytes(part.bytes.size(), seed)));
    }
    auto kept = kept_.lock();
    for (Part& part : arrival.parts) kept->push_back(std::move(part));
    if (kept->size() > 10) kept->clear();
  }
  void lost(Remote& remote, const Error& error) noexcept override {
    if (remote.address().encode() != victim_address) return;
    text = error.what();
    EXPECT_FALSE(told.exchange(true)) << "told twice";
    if (Endpoint* const known = endpoint) known->wake();
  }

 private:
  const Plan* const mine_;
  std::atomic<std::uint64_t> points_{0};
  Guarded<std::deque<Bytes>> places_;
  Guarded<std::vector<Part>> kept_;
};

void send_some(Letters& inbox, Remote& to, Random& random) {
  const std::uint64_t seed = random.next();
  Bytes head = some_bytes(8 + random.below(300), seed);
  const Bytes rest = some_bytes(head.size() - 8, seed);
  auto write = [&](std::span<std::byte> space) {
    std::memcpy(space.data(), &seed, 8);
    if (space.size() > 8) std::memcpy(space.data() + 8, rest.data(), (space.size() - 8) / 2);
    inbox.reach(Point::kInWriter);
    if (space.size() > 8) std::memcpy(space.data() + 8, rest.data(), rest.size());
  };
  auto data = std::make_shared<Bytes>();
  std::vector<Piece> pieces;
  if (random.below(5) == 0) {
    *data = some_bytes(1 + random.below(random.below(5) == 0 ? 300'000 : 5000), seed);
    pieces.push_back({*data, random.below(2) == 0});
  }
  std::optional<TripWire> wire;
  if (inbox.is_time(Point::kInStream)) {
    // A letter that goes before it is filled, and is not filled any more.
    *data = some_bytes(300'000 + random.below(1000), seed);
    wire.emplace(*data, random.below(data->size()), Letters::die);
    pieces = {{wire->bytes()}};
  }
  const Letter letter{1, random.below(4) == 0, Head(head.size(), write), pieces};
  if (to.try_send(letter, [data](const Error*) {}) == SendResult::kSent) {
    inbox.reach(Point::kAfterLetter);
  }
}

void run_rank(Rank& rank, const Plan& plan, std::uint64_t seed) {
  const bool victim = rank.id() == plan.victim;
  Letters inbox(victim ? &plan : nullptr);
  auto endpoint = shm::make_shm_endpoint(inbox);
  inbox.endpoint = endpoint.get();
  auto& store = *rank.store();
  store.set(concat("address/", rank.id()), endpoint->address().encode());
  const auto address = [&](int other) {
    return store.get(concat("address/", other), rank.deadline());
  };
  inbox.victim_address = address(plan.victim);
  std::vector<Remote*> remotes;
  for (int other = 0; other < rank.size(); ++other) {
    const bool known = other != rank.id() && (!plan.star || other == 0 || rank.id() == 0);
    if (known) remotes.push_back(&endpoint->remote(Address::decode(address(other))));
  }
  rank.barrier();
  rank.mark("going");
  const bool knows = !plan.star || rank.id() == 0 || plan.victim == 0;
  Random random(seed * 100 + static_cast<std::uint64_t>(rank.id()));
  const auto going_on = [&] {
    if (knows) return !inbox.told.load();
    return !store.try_get("told/0").has_value();
  };
  while (going_on() && !rank.deadline().expired()) {
    for (Remote* const remote : remotes) send_some(inbox, *remote, random);
    // Leaves that have to ask the store do so at times.
    if (!knows) endpoint->wait(Deadline::after(2ms), [] { return false; });
  }
  if (knows) {
    ASSERT_TRUE(inbox.told.load()) << "not told in time";
    EXPECT_THAT(inbox.text, AllOf(HasSubstr("pid "), HasSubstr("SIGKILL")));
    EXPECT_EQ(shm::shm_stats(*endpoint).limbo_loans, 0u) << "loans of the dead are free";
    store.set(concat("told/", rank.id()), "");
  }
  // Others may still send.
  for (int other = 0; other < rank.size(); ++other) {
    const bool tells = other != plan.victim && (!plan.star || other == 0 || plan.victim == 0);
    if (tells) store.get(concat("told/", other), rank.deadline());
  }
  inbox.endpoint = nullptr;
  endpoint.reset();
  // The watch thread has let go of the lost, when it has done this.
  shm::Fabric::instance().close_door(Id{});
}

}  // namespace

void run_kill(int ranks, std::uint64_t seed) {
  const Plan plan(ranks, seed);
  RankGroup group(ranks, RankMode::kProcesses, {.limit = 100s});
  group.start([&](Rank& rank) { run_rank(rank, plan, seed); });
  if (plan.point == Point::kOutside) {
    group.wait_mark("going", plan.victim);
    group.kill(plan.victim, SIGKILL);
  }
  auto results = group.collect();
  if (results.empty()) return;
  const auto at = static_cast<std::size_t>(plan.victim);
  if (!convoy::test::in_rank()) {
    EXPECT_EQ(results[at].status.signal, SIGKILL) << "seed " << seed;
  }
  results.erase(results.begin() + plan.victim);
  convoy::test::report(results);
}

}  // namespace convoy::transport::test
