#include "coll/mesh.h"

#include <atomic>
#include <charconv>
#include <cstring>
#include <sstream>

#include "base/error.h"

namespace convoy::shm {
namespace {

constexpr const char* kFailedKey = "failed";
constexpr const char* kControlKey = "control";

std::string hello_key(int rank) { return concat("process/", rank); }

// Waits for a key, but not when another rank has given up: then throws what that rank threw.
std::string get_unless_failed(Store& store, const std::string& key, const Deadline& deadline) {
  for (;;) {
    const auto slice = std::min(Deadline::after(std::chrono::milliseconds(100)), deadline);
    try {
      return store.get(key, slice);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
    if (const auto failure = store.try_get(kFailedKey)) {
      const auto kind = static_cast<ErrorKind>(failure->at(0) - '0');
      throw Error(kind, failure->substr(1));
    }
    if (deadline.expired()) fail(ErrorKind::kTimeout, "timed out waiting for '", key, "'");
  }
}

struct ControlInfo {
  Location location;
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
    // Tells the others; the first failure counts.
    try {
      store.compare_set(kFailedKey, "", concat(static_cast<int>(kind), text));
    } catch (const Error&) {  // the store is gone too: each rank finds that out by itself
    }
    throw Error(kind, text);
  };
  try {
    meet(store, options);
    share_control(store, options);
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.starts_with("making group ")) throw;  // another rank's failure, already complete
    fail_all(error.kind(), text);
  }
}

void Mesh::meet(Store& store, const MeshOptions& options) {
  Fabric& fabric = Fabric::instance();
  store.set(hello_key(rank_), fabric.self().encode());
  std::string missing;
  for (int other = 0; other < size(); ++other) {
    try {
      members_[at(other)].info =
          ProcessInfo::decode(get_unless_failed(store, hello_key(other), options.deadline));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
      missing += concat(missing.empty() ? "" : ", ", other);
    }
  }
  if (!missing.empty()) {
    fail(ErrorKind::kTimeout, "these ranks did not come by the deadline: ", missing,
         "; were they started, and with the same store and group name?");
  }
  for (auto& member : members_) member.peer = fabric.connect(member.info, options.deadline);
}

void Mesh::share_control(Store& store, const MeshOptions& options) {
  const std::size_t proofs = proof_bytes(size());
  ControlInfo info;
  std::byte* base = nullptr;
  if (rank_ == 0) {
    control_block_ = Fabric::instance().allocate(proofs + options.control_bytes);
    base = control_block_.data();
    std::memset(base, 0, proofs + options.cleared_bytes);
    info = {control_block_.location(), options.control_bytes, random_u64()};
    store.set(kControlKey, info.encode());
  } else {
    info = ControlInfo::decode(get_unless_failed(store, kControlKey, options.deadline));
    if (info.bytes != options.control_bytes) {
      fail(ErrorKind::kInvalidArgument, "rank 0 shares ", info.bytes, " bytes and rank ", rank_,
           " expects ", options.control_bytes, ": different versions or settings of convoy");
    }
    base = resolve(0, info.location, proofs + info.bytes, options.deadline);
    if (const auto& owner = members_[0].peer) {
      control_mapping_ = owner->keep(info.location.segment);
    }
  }
  proof_word(base, rank_).store(proof_of(info.token, rank_), std::memory_order_release);
  // A barrier in the store, so that every proof is there to be read.
  const std::string mapped = "mapped";
  if (store.add(mapped + "/count", 1) == size()) store.set(mapped, "");
  get_unless_failed(store, mapped, options.deadline);
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

void Mesh::subscribe(const std::shared_ptr<Alarm>& alarm) {
  // A process may hold several ranks; ringing twice does no harm.
  for (const auto& member : members_) {
    if (member.peer) member.peer->subscribe(alarm);
  }
}

std::byte* Mesh::resolve(int rank, const Location& location, std::size_t bytes,
                         const Deadline& deadline) const {
  if (const auto& peer = members_[at(rank)].peer) return peer->resolve(location, bytes, deadline);
  std::byte* memory = Fabric::instance().resolve(location, bytes);
  if (!memory) {
    fail(ErrorKind::kInvalidArgument, "rank ", rank, " published memory that it does not have");
  }
  return memory;
}

std::vector<std::shared_ptr<Peer>> Mesh::peers() const {
  std::vector<std::shared_ptr<Peer>> peers;
  for (const auto& member : members_) peers.push_back(member.peer);
  return peers;
}

void Mesh::keep_control_until(std::function<bool()> released) {
  if (control_block_) Fabric::instance().quarantine(control_block_.location(), std::move(released));
}

}  // namespace convoy::shm
