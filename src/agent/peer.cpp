#include "agent/peer.h"

#include <algorithm>
#include <thread>

#include "agent/peer_table.h"
#include "base/concat.h"
#include "base/error.h"

namespace convoy::agent {

PeerTable::PeerTable() = default;

PeerTable::~PeerTable() {
  for (auto& chunk : chunks_) delete chunk.load(std::memory_order_relaxed);
}

void PeerTable::push_back(std::unique_ptr<Peer> peer) {
  const std::size_t i = size_.load(std::memory_order_relaxed);
  if (i == kMost)
    fail(ErrorKind::kResource, "a session has had ", kMost, " workers, the most that it can have");
  auto& chunk = chunks_[i / kChunk];
  if (!chunk.load(std::memory_order_relaxed)) chunk.store(new Chunk, std::memory_order_release);
  (*chunk.load(std::memory_order_relaxed))[i % kChunk] = std::move(peer);
  size_.store(i + 1, std::memory_order_release);
}

namespace {
thread_local const AgentLife* life_here = nullptr;
}

AgentLife::Scope::Scope(const AgentLife& life) noexcept
    : before_(std::exchange(life_here, &life)) {}
AgentLife::Scope::~Scope() { life_here = before_; }
bool AgentLife::is_here() const noexcept { return life_here == this; }

void AgentLife::end() noexcept {
  users_.fetch_or(1);
  // They only send something.
  while (users_.load(std::memory_order_acquire) != 1) std::this_thread::yield();
}

bool is_large(std::span<const Piece> pieces) {
  constexpr std::size_t kMostSmall = 1024;
  constexpr std::size_t kMostTogether = 4096;
  std::size_t together = 0;
  for (const Piece& piece : pieces) {
    if (piece.bytes.size() > kMostSmall) return true;
    together += piece.bytes.size();
  }
  return together > kMostTogether;
}

std::size_t bytes_of(const Outgoing& outgoing) {
  std::size_t bytes = outgoing.body.size();
  for (const Piece& piece : outgoing.pieces) bytes += piece.bytes.size();
  return bytes;
}

void Peer::link(Call& call) {
  if (free_slots.empty()) {
    free_slots.push_back(static_cast<std::uint32_t>(slots.size()));
    slots.push_back(nullptr);
  }
  call.slot_ = free_slots.back();
  free_slots.pop_back();
  slots[call.slot_] = &call;
  call.peer_ = this;
  call.number_ = next_number++;
  call.before_ = last_call;
  call.after_ = nullptr;
  (last_call ? last_call->after_ : first_call) = &call;
  last_call = &call;
  ++calls;
  bytes += call.bytes_;
}

Call* Peer::take(std::uint32_t slot, std::uint64_t number) {
  if (slot >= slots.size() || !slots[slot] || slots[slot]->number_ != number) return nullptr;
  Call* const call = slots[slot];
  unlink(*call);
  return call;
}

void Peer::unlink(Call& call) {
  (call.before_ ? call.before_->after_ : first_call) = call.after_;
  (call.after_ ? call.after_->before_ : last_call) = call.before_;
  slots[call.slot_] = nullptr;
  free_slots.push_back(call.slot_);
  call.number_ = 0;
  --calls;
  bytes -= call.bytes_;
}

void Peer::link(Request& request) {
  request.before_ = last_request;
  request.after_ = nullptr;
  (last_request ? last_request->after_ : first_request) = &request;
  last_request = &request;
  ++requests;
}

void Peer::unlink(Request& request) {
  (request.before_ ? request.before_->after_ : first_request) = request.after_;
  (request.after_ ? request.after_->before_ : last_request) = request.before_;
  --requests;
}

std::optional<QueuedLetter> Peer::unqueue(const Call& call) {
  for (auto& queue : queues) {
    const auto found = std::find_if(queue.begin(), queue.end(),
                                    [&](const auto& letter) { return letter.call == &call; });
    if (found == queue.end()) continue;
    QueuedLetter letter = std::move(*found);
    queue.erase(found);
    return letter;
  }
  return std::nullopt;
}

std::int64_t Peer::place_of(FunctionId function) {
  if (function >= places.size()) places.resize(function + 1, kUnknown);
  std::int64_t& place = places[function];
  if (place != kUnknown) [[likely]]
    return place;
  const FunctionKey key = declared_function(function);
  place = kMissing;
  const auto [begin, end] = by_name.equal_range(std::string(key.name));
  for (auto i = begin; i != end; ++i) {
    if (table[i->second].hash == key.hash) place = i->second;
  }
  return place;
}

std::string Peer::describe_missing(FunctionId function) const {
  const FunctionKey key = declared_function(function);
  std::string others;
  const auto [begin, end] = by_name.equal_range(std::string(key.name));
  for (auto i = begin; i != end; ++i) {
    others += concat(others.empty() ? "" : ", ", in_quotes(table[i->second].signature, 400));
  }
  if (others.empty()) {
    return concat("it is not registered on ", worker.name,
                  "; register it there with CONVOY_RPC, in a file that is linked into its program");
  }
  return concat("it has another signature on ", worker.name, ": ", others, " there, ",
                in_quotes(key.signature, 400), " here; build both programs of the same sources");
}

void Peer::count_error(const Call& call) {
  FunctionStats& counted = counters_of(call.function_);
  ++counted.calls;
  ++counted.errors;
  counted.bytes_sent += call.bytes_;
}

FunctionStats& Peer::counters_of(FunctionId function) {
  if (function >= counters.size()) counters.resize(function + 1);
  return counters[function];
}

}  // namespace convoy::agent
