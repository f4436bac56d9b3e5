#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "base/guarded.h"
#include "transport/endpoint.h"
#include "transport/faulty.h"
#include "transport/shm/shm_endpoint.h"
#include "transport/simulation.h"

namespace convoy::transport::test {

using Bytes = std::vector<std::byte>;

// Bytes that follow from a seed.
Bytes some_bytes(std::size_t count, std::uint64_t seed);
Bytes to_bytes(const std::string& text);
std::string to_text(std::span<const std::byte> bytes);

// Keeps what arrives. Everything may be asked from any thread.
class Recorder : public Inbox {
 public:
  struct Got {
    Remote* from;
    LetterKind kind;
    bool reply;
    std::string head;
    std::vector<Part> parts;
  };
  struct State {
    std::vector<Got> letters;
    std::vector<Remote*> joined;
    std::vector<std::pair<Remote*, std::string>> lost;
    std::map<Remote*, int> rooms;
    std::map<std::tuple<Remote*, LetterKind, std::size_t>, Bytes> placed;
    std::string order;  // "placed ", "arrived "
  };

  // Called in arrived(), before the letter is kept.
  std::function<void(Remote&, const Arrival&)> on_arrived;
  // Pieces are placed into memory of this object.
  std::atomic<bool> places{false};
  // Woken after each call: for threads that wait for what is recorded.
  std::atomic<Endpoint*> wakes{nullptr};

  State state() { return *state_.lock(); }
  std::size_t letters() { return state_.lock()->letters.size(); }
  std::size_t losses() { return state_.lock()->lost.size(); }
  std::string order() { return state_.lock()->order; }
  Got letter(std::size_t index) { return state_.lock()->letters.at(index); }
  void clear() { state_.lock()->letters.clear(); }

  std::span<std::byte> place(Remote& from, const Arrival& arrival, std::size_t piece,
                             std::size_t bytes) noexcept override;
  void arrived(Remote& from, Arrival&& arrival) noexcept override;
  void lost(Remote& remote, const Error& error) noexcept override;
  void joined(Remote& remote) noexcept override;
  void room(Remote& remote) noexcept override;

 private:
  void wake();

  Guarded<State> state_;
};

// An endpoint and what it got.
struct Party {
  Recorder inbox;
  std::unique_ptr<Endpoint> endpoint;

  ~Party();
  Remote& to(const Party& other) const { return endpoint->remote(other.endpoint->address()); }
};

// Where parties live.
class Net {
 public:
  virtual ~Net() = default;
  virtual std::unique_ptr<Party> join(const std::string& name) = 0;
  // Lets things happen until ready(). False: it does not come.
  virtual bool until(Party& party, const std::function<bool()>& ready) = 0;
};

enum class NetKind { kShm, kSimulated, kFaultyShm, kFaultySimulated };
std::string to_name(NetKind kind);
inline void PrintTo(NetKind kind, std::ostream* out) { *out << to_name(kind); }
std::unique_ptr<Net> make_net(NetKind kind, std::uint64_t seed = 1);

// Sends, and waits for room where there is none.
void send(Net& net, Party& from, Remote& to, const Letter& letter, const Sent& on_sent = nullptr);

}  // namespace convoy::transport::test
