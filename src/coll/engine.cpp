#include "coll/engine.h"

#include <bit>
#include <cstring>

#include "base/error.h"
#include "coll/engine_wait.h"
#include "os/machine.h"

namespace convoy::coll {
namespace {

int checked_size(int size, const std::string& name) {
  if (size >= 1 && size <= kMaxRanks) return size;
  fail(ErrorKind::kInvalidArgument, "group \"", name, "\": ", size,
       " ranks; shared memory takes 1 to ", kMaxRanks);
}

shm::MeshOptions mesh_options(const Layout& layout, const EngineOptions& options) {
  return {.name = options.name,
          .control_bytes = layout.total_bytes(),
          .cleared_bytes = layout.cleared_bytes(),
          .deadline = options.deadline};
}

CoreSet all_cores(const shm::Mesh& mesh) {
  CoreSet all;
  for (int r = 0; r < mesh.size(); ++r) all.add(mesh.process(r).cores);
  return all;
}

// Near cores hand over cached lines faster than memory does; far ones do not. Where ranks outnumber
// cores a probe would only measure the scheduler.
StoreHint first_guess(const CoreSet& cores, int ranks) {
  if (ranks > usable_cores(cores)) return StoreHint::kCached;
  static const CoreDistance measured = measure_core_distance(cores);
  return measured.near() ? StoreHint::kCached : StoreHint::kStreaming;
}

}  // namespace

Reduction Call::reduction(int ranks) const {
  return {.type = signature.type,
          .op = signature.reduce,
          .ranks = ranks,
          .factor = std::bit_cast<double>(signature.factor)};
}

Engine::Engine(Store& store, int rank, int size, const EngineOptions& options)
    : rank_(rank),
      size_(checked_size(size, options.name)),
      name_(options.name),
      layout_(size),
      mesh_(shm::Mesh::create(store, rank, size, mesh_options(layout_, options))),
      base_(mesh_->control().data()),
      policy_(WaitPolicy::for_ranks(size, usable_cores(all_cores(*mesh_)))),
      bell_(std::make_shared<Bell>(group().bell)),
      workers_(options.threads) {
  const auto n = static_cast<std::size_t>(size);
  sources_.resize(n);
  targets_.resize(n);
  inputs_.resize(n);
  outputs_.resize(n);
  mesh_->subscribe(bell_);
  if (rank == 0 && size > 1) tuner_.emplace(first_guess(all_cores(*mesh_), size));
}

Engine::~Engine() {
  close();
  {
    const std::lock_guard lock(bell_->mutex);
    bell_->bell = nullptr;
  }
  // Rank 0 owns the memory that all still look at: it is not used again before all have left.
  mesh_->keep_control_until([peers = mesh_->peers(), layout = layout_, base = base_] {
    for (std::size_t r = 0; r < peers.size(); ++r) {
      const auto& head = layout.rank(base, static_cast<int>(r));
      const bool dead = peers[r] && peers[r]->lost();
      if (!dead && head.departed.load(std::memory_order_acquire) == 0) return false;
    }
    return true;
  });
  head(rank_).departed.store(1, std::memory_order_release);
}

void Engine::close() noexcept {
  closing_.store(true, std::memory_order_seq_cst);
  std::uint64_t member = 0;
  if (head(rank_).left.compare_exchange_strong(member, 1 + last_completed(),
                                               std::memory_order_acq_rel)) {
    group().departures.fetch_add(1, std::memory_order_acq_rel);
  }
  group().bell.value.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(group().bell.value);
}

void Engine::abort(const std::string& why) noexcept {
  const std::uint64_t next = last_completed() + 1;
  record_failure(next, ErrorKind::kPeerLost, concat("rank ", rank_, " aborted the group: ", why));
}

void Engine::run(const Call& call, std::uint64_t number) {
  const Running running{&call, number};
  check_failed(running);
  if (size_ > 1) {
    arrive(running);
    compare_signatures(running);
  }
  try {
    move_data(running);
  } catch (const Error&) {
    if (broken()) quarantine_buffers(running);
    throw;
  }
  completed_.store(number, std::memory_order_release);
}

void Engine::move_data(const Running& running) {
  switch (running.call->signature.op) {
    case OpKind::kBarrier: break;
    case OpKind::kAllReduce: all_reduce(running); break;
    case OpKind::kBroadcast: broadcast(running); break;
    case OpKind::kNone: fail(ErrorKind::kInternal, "no operation");
  }
}

// Publishes signature, place and small data, and waits for everyone's.
void Engine::arrive(const Running& running) {
  const Call& call = *running.call;
  const std::size_t bytes = call.bytes();
  const bool sends = call.signature.op == OpKind::kAllReduce ||
                     (call.signature.op == OpKind::kBroadcast &&
                      call.signature.root == static_cast<std::uint32_t>(rank_));
  Slot& mine = slot(rank_, running.number);
  mine.signature = call.signature;
  if (bytes <= kInlineBytes) {
    if (sends && bytes != 0) std::memcpy(mine.small.data(), call.input, bytes);
  } else if (bytes <= layout_.eager_bytes()) {
    if (sends) std::memcpy(layout_.payload(base_, rank_, running.number), call.input, bytes);
  } else {
    auto& fabric = shm::Fabric::instance();
    mine.input = call.input ? fabric.locate(call.input, bytes) : shm::Location{};
    mine.output = fabric.locate(call.output, bytes);
    if (tuner_)
      mine.hints = {tuner_->choose(Route::kDirect, bytes), tuner_->choose(Route::kStaged, bytes)};
  }
  mine.arrived.store(running.number, std::memory_order_release);
  wait_all(running, [&](int r) {
    return slot(r, running.number).arrived.load(std::memory_order_acquire) >= running.number;
  });
  // Only now: who is not the last to arrive has nobody to wake, and the fence in here costs as much
  // as a small operation if the arrival is still on its way to the other cores.
  ring_sleepers();
}

// Every rank looks at all signatures and finds the same first difference, so all tell the same.
void Engine::compare_signatures(const Running& running) {
  const Signature& mine = running.call->signature;
  bool equal = true;
  for (int r = 0; r < size_; ++r) equal &= slot(r, running.number).signature == mine;
  if (equal) [[likely]]
    return;
  const Signature& first = slot(0, running.number).signature;
  for (int r = 1; r < size_; ++r) {
    const Signature& other = slot(r, running.number).signature;
    if (other == first) continue;
    fail(ErrorKind::kInvalidArgument, prefix(running), "ranks disagree: rank 0 called ",
         first.to_string(), ", rank ", r, " called ", other.to_string(),
         "; no data was touched; every rank must make the same calls in the same order");
  }
}

void Engine::publish_step(std::uint64_t step) {
  head(rank_).step.store(step, std::memory_order_release);
  ring_sleepers();
}

void Engine::wait_steps(const Running& running, std::uint64_t step) {
  wait_all(running, [&](int r) { return head(r).step.load(std::memory_order_acquire) >= step; });
}

std::byte* Engine::peer_memory(const Running& running, int rank, const shm::Location& location,
                               std::size_t bytes) {
  try {
    return mesh_->resolve(rank, location, bytes, running.call->deadline);
  } catch (const Error& error) {
    fail_run(running, error.kind(), concat("memory of rank ", rank, ": ", error.what()));
  }
}

}  // namespace convoy::coll
