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

void Contact::lose(const std::optional<Error>& error) {
  lost = true;
  left = !error || leaves;
  open = false;
  why = left ? "it has left the session" : error->what();
}

void CallList::link(Call& call) {
  if (free_slots.empty()) {
    free_slots.push_back(static_cast<std::uint32_t>(slots.size()));
    slots.push_back(nullptr);
  }
  call.slot_ = free_slots.back();
  free_slots.pop_back();
  slots[call.slot_] = &call;
  call.number_ = next_number++;
  call.before_ = last;
  call.after_ = nullptr;
  (last ? last->after_ : first) = &call;
  last = &call;
  ++count;
  bytes += call.bytes_;
}

Call* CallList::take(std::uint32_t slot, std::uint64_t number) {
  if (slot >= slots.size() || !slots[slot] || slots[slot]->number_ != number) return nullptr;
  Call* const call = slots[slot];
  unlink(*call);
  return call;
}

void CallList::unlink(Call& call) {
  (call.before_ ? call.before_->after_ : first) = call.after_;
  (call.after_ ? call.after_->before_ : last) = call.before_;
  slots[call.slot_] = nullptr;
  free_slots.push_back(call.slot_);
  call.number_ = 0;
  --count;
  bytes -= call.bytes_;
}

void RequestList::link(Request& request) {
  request.before_ = last;
  request.after_ = nullptr;
  (last ? last->after_ : first) = &request;
  last = &request;
  ++count;
}

void RequestList::unlink(Request& request) {
  (request.before_ ? request.before_->after_ : first) = request.after_;
  (request.after_ ? request.after_->before_ : last) = request.before_;
  --count;
}

void RequestList::cancel_all() {
  for (Request* request = first; request; request = request->after_) {
    request->cancelled_.store(true, std::memory_order_relaxed);
  }
}

std::optional<QueuedLetter> Outbox::remove(const Call& call) {
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

void RemoteFunctions::learn(std::vector<TableEntry> told) {
  table = std::move(told);
  by_name.clear();
  for (std::size_t i = 0; i < table.size(); ++i) {
    by_name.emplace(table[i].name, static_cast<std::uint32_t>(i));
  }
  places.clear();
}

std::int64_t RemoteFunctions::place_of(FunctionId function) {
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

std::string RemoteFunctions::describe_missing(FunctionId function,
                                              const std::string& worker) const {
  const FunctionKey key = declared_function(function);
  std::string others;
  const auto [begin, end] = by_name.equal_range(std::string(key.name));
  for (auto i = begin; i != end; ++i) {
    others += concat(others.empty() ? "" : ", ", in_quotes(table[i->second].signature, 400));
  }
  if (others.empty()) {
    return concat("it is not registered on ", worker,
                  "; register it there with CONVOY_RPC, in a file that is linked into its program");
  }
  return concat("it has another signature on ", worker, ": ", others, " there, ",
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
