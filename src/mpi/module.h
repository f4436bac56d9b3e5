#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "coll/medium.h"
#include "convoy/store.h"

namespace convoy::mpi {

struct MediumOptions {
  std::string name = "world";
  std::chrono::nanoseconds timeout = std::chrono::minutes(30);  // of making it
  // All ranks compare what they called before data is touched, as shared memory always does: costs
  // a small all-gather for each operation.
  bool check = false;
};

struct WorldRank {
  int rank = 0;
  int size = 1;
};

// What libconvoy_mpi.so offers: the only file of ours that needs an MPI. It is loaded when it is
// first asked for and never unloaded, so that everything else runs on machines without one; and
// whoever packages us can leave it out. Thread-safe.
class Module {
 public:
  // Of the convoy that it was built with: the interface is that version's only.
  virtual const char* version() const = 0;

  // Our place in MPI_COMM_WORLD. This and all below initialise MPI unless the program has, and end
  // it at exit() if they did. kUnsupported if threads cannot call it.
  virtual WorldRank world() = 0;

  // Collective among the ranks of the new medium:
  // - all of MPI_COMM_WORLD;
  virtual std::shared_ptr<coll::Medium> of_world(const MediumOptions& options) = 0;
  // - those that meet in a store, whose keys must be fresh; all are of one MPI_COMM_WORLD;
  virtual std::shared_ptr<coll::Medium> of_store(Store& store, const WorldRank& place,
                                                 const MediumOptions& options) = 0;
  // - those of an MPI_Comm, which is copied; the caller keeps it. MPI must have been initialised;
  virtual std::shared_ptr<coll::Medium> of_communicator(const void* communicator, std::size_t bytes,
                                                        const MediumOptions& options) = 0;
  // - these ranks, in that order, of a medium that this module made. The caller is one of them.
  virtual std::shared_ptr<coll::Medium> part_of(coll::Medium& parent, const std::vector<int>& ranks,
                                                const MediumOptions& options) = 0;

  // Memory that is best for this MPI to move. kResource. Freeing is for any thread and any time.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* memory) noexcept = 0;

 protected:
  ~Module() = default;
};

// kUnsupported, with the reason, if it is not there or cannot be loaded.
Module& module();

}  // namespace convoy::mpi
