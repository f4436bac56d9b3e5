#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "transport/shm/doorbell.h"
#include "transport/shm/shm_events.h"
#include "transport/shm/shm_remote.h"

namespace convoy::shm {

// What goes over the socket of a connection, as Frame::segment of a note; `bytes` is the size of
// the memory whose descriptor comes with it.
enum class NoteType : std::uint64_t {
  kBell = 1,     // the sender's doorbell; the receiver's slot there is in Frame::process
  kRing = 2,     // the ring of letters from the sender
  kSegment = 3,  // memory that letters will refer to; its number is in Frame::process
  kDrop = 4,     // no more
  kWaker = 5,    // the sender's thread that serves sleeps on epoll: its eventfd; before kBell
};

// A number in the place of an Id, which notes have room for.
Id note_id(std::uint64_t number);
std::uint64_t note_number(const Id& id);

// Who is connected. Under the endpoint's mutex.
//
// A remote stays until the endpoint ends. Its number chooses its bit in the doorbell; it has that,
// and its connections have it as their owner, until it is told that it is lost.
class Connections {
 public:
  const std::map<Id, std::unique_ptr<ShmRemote>>& remotes() const { return remotes_; }
  ShmRemote* find(const Id& id) const;
  ShmRemote& add(ShmEndpoint& owner, const transport::Address& address, const ProcessInfo& info);
  // Those that share this bit.
  const std::vector<ShmRemote*>& of_bit(std::size_t slot) const { return slots_[slot]; }
  void clear_bit(ShmRemote& remote);

  // Of a connection; nullptr: nobody.
  ShmRemote* owner(const Peer* peer) const;
  void set_owner(const Peer* peer, ShmRemote& remote) { owners_[peer] = &remote; }
  void end(const Peer* peer) { owners_.erase(peer); }

  // Around what a thread in remote() does until it has set the owner of its connection. Events of
  // nobody are kept meanwhile.
  void begin_dialing() { ++dialing_; }
  void end_dialing();
  void keep_early(Event event);
  // Those that have an owner now.
  std::vector<Event> take_early();

 private:
  std::map<Id, std::unique_ptr<ShmRemote>> remotes_;
  std::map<const Peer*, ShmRemote*> owners_;
  int dialing_ = 0;           // threads in remote()
  std::vector<Event> early_;  // of connections that they are about to make
  std::vector<std::vector<ShmRemote*>> slots_{Doorbell::kSlots};
  std::uint32_t next_number_ = 0;
};

}  // namespace convoy::shm
