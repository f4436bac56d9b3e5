#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "transport/shm/shm_remote.h"

namespace convoy::shm {

// What one thread knows of the ring that it looks at besides the doorbell.
struct Watch {
  std::shared_ptr<RingReader> ring;
  std::uint32_t number = 0;  // as in Doorbell::watched

  bool sees() const noexcept { return ring && ring->has_letter(); }
};

// The ring that is looked at besides the doorbell, since the last letters came there: which it is
// and which it should be. Under the endpoint's mutex. Doorbell::watched says the same to senders.
class WatchedRing {
 public:
  ShmRemote* remote() const noexcept { return remote_; }
  std::uint32_t number() const noexcept { return remote_ ? remote_->number() + 1 : 0; }
  bool sees() const noexcept { return ring_ && ring_->has_letter(); }
  // For who goes on to look without the lock.
  Watch watch() const { return {ring_, number()}; }

  // So many letters of it were taken. True: its ring is to be watched from now on.
  bool count_letters(const ShmRemote& remote, int letters) noexcept {
    in_a_row_ = std::exchange(last_, &remote) == &remote ? in_a_row_ + letters : letters;
    return in_a_row_ >= kLettersUntilWatched && remote_ != &remote;
  }
  // What follows does not come in a row with the letters of this one.
  void end_row_of(const ShmRemote& remote) noexcept {
    if (last_ == &remote) last_ = nullptr;
  }
  // The remote (nullptr: none) and the ring that were watched until now: somebody must look there.
  std::pair<ShmRemote*, std::shared_ptr<RingReader>> replace(ShmRemote* remote) {
    return {std::exchange(remote_, remote),
            std::exchange(ring_, remote ? remote->in().reader : nullptr)};
  }

 private:
  static constexpr int kLettersUntilWatched = 4;

  ShmRemote* remote_ = nullptr;
  std::shared_ptr<RingReader> ring_;
  const ShmRemote* last_ = nullptr;  // whose letter was the last
  int in_a_row_ = 0;                 // letters of it
};

}  // namespace convoy::shm
