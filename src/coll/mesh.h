#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/store.h"
#include "transport/shm/fabric.h"

namespace convoy::coll {

struct MeshOptions {
  std::string name;               // of the group, for messages
  std::size_t control_bytes = 0;  // of memory that all ranks share
  std::size_t cleared_bytes = 0;  // how much of it, from its beginning, must start as zeros
  Deadline deadline = Deadline::after(Store::kDefaultTimeout);
  // Ranks that have ended ("exited with exit code 0") as far as somebody else knows: those of them
  // that have not come never will. Asked now and then.
  std::function<std::map<int, std::string>()> ended = {};
};

// The ranks of one group on one host, each connected to every other: a piece of memory that all
// share (control), the memory each has from the shm::Fabric, and who is alive. Ranks may be
// processes or threads of one process. Thread-safe.
class Mesh {
 public:
  // Collective. The ranks meet through `store`, whose keys must not have been used before
  // (with_prefix). That they share a host is proved by a connection and by a word written into the
  // shared memory, never taken from the environment. If one rank fails here, all fail with its
  // error; if one dies, all get kPeerLost soon, with its name.
  static std::shared_ptr<Mesh> create(Store& store, int rank, int size, const MeshOptions& options);
  ~Mesh();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }

  std::span<std::byte> control() const { return control_; }
  // Keeps the control memory mapped here after this object is gone; nullptr where this process
  // itself owns it (see keep_control_until).
  std::shared_ptr<const Segment> control_mapping() const { return control_mapping_; }
  const shm::ProcessInfo& process(int rank) const { return members_[at(rank)].info; }
  bool is_self(int rank) const { return !members_[at(rank)].peer; }

  // Why the rank's process is gone; nullopt while it lives.
  std::optional<std::string> loss(int rank) const;
  bool lost(int rank) const noexcept {
    const auto& peer = members_[at(rank)].peer;
    return peer && peer->lost();
  }
  // Rung whenever a rank's process is gone.
  void subscribe(const std::shared_ptr<shm::Alarm>& alarm);

  // A rank's shared memory in this process. Throws as shm::Peer::resolve.
  std::byte* resolve(int rank, const shm::Location& location, std::size_t bytes,
                     const Deadline& deadline) const;

  // By rank; nullptr for ranks of this process. For those that ask about lives after this object.
  std::vector<std::shared_ptr<shm::Peer>> peers() const;

  // The control memory is kept until `released()` although this object goes. Must not block, nor
  // own this object.
  void keep_control_until(std::function<bool()> released);
  // As shm::Fabric::quarantine(), for a `released` that looks at the control memory.
  void quarantine(const shm::Location& location, std::function<bool()> released) const;

 private:
  struct MeshRank {
    shm::ProcessInfo info;
    std::shared_ptr<shm::Peer> peer;  // nullptr: a rank of this process
    // While ranks meet: `info` is known; and how it is watched until there is a peer.
    bool met = false;
    bool watched = false;  // it is another process, of which this one can tell whether it lives
    UniqueFd pidfd;        // may be missing: there may be no descriptors
  };

  Mesh(int rank, int size) : rank_(rank), members_(static_cast<std::size_t>(size)) {}
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  void join(Store& store, const MeshOptions& options);
  void meet(Store& store, const MeshOptions& options);
  void introduce(int rank, shm::ProcessInfo info);
  void connect(Store& store, const MeshOptions& options);
  void share_control(Store& store, const MeshOptions& options);
  std::string get(Store& store, const std::string& key, const MeshOptions& options) const;
  // Throws what another rank threw; kPeerLost if one is gone.
  void check(Store& store, const MeshOptions& options) const;
  void check_alive(const MeshOptions& options) const;

  const int rank_;
  std::vector<MeshRank> members_;
  shm::Block control_block_;  // of rank 0 only
  std::shared_ptr<const Segment> control_mapping_;
  shm::Location control_location_;  // if it is this process's own
  std::span<std::byte> control_;
};

}  // namespace convoy::coll
