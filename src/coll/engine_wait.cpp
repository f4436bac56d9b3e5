#include "coll/engine_wait.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "coll/report.h"

namespace convoy::coll {
namespace {

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) text += concat(i == 0 ? "" : ", ", ranks[i]);
  return text;
}

}  // namespace

void Engine::Bell::ring() noexcept {
  rung.store(true, std::memory_order_seq_cst);
  const std::lock_guard lock(mutex);
  if (!bell) return;
  for (WaitWord* word : {bell, mail}) ring_anyway(*word);
}

void Engine::wake_all() noexcept {
  ring_anyway(group().bell);
  for (int r = 0; r < size_; ++r) ring_anyway(head(r).mail);
}

void Engine::ring_sleepers() noexcept { ring(group().bell); }

bool Engine::troubled() const {
  return bell_->rung.load(std::memory_order_acquire) ||
         group().failed.load(std::memory_order_acquire) != 0 ||
         group().departures.load(std::memory_order_acquire) != 0 ||
         closing_.load(std::memory_order_acquire);
}

bool Engine::broken() const { return group().failed.load(std::memory_order_acquire) != 0; }

std::optional<ErrorKind> Engine::failure() const {
  if (!broken()) return std::nullopt;
  return recorded_cause().first;
}

bool Engine::gone(int rank, std::uint64_t number) const {
  if (rank == rank_) return false;
  const std::uint64_t left = head(rank).left.load(std::memory_order_acquire);
  return (left != 0 && left - 1 < number) || mesh_->loss(rank).has_value();
}

int Engine::casualty(std::uint64_t number) const {
  for (int r = 0; r < size_; ++r) {
    if (gone(r, number)) return r;
  }
  return -1;
}

// True: operation `number` is complete, or will be. The first to decide decides for all.
bool Engine::decide(std::uint64_t number, bool complete) {
  std::uint64_t seen = group().decided.load(std::memory_order_acquire);
  while (seen >> 1 < number) {
    const std::uint64_t next = number << 1 | (complete ? 0 : 1);
    if (group().decided.compare_exchange_weak(seen, next, std::memory_order_acq_rel)) seen = next;
  }
  // Nobody gets to a later one unless this one completed.
  return seen != (number << 1 | 1);
}

void Engine::confirm(const Running& running) {
  if (decide(running.number, true)) return;
  // Whoever decided so is about to tell why, unless it is killed first: then this rank hears of
  // that, or of the first death, by itself.
  while (!call_deadline(running).expired()) {
    check_failed(running);
    if (const int dead = casualty(running.number); dead >= 0) fail_peer(running, dead);
    yield_cpu();
  }
  fail_run(running, ErrorKind::kPeerLost, "another rank failed and could not say why");
}

// Woken it is by whoever makes the wait succeed; the limit is for words that somebody overwrites,
// and, where something is wrong already, for what follows from it.
Deadline Engine::nap(const Running& running) const {
  constexpr std::chrono::milliseconds kLong(500);
  constexpr std::chrono::milliseconds kShort(5);
  return std::min(call_deadline(running), Deadline::after(troubled() ? kShort : kLong));
}

std::string Engine::describe_gone(int rank) const {
  const auto& process = mesh_->process(rank);
  const std::uint64_t left = head(rank).left.load(std::memory_order_acquire);
  if (left != 0) {
    return concat("rank ", rank, " (pid ", process.pid, ") left the group after #", left - 1,
                  " and will not take part");
  }
  return concat("rank ", rank, " (pid ", process.pid, ", host ", process.host, ") ",
                mesh_->loss(rank).value_or("is gone"));
}

Speaker Engine::speaker(const Running& running) const {
  return {running.call->signature.op, running.number, name_, rank_, size_};
}

std::string Engine::prefix(const Running& running) const {
  return operation_prefix(speaker(running));
}

// Throws if this operation, or one before it, has failed on any rank.
void Engine::check_failed(const Running& running) {
  if (closing_.load(std::memory_order_acquire)) {
    fail(ErrorKind::kPeerLost, prefix(running), "the group was closed on this rank meanwhile");
  }
  const std::uint64_t failed = group().failed.load(std::memory_order_acquire);
  if (failed == 0 || failed > running.number) return;
  head(rank_).gave_up.store(1, std::memory_order_release);
  const auto [kind, cause] = recorded_cause();
  std::string text = prefix(running) + cause;
  if (failed < running.number) {
    text += concat("; the group is broken since #", failed, ": make a new one");
  }
  throw Error(kind, text);
}

std::pair<ErrorKind, std::string> Engine::recorded_cause() const {
  const Cause& cause = group().cause;
  // The writer needs a moment, unless it was killed in it.
  const auto limit = Deadline::after(std::chrono::milliseconds(100));
  while (cause.state.load(std::memory_order_acquire) == 1 && !limit.expired()) yield_cpu();
  if (cause.state.load(std::memory_order_acquire) != 2) {
    return {ErrorKind::kPeerLost, "another rank failed and could not say why; read its log"};
  }
  const auto length = std::min<std::size_t>(cause.length, kCauseBytes);
  const auto kind = std::min<std::uint32_t>(cause.kind, static_cast<int>(ErrorKind::kInternal));
  std::string text(cause.text.data(), length);
  // One line, whatever stands there.
  std::replace_if(
      text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < ' '; }, '?');
  return {static_cast<ErrorKind>(kind), std::move(text)};
}

void Engine::record_failure(std::uint64_t number, ErrorKind kind,
                            const std::string& text) noexcept {
  Cause& cause = group().cause;
  std::uint32_t empty = 0;
  if (cause.state.compare_exchange_strong(empty, 1, std::memory_order_acq_rel)) {
    cause.kind = static_cast<std::uint32_t>(kind);
    cause.reporter = rank_;
    cause.length = static_cast<std::uint32_t>(std::min(text.size(), kCauseBytes));
    std::memcpy(cause.text.data(), text.data(), cause.length);
    cause.state.store(2, std::memory_order_release);
  }
  std::uint64_t seen = group().failed.load(std::memory_order_acquire);
  while ((seen == 0 || seen > number) &&
         !group().failed.compare_exchange_weak(seen, number, std::memory_order_acq_rel)) {
  }
  wake_all();
}

void Engine::fail_run(const Running& running, ErrorKind kind, const std::string& cause) {
  record_failure(running.number, kind, cause);
  head(rank_).gave_up.store(1, std::memory_order_release);
  // Says the recorded cause, which may be another rank's: every rank tells the same story.
  const auto [first_kind, first_cause] = recorded_cause();
  throw Error(first_kind, prefix(running) + first_cause);
}

bool Engine::gave_up(const RankHead& head) {
  const bool quiet = head.gave_up.load(std::memory_order_acquire) != 0 &&
                     (head.mail_used.load(std::memory_order_acquire) == 0 ||
                      head.mail_stopped.load(std::memory_order_acquire) != 0);
  return quiet || head.departed.load(std::memory_order_acquire) != 0;
}

// A peer that has not noticed yet may still write into this rank's buffers, or read them: the
// memory is not used for anything else before every living rank has given up.
std::function<bool()> Engine::all_gave_up() const {
  return
      [peers = mesh_->peers(), mapping = mesh_->control_mapping(), layout = layout_, base = base_] {
        for (std::size_t r = 0; r < peers.size(); ++r) {
          const bool dead = peers[r] && peers[r]->lost();
          if (!dead && !gave_up(layout.rank(base, static_cast<int>(r)))) return false;
        }
        return true;
      };
}

void Engine::quarantine_buffers(const Running& running) {
  const auto released = all_gave_up();
  auto& fabric = shm::Fabric::instance();
  for (const View& view : {running.call->input_view(), running.call->output_view()}) {
    for (const Stretch& each : view.stretches()) {
      if (each.bytes == 0) continue;
      const auto location = fabric.locate(each.data, each.bytes);
      if (location) mesh_->quarantine(location, released);
    }
  }
}

void Engine::fail_peer(const Running& running, int rank) {
  std::vector<int> waiting;
  for (int r = 0; r < size_; ++r) {
    if (slot(r, running.number).arrived.load(std::memory_order_acquire) >= running.number &&
        !gone(r, running.number)) {
      waiting.push_back(r);
    }
  }
  fail_run(running, ErrorKind::kPeerLost,
           concat(describe_gone(rank), "; ", list(waiting), " waited in #", running.number,
                  "; last completed #", running.number - 1, "; read rank ", rank, "'s log first"));
}

std::vector<int> Engine::lost_ranks() const {
  std::vector<int> lost;
  for (int r = 0; r < size_; ++r) {
    if (mesh_->loss(r)) lost.push_back(r);
  }
  return lost;
}

}  // namespace convoy::coll
