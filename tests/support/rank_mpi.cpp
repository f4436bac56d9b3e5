// Ranks that mpirun has started: every process runs all tests, in the same order, each as its own
// rank.
#include <unistd.h>

#include <cstdlib>

#include "base/error.h"
#include "mpi/module.h"
#include "support/rank_runner.h"

namespace convoy::test {
namespace {

int variable(const char* name) {
  const char* const text = std::getenv(name);
  if (!text) fail(ErrorKind::kInvalidArgument, name, " is not set: run this under mpirun");
  return std::atoi(text);
}

std::shared_ptr<Store> job_store() {
  static const auto store =
      connect_store(std::getenv(kMpiStoreVariable), Deadline::after(std::chrono::seconds(30)));
  return store;
}

class MpiRunner final : public RankGroup::Runner, private RankLink {
 public:
  MpiRunner(int size, const RankGroupOptions& options)
      : size_(size),
        all_(variable("OMPI_COMM_WORLD_SIZE")),
        id_(mpi::module().world().rank),  // all of them begin MPI, or it would wait
        deadline_(Deadline::after(options.limit)),
        results_(static_cast<std::size_t>(size)) {
    if (size > all_) fail(ErrorKind::kInvalidArgument, size, " ranks, but mpirun has ", all_);
    static int groups = 0;  // every process makes the same ones
    store_ = with_prefix(job_store(), std::to_string(++groups));
  }

  void start(const RankFunction& function) override {
    if (id_ < size_) {
      Rank rank(id_, size_, RankMode::kMpi, deadline_, *this);
      const auto thrown = call_rank(function, rank);
      auto& mine = results_[static_cast<std::size_t>(id_)];
      mine.returned = !thrown;
      if (thrown) mine.failures.push_back(*thrown);
    }
    // Nobody begins the next test while others still need this one's processes.
    store_->barrier("harness/end", all_, deadline_);
  }
  std::vector<RankResult> collect() override { return results_; }
  void abandon() override {}

  std::shared_ptr<Store> store() override { return store_; }
  void mark(const std::string&) override { refuse(); }
  void wait_for(const std::string&, const Deadline&) override { refuse(); }
  void wait_mark(const std::string&, std::optional<int>) override { refuse(); }
  void post(const std::string&, std::optional<int>) override { refuse(); }
  void kill(int, int) override { refuse(); }
  pid_t pid(int) const override { return ::getpid(); }

 private:
  [[noreturn]] static void refuse() {
    fail(ErrorKind::kUnsupported, "ranks of mpirun have no test that interferes");
  }

  const int size_;
  const int all_;
  const int id_;
  const Deadline deadline_;
  std::shared_ptr<Store> store_;
  std::vector<RankResult> results_;
};

}  // namespace

bool under_mpi() { return std::getenv(kMpiStoreVariable) != nullptr; }

std::unique_ptr<RankGroup::Runner> make_mpi_runner(int size, const RankGroupOptions& options) {
  return std::make_unique<MpiRunner>(size, options);
}

}  // namespace convoy::test
