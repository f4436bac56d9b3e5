#pragma once

#include "coll/medium.h"
#include "convoy/backend.h"

namespace convoy {

// The operations of ConvoyBackend over an MPI. Everything about tensors is the parent's; what is
// here is what groups and memory are to MPI.
class MpiBackend final : public ConvoyBackend {
 public:
  // `check`: as MpiOptions::check.
  MpiBackend(const std::shared_ptr<coll::Medium>& medium,
             const c10::intrusive_ptr<Options>& options, bool check);

  const std::string getBackendName() const override { return "mpi"; }
  bool shares_memory() const override { return false; }

  // Collective among `ranks`, which meet through MPI: the store is not used, and may be nullptr.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  // kUnsupported: two groups of MPI have nothing to meet through.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;

  // Memory of MPI_Alloc_mem, which a network may have registered: nothing is copied on the way to
  // it. Other ranks do not see it.
  at::Tensor allocateTensor(long numel, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

 private:
  const bool check_;
};

// Backend "mpi" for new_group and init. Without a store: all ranks of MPI_COMM_WORLD.
c10::intrusive_ptr<c10d::Backend> make_mpi_backend(
    const std::shared_ptr<Store>& store, int rank, int size,
    const c10::intrusive_ptr<ConvoyBackend::Options>& options, bool check);

}  // namespace convoy
