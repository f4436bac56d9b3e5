// The shared-memory endpoint: what is lost, and what was lent to it. Everything here runs under
// ShmEndpoint::mutex_.
#include "base/error.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

// What it sent before still arrives; then finish_loss().
void ShmEndpoint::lose(ShmRemote& remote, const Error& why) {
  if (remote.ending_) return;
  remote.ending_ = true;
  remote.why_ = why;
  remote.lost_.store(true);
  // Segments that have not come will not. What is complete has arrived.
  for (auto& transfer : std::exchange(remote.stalled_, {})) {
    if (transfer->placed && transfer->can_go_on()) {
      go_on(std::move(transfer));
    } else {
      --remote.transfers_;
    }
  }
  enqueue(remote);
  ring_service();
}

void ShmEndpoint::drop_reader(ShmRemote& remote) {
  if (last_ == &remote) last_ = nullptr;
  if (watched_ == &remote) set_watched(nullptr);
  remote.reader_.reset();
}

void ShmEndpoint::break_off(ShmRemote& remote, const std::string& what) {
  drop_reader(remote);
  {
    const std::scoped_lock send_lock(remote.send_mutex_);
    for (const auto& link : remote.links_) link.peer->send_bye();
  }
  lose(remote, Error(ErrorKind::kPeerLost, concat(remote.name(), ": ", what)));
}

void ShmEndpoint::finish_loss(ShmRemote& remote) {
  if (remote.told_) return;
  remote.told_ = true;
  drop_reader(remote);
  remote.segments_.clear();
  std::erase(slots_[remote.number_ % Doorbell::kSlots], &remote);
  std::vector<std::shared_ptr<Peer>> gone;
  Task task{.type = Task::Type::kLost, .remote = &remote};
  {
    const std::scoped_lock send_lock(remote.send_mutex_);
    bool alive = false;
    for (auto& link : remote.links_) {
      owners_.erase(link.peer.get());
      alive |= liveness_by(link.peer->pidfd()) != Liveness::kDead;
      gone.push_back(std::move(link.peer));
    }
    remote.links_.clear();
    if (remote.writer_) remote.writer_.layout().revoked.store(1);
    task.sent = take_loans(remote, alive ? gone.at(0) : nullptr);
    remote.writer_ = {};
  }
  fabric_.forget(std::move(gone));
  push_task(std::move(task));
}

// Of a remote that is lost: what it cannot read any more is free.
std::vector<std::pair<transport::Sent, bool>> ShmEndpoint::take_loans(
    ShmRemote& remote, const std::shared_ptr<Peer>& alive) {
  std::vector<std::pair<transport::Sent, bool>> sent;
  Limbo limbo{.ring = remote.writer_.mapping(), .peer = alive, .blocks = {}};
  auto heap = heap_.lock();
  for (std::size_t i = 0; i < remote.loans_.size(); ++i) {
    auto& loan = remote.loans_[i];
    if (loan.state != ShmRemote::Loan::State::kLent)
      continue;  // one that is being filled: its sender finds out
    if (loan.on_sent) sent.emplace_back(std::move(loan.on_sent), false);
    if (loan.block && alive) {
      limbo.blocks.emplace(static_cast<std::uint16_t>(i), loan.block);
    } else if (loan.block) {
      heap->arena->free(loan.block);
    }
    remote.lent_bytes_ -= loan.bytes;
    loan = {};
  }
  if (!limbo.blocks.empty()) heap->limbo.push_back(std::move(limbo));
  sweep_limbo(*heap);
  return sent;
}

void ShmEndpoint::sweep_limbo(Heap& heap) {
  std::erase_if(heap.limbo, [&](Limbo& limbo) {
    const bool dead = liveness_by(limbo.peer->pidfd()) == Liveness::kDead;
    const auto& layout = *reinterpret_cast<const RingLayout*>(limbo.ring->data());
    std::erase_if(limbo.blocks, [&](const auto& entry) {
      const auto [loan, block] = entry;
      const bool released = (layout.released[loan / 64].load() >> loan % 64 & 1) != 0;
      if (!dead && !released) return false;
      heap.arena->free(block);
      return true;
    });
    return limbo.blocks.empty();
  });
}

}  // namespace convoy::shm
