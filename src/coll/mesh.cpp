#include "coll/mesh.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <sstream>

#include "base/error.h"
#include "store/ended.h"

namespace convoy::coll {
namespace {

constexpr const char* kFailedKey = "failed";
constexpr const char* kControlKey = "control";

std::string hello_key(int rank) { return concat("process/", rank); }

// What a rank has written under kFailedKey: the kind's number and the text.
void rethrow(const std::string& failure) {
  if (failure.empty()) return;
  const int kind = std::clamp(failure.front() - '0', 0, static_cast<int>(ErrorKind::kInternal));
  throw Error(static_cast<ErrorKind>(kind), failure.substr(1));
}

// Between looks at who is gone: short at first, as ranks come together soon or late.
constexpr std::chrono::milliseconds kFirstSlice(10);
constexpr std::chrono::milliseconds kLastSlice(50);
// A dying process closes its descriptors a moment before its pidfd tells how it ended.
constexpr std::chrono::milliseconds kExitGrace(500);

struct ControlInfo {
  shm::Location location;
  std::size_t bytes = 0;
  std::uint64_t token = 0;  // random; written into the control memory by every rank

  std::string encode() const {
    return concat(location.segment, " ", location.offset, " ", bytes, " ", token);
  }
  static ControlInfo decode(const std::string& text) {
    std::istringstream in(text);
    ControlInfo info;
    if (!(in >> info.location.segment >> info.location.offset >> info.bytes >> info.token)) {
      fail(ErrorKind::kInvalidArgument, "the store holds no control memory: '", text, "'");
    }
    return info;
  }
};

// The control memory begins with one word a rank, in which it proves that it maps this memory.
std::atomic<std::uint64_t>& proof_word(std::byte* control, int rank) {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(control)[rank];
}

std::size_t proof_bytes(int size) {
  return (static_cast<std::size_t>(size) * sizeof(std::uint64_t) + 4095) / 4096 * 4096;
}

std::uint64_t proof_of(std::uint64_t token, int rank) {
  return hash_text(concat(token, "/", rank)) | 1;
}

}  // namespace

std::shared_ptr<Mesh> Mesh::create(Store& store, int rank, int size, const MeshOptions& options) {
  if (size < 1 || rank < 0 || rank >= size) {
    fail(ErrorKind::kInvalidArgument, "group \"", options.name, "\": rank ", rank, " of ", size,
         "; a rank lies between 0 and size - 1");
  }
  std::shared_ptr<Mesh> mesh(new Mesh(rank, size));
  mesh->join(store, options);
  return mesh;
}

Mesh::~Mesh() = default;

void Mesh::join(Store& store, const MeshOptions& options) {
  const auto fail_all = [&](ErrorKind kind, const std::string& what) {
    const std::string text =
        concat("making group \"", options.name, "\", rank ", rank_, " of ", size(), ": ", what);
    // Tells the others; the first failure counts, here too.
    std::string first = concat(static_cast<int>(kind), text);
    try {
      first = store.compare_set(kFailedKey, "", first);
    } catch (const Error&) {  // the store is gone too: each rank finds that out by itself
    }
    rethrow(first);
    throw Error(kind, text);
  };
  try {
    meet(store, options);
    connect(store, options);
    share_control(store, options);
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.starts_with("making group ")) throw;  // another rank's failure, already complete
    fail_all(error.kind(), text);
  }
}

// Waits for a key, but not for ranks that have given up or are gone.
std::string Mesh::get(Store& store, const std::string& key, const MeshOptions& options) const {
  for (auto slice = kFirstSlice;; slice = std::min(2 * slice, kLastSlice)) {
    try {
      return store.get(key, std::min(Deadline::after(slice), options.deadline));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    check(store, options);
    if (options.deadline.expired()) fail(ErrorKind::kTimeout, "timed out waiting for '", key, "'");
  }
}

void Mesh::check(Store& store, const MeshOptions& options) const {
  const auto throw_failure = [&] {
    if (const auto failure = store.try_get(kFailedKey)) rethrow(*failure);
  };
  throw_failure();
  try {
    check_alive(options);
  } catch (const Error&) {
    // A rank that has given up may have ended: then it has said why before.
    throw_failure();
    throw;
  }
}

void Mesh::check_alive(const MeshOptions& options) const {
  const auto fail_lost = [](int rank, const std::string& who, const std::string& how) {
    fail(ErrorKind::kPeerLost, "rank ", rank, who, " ", how,
         " while the group was being made; read rank ", rank, "'s log first");
  };
  bool all_met = true;
  for (int r = 0; r < size(); ++r) {
    const MeshRank& member = members_[at(r)];
    all_met &= member.met;
    const auto who = [&] {
      return concat(" (pid ", member.info.pid, ", host ", member.info.host, ")");
    };
    if (member.peer) {
      if (const auto loss = member.peer->loss()) fail_lost(r, who(), *loss);
    } else if (member.watched) {
      const auto [pid, start] = std::pair(member.info.pid, member.info.start_time);
      const auto life = member.pidfd ? liveness_by(member.pidfd.get()) : liveness_of(pid, start);
      if (life == Liveness::kDead) fail_lost(r, who(), shm::describe_end(pid, member.pidfd.get()));
    }
  }
  if (all_met || !options.ended) return;
  for (const auto& [rank, how] : options.ended()) {
    if (rank < size() && !members_[at(rank)].met) fail_lost(rank, "", how);
  }
}

void Mesh::meet(Store& store, const MeshOptions& options) {
  store.set(hello_key(rank_), shm::Fabric::instance().self().encode());
  std::string missing;
  for (int other = 0; other < size(); ++other) {
    try {
      introduce(other, shm::ProcessInfo::decode(get(store, hello_key(other), options)));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      missing += concat(missing.empty() ? "" : ", ", other);
    }
  }
  if (!missing.empty()) {
    fail(ErrorKind::kTimeout, "these ranks did not come by the deadline: ", missing,
         "; were they started, and with the same store and group name?", ended_in_job());
  }
}

// From now on its death is seen, by whoever has met it.
void Mesh::introduce(int rank, shm::ProcessInfo info) {
  const shm::ProcessInfo& self = shm::Fabric::instance().self();
  MeshRank& member = members_[at(rank)];
  member.info = std::move(info);
  member.met = true;
  if (member.info.id == self.id || member.info.boot != self.boot ||
      member.info.domain != self.domain) {
    return;  // itself, or one that connect() refuses
  }
  member.watched = true;
  member.pidfd = open_pidfd(member.info.pid);
  // The number may be another process's by now.
  if (process_start_time(member.info.pid) != member.info.start_time) member.pidfd.reset();
}

void Mesh::connect(Store& store, const MeshOptions& options) {
  shm::Fabric& fabric = shm::Fabric::instance();
  for (int r = 0; r < size(); ++r) {
    MeshRank& member = members_[at(r)];
    bool told = false;  // what is thrown is complete
    const auto look = [&] {
      told = true;
      check(store, options);
      told = false;
    };
    try {
      member.peer = fabric.connect(member.info, options.deadline, look);
    } catch (const Error& error) {
      if (told) throw;
      // Perhaps because it is dying: then who it is and how it ends is to be told.
      if (error.kind() == ErrorKind::kPeerLost && member.pidfd) {
        wait_ready(member.pidfd.get(), POLLIN, Deadline::after(kExitGrace));
      }
      check(store, options);
      fail(error.kind(), "rank ", r, ": ", error.what());
    }
    member.pidfd.reset();
  }
}

void Mesh::share_control(Store& store, const MeshOptions& options) {
  const std::size_t proofs = proof_bytes(size());
  ControlInfo info;
  std::byte* base = nullptr;
  if (rank_ == 0) {
    control_block_ = shm::Fabric::instance().allocate(proofs + options.control_bytes);
    base = control_block_.data();
    std::memset(base, 0, proofs + options.cleared_bytes);
    info = {control_block_.location(), options.control_bytes, random_u64()};
    store.set(kControlKey, info.encode());
  } else {
    info = ControlInfo::decode(get(store, kControlKey, options));
    if (info.bytes != options.control_bytes) {
      fail(ErrorKind::kInvalidArgument, "rank 0 shares ", info.bytes, " bytes and rank ", rank_,
           " expects ", options.control_bytes, ": different versions or settings of convoy");
    }
    try {
      base = resolve(0, info.location, proofs + info.bytes, options.deadline);
    } catch (const Error&) {
      check(store, options);
      throw;
    }
    if (const auto& owner = members_[0].peer) {
      control_mapping_ = owner->keep(info.location.segment);
    }
  }
  if (!members_[0].peer) control_location_ = info.location;
  proof_word(base, rank_).store(proof_of(info.token, rank_), std::memory_order_release);
  // A barrier in the store, so that every proof is there to be read.
  const std::string mapped = "mapped";
  if (store.add(mapped + "/count", 1) == size()) store.set(mapped, "");
  get(store, mapped, options);
  for (int other = 0; other < size(); ++other) {
    if (proof_word(base, other).load(std::memory_order_acquire) != proof_of(info.token, other)) {
      fail(ErrorKind::kUnsupported, "rank ", other, " (pid ", process(other).pid,
           ") does not see the memory that rank 0 shares: is it on this host?");
    }
  }
  control_ = {base + proofs, options.control_bytes};
}

std::optional<std::string> Mesh::loss(int rank) const {
  const auto& peer = members_[at(rank)].peer;
  return peer ? peer->loss() : std::nullopt;
}

void Mesh::subscribe(const std::shared_ptr<shm::Alarm>& alarm) {
  // A process may hold several ranks; ringing twice does no harm.
  for (const auto& member : members_) {
    if (member.peer) member.peer->subscribe(alarm);
  }
}

std::byte* Mesh::resolve(int rank, const shm::Location& location, std::size_t bytes,
                         const Deadline& deadline) const {
  if (const auto& peer = members_[at(rank)].peer) return peer->resolve(location, bytes, deadline);
  std::byte* memory = shm::Fabric::instance().resolve(location, bytes);
  if (!memory) {
    fail(ErrorKind::kInvalidArgument, "rank ", rank, " published memory that it does not have");
  }
  return memory;
}

std::vector<std::shared_ptr<shm::Peer>> Mesh::peers() const {
  std::vector<std::shared_ptr<shm::Peer>> peers;
  for (const auto& member : members_) peers.push_back(member.peer);
  return peers;
}

void Mesh::keep_control_until(std::function<bool()> released) {
  if (control_block_) quarantine(control_block_.location(), std::move(released));
}

void Mesh::quarantine(const shm::Location& location, std::function<bool()> released) const {
  shm::Fabric::instance().quarantine(location, std::move(released), control_location_);
}

}  // namespace convoy::coll
