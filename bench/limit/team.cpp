#include "team.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <new>

namespace limit {
namespace {

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void pin(int index) {
  cpu_set_t all, one;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  int left = index % CPU_COUNT(&all);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &all) || left-- != 0) continue;
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    sched_setaffinity(0, sizeof one, &one);
    return;
  }
}

std::byte* map(std::size_t bytes, int flags) {
  void* p =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("bench_limit: mmap");
    std::exit(1);
  }
  return static_cast<std::byte*>(p);
}

Rank make_view(int ranks, std::size_t bytes) {
  Rank view;
  view.ranks = ranks;
  view.crowded = ranks > cores();
  const std::size_t buffer = (bytes + 4095) / 4096 * 4096;
  auto* memory = map(sizeof(Shared) + ranks * (buffer + 2 * kSlot), MAP_SHARED);
  std::byte* next = memory;
  for (int r = 0; r < ranks; ++r, next += buffer) view.group.push_back(next);
  for (int r = 0; r < ranks; ++r, next += kSlot) view.slot_in.push_back(next);
  for (int r = 0; r < ranks; ++r, next += kSlot) view.slot_out.push_back(next);
  view.shared = new (next) Shared;
  return view;
}

void run_rank(Rank rank, int id, const std::function<void(Rank&)>& body) {
  pin(id);
  rank.id = id;
  rank.shared->pids[id] = getpid();
  rank.barrier();
  body(rank);
  rank.barrier();
}

}  // namespace

void Rank::await(const std::atomic<std::uint64_t>& counter, std::uint64_t value) const {
  for (int spins = 0; counter.load(std::memory_order_acquire) < value; ++spins) {
    if (crowded && spins > 100) sched_yield();
  }
}

void Rank::await_all(const Counter (&counters)[kMaxRanks], std::uint64_t value) const {
  for (int r = 0; r < ranks; ++r) {
    if (r != id) await(counters[r].value, value);
  }
}

void Rank::barrier() {
  shared->barrier[id].value.store(++barriers, std::memory_order_release);
  await_all(shared->barrier, barriers);
}

bool run_ranks(int ranks, std::size_t bytes, const std::function<void(Rank&)>& body) {
  const Rank view = make_view(ranks, bytes);
  std::fflush(stdout);
  std::vector<pid_t> pids;
  for (int id = 0; id < ranks; ++id) {
    const pid_t pid = fork();
    if (pid < 0) {
      std::perror("bench_limit: fork");
      std::exit(1);
    }
    pids.push_back(pid);
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      run_rank(view, id, body);
      _exit(0);
    }
  }
  bool good = true;
  for (int id = 0; id < ranks; ++id) {
    int status = 0;
    wait(&status);
    if (good && (!WIFEXITED(status) || WEXITSTATUS(status) != 0)) {
      good = false;
      for (const pid_t pid : pids) kill(pid, SIGKILL);  // they would wait for it forever
    }
  }
  munmap(view.group[0], sizeof(Shared) + ranks * ((bytes + 4095) / 4096 * 4096 + 2 * kSlot));
  return good;
}

}  // namespace limit
