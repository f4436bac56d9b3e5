// Processes that take work from a queue:
//
//   work_queue
//
// Three workers square matrices. One of them crashes on the way; it is started again, and what is
// missing is given out again. docs/guide/processes.md explains it.
#include <convoy/convoy.h>
#include <signal.h>
#include <torch/types.h>

#include <iostream>
#include <set>

using namespace std::chrono_literals;
using convoy::share::Queue;

// In each worker, until the queue of jobs is closed and empty.
void work(int /*index*/, const Queue& jobs, const Queue& results) {
  try {
    while (true) {
      const auto job = jobs.get(convoy::Deadline::after(60s));
      if (job.text(2) == "crash") ::raise(SIGKILL);
      results.put({job.integer(0), job.tensor(1).matmul(job.tensor(1))});
    }
  } catch (const convoy::Error& error) {
    if (error.kind() != convoy::ErrorKind::kPeerLost) throw;  // kPeerLost: closed and empty
  }
}

int main(int argc, char** argv) {
  convoy::start(argc, argv);  // first: a spawned process runs work() here, and ends
  constexpr int kJobs = 40;
  const Queue jobs({.capacity = 2 * kJobs}), results({.capacity = 2 * kJobs});
  auto workers = convoy::spawn<work>(3, jobs, results);

  std::set<std::int64_t> open;
  for (int i = 0; i < kJobs; ++i) {
    jobs.put({i, torch::full({64, 64}, i), i == 5 ? "crash" : "compute"});
    open.insert(i);
  }
  double sum = 0;
  while (!open.empty()) {
    for (const auto& result : results.get_many(kJobs, convoy::Deadline::after(100ms))) {
      if (open.erase(result.integer(0)) == 1) sum += result.tensor(1).sum().item<double>();
    }
    for (const auto& failure : workers.restart_failed()) {
      std::cout << failure.to_string() << "; " << open.size() << " jobs again" << std::endl;
      for (const auto i : open) jobs.put({i, torch::full({64, 64}, i), "compute"});
    }
  }
  jobs.close();
  workers.join(60s);
  std::cout << kJobs << " results, sum " << sum << std::endl;
  return sum == 64. * 64 * 64 * (39. * 40 * 79 / 6) ? 0 : 1;
}
