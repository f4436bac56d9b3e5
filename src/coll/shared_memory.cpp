#include "coll/shared_memory.h"

#include "coll/mail.h"
#include "os/fork_guard.h"

namespace convoy::coll {
namespace {

class SharedMemory final : public Engine, public std::enable_shared_from_this<SharedMemory> {
 public:
  SharedMemory(Store& store, int rank, int size, const EngineOptions& options)
      : Engine(store, rank, size, options), mail_(*this, [this] { return shared_from_this(); }) {}

  Messages& messages() override { return mail_; }

 private:
  Mail mail_;
};

}  // namespace

std::shared_ptr<Medium> make_shared_memory(Store& store, int rank, int size,
                                           const EngineOptions& options) {
  return std::shared_ptr<SharedMemory>(new SharedMemory(store, rank, size, options),
                                       DeleteAtHome());
}

bool has_given_up(Medium& medium, int rank) {
  const auto* const engine = dynamic_cast<Engine*>(&medium);
  return engine && engine->has_given_up(rank);
}

std::shared_ptr<Mesh> mesh_of(Medium& medium) {
  const auto* const engine = dynamic_cast<Engine*>(&medium);
  return engine ? engine->shared_mesh() : nullptr;
}

}  // namespace convoy::coll
