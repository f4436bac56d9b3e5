// The shared-memory endpoint: what is lost, and what was lent to it. Everything here runs under
// ShmEndpoint::mutex_.
#include "base/error.h"
#include "transport/shm/shm_endpoint_impl.h"

namespace convoy::shm {

// What it sent before still arrives; then finish_loss().
void ShmEndpoint::lose(ShmRemote& remote, const Error& why) {
  if (remote.in().ending) return;
  remote.in().ending = true;
  remote.in().why = why;
  remote.lost_.store(true);
  // Segments that have not come will not. What is complete has arrived.
  for (auto& transfer : std::exchange(remote.in().stalled, {})) {
    if (transfer->placed && transfer->can_go_on()) {
      go_on(std::move(transfer));
    } else {
      --remote.in().transfers;
    }
  }
  backlog_.add_ring(remote);
  bell_.ring_service_once();
}

void ShmEndpoint::drop_reader(ShmRemote& remote) {
  watched_.end_row_of(remote);
  if (watched_.remote() == &remote) set_watched(nullptr);
  remote.in().reader.reset();
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
  if (remote.in().told) return;
  remote.in().told = true;
  drop_reader(remote);
  remote.in().segments.clear();
  connections_.clear_bit(remote);
  std::vector<std::shared_ptr<Peer>> gone;
  Task task{.type = Task::Type::kLost, .remote = &remote};
  {
    const std::scoped_lock send_lock(remote.send_mutex_);
    bool alive = false;
    for (auto& link : remote.links_) {
      connections_.end(link.peer.get());
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
SentList ShmEndpoint::take_loans(ShmRemote& remote, const std::shared_ptr<Peer>& alive) {
  SentList sent;
  LentHeap::Limbo limbo{.ring = remote.writer_.mapping(), .peer = alive, .blocks = {}};
  auto heap = heap_.lock();
  const std::span<Loan> loans = remote.loans_.all();
  for (std::size_t i = 0; i < loans.size(); ++i) {
    Loan& loan = loans[i];
    if (loan.state != Loan::State::kLent) continue;  // being filled: its sender finds out
    if (loan.on_sent) sent.emplace_back(std::move(loan.on_sent), false);
    if (loan.block && alive) {
      limbo.blocks.emplace(static_cast<std::uint16_t>(i), loan.block);
    } else if (loan.block) {
      heap->arena->free(loan.block);
    }
    remote.loans_.free(loan);
  }
  if (!limbo.blocks.empty()) heap->limbo.push_back(std::move(limbo));
  heap->sweep();
  return sent;
}

void LentHeap::sweep() {
  std::erase_if(limbo, [&](Limbo& loans) {
    const bool dead = liveness_by(loans.peer->pidfd()) == Liveness::kDead;
    const auto& layout = *reinterpret_cast<const RingLayout*>(loans.ring->data());
    std::erase_if(loans.blocks, [&](const auto& entry) {
      const auto [loan, block] = entry;
      const bool released = (layout.released[loan / 64].load() >> loan % 64 & 1) != 0;
      if (!dead && !released) return false;
      arena->free(block);
      return true;
    });
    return loans.blocks.empty();
  });
}

}  // namespace convoy::shm
