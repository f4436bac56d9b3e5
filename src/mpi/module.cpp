#include "mpi/module.h"

#include <cstring>

#include "base/config.h"
#include "base/id.h"
#include "mpi/medium.h"

namespace convoy::mpi {
namespace {

Deadline deadline_of(const MediumOptions& options) { return Deadline::after(options.timeout); }

// With a copy for what must not meet users' messages.
std::shared_ptr<coll::Medium> over(Communicator data, const Deadline& deadline,
                                   const MediumOptions& options) {
  auto control = Communicator::copy_of(data.get(), deadline);
  return MpiMedium::make(std::move(data), std::move(control), options);
}

// Only the members call it, and all of them are there: MPI has no form of this that does not wait.
Communicator communicator_of(MPI_Comm parent, const std::vector<int>& ranks, int tag) {
  MPI_Group all = MPI_GROUP_NULL, some = MPI_GROUP_NULL;
  MPI_Comm made = MPI_COMM_NULL;
  {
    const Library::Turn turn;
    check(MPI_Comm_group(parent, &all), "MPI_Comm_group");
    int code = MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &some);
    if (code == MPI_SUCCESS) code = MPI_Comm_create_group(parent, some, tag, &made);
    MPI_Group_free(&all);
    if (some != MPI_GROUP_NULL) MPI_Group_free(&some);
    check(code, "MPI_Comm_create_group");
  }
  return Communicator(made);
}

// A tag for a meeting of these ranks: small, because MPI need not have more than 32767.
int tag_of(const std::string& name, const std::vector<int>& ranks) {
  std::string text = name;
  for (const int rank : ranks) text += concat("/", rank);
  return 2 + static_cast<int>(hash_text(text) % 16'000);
}

std::string describe(const MediumOptions& options) {
  return concat("making group \"", options.name, "\" over MPI: ");
}

class MpiModule final : public Module {
 public:
  const char* version() const override { return CONVOY_VERSION_TEXT; }

  WorldRank world() override {
    Library::instance();
    WorldRank place;
    const Library::Turn turn;
    check(MPI_Comm_rank(MPI_COMM_WORLD, &place.rank), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &place.size), "MPI_Comm_size");
    return place;
  }

  std::shared_ptr<coll::Medium> of_world(const MediumOptions& options) override {
    return copy(Library::instance(), MPI_COMM_WORLD, options);
  }

  std::shared_ptr<coll::Medium> of_store(Store& store, const WorldRank& place,
                                         const MediumOptions& options) override {
    const int me = world().rank;
    const auto deadline = deadline_of(options);
    const auto key = [](int rank) { return concat("mpi/", rank); };
    store.set(key(place.rank), std::to_string(me));
    std::vector<int> ranks;
    for (int r = 0; r < place.size; ++r) {
      ranks.push_back(std::stoi(store.get(key(r), deadline)));
      if (r != place.rank && ranks.back() == me) {
        fail(ErrorKind::kInvalidArgument, describe(options), "rank ", r, " and rank ", place.rank,
             " are both rank ", me,
             " of MPI_COMM_WORLD; a process can be one rank only, and all "
             "must have been started by one mpirun");
      }
    }
    return over(communicator_of(MPI_COMM_WORLD, ranks, tag_of(options.name, ranks)), deadline,
                options);
  }

  std::shared_ptr<coll::Medium> of_communicator(const void* communicator, std::size_t bytes,
                                                const MediumOptions& options) override {
    MPI_Comm host = MPI_COMM_NULL;
    if (bytes != sizeof(MPI_Comm)) {
      fail(
          ErrorKind::kInvalidArgument,
          "from_mpi: what was passed is not an MPI_Comm of the MPI that libconvoy_mpi.so was built "
          "with");
    }
    std::memcpy(&host, communicator, bytes);
    if (host == MPI_COMM_NULL) {
      fail(ErrorKind::kInvalidArgument, "from_mpi: the communicator is MPI_COMM_NULL");
    }
    auto& library = Library::of_host();
    int between = 0;
    {
      const Library::Turn turn;
      check(MPI_Comm_test_inter(host, &between), "from_mpi");
    }
    if (between) {
      fail(ErrorKind::kUnsupported,
           "from_mpi: a communicator between two groups; merge them (MPI_Intercomm_merge)");
    }
    return copy(library, host, options);
  }

  std::shared_ptr<coll::Medium> part_of(coll::Medium& parent, const std::vector<int>& ranks,
                                        const MediumOptions& options) override {
    const Library::Inside inside;
    auto& whole = dynamic_cast<MpiMedium&>(parent);
    const auto deadline = deadline_of(options);
    const int tag = tag_of(options.name, ranks);
    const auto late = meet({whole.control().get(), ranks, tag}, deadline, whole.closing());
    if (!late) fail(ErrorKind::kPeerLost, describe(options), "the parent was closed meanwhile");
    if (!late->empty()) {
      std::string text = "Timed out waiting";
      for (const int rank : *late) text += concat("; rank ", rank, " of the parent has not come");
      fail(ErrorKind::kTimeout, describe(options), text);
    }
    return over(communicator_of(whole.communicator(), ranks, tag), deadline, options);
  }

  void* allocate(std::size_t bytes) override {
    Library::instance();
    void* memory = nullptr;
    const Library::Turn turn;
    check(MPI_Alloc_mem(static_cast<MPI_Aint>(bytes), MPI_INFO_NULL, &memory), "MPI_Alloc_mem of ",
          bytes, " bytes");
    return memory;
  }

  void free(void* memory) noexcept override {
    if (Library::ended()) return;  // tensors may outlive MPI
    const Library::Turn turn;
    MPI_Free_mem(memory);
  }

 private:
  static std::shared_ptr<coll::Medium> copy(Library& library, MPI_Comm communicator,
                                            const MediumOptions& options) {
    const auto deadline = deadline_of(options);
    const std::lock_guard lock(library.making());
    return over(Communicator::copy_of(communicator, deadline), deadline, options);
  }
};

}  // namespace
}  // namespace convoy::mpi

extern "C" convoy::mpi::Module* convoy_mpi_module() {
  static convoy::mpi::MpiModule module;
  return &module;
}
