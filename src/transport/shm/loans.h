#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "transport/endpoint.h"
#include "transport/shm/arena.h"
#include "transport/shm/letter_ring.h"

namespace convoy::shm {

// Memory that a letter lends to its receiver.
struct Loan {
  // kStreaming: it is being filled, too, and the reader knows of it.
  enum class State { kFree, kFilling, kStreaming, kLent } state = State::kFree;
  bool given_back = false;  // of one that streams: the sender frees it when it has filled it
  std::size_t bytes = 0;
  Location block;
  transport::Sent on_sent;
};

// The loans of the ring to one remote, by number. lent_bytes() is what those that are not free
// hold. Not thread-safe: the owner locks.
class Loans {
 public:
  // With the ring; before that there are none.
  void make() { loans_.resize(RingLayout::kLoans); }

  std::span<Loan> all() { return loans_; }
  Loan& at(int number) { return loans_[static_cast<std::size_t>(number)]; }
  std::size_t lent_bytes() const { return lent_bytes_; }
  bool has_free() const { return std::any_of(loans_.begin(), loans_.end(), is_free); }

  // The number of one that is to be filled; -1: none is free.
  int reserve(std::size_t bytes) {
    const auto found = std::find_if(loans_.begin(), loans_.end(), is_free);
    if (found == loans_.end()) return -1;
    found->state = Loan::State::kFilling;
    found->bytes = bytes;
    lent_bytes_ += bytes;
    return static_cast<int>(found - loans_.begin());
  }
  // What becomes of its block and its `on_sent` is the caller's.
  void free(Loan& loan) {
    lent_bytes_ -= loan.bytes;
    loan = {};
  }

 private:
  static bool is_free(const Loan& loan) { return loan.state == Loan::State::kFree; }

  std::vector<Loan> loans_;
  std::size_t lent_bytes_ = 0;
};

}  // namespace convoy::shm
