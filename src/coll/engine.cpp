#include "coll/engine.h"

#include <bit>
#include <cstring>

#include "base/error.h"
#include "coll/engine_wait.h"
#include "coll/report.h"
#include "os/flight_recorder.h"
#include "os/machine.h"

namespace convoy::coll {
namespace {

// Up to here data is copied into the payload even if it lies in shared memory: two ranks that work
// on each other's memory must wait for each other once more.
constexpr std::size_t kCopiedBytes = std::size_t{8} << 10;

int checked_size(int size, const std::string& name) {
  if (size >= 1 && size <= kMaxRanks) return size;
  fail(ErrorKind::kInvalidArgument, "group \"", name, "\": ", size,
       " ranks; shared memory takes 1 to ", kMaxRanks);
}

MeshOptions mesh_options(const Layout& layout, const EngineOptions& options) {
  return {.name = options.name,
          .control_bytes = layout.total_bytes(),
          .cleared_bytes = layout.cleared_bytes(),
          .deadline = options.deadline,
          .ended = options.ended};
}

CoreSet all_cores(const Mesh& mesh) {
  CoreSet all;
  for (int r = 0; r < mesh.size(); ++r) all.add(mesh.process(r).cores);
  return all;
}

// Near cores hand over cached lines faster than memory does; far ones do not. Where ranks outnumber
// cores a probe would only measure the scheduler.
Way first_guess(const CoreSet& cores, int ranks) {
  if (ranks > usable_cores(cores)) return Way::kCached;
  static const CoreDistance measured = measure_core_distance(cores);
  return measured.near() ? Way::kCached : Way::kStreaming;
}

}  // namespace

Reduction Call::reduction(int ranks) const {
  return {.type = signature.type,
          .op = signature.reduce,
          .ranks = ranks,
          .factor = std::bit_cast<double>(signature.factor),
          .rounding = signature.rounding};
}

Engine::Engine(Store& store, int rank, int size, const EngineOptions& options)
    : rank_(rank),
      size_(checked_size(size, options.name)),
      name_(options.name),
      layout_(size),
      mesh_(Mesh::create(store, rank, size, mesh_options(layout_, options))),
      base_(mesh_->control().data()),
      policy_(WaitPolicy::for_ranks(size, usable_cores(all_cores(*mesh_)))),
      bell_(std::make_shared<Bell>(group().bell, head(rank).mail)),
      workers_(options.threads),
      may_read_private_(options.read_private) {
  const auto n = static_cast<std::size_t>(size);
  readable_.resize(n);
  writable_.resize(n);
  stretches_.resize(2 * n);
  counts_.resize(n * n);
  head(rank_).probe.store(reinterpret_cast<std::uintptr_t>(this), std::memory_order_relaxed);
  try {
    if (const int fd = flight::Recorder::instance().descriptor(); fd >= 0) {
      const std::uint64_t inode = Segment::key_of(fd).inode;
      head(rank_).flight.store(static_cast<std::uint64_t>(fd) + 1, std::memory_order_relaxed);
      head(rank_).flight_inode.store(inode, std::memory_order_relaxed);
    }
    mesh_->subscribe(bell_);
    if (rank == 0 && size > 1) tuner_.emplace(first_guess(all_cores(*mesh_), size));
  } catch (const std::exception& error) {
    // The others have their group already: they hear that this rank has not.
    abort(concat("it could not make its part of it: ", error.what()));
    leave();
    throw;
  }
}

Engine::~Engine() { leave(); }

void Engine::leave() noexcept {
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
  wake_all();
}

void Engine::abort(const std::string& why) noexcept {
  const std::uint64_t next = last_completed() + 1;
  record_failure(next, ErrorKind::kPeerLost, concat("rank ", rank_, " aborted the group: ", why));
}

void Engine::run(const Call& call, std::uint64_t number) {
  const Running running{&call, number};
  started_.store(number, std::memory_order_release);
  check_failed(running);
  if (has_table(call.signature.op)) {
    CountTable& table = layout_.table(base_, rank_, number);
    std::copy(call.lists->send.begin(), call.lists->send.end(), table.send.begin());
    std::copy(call.lists->receive.begin(), call.lists->receive.end(), table.receive.begin());
    const auto hashes = [&](const ShapeList& shapes, auto& words) {
      for (std::size_t r = 0; r < static_cast<std::size_t>(size_); ++r) {
        words[r] = shapes.size() == 0 ? 0 : hash_shape(shapes.at(r));
      }
    };
    hashes(call.lists->send_shapes, table.send_shape);
    hashes(call.lists->receive_shapes, table.receive_shape);
  }
  try {
    if (size_ > 1) {
      arrive(running);
      compare_signatures(running);
    }
    if (has_table(call.signature.op)) compare_tables(running);
    move_data(running);
    if (size_ > 1 && group().doubted.load(std::memory_order_acquire) >= number) [[unlikely]]
      confirm(running);
  } catch (const Error&) {
    // Others may have seen this rank arrive, and go on.
    if (broken() || closing_.load(std::memory_order_acquire)) quarantine_buffers(running);
    throw;
  }
  completed_.store(number, std::memory_order_release);
}

void Engine::move_data(const Running& running) {
  switch (running.call->signature.op) {
    case OpKind::kBarrier:
    case OpKind::kMonitoredBarrier: break;
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV: combine(running); break;
    case OpKind::kBroadcast:
    case OpKind::kAllGather:
    case OpKind::kGather:
    case OpKind::kScatter:
    case OpKind::kAllToAll:
    case OpKind::kAllGatherV:
    case OpKind::kGatherV:
    case OpKind::kScatterV:
    case OpKind::kAllToAllV: move(running); break;
    case OpKind::kNone: fail(ErrorKind::kInternal, "no operation");
  }
}

// Publishes signature, place and small data, and waits for everyone's.
void Engine::arrive(const Running& running) {
  const Call& call = *running.call;
  Slot& mine = slot(rank_, running.number);
  mine.signature = call.signature;
  offer_data(call, running.number, mine);
  mine.arrived.store(running.number, std::memory_order_release);
  wait_all(running, [&](int r) {
    return slot(r, running.number).arrived.load(std::memory_order_acquire) >= running.number;
  });
  // Only now: who is not the last to arrive has nobody to wake, and the fence in here costs as much
  // as a small operation if the arrival is still on its way to the other cores.
  ring_sleepers();
}

// Small data is copied to where everyone can read it without coming back; of large data only the
// place is told. Data in shared memory counts as large much sooner: it needs no copy.
void Engine::offer_data(const Call& call, std::uint64_t number, Slot& mine) {
  const std::size_t bytes = call.input_bytes;
  if (bytes <= kInlineBytes) {
    if (bytes != 0 && call.input) {
      std::memcpy(mine.small.data(), call.input, bytes);
    } else {
      copy_from(call.input_view(), 0, mine.small.data(), bytes, StoreHint::kCached);
    }
    if (call.output_bytes <= kCopiedBytes) return;
  } else if (bytes <= kCopiedBytes) {
    copy_from(call.input_view(), 0, layout_.payload(base_, rank_, number), bytes,
              StoreHint::kCached);
    if (call.output_bytes <= kCopiedBytes) return;
  }
  auto& fabric = shm::Fabric::instance();
  if (tuner_) {
    for (int route = 0; route < kRoutes; ++route) {
      mine.ways[static_cast<std::size_t>(route)] =
          tuner_->choose(tuned_kind(call), static_cast<Route>(route), call.bytes());
    }
  }
  // Every stretch must be shared, and there must be room to tell where they are.
  auto* places = reinterpret_cast<shm::Location*>(layout_.payload(base_, rank_, number));
  const auto locate = [&](const View& view, shm::Location& one, std::size_t first) {
    const auto stretches = view.stretches();
    bool shared = view.bytes() != 0;
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      const Stretch& each = stretches[i];
      const auto found = each.bytes ? fabric.locate(each.data, each.bytes) : shm::Location{};
      shared &= found || each.bytes == 0;
      if (view.contiguous()) {
        one = found ? found : shm::Location{0, reinterpret_cast<std::uintptr_t>(each.data)};
      } else if ((first + i + 1) * sizeof(shm::Location) <= layout_.eager_bytes()) {
        places[first + i] = found;
      } else {
        shared = false;
      }
    }
    return std::pair(shared, stretches.size());
  };
  if (bytes > kCopiedBytes) {
    const auto [shared, stretches] = locate(call.input_view(), mine.input, 0);
    mine.stretches = static_cast<std::uint16_t>(std::min<std::size_t>(stretches, 0xffff));
    mine.carrier = shared ? Carrier::kShared : Carrier::kPrivate;
    mine.shared_output = 0;
    // Only results that others write need to be known.
    const OpKind op = call.signature.op;
    if (op == OpKind::kAllReduce || op == OpKind::kReduce) {
      mine.shared_output = locate(call.output_view(), mine.output, stretches).first ? 1 : 0;
    }
    if (!shared && bytes <= layout_.eager_bytes()) {
      // The places of outputs would be overwritten.
      if (!call.output_view().contiguous()) mine.shared_output = 0;
      copy_from(call.input_view(), 0, layout_.payload(base_, rank_, number), bytes,
                StoreHint::kCached);
      mine.carrier = Carrier::kPayload;
    }
  } else if (call.signature.op == OpKind::kBroadcast) {
    mine.stretches = 0;
    mine.shared_output = locate(call.output_view(), mine.output, 0).first ? 1 : 0;
  }
}

Carrier Engine::carrier_of(const Running& running, int rank, std::size_t contribution) {
  if (contribution == 0) return Carrier::kNone;
  if (contribution <= kInlineBytes) return Carrier::kInline;
  if (contribution <= kCopiedBytes) return Carrier::kPayload;
  const Carrier carrier = slot(rank, running.number).carrier;
  const bool fits = carrier == Carrier::kPayload && contribution <= layout_.eager_bytes();
  if (!fits && carrier != Carrier::kShared && carrier != Carrier::kPrivate) [[unlikely]]
    fail_nonsense(running, rank);
  return carrier;
}

void Engine::copy_from(const View& source, std::size_t begin, std::byte* to, std::size_t length,
                       StoreHint hint) {
  source.for_each(begin, length, [&](std::byte* from, std::size_t done, std::size_t bytes) {
    workers_.split(bytes, kLine, [&](std::size_t first, std::size_t last) {
      copy(to + done + first, from + first, last - first, hint);
    });
  });
}

void Engine::copy_to(const View& target, std::size_t begin, const std::byte* from,
                     std::size_t length, StoreHint hint) {
  target.for_each(begin, length, [&](std::byte* to, std::size_t done, std::size_t bytes) {
    workers_.split(bytes, kLine, [&](std::size_t first, std::size_t last) {
      copy(to + first, from + done + first, last - first, hint);
    });
  });
}

// Every rank looks at all signatures and finds the same first difference, so all tell the same.
void Engine::compare_signatures(const Running& running) {
  const Signature& mine = running.call->signature;
  bool equal = true;
  for (int r = 0; r < size_; ++r) equal &= slot(r, running.number).signature == mine;
  if (equal) [[likely]]
    return;
  const auto texts = exchange_texts(running, describe_call(*running.call));
  std::vector<Called> calls;
  for (int r = 0; r < size_; ++r) {
    calls.push_back(
        Called::parse(slot(r, running.number).signature, texts[static_cast<std::size_t>(r)]));
  }
  fail_signatures(speaker(running), std::move(calls));
}

// For ranks that all found the same disagreement. No data moves then, so that everyone's payload is
// free; it is used again two operations later, as always.
std::vector<std::string> Engine::exchange_texts(const Running& running, std::string_view mine) {
  const auto place = [&](int r) { return layout_.payload(base_, r, running.number); };
  const std::uint64_t length = std::min(mine.size(), layout_.eager_bytes() - sizeof(length));
  std::memcpy(place(rank_), &length, sizeof length);
  std::memcpy(place(rank_) + sizeof length, mine.data(), length);
  publish_step(++step_);
  wait_steps(running, step_);
  std::vector<std::string> texts;
  for (int r = 0; r < size_; ++r) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, place(r), sizeof bytes);
    bytes = std::min<std::uint64_t>(bytes, layout_.eager_bytes() - sizeof bytes);
    texts.emplace_back(reinterpret_cast<const char*>(place(r)) + sizeof bytes, bytes);
  }
  return texts;
}

// Also takes the counts over: what is used must be what was compared. Those of this rank's own
// memory are its own, whatever stands in the table.
void Engine::compare_tables(const Running& running) {
  const auto& lists = *running.call->lists;
  for (int s = 0; s < size_; ++s) {
    for (int t = 0; t < size_; ++t) {
      const auto to = static_cast<std::size_t>(t), from = static_cast<std::size_t>(s);
      const auto sent =
          s == rank_ ? lists.send[to] : layout_.table(base_, s, running.number).send[to];
      const auto expected =
          t == rank_ ? lists.receive[from] : layout_.table(base_, t, running.number).receive[from];
      if (sent != expected) {
        fail_counts(speaker(running), running.call->signature.type, {s, t, sent, expected});
      }
      counts_[from * static_cast<std::size_t>(size_) + to] = sent;
      if (layout_.table(base_, s, running.number).send_shape[to] !=
          layout_.table(base_, t, running.number).receive_shape[from]) {
        fail_pair(running, s, t);
      }
    }
  }
}

// Tells the shape that one rank sends and the one that the other expects.
void Engine::fail_pair(const Running& running, int source, int target) {
  const auto& lists = *running.call->lists;
  const auto text = [](const ShapeList& shapes, int rank) {
    return shapes.size() == 0 ? "" : to_string(shapes.at(static_cast<std::size_t>(rank)));
  };
  // Of the pair's two ends each tells its own; where a rank sends to itself, both.
  const auto mine = concat(rank_ == source ? text(lists.send_shapes, target) : "", "\n",
                           rank_ == target ? text(lists.receive_shapes, source) : "");
  const auto all = size_ > 1 ? exchange_texts(running, mine) : std::vector<std::string>{mine};
  const auto& sent = all[static_cast<std::size_t>(source)];
  const auto& expected = all[static_cast<std::size_t>(target)];
  fail_shapes(speaker(running), {source, target, sent.substr(0, sent.find('\n')),
                                 expected.substr(expected.find('\n') + 1)});
}

// A rank may have arrived and then left: its memory must be left alone.
void Engine::check_members(const Running& running) {
  if (group().departures.load(std::memory_order_acquire) == 0) return;
  for (int r = 0; r < size_; ++r) {
    const std::uint64_t left = head(r).left.load(std::memory_order_acquire);
    if (r != rank_ && left != 0 && left - 1 < running.number) fail_peer(running, r);
  }
}

void Engine::publish_step(std::uint64_t step) {
  head(rank_).step.store(step, std::memory_order_release);
  ring_sleepers();
}

void Engine::wait_steps(const Running& running, std::uint64_t step) {
  wait_all(running, [&](int r) { return head(r).step.load(std::memory_order_acquire) >= step; });
}

// It may be still on its way here. In slices: other trouble ends the wait, too.
std::byte* Engine::peer_memory(const Running& running, int rank, const shm::Location& location,
                               std::size_t bytes) {
  constexpr std::chrono::milliseconds kSlice(50);
  for (;;) {
    try {
      return mesh_->resolve(rank, location, bytes,
                            std::min(call_deadline(running), Deadline::after(kSlice)));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout || call_deadline(running).expired()) {
        fail_run(running, error.kind(), concat("memory of rank ", rank, ": ", error.what()));
      }
    }
    if (!troubled()) continue;
    check_failed(running);
    if (const int dead = casualty(running.number); dead >= 0) fail_peer(running, dead);
  }
}

void Engine::fail_nonsense(const Running& running, int rank) {
  fail_run(running, ErrorKind::kInternal,
           concat("rank ", rank, " (pid ", mesh_->process(rank).pid,
                  ") wrote invalid data into the group's memory; something may overwrite it"));
}

// Where the stretches of a rank's buffer are, behind `first` others.
std::span<const shm::Location> Engine::peer_places(const Running& running, int rank,
                                                   std::size_t first, std::size_t count) {
  const std::size_t room = layout_.eager_bytes() / sizeof(shm::Location);
  if (first > room || count > room - first) fail_nonsense(running, rank);
  const auto* places =
      reinterpret_cast<const shm::Location*>(layout_.payload(base_, rank, running.number));
  return {places + first, count};
}

// A rank's input or output in this process. Where it has several stretches they are as long as
// those of `like`.
View Engine::peer_view(const Running& running, int rank, Side side, const View& like) {
  const Slot& theirs = slot(rank, running.number);
  if (like.contiguous()) {
    const auto& place = side == Side::kInput ? theirs.input : theirs.output;
    return {peer_memory(running, rank, place, like.bytes()), like.bytes()};
  }
  const auto places =
      peer_places(running, rank, side == Side::kOutput ? theirs.stretches : std::size_t{0},
                  like.stretches().size());
  const auto at = static_cast<std::size_t>(side == Side::kInput ? rank : size_ + rank);
  auto& stretches = stretches_[at];
  stretches.clear();
  for (const Stretch& each : like.stretches()) {
    std::byte* data =
        each.bytes ? peer_memory(running, rank, places[stretches.size()], each.bytes) : nullptr;
    stretches.push_back({data, each.bytes, each.begin});
  }
  return View(stretches);
}

}  // namespace convoy::coll
