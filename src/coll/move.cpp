// The operations that only move: broadcast, all_gather, gather, scatter, all_to_all.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>

#include "base/concat.h"
#include "base/error.h"
#include "coll/engine_wait.h"
#include "coll/movement.h"

namespace convoy::coll {

void Engine::move(const Running& running) {
  const Movement movement(*running.call, rank_, size_, counts_);
  if (size_ == 1) return keep_own(movement, StoreHint::kCached);

  bool small = true, staged = false, readable = true;
  for (int r = 0; r < size_; ++r) {
    const std::size_t bytes = movement.contribution(r);
    const Carrier carrier = carrier_of(running, r, bytes);
    small &=
        carrier == Carrier::kNone || carrier == Carrier::kInline || carrier == Carrier::kPayload;
    if (carrier != Carrier::kPrivate) continue;
    staged = true;
    readable &= slot(r, running.number).stretches <= 1;
  }
  if (small) {
    keep_own(movement, StoreHint::kCached);
    return pull(running, movement, Way::kCached);
  }
  check_members(running);
  const Route route = !staged                              ? Route::kDirect
                      : readable && reads_private(running) ? Route::kMoved
                                                           : Route::kStaged;
  tuned(running, route, [&](Way way) {
    if (can_share_broadcast(running)) {
      keep_own(movement, store_hint(way));
      return share_broadcast(running, store_hint(way));
    }
    // What everyone gets is kept while it is staged: it is read once then.
    const bool later =
        movement.multicast() && is_staged(running, rank_, movement.contribution(rank_), way);
    if (!later) keep_own(movement, store_hint(way));
    pull(running, movement, way);
    if (staged && way != Way::kRead) return move_staged(running, movement, way);
    publish_step(++step_);
    wait_steps(running, step_);
  });
}

void Engine::keep_own(const Movement& movement, StoreHint hint) {
  keep_own(movement, 0, movement.sent(rank_, rank_), hint);
}

// [begin, begin + length) of what stays here. In place it is there already.
void Engine::keep_own(const Movement& movement, std::size_t begin, std::size_t length,
                      StoreHint hint) {
  const View own = movement.outgoing(rank_);
  movement.incoming(rank_).for_each(begin, length,
                                    [&](std::byte* to, std::size_t done, std::size_t bytes) {
                                      if (to != own.at(begin + done))
                                        copy_from(own, begin + done, to, bytes, hint);
                                    });
}

bool Engine::is_staged(const Running& running, int source, std::size_t contribution, Way way) {
  return way != Way::kRead && carrier_of(running, source, contribution) == Carrier::kPrivate;
}

// True if the root's data, and where the others want it, are within reach of all ranks. All of them
// find the same.
bool Engine::can_share_broadcast(const Running& running) {
  const Call& call = *running.call;
  if (call.signature.op != OpKind::kBroadcast) return false;
  const int root = static_cast<int>(call.signature.root);
  for (int r = 0; r < size_; ++r) {
    const bool reachable = r == root ? carrier_of(running, r, call.output_bytes) == Carrier::kShared
                                     : slot(r, running.number).shared_output != 0;
    if (!reachable) return false;
  }
  return true;
}

// The root would only watch while the others copy: it takes chunks too, and a chunk is read once
// for all of them.
void Engine::share_broadcast(const Running& running, StoreHint hint) {
  const Call& call = *running.call;
  const int root = static_cast<int>(call.signature.root);
  const View output = call.output_view();
  const View source =
      rank_ == root ? call.input_view() : peer_view(running, root, Side::kInput, output);
  for (int r = 0; r < size_; ++r) {
    if (r == root) continue;
    writable_[static_cast<std::size_t>(r)] =
        r == rank_ ? output : peer_view(running, r, Side::kOutput, output);
  }
  const auto part = [&](std::size_t begin, std::size_t length) {
    source.for_each(begin, length, [&](std::byte* from, std::size_t done, std::size_t bytes) {
      for (int r = 0; r < size_; ++r) {
        if (r == root) continue;
        copy(writable_[static_cast<std::size_t>(r)].at(begin + done), from, bytes, hint);
      }
    });
  };
  take_chunks(running, output.bytes(), std::ref(part));
}

// Copies from every source whose data can be reached as it is. Each rank begins with another
// source, so that they do not all read the same memory at once.
void Engine::pull(const Running& running, const Movement& movement, Way way) {
  const StoreHint hint = store_hint(way);
  for (int i = 1; i < size_; ++i) {
    const int source = (rank_ + i) % size_;
    const std::size_t bytes = movement.sent(source, rank_);
    if (bytes == 0) continue;
    const std::size_t contribution = movement.contribution(source);
    const View target = movement.incoming(source);
    const std::size_t offset = movement.offset(source, rank_);
    if (offset > contribution || bytes > contribution - offset) fail_nonsense(running, source);
    const Slot& theirs = slot(source, running.number);
    switch (carrier_of(running, source, contribution)) {
      case Carrier::kNone: break;
      case Carrier::kInline: copy_to(target, 0, theirs.small.data() + offset, bytes, hint); break;
      case Carrier::kPayload:
        copy_to(target, 0, layout_.payload(base_, source, running.number) + offset, bytes, hint);
        break;
      case Carrier::kShared: pull_shared(running, movement, source, hint); break;
      case Carrier::kPrivate:
        if (way == Way::kRead) {
          read_private(running, source, theirs.input.offset + offset, target);
        }
        break;
    }
  }
}

void Engine::pull_shared(const Running& running, const Movement& movement, int source,
                         StoreHint hint) {
  const Slot& theirs = slot(source, running.number);
  const View target = movement.incoming(source);
  const std::size_t bytes = movement.sent(source, rank_);
  if (theirs.stretches <= 1) {
    shm::Location place = theirs.input;
    place.offset += movement.offset(source, rank_);
    return copy_to(target, 0, peer_memory(running, source, place, bytes), bytes, hint);
  }
  // Several stretches: for everyone the same ones, as long as those they go to; otherwise one each.
  if (!movement.multicast()) {
    const auto place = peer_places(running, source, static_cast<std::size_t>(rank_), 1)[0];
    return copy_to(target, 0, peer_memory(running, source, place, bytes), bytes, hint);
  }
  const auto stretches = target.stretches();
  const auto places = peer_places(running, source, 0, stretches.size());
  for (std::size_t i = 0; i < stretches.size(); ++i) {
    const Stretch& to = stretches[i];
    if (to.bytes == 0) continue;
    copy_to(target, to.begin, peer_memory(running, source, places[i], to.bytes), to.bytes, hint);
  }
}

// Sources fill their three staging buffers in turn; their targets copy from them. Steps as in
// combine_staged: A(t + 1), "my data for round t + 1 is staged", and B(t), "I have copied what was
// mine in round t".
void Engine::move_staged(const Running& running, const Movement& movement, Way way) {
  const StoreHint staging = store_hint(way);
  const StoreHint writing = hint_for_output(running.call->output_bytes);
  // Only one rank, or all of them, want a source's bytes: the whole buffer is for them.
  const OpKind kind = running.call->signature.op;
  const bool whole = movement.multicast() || kind == OpKind::kGather || kind == OpKind::kGatherV;
  const std::size_t slice = whole ? layout_.stage_bytes() : layout_.slice_bytes();
  std::uint64_t rounds = 0;
  for (int s = 0; s < size_; ++s) {
    if (!is_staged(running, s, movement.contribution(s), way)) continue;
    for (int t = 0; t < size_; ++t) {
      if (t != s)
        rounds = std::max<std::uint64_t>(rounds, (movement.sent(s, t) + slice - 1) / slice);
    }
  }
  const bool i_stage = is_staged(running, rank_, movement.contribution(rank_), way);
  const auto place = [&](int source, int target) {
    return whole ? 0 : static_cast<std::size_t>(target < source ? target : target - 1) * slice;
  };
  const auto range = [&](std::uint64_t round, int source, int target) {
    const std::size_t bytes = movement.sent(source, target);
    const std::size_t begin = std::min(bytes, round * slice);
    return std::pair(begin, std::min(slice, bytes - begin));
  };
  const auto stage = [&](std::uint64_t round) {
    if (!i_stage || round >= rounds) return;
    std::byte* buffer = layout_.stage(base_, rank_, round);
    for (int i = 1; i < size_; ++i) {
      const int target = (rank_ + i) % size_;
      const auto [begin, length] = range(round, rank_, target);
      if (length == 0) continue;
      copy_from(movement.outgoing(target), begin, buffer + place(rank_, target), length, staging);
      if (!movement.multicast()) continue;
      keep_own(movement, begin, length, writing);
      break;  // it is staged once for all
    }
  };
  const std::uint64_t base = step_;
  stage(0);
  publish_step(base + 1);  // A(0)
  for (std::uint64_t t = 0; t < rounds; ++t) {
    if (i_stage && t > 1) wait_steps(running, base + 2 * t - 1);  // B(t - 2)
    stage(t + 1);
    publish_step(base + 2 * t + 2);  // A(t + 1)
    for (int i = 1; i < size_; ++i) {
      const int source = (rank_ + i) % size_;
      const auto [begin, length] = range(t, source, rank_);
      if (length == 0 || !is_staged(running, source, movement.contribution(source), way)) continue;
      const std::uint64_t staged = base + (t == 0 ? 1 : 2 * t);  // A(t)
      wait_all(running, [&](int r) {
        return r != source || head(r).step.load(std::memory_order_acquire) >= staged;
      });
      copy_to(movement.incoming(source), begin,
              layout_.stage(base_, source, t) + place(source, rank_), length, writing);
    }
    publish_step(base + 2 * t + 3);  // B(t)
  }
  step_ = base + 2 * rounds + 1;
  wait_steps(running, step_);
}

// Whether every rank can read every other one's private memory: a kernel may forbid it (Yama,
// seccomp), and all must choose the same way. Found out once, together.
bool Engine::reads_private(const Running& running) {
  if (!reads_private_) {
    bool works = may_read_private_;
    for (int r = 0; r < size_ && works; ++r) {
      const std::uint64_t address = head(r).probe.load(std::memory_order_relaxed);
      std::byte byte{};
      const iovec local{&byte, 1};
      const iovec remote{reinterpret_cast<void*>(address), 1};
      works = process_vm_readv(mesh_->process(r).pid, &local, 1, &remote, 1, 0) == 1;
    }
    head(rank_).reads_private.store(works ? 1 : 2, std::memory_order_release);
    publish_step(++step_);
    wait_steps(running, step_);
    bool all = true;
    for (int r = 0; r < size_; ++r) {
      all &= head(r).reads_private.load(std::memory_order_acquire) == 1;
    }
    reads_private_ = all;
  }
  return *reads_private_;
}

void Engine::read_private(const Running& running, int source, std::uint64_t address,
                          const View& target) {
  const pid_t pid = mesh_->process(source).pid;
  target.for_each(0, target.bytes(), [&](std::byte* to, std::size_t done, std::size_t bytes) {
    while (bytes > 0) {
      // Not the whole at once: a system call cannot be interrupted by a peer's death.
      const iovec local{to, std::min(bytes, std::size_t{16} << 20)};
      const iovec remote{reinterpret_cast<void*>(address + done), local.iov_len};
      const ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
      if (got <= 0) {
        const int code = got < 0 ? errno : EFAULT;
        // It is gone: the watch thread knows why, and the wait tells.
        if (code == ESRCH) wait_all(running, [&](int r) { return r != source; });
        fail_run(running, ErrorKind::kPeerLost,
                 concat("reading memory of rank ", source, ": ", errno_text(code)));
      }
      to += got;
      done += static_cast<std::size_t>(got);
      bytes -= static_cast<std::size_t>(got);
    }
  });
}

}  // namespace convoy::coll
