// Agents: how workers meet and know each other. Their calls are in agent_calls.cpp, others' in
// agent_serve.cpp.
#include "agent/agent.h"

#include <algorithm>

#include "agent/agent_impl.h"
#include "agent/peer.h"
#include "base/duration.h"
#include "base/error.h"
#include "base/log.h"
#include "base/wire.h"
#include "os/memory_pool.h"
#include "transport/shm/shm_endpoint.h"

namespace convoy::agent {
namespace {

using namespace std::chrono_literals;

// When a greeting that was not answered is repeated.
constexpr auto kHelloAgain = 50ms;
// So long the goodbye of a worker that leaves may take.
constexpr auto kGoodbyeTime = 100ms;
// Pieces from this size on arrive in memory of their own.
constexpr std::size_t kLeastPlaced = 1025;

void check_name(const std::string& name) {
  const auto allowed = [](char letter) {
    return (letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z') ||
           (letter >= '0' && letter <= '9') || letter == '_' || letter == '-' || letter == ':';
  };
  if (!name.empty() && name.size() <= kMostName && std::all_of(name.begin(), name.end(), allowed)) {
    return;
  }
  fail(ErrorKind::kInvalidArgument, "a worker cannot have the name ", in_quotes(name),
       ": names have 1 to ", kMostName, " letters, digits, '_', '-' or ':'");
}

std::string member_key(std::size_t rank) { return concat("worker/", rank); }

}  // namespace

Agent::Agent(const AgentOptions& options)
    : options_(options),
      call_timeout_(options.call_timeout),
      life_(std::make_shared<AgentLife>(*this)),
      functions_(std::make_unique<Functions>()),
      gathers_(std::make_unique<Gathers>()),
      placed_(std::make_unique<Placed>()),
      executor_(options.threads, options.start_thread) {
  check_name(options.name);
  if (options.call_timeout < 0ns) {
    fail(ErrorKind::kInvalidArgument, "timeout must be >= 0, got ",
         format_duration(options.call_timeout));
  }
  add_handlers(options.handlers);
  auto make = options.make_endpoint;
  if (!make) make = [](transport::Inbox& inbox) { return shm::make_shm_endpoint(inbox); };
  if (options.most_inline > 0ns && !options.start_thread) tick_ = std::make_unique<Tick>(*this);
  owned_endpoint_ = make(*this);
  endpoint_ = owned_endpoint_.get();
}

Agent::~Agent() {
  abort();
  executor_.stop();
  life_->end();
  if (tick_) tick_->stop();
  owned_endpoint_.reset();  // its thread may still look at tick_
}

void Agent::meet(Store& store, int size, const Deadline& deadline) {
  const auto count = static_cast<std::size_t>(std::max(size, 1));
  if (options_.rank >= count) {
    fail(ErrorKind::kInvalidArgument, "rank must be from 0 to size - 1, got rank ", options_.rank,
         " of ", count, " workers");
  }
  // Whoever comes first names the session.
  const std::string proposal = Id::random().to_string();
  const Id session = Id::parse(store.compare_set("session", "", proposal));
  std::string self;
  WireWriter writer(self);
  writer.put_sized<std::uint16_t>(options_.name);
  writer.put_sized<std::uint32_t>(address().encode());
  store.set(member_key(options_.rank), self);
  std::vector<Member> members;
  for (std::size_t rank = 0; rank < count; ++rank) {
    const std::string text = store.get(member_key(rank), deadline);
    WireReader reader(text, "entry of a worker");
    Member member;
    member.name = reader.take_sized<std::uint16_t>();
    member.address = transport::Address::decode(std::string(reader.take_sized<std::uint32_t>()));
    reader.end();
    members.push_back(std::move(member));
  }
  admit(session, members);
}

void Agent::admit(const Id& session, std::span<const Member> members) {
  roster_.check_not_begun();
  CONVOY_CHECK(options_.rank < members.size());
  Roster::Names names;
  for (const Member& member : members) {
    check_name(member.name);
    const auto id = static_cast<WorkerId>(&member - members.data());
    const auto [other, added] = names.emplace(member.name, id);
    if (!added) {
      fail(ErrorKind::kInvalidArgument, "the name ", in_quotes(member.name), " of worker ", id,
           " is not unique: worker ", other->second, " has it, too");
    }
  }
  for (const Member& member : members) roster_.add(member.name, member.address);
  begin(session, std::move(names), Roster::Growth::kConstant);
}

void Agent::begin(const Id& session, Roster::Names names, Roster::Growth growth) {
  std::vector<std::string> workers;
  for (const auto& known : roster_.peers()) workers.push_back(known->worker.name);
  // A simulation has another time.
  if (!options_.start_thread) record_.join(session, options_.rank, workers);
  roster_.begin(session, std::move(names), growth);
  if (listeners_.admitted) {
    listeners_.admitted(options_.rank);
    for (WorkerId id = 0; id < workers.size(); ++id) {
      if (id != options_.rank) listeners_.admitted(id);
    }
  }
  early_hellos_.admit(workers.size());
  hear_early();
}

void Agent::hear_early() {
  for (const auto& hello : early_hellos_.take()) {
    hear_hello(*hello.remote, hello.head, hello.table);
  }
}

void Agent::enter(const Id& session, WorkerId self, std::span<const Member> members) {
  roster_.check_not_begun();
  CONVOY_CHECK(self < members.size());
  Roster::Names names;
  for (const Member& member : members) {
    check_name(member.name);
    const auto id = static_cast<WorkerId>(&member - members.data());
    names.insert_or_assign(member.name, id);
    roster_.add(member.name, member.address);
  }
  options_.rank = self;
  begin(session, std::move(names), Roster::Growth::kGrows);
}

void Agent::admit_more(const Member& member) {
  roster_.check_grows();
  check_name(member.name);
  const auto id = static_cast<WorkerId>(roster_.peers().size());
  roster_.add(member.name, member.address);
  roster_.set_name(id, member.name);
  record_.add_worker(id, member.name);
  if (listeners_.admitted) listeners_.admitted(id);
  early_hellos_.admit(id + 1);
  hear_early();
}

void Agent::dismiss(WorkerId worker, const std::optional<Error>& error) noexcept {
  if (ending_.closed.load() || worker >= roster_.peers().size()) return;
  Peer& peer = *roster_.peers()[worker];
  if (error || !peer.remote.load(std::memory_order_acquire)) return lose(peer, error);
  // Its goodbye comes over the connection, behind what it sent before.
  {
    const std::scoped_lock lock(peer.mutex);
    peer.contact.leaves = true;
  }
  try {
    endpoint_->call_at(now() + kGoodbyeTime, [this, &peer] {
      const InboxScope scope(*this);
      if (!ending_.closed.load(std::memory_order_acquire)) lose(peer, std::nullopt);
    });
  } catch (const std::exception&) {
    lose(peer, std::nullopt);
  }
}

bool Agent::answers(const transport::Address& address) {
  try {
    return !endpoint_->remote(address).lost();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost) throw;
    return false;
  }
}

// --- workers ---

Peer& Agent::peer(WorkerId worker) const {
  if (!roster_.has_begun()) {
    fail(ErrorKind::kInvalidArgument, "the agent of ", in_quotes(options_.name),
         " has not met the other workers yet");
  }
  const PeerTable& peers = roster_.peers();
  if (worker >= peers.size()) {
    fail(ErrorKind::kInvalidArgument, "could not find destination: there is no worker ", worker,
         "; the session has ", peers.size());
  }
  return *peers[worker];
}

const Worker& Agent::self() const { return peer(options_.rank).worker; }

const Worker* Agent::find_worker(std::string_view name) const { return roster_.find(name); }

const Worker& Agent::worker(std::string_view name) const {
  if (const Worker* const found = find_worker(name)) return *found;
  const PeerTable& peers = roster_.peers();
  std::string others;
  for (std::size_t i = 0; i < peers.size() && i < 8; ++i) {
    others += concat(i == 0 ? "" : ", ", peers[i]->worker.name);
  }
  if (peers.size() > 8) others += ", ...";
  fail(ErrorKind::kInvalidArgument, "could not find destination: there is no worker ",
       in_quotes(name), "; there are ", others);
}

const Worker& Agent::worker(std::int64_t rank) const {
  const PeerTable& peers = roster_.peers();
  if (rank >= 0 && static_cast<std::uint64_t>(rank) < peers.size()) {
    return peers[static_cast<std::size_t>(rank)]->worker;
  }
  fail(ErrorKind::kInvalidArgument, "could not find destination: there is no worker ", rank,
       "; ranks are 0 to ", peers.size() - 1);
}

std::vector<Worker> Agent::workers() const {
  std::vector<Worker> workers;
  for (const auto& known : roster_.peers()) workers.push_back(known->worker);
  return workers;
}

bool Agent::is_lost(WorkerId worker) const {
  require_home();
  Peer& known = peer(worker);
  const std::scoped_lock lock(known.mutex);
  return known.contact.lost || known.contact.left;
}

bool Agent::has_left(WorkerId worker) const {
  Peer& known = peer(worker);
  const std::scoped_lock lock(known.mutex);
  return known.contact.left;
}

// --- connections ---

void Agent::connect(Peer& peer) {
  try {
    transport::Remote& remote = endpoint_->remote(peer.address);
    {
      const std::scoped_lock lock(peer.mutex);
      if (peer.contact.open || peer.contact.lost) return;
      remote.user.store(&peer, std::memory_order_release);
      peer.remote.store(&remote, std::memory_order_release);
      peer.contact.hello_again = now() + kHelloAgain;
    }
    // It may have been lost before we knew whose it was: nobody tells us again.
    if (remote.lost())
      return lose(peer, Error(ErrorKind::kPeerLost, concat(remote.name(), " is gone")));
    say_hello(peer, /*asks=*/true);
    arm(now() + kHelloAgain);
  } catch (const Error& error) {
    // Everything else may pass: the next call tries again.
    if (error.kind() != ErrorKind::kPeerLost) throw;
    lose(peer, error);
  }
}

// Nothing is kept if there is no room: what is not answered is said again.
void Agent::say_hello(Peer& peer, bool asks) {
  transport::Remote* const remote = peer.remote.load(std::memory_order_acquire);
  if (!remote) return;
  Hello hello{
      .session = roster_.session(), .worker = options_.rank, .name = options_.name, .asks = asks};
  {
    const std::scoped_lock lock(peer.mutex);
    hello.knows = peer.contact.known;
  }
  const std::string head = encode_hello(hello);
  const std::string table = encode_table(functions_->table());
  const Piece piece{std::as_bytes(std::span(table))};
  try {
    remote->try_send({.kind = static_cast<transport::LetterKind>(LetterType::kHello),
                      .head = std::as_bytes(std::span(head)),
                      .pieces = {&piece, 1}});
  } catch (const Error& error) {
    log_warn("rpc, ", options_.name, ": ", peer.worker.name,
             " cannot be greeted now: ", error.what());
  }
}

void Agent::hear_hello(transport::Remote& remote, std::span<const std::byte> head,
                       std::span<const std::byte> table) {
  Hello hello = decode_hello(head, table);
  const bool early = !early_hellos_.is_anybody_admitted();
  if (early || (roster_.grows() && hello.session == roster_.session() &&
                !early_hellos_.is_admitted(hello.worker))) {
    if (!early_hellos_.keep(remote, head, table)) return;
    // It may have been admitted meanwhile.
    if (early_hellos_.is_admitted(hello.worker)) return hear_early();
    if (!early && listeners_.stranger) listeners_.stranger();
    return;
  }
  // The address is the endpoint's own word, and the store told us whose it is.
  const PeerTable& peers = roster_.peers();
  if (hello.session != roster_.session() || hello.worker >= peers.size() ||
      peers[hello.worker]->worker.name != hello.name ||
      peers[hello.worker]->address != remote.address()) {
    fail(ErrorKind::kInvalidArgument, "it is not a worker of this session");
  }
  Peer& peer = *peers[hello.worker];
  {
    const std::scoped_lock lock(peer.mutex);
    if (peer.contact.lost) return;
    peer.functions.learn(std::move(hello.table));
    peer.contact.known = true;
    peer.contact.open = peer.contact.open || hello.knows;
    remote.user.store(&peer, std::memory_order_release);
    peer.remote.store(&remote, std::memory_order_release);
    // It knows us when it says so, and has to be asked for that.
    if (!peer.contact.open) peer.contact.hello_again = now() + kHelloAgain;
  }
  // Before we knew whose it is: nobody tells us again.
  if (remote.lost()) {
    return lose(peer, Error(ErrorKind::kPeerLost, concat(remote.name(), " is gone")));
  }
  if (hello.asks) say_hello(peer, /*asks=*/false);
  arm(now() + kHelloAgain);
  flush(peer);
}

// --- what arrives ---

std::span<std::byte> Agent::place(transport::Remote& remote, const transport::Arrival&, std::size_t,
                                  std::size_t bytes) noexcept {
  if (bytes < kLeastPlaced || !remote.user.load(std::memory_order_acquire)) return {};
  try {
    auto& pool = MemoryPool::instance();
    std::shared_ptr<void> memory(pool.allocate(bytes), [&pool](void* data) { pool.free(data); });
    auto* const data = static_cast<std::byte*>(memory.get());
    placed_->memory.lock()->emplace(data, Placed::Entry{&remote, std::move(memory)});
    return {data, bytes};
  } catch (const std::exception&) {
    return {};  // the endpoint has a place for it, or says why not
  }
}

// Parts that lie where place() said own that memory from now on.
void Agent::adopt_parts(std::vector<Part>& parts) {
  for (Part& part : parts) {
    if (part.where != Part::Where::kPlaced || part.bytes.empty()) continue;
    auto memory = placed_->memory.lock();
    const auto found = memory->find(part.bytes.data());
    CONVOY_CHECK(found != memory->end(), "a piece in memory that was not given");
    part.hold = std::move(found->second.memory);
    memory->erase(found);
  }
}

void Agent::require_home() const {
  if (home_.is_here()) [[likely]]
    return;
  fail(ErrorKind::kUnsupported, options_.name,
       ": a session cannot be used in a forked child of the process that made it");
}

void Agent::arrived(transport::Remote& remote, transport::Arrival&& arrival) noexcept {
  const InboxScope scope(*this);
  if (ending_.closed.load(std::memory_order_acquire)) return;
  auto* const peer = static_cast<Peer*>(remote.user.load(std::memory_order_acquire));
  try {
    adopt_parts(arrival.parts);
    if (static_cast<LetterType>(arrival.kind) == LetterType::kHello) {
      if (arrival.parts.size() != 1)
        fail(ErrorKind::kInvalidArgument, "a hello without its table of functions");
      return hear_hello(remote, arrival.head, arrival.parts[0].bytes);
    }
    if (!peer) fail(ErrorKind::kInvalidArgument, "it has not said who it is");
    take_letter(*peer, arrival);
  } catch (const std::exception& error) {
    const std::string why = concat("it sent something unusable: ", error.what());
    if (const auto more = complaints_.lock()->take(now())) {
      log_warn("rpc, ", options_.name, ": ", peer ? peer->worker.name : remote.name(), ": ", why,
               *more == 0 ? "" : concat(" (and ", *more, " more that were not logged)"));
    }
    if (peer) lose(*peer, Error(ErrorKind::kPeerLost, why));
    remote.cut();
  }
}

void Agent::take_letter(Peer& peer, transport::Arrival& arrival) {
  // Whoever writes to us knows us.
  if (!peer.wrote.load(std::memory_order_relaxed)) [[unlikely]] {
    peer.wrote.store(true, std::memory_order_relaxed);
    {
      const std::scoped_lock lock(peer.mutex);
      peer.contact.open = !peer.contact.lost;
    }
    flush(peer);
  }
  switch (static_cast<LetterType>(arrival.kind)) {
    case LetterType::kCall: return hear_call(peer, arrival);
    case LetterType::kReply: return hear_reply(peer, arrival);
    case LetterType::kError: return hear_error(peer, arrival);
    case LetterType::kCancel: return hear_cancel(peer, arrival);
    case LetterType::kGather: return hear_gather(peer, arrival);
    case LetterType::kGatherAsk: return hear_gather_ask(peer, arrival);
    case LetterType::kGoodbye:
      if (!arrival.head.empty() || !arrival.parts.empty()) {
        fail(ErrorKind::kInvalidArgument, "a goodbye that is not empty");
      }
      return lose(peer, std::nullopt);
    case LetterType::kHello: break;
  }
  const auto handler = listeners_.letters.find(arrival.kind);
  if (handler == listeners_.letters.end()) {
    fail(ErrorKind::kInvalidArgument, "a message of unknown kind ", arrival.kind);
  }
  handler->second(peer.worker, arrival.head, std::move(arrival.parts));
}

void Agent::lost(transport::Remote& remote, const Error& error) noexcept {
  const InboxScope scope(*this);
  if (ending_.closed.load(std::memory_order_acquire)) return;
  std::erase_if(*placed_->memory.lock(),
                [&](const auto& entry) { return entry.second.remote == &remote; });
  early_hellos_.drop(remote);
  if (auto* const peer = static_cast<Peer*>(remote.user.load(std::memory_order_acquire))) {
    lose(*peer, error);
  }
}

// No error: it has left by itself.
void Agent::lose(Peer& peer, const std::optional<Error>& error) noexcept {
  Ended ended;
  std::string why;
  bool left = false;
  {
    const std::scoped_lock lock(peer.mutex);
    if (peer.contact.lost) return;
    peer.contact.lose(error);
    left = peer.contact.left;
    why = concat(peer.worker.name, " is lost: ", peer.contact.why);
    while (Call* const call = peer.calls.first) {
      peer.count_error(*call);
      record_.ended(call->ticket_, CallRecord::End::kFailed, quick_now());
      peer.calls.unlink(*call);
      ended.calls.emplace_back(call, failure_of(*call, ErrorKind::kPeerLost, why));
    }
    for (auto& queue : peer.outbox.queues) {
      for (QueuedLetter& letter : std::exchange(queue, {})) {
        ended.letters.emplace_back(std::move(letter.on_sent), why);
      }
    }
    peer.requests.cancel_all();
  }
  ended.tell();
  if (!left) {
    for (const auto& listener : listeners_.lost) {
      listener(peer.worker, Error(ErrorKind::kPeerLost, why));
    }
  }
  listeners_.tell_gone(peer.worker, why);
  endpoint_->wake();
}

void Agent::accompany(std::shared_ptr<Companion> companion) {
  roster_.check_not_begun();
  listeners_.companions.push_back(std::move(companion));
}

const transport::Address& Agent::address_of(WorkerId worker) const { return peer(worker).address; }

void Agent::watch(WorkerId worker) noexcept {
  try {
    Peer& known = peer(worker);
    if (!known.remote.load(std::memory_order_acquire)) connect(known);
  } catch (const Error& error) {
    log_warn("rpc, ", options_.name, ": worker ", worker, " cannot be reached: ", error.what());
  }
}

void Agent::room(transport::Remote& remote) noexcept {
  const InboxScope scope(*this);
  if (ending_.closed.load(std::memory_order_acquire)) return;
  if (auto* const peer = static_cast<Peer*>(remote.user.load(std::memory_order_acquire))) {
    flush(*peer);
  }
}

// --- threads ---

namespace {
thread_local const Agent* agent_inbox = nullptr;
}

InboxScope::InboxScope(const Agent& agent) noexcept : before_(std::exchange(agent_inbox, &agent)) {}
InboxScope::~InboxScope() { agent_inbox = before_; }
bool InboxScope::is_here(const Agent* agent) noexcept {
  return agent_inbox && (!agent || agent_inbox == agent);
}

bool Agent::in_own_thread() const noexcept {
  return executor_.is_here() || InboxScope::is_here(this);
}

}  // namespace convoy::agent
