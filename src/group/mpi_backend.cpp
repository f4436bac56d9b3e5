#include "group/mpi_backend.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/log.h"
#include "coll/group.h"
#include "convoy/mpi.h"
#include "mpi/module.h"
#include "os/fork_guard.h"
#include "tensor/memory.h"

namespace convoy {
namespace {

// The process that first took memory from MPI: in its forked children memory is not given back.
const HomeProcess& home_of_mpi() {
  static const HomeProcess home;
  return home;
}

class MpiAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    home_of_mpi();
    void* const memory = mpi::module().allocate(bytes);
    return {memory, memory, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }

 private:
  static void release(void* memory) {
    if (memory && home_of_mpi().is_here()) mpi::module().free(memory);
  }
};

c10::Allocator* mpi_allocator() {
  static auto* const allocator = new MpiAllocator;  // tensors may outlive everything
  return allocator;
}

mpi::MediumOptions medium_options(const ConvoyBackend::Options& options, bool check) {
  return {.name = options.group_name.empty() ? "mpi" : options.group_name,
          .timeout = options.timeout,
          .check = check || log_level_from_environment() == LogLevel::kDebug};
}

}  // namespace

MpiBackend::MpiBackend(const std::shared_ptr<coll::Medium>& medium,
                       const c10::intrusive_ptr<Options>& options, bool check)
    : ConvoyBackend(coll::Group::over(medium, options->timeout), options), check_(check) {}

c10::intrusive_ptr<c10d::Backend> MpiBackend::split(
    const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  group().check_process("split");
  if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) return nullptr;
  auto options = c10::make_intrusive<Options>(opts ? opts->timeout : getBackendOptions()->timeout);
  if (opts) options->group_name = opts->group_name;
  options->compare_shapes = compares_shapes();
  const auto medium =
      mpi::module().part_of(*group().medium(), ranks, medium_options(*options, check_));
  return c10::make_intrusive<MpiBackend>(medium, options, check_);
}

c10::intrusive_ptr<c10d::Backend> MpiBackend::merge(
    const c10::intrusive_ptr<c10d::Store>&, const c10::intrusive_ptr<c10d::Backend::Options>&,
    const int&, const int&) {
  fail(ErrorKind::kUnsupported,
       "merge: backend \"mpi\" cannot merge groups; make a group of all ranks");
}

at::Tensor MpiBackend::allocateTensor(long numel, at::TensorOptions options) {
  group().check_process("allocate");
  return empty_from(mpi_allocator(), {numel}, options);
}

std::shared_ptr<c10::Allocator> MpiBackend::getMemAllocator() {
  return {mpi_allocator(), [](c10::Allocator*) {}};  // it lives forever
}

c10::intrusive_ptr<c10d::Backend> make_mpi_backend(
    const std::shared_ptr<Store>& store, int rank, int size,
    const c10::intrusive_ptr<ConvoyBackend::Options>& options, bool check) {
  const auto settings = medium_options(*options, check);
  const auto medium = store ? mpi::module().of_store(*store, {rank, size}, settings)
                            : mpi::module().of_world(settings);
  return c10::make_intrusive<MpiBackend>(medium, options, check);
}

ProcessGroup detail::from_mpi(const void* communicator, std::size_t bytes,
                              const MpiOptions& options) {
  if (options.timeout <= std::chrono::milliseconds::zero()) {
    fail(ErrorKind::kInvalidArgument, "from_mpi: timeout must be > 0 ms, got ",
         options.timeout.count());
  }
  auto own = c10::make_intrusive<ConvoyBackend::Options>(options.timeout);
  own->group_name = options.name;
  const auto medium =
      mpi::module().of_communicator(communicator, bytes, medium_options(*own, options.check));
  return ProcessGroup::from(c10::make_intrusive<MpiBackend>(medium, own, options.check),
                            {.name = options.name, .timeout = options.timeout});
}

}  // namespace convoy
