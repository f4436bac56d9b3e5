#include "coll/shared_memory.h"

#include "coll/mail.h"
#include "os/fork_guard.h"

namespace convoy::coll {
namespace {

class SharedMemory final : public Medium, public std::enable_shared_from_this<SharedMemory> {
 public:
  SharedMemory(Store& store, int rank, int size, const EngineOptions& options)
      : engine_(store, rank, size, options),
        mail_(engine_, [this] { return shared_from_this(); }) {}

  int rank() const override { return engine_.rank(); }
  int size() const override { return engine_.size(); }
  const std::string& name() const override { return engine_.name(); }

  void run(const Call& call, std::uint64_t number) override { engine_.run(call, number); }
  Messages& messages() override { return mail_; }

  void abort(const std::string& why) noexcept override { engine_.abort(why); }
  void close() noexcept override { engine_.close(); }

  std::optional<ErrorKind> failure() const override { return engine_.failure(); }
  bool broken() const override { return engine_.broken(); }
  std::vector<int> lost_ranks() const override { return engine_.lost_ranks(); }
  std::vector<int> late_ranks() override { return engine_.late_ranks(); }
  std::uint64_t last_completed() const override { return engine_.last_completed(); }
  // Private ones are never touched by others; shared ones are kept apart (quarantine_buffers).
  bool holds_buffers() const override { return false; }

  bool has_given_up(int rank) const { return engine_.has_given_up(rank); }
  std::shared_ptr<shm::Mesh> mesh() const { return engine_.shared_mesh(); }

 private:
  Engine engine_;
  Mail mail_;
};

}  // namespace

std::shared_ptr<Medium> make_shared_memory(Store& store, int rank, int size,
                                           const EngineOptions& options) {
  return std::shared_ptr<SharedMemory>(new SharedMemory(store, rank, size, options),
                                       DeleteAtHome());
}

bool has_given_up(Medium& medium, int rank) {
  const auto* const shared = dynamic_cast<SharedMemory*>(&medium);
  return shared && shared->has_given_up(rank);
}

std::shared_ptr<shm::Mesh> mesh_of(Medium& medium) {
  const auto* const shared = dynamic_cast<SharedMemory*>(&medium);
  return shared ? shared->mesh() : nullptr;
}

}  // namespace convoy::coll
