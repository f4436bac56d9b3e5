#include <algorithm>
#include <cstring>

#include "coll/engine_wait.h"

namespace convoy::coll {

void Engine::broadcast(const Running& running) {
  const Call& call = *running.call;
  const std::size_t bytes = call.bytes();
  const int root = static_cast<int>(call.signature.root);
  if (rank_ == root && bytes != 0 && call.output != call.input) {
    std::memcpy(call.output, call.input, bytes);
  }
  if (size_ == 1 || bytes == 0) return;
  if (bytes <= layout_.eager_bytes()) {
    if (rank_ == root) return;
    const std::byte* source = bytes <= kInlineBytes ? slot(root, running.number).small.data()
                                                    : layout_.payload(base_, root, running.number);
    std::memcpy(call.output, source, bytes);
  } else if (slot(root, running.number).input) {
    tuned(running, Route::kDirect, [&](StoreHint hint) { broadcast_direct(running, hint); });
  } else {
    tuned(running, Route::kStaged, [&](StoreHint hint) { broadcast_staged(running, hint); });
  }
}

// The root's data is in shared memory: everyone copies it from there, and the root waits until all
// have.
void Engine::broadcast_direct(const Running& running, StoreHint hint) {
  const Call& call = *running.call;
  const std::size_t bytes = call.bytes();
  const int root = static_cast<int>(call.signature.root);
  if (rank_ != root) {
    const std::byte* source = peer_memory(running, root, slot(root, running.number).input, bytes);
    workers_.split(bytes, kLine, [&](std::size_t begin, std::size_t end) {
      copy(call.output + begin, source + begin, end - begin, hint);
    });
  }
  publish_step(++step_);
  wait_steps(running, step_);
}

// The root fills its two staging buffers in turn; the others copy from them. A rank's step counts
// the rounds it has done: filled, for the root, and copied, for the others.
void Engine::broadcast_staged(const Running& running, StoreHint staging) {
  const Call& call = *running.call;
  const std::size_t bytes = call.bytes();
  const int root = static_cast<int>(call.signature.root);
  const std::size_t piece = layout_.stage_bytes();
  const std::uint64_t rounds = (bytes + piece - 1) / piece;
  const std::uint64_t base = step_;
  const StoreHint hint = StoreHint::kCached;
  const auto done = [&](int rank, std::uint64_t round) {
    return head(rank).step.load(std::memory_order_acquire) >= base + round + 1;
  };
  for (std::uint64_t t = 0; t < rounds; ++t) {
    const std::size_t begin = t * piece;
    const std::size_t length = std::min(piece, bytes - begin);
    std::byte* buffer = layout_.stage(base_, root, t);
    if (rank_ == root) {
      if (t >= 2) wait_all(running, [&](int r) { return r == root || done(r, t - 2); });
      workers_.split(length, kLine, [&](std::size_t first, std::size_t last) {
        copy(buffer + first, call.input + begin + first, last - first, staging);
      });
    } else {
      wait_all(running, [&](int r) { return r != root || done(r, t); });
      workers_.split(length, kLine, [&](std::size_t first, std::size_t last) {
        copy(call.output + begin + first, buffer + first, last - first, hint);
      });
    }
    publish_step(base + t + 1);
  }
  step_ = base + rounds;
  wait_steps(running, step_);
}

}  // namespace convoy::coll
