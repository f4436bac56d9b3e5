#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "convoy/group.h"

namespace convoy {

// The collectives of SyncBatchNorms, on a group of their own: they come while buckets are on their
// way, and where a backward fails on one rank the others must not wait. One for each group.
class NormGroup {
 public:
  explicit NormGroup(ProcessGroup parent) : parent_(std::move(parent)) {}

  // Finds or makes that of a group.
  static std::shared_ptr<NormGroup> of(const ProcessGroup& parent);
  // nullptr if there is none.
  static std::shared_ptr<NormGroup> find(const ProcessGroup& parent);

  const ProcessGroup& parent() const { return parent_; }
  // (size(), elements) of (elements): every rank's.
  at::Tensor gather(const at::Tensor& mine);
  // In place.
  void sum(const at::Tensor& tensor);
  // The same for a rank that has nothing, in a Join.
  void shadow(std::uint64_t detail);
  // What is pending fails on all ranks; the next call makes a new group, on all ranks.
  void abandon();

 private:
  const ProcessGroup& ready();
  void tell(bool backward, const at::Tensor& tensor) const;
  template <class Function>
  void guarded(const char* what, Function function);

  const ProcessGroup parent_;
  ProcessGroup own_;
};

// To be called on all ranks of a group in which a backward has failed.
void abandon_norms(const ProcessGroup& parent);

}  // namespace convoy
