#include "programs.h"

#include <algorithm>
#include <deque>
#include <set>

#include "base/concat.h"
#include "base/random.h"

namespace convoy::transport::test {
namespace {

struct Message {
  std::uint64_t number = 0;
  LetterKind kind = 0;
  bool reply = false;
  bool small = true;
  std::size_t head = 0;
  std::vector<std::size_t> pieces;

  bool ordered() const { return small && !reply; }
};

// What a head says, so that it can be checked without the model.
Bytes head_of(const Message& message) {
  Bytes bytes = some_bytes(message.head, message.number);
  std::memcpy(bytes.data(), &message.number, sizeof message.number);
  return bytes;
}
Bytes piece_of(const Message& message, std::size_t piece) {
  return some_bytes(message.pieces[piece], message.number * 1000 + piece);
}

// Letters from one incarnation to another.
struct Stream {
  std::deque<std::uint64_t> ordered;  // small ones that are no replies
  std::set<std::uint64_t> unordered;  // others
  bool broken = false;                // cut or closed: the rest need not arrive
  bool lost = false;                  // the receiver was told
};

struct Model {
  std::map<std::uint64_t, Message> messages;
  std::map<std::pair<Id, Id>, Stream> streams;
  std::vector<std::string> errors;
  bool ending = false;

  void wrong(const std::string& what) {
    if (errors.size() < 10) errors.push_back(what);
  }
};

class Checker final : public Inbox {
 public:
  Checker(Guarded<Model>& model, std::uint64_t seed) : model_(model), random_(seed) {}

  std::atomic<Endpoint*> endpoint{nullptr};
  Id id;

  std::span<std::byte> place(Remote&, const Arrival&, std::size_t,
                             std::size_t bytes) noexcept override {
    auto state = state_.lock();
    if (random_.below(2) == 0) return {};
    state->places.emplace_back(bytes);
    return state->places.back();
  }
  void arrived(Remote& from, Arrival&& arrival) noexcept override {
    std::uint64_t number = 0;
    if (arrival.head.size() >= sizeof number) {
      std::memcpy(&number, arrival.head.data(), sizeof number);
    }
    {
      auto model = model_.lock();
      const auto found = model->messages.find(number);
      if (found == model->messages.end()) {
        model->wrong("a letter that nobody sent");
        return;
      }
      const Message& message = found->second;
      Stream& stream = model->streams[{from.address().id, id}];
      if (stream.lost) model->wrong("a letter after lost()");
      if (!message.ordered()) {
        if (stream.unordered.erase(number) == 0) model->wrong(concat("letter ", number, " twice"));
      } else if (stream.ordered.empty() || stream.ordered.front() != number) {
        model->wrong(concat("letter ", number, " out of order, or twice"));
      } else {
        stream.ordered.pop_front();
      }
      if (arrival.kind != message.kind || arrival.reply != message.reply ||
          !std::ranges::equal(arrival.head, head_of(message)) ||
          arrival.parts.size() != message.pieces.size()) {
        model->wrong(concat("letter ", number, " has changed"));
        return;
      }
      for (std::size_t i = 0; i < message.pieces.size(); ++i) {
        if (!std::ranges::equal(arrival.parts[i].bytes, piece_of(message, i))) {
          model->wrong(concat("piece ", i, " of letter ", number, " has changed"));
        }
      }
    }
    {
      auto state = state_.lock();
      ++state->letters;
      for (Part& part : arrival.parts) {
        if (random_.below(4) == 0) state->kept.push_back(std::move(part));
      }
      if (random_.below(4) == 0) state->kept.clear();
    }
    wake();
  }
  void lost(Remote& remote, const Error& error) noexcept override {
    if (error.kind() != ErrorKind::kPeerLost) model_.lock()->wrong(error.what());
    auto model = model_.lock();
    Stream& stream = model->streams[{remote.address().id, id}];
    if (stream.lost) model->wrong("lost() twice");
    if (!stream.broken && !model->ending)
      model->wrong(concat("lost for no reason: ", error.what()));
    stream.lost = true;
    wake();
  }
  void room(Remote&) noexcept override {
    ++state_.lock()->rooms;
    wake();
  }

  int rooms() { return state_.lock()->rooms; }
  void drop_kept() { state_.lock()->kept.clear(); }

 private:
  struct State {
    std::deque<Bytes> places;
    std::vector<Part> kept;
    int letters = 0;
    int rooms = 0;
  };

  void wake() {
    if (Endpoint* const known = endpoint) known->wake();
  }

  Guarded<Model>& model_;
  Guarded<State> state_;
  Random random_;  // under the lock of state_
};

struct Member {
  std::unique_ptr<Checker> inbox;
  std::unique_ptr<Endpoint> endpoint;
};

class Program {
 public:
  Program(NetKind kind, std::uint64_t seed) : random_(seed), kind_(kind), restless_(seed % 3 == 0) {
    if (kind_ == NetKind::kSimulated || kind_ == NetKind::kFaultySimulated) {
      world_ = std::make_unique<World>(WorldOptions{.seed = seed, .lose_tails = false});
    }
    members_.resize(2 + random_.below(3));
    for (auto& member : members_) start(member);
  }

  std::vector<std::string> run() {
    const std::uint64_t steps = restless_ ? 10 + random_.below(40) : 20 + random_.below(100);
    for (std::uint64_t i = 0; i < steps; ++i) step();
    for (auto& member : members_) member.inbox->drop_kept();
    // Everything that must arrive arrives.
    const bool came = until(members_[0], [&] {
      auto model = model_.lock();
      for (const auto& [pair, stream] : model->streams) {
        const bool all = stream.ordered.empty() && stream.unordered.empty();
        if (!all && !stream.broken) return false;
        if (stream.broken && !stream.lost && alive(pair.second) && met_.contains(pair))
          return false;
      }
      return true;
    });
    if (!came) model_.lock()->wrong("something did not arrive");
    model_.lock()->ending = true;
    for (auto& member : members_) member.inbox->endpoint = nullptr;
    for (auto& member : members_) member.endpoint.reset();
    if (sent_ != wanted_sent_) model_.lock()->wrong(concat(sent_.load(), " of ", wanted_sent_));
    return model_.lock()->errors;
  }

 private:
  void start(Member& member) {
    member.inbox = std::make_unique<Checker>(model_, random_.next());
    const auto make = [&](Inbox& inbox) -> std::unique_ptr<Endpoint> {
      if (world_) return world_->join(inbox, concat("member ", &member - members_.data()));
      return shm::make_shm_endpoint(inbox, {.quota = 1 << 20});
    };
    const bool faulty = kind_ == NetKind::kFaultyShm || kind_ == NetKind::kFaultySimulated;
    member.endpoint = faulty ? make_faulty(*member.inbox, {}, make) : make(*member.inbox);
    member.inbox->id = member.endpoint->address().id;
    member.inbox->endpoint = member.endpoint.get();
  }

  bool alive(const Id& id) const {
    return std::ranges::any_of(
        members_, [&](const Member& member) { return member.endpoint->address().id == id; });
  }

  bool until(Member& member, const std::function<bool()>& ready) {
    if (world_) return world_->run(ready);
    // Others' events do not wake this thread: it looks again.
    const Deadline limit = Deadline::after(std::chrono::seconds(30));
    while (!limit.expired()) {
      const auto slice = Deadline::after(std::chrono::milliseconds(1));
      if (member.endpoint->wait(slice, ready)) return true;
    }
    return ready();
  }

  void step() {
    const std::uint64_t what = random_.below(100);
    Member& from = members_[random_.below(members_.size())];
    Member& to = members_[random_.below(members_.size())];
    if (what < (restless_ ? 70 : 94)) return send(from, to);
    if (what < (restless_ ? 72 : 96)) {
      from.inbox->drop_kept();
    } else if (what < (restless_ ? 88 : 98)) {
      cut(from, to);
    } else {
      close(from);
    }
  }

  void break_streams(const Id& a, const Id& b) {
    auto model = model_.lock();
    model->streams[{a, b}].broken = true;
    model->streams[{b, a}].broken = true;
  }

  void cut(Member& from, Member& to) {
    const Id a = from.inbox->id, b = to.inbox->id;
    if (a == b || !met_.contains({a, b})) return;
    break_streams(a, b);
    from.endpoint->remote(to.endpoint->address()).cut();
  }

  void close(Member& member) {
    const Id id = member.inbox->id;
    for (const Member& other : members_) {
      if (&other != &member) break_streams(id, other.inbox->id);
    }
    {
      auto model = model_.lock();
      model->streams[{id, id}].broken = true;
    }
    member.inbox->endpoint = nullptr;
    member.endpoint.reset();
    start(member);
  }

  void send(Member& from, Member& to) {
    const Id a = from.inbox->id, b = to.inbox->id;
    if (model_.lock()->streams[{a, b}].broken) return;
    Remote& remote = from.endpoint->remote(to.endpoint->address());
    met_.insert({a, b});
    met_.insert({b, a});
    Message message;
    message.number = ++next_;
    message.kind = static_cast<LetterKind>(random_.next());
    message.reply = random_.below(3) == 0;
    message.head = 8 + random_.below(random_.below(20) == 0 ? 8000 : 100);
    std::size_t bytes = 0;
    if (random_.below(3) == 0) {
      const std::uint64_t count = 1 + random_.below(4);
      for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t scale = random_.below(10);
        message.pieces.push_back(random_.below(scale < 6 ? 200 : scale < 9 ? 20'000 : 200'000));
        bytes += message.pieces.back();
        message.small = message.small && message.pieces.back() <= 1024;
      }
    }
    // In a simulation the limit is that of all pieces together.
    if (world_) message.small = bytes <= 2048;
    auto data = std::make_shared<std::vector<Bytes>>();
    std::vector<Piece> pieces;
    const bool stays = random_.below(2) == 0;
    for (std::size_t i = 0; i < message.pieces.size(); ++i) {
      data->push_back(piece_of(message, i));
      pieces.push_back({data->back(), stays});
    }
    const Bytes head = head_of(message);
    auto write = [&](std::span<std::byte> to_bytes) {
      std::memcpy(to_bytes.data(), head.data(), head.size());
    };
    {
      auto model = model_.lock();
      model->messages[message.number] = message;
      Stream& stream = model->streams[{a, b}];
      if (message.ordered()) {
        stream.ordered.push_back(message.number);
      } else {
        stream.unordered.insert(message.number);
      }
    }
    const Letter letter{message.kind, message.reply, Head(head.size(), write), pieces};
    ++wanted_sent_;
    for (;;) {
      const int rooms = from.inbox->rooms();
      const SendResult result = remote.try_send(letter, [this, data](const Error*) { ++sent_; });
      if (result == SendResult::kSent) return;
      to.inbox->drop_kept();
      if (result == SendResult::kWouldBlock &&
          until(from, [&] { return from.inbox->rooms() != rooms || remote.lost(); })) {
        continue;
      }
      model_.lock()->wrong(result == SendResult::kLost ? "lost without a cause" : "no room came");
      return;
    }
  }

  Random random_;
  const NetKind kind_;
  const bool restless_;  // connections come and go: who has just been met may be gone again
  std::unique_ptr<World> world_;
  Guarded<Model> model_;
  std::set<std::pair<Id, Id>> met_;
  std::vector<Member> members_;
  std::uint64_t next_ = 0;
  std::atomic<int> sent_{0};
  int wanted_sent_ = 0;
};

}  // namespace

void run_programs(NetKind kind, std::uint64_t first_seed, std::uint64_t count) {
  for (std::uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    const auto errors = Program(kind, seed).run();
    for (const auto& error : errors) ADD_FAILURE() << "seed " << seed << ": " << error;
    if (!errors.empty()) return;
  }
}

}  // namespace convoy::transport::test
