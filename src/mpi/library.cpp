#include "mpi/library.h"

#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "base/log.h"
#include "os/wait.h"

namespace convoy::mpi {
namespace {

const char* level_name(int level) {
  if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
  if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
  if (level == MPI_THREAD_SERIALIZED) return "MPI_THREAD_SERIALIZED";
  return "MPI_THREAD_MULTIPLE";
}

void finalize_at_exit() {
  int already = 0;
  MPI_Finalized(&already);
  if (!already) MPI_Finalize();
}

}  // namespace

Library& Library::instance() {
  static auto* const library = new Library;
  return *library;
}

Library& Library::of_host() {
  int initialised = 0;
  MPI_Initialized(&initialised);
  if (!initialised) {
    fail(ErrorKind::kInvalidArgument,
         "from_mpi: MPI has not been initialised, or not the MPI that libconvoy_mpi.so was built "
         "with: call MPI_Init_thread first, and use one MPI");
  }
  return instance();
}

Library::Library() {
  int finalised = 0, initialised = 0;
  MPI_Finalized(&finalised);
  if (finalised) {
    fail(ErrorKind::kUnsupported, "MPI has been finalized: no group can be made any more");
  }
  MPI_Initialized(&initialised);
  int level = MPI_THREAD_SINGLE;
  const bool ours = !initialised;
  if (ours) {
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    // Before statics that were made until now are destroyed: groups are among them.
    if (std::atexit(&finalize_at_exit) != 0) log_warn("MPI will not be finalized at exit");
  } else {
    check(MPI_Query_thread(&level), "MPI_Query_thread");
  }
  if (level < MPI_THREAD_SERIALIZED) {
    fail(ErrorKind::kUnsupported, "backend \"mpi\" calls MPI from threads of its own, but ",
         ours ? "this MPI gives only " : "the program initialised it with ", level_name(level),
         ours ? "" : "; call MPI_Init_thread with MPI_THREAD_MULTIPLE, or MPI_THREAD_SERIALIZED");
  }
  serialized_ = level == MPI_THREAD_SERIALIZED;
  watch_for_end();
}

// MPI_Finalize, whoever calls it, begins by deleting the attributes of MPI_COMM_SELF.
void Library::watch_for_end() {
  int key = 0;
  check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &Library::end, &key, this),
        "MPI_Comm_create_keyval");
  check(MPI_Comm_set_attr(MPI_COMM_SELF, key, this), "MPI_Comm_set_attr");
}

int Library::end(MPI_Comm, int, void*, void* state) {
  auto& library = *static_cast<Library*>(state);
  ended_.store(true, std::memory_order_seq_cst);
  std::vector<std::shared_ptr<Stoppable>> users;
  {
    auto all = library.users_.lock();
    for (const auto& weak : *all) {
      if (auto user = weak.lock()) users.push_back(std::move(user));
    }
  }
  for (const auto& user : users) user->stop();
  const auto deadline = Deadline::after(std::chrono::seconds(10));
  while (inside_.load(std::memory_order_acquire) != 0 && !deadline.expired()) yield_cpu();
  const auto left = library.abandoned_.lock()->size();
  if (left != 0) log_warn("MPI ends while ", left, " operations that failed are still under way");
  return MPI_SUCCESS;
}

void Library::stop_at_end(const std::shared_ptr<Stoppable>& user) {
  auto users = users_.lock();
  std::erase_if(*users, [](const auto& weak) { return weak.expired(); });
  users->push_back(user);
}

Library::Inside::Inside() {
  inside_.fetch_add(1, std::memory_order_seq_cst);
  if (!ended_.load(std::memory_order_seq_cst)) [[likely]]
    return;
  inside_.fetch_sub(1, std::memory_order_release);
  fail(ErrorKind::kPeerLost, "MPI has been finalized");
}

void Library::abandon(MPI_Request request, std::shared_ptr<void> memory) {
  abandoned_.lock()->push_back({request, std::move(memory)});
}

// --- errors ---

ErrorKind error_kind(int code) {
  int kind = MPI_ERR_UNKNOWN;
  MPI_Error_class(code, &kind);
  switch (kind) {
    case MPI_ERR_NO_MEM: return ErrorKind::kResource;
    case MPI_ERR_TRUNCATE:
    case MPI_ERR_TAG: return ErrorKind::kInvalidArgument;
    case MPI_ERR_UNSUPPORTED_OPERATION: return ErrorKind::kUnsupported;
    // What we hand to MPI was checked before.
    case MPI_ERR_ARG:
    case MPI_ERR_BUFFER:
    case MPI_ERR_COMM:
    case MPI_ERR_COUNT:
    case MPI_ERR_GROUP:
    case MPI_ERR_OP:
    case MPI_ERR_RANK:
    case MPI_ERR_REQUEST:
    case MPI_ERR_ROOT:
    case MPI_ERR_TYPE: return ErrorKind::kInternal;
    // A network or a process that is gone has no class of its own before MPI 5.
    default: return ErrorKind::kPeerLost;
  }
}

std::string error_text(int code) {
  std::string text(MPI_MAX_ERROR_STRING, '\0');
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) {
    return concat("MPI error ", code);
  }
  text.resize(static_cast<std::size_t>(length));
  return text;
}

// --- waiting ---

bool is_crowded() {
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"}) {
    if (const char* const ranks = std::getenv(name)) {
      // Not those that this process may use: mpirun gives each rank one of its own.
      return std::atoi(ranks) > static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
    }
  }
  return false;
}

void Patience::pause() {
  ++times_;
  if (times_ < eager_) return;
  if (times_ < eager_ + kYields) return yield_cpu();
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

namespace {

// Throws what a test of several requests returned: of the one that failed, where that is known.
void check_all(int code, std::span<const MPI_Status> statuses) {
  if (code == MPI_SUCCESS) [[likely]]
    return;
  int kind = MPI_ERR_UNKNOWN;
  MPI_Error_class(code, &kind);
  if (kind == MPI_ERR_IN_STATUS) {
    for (const MPI_Status& status : statuses) {
      if (status.MPI_ERROR != MPI_ERR_PENDING) check(status.MPI_ERROR, "MPI_Testall");
    }
  }
  check(code, "MPI_Testall");
}

}  // namespace

Finish finish(std::span<MPI_Request> requests, const Deadline& deadline,
              const std::atomic<bool>& stop, std::span<MPI_Status> statuses) {
  static const bool crowded = is_crowded();
  Patience patience(crowded);
  for (int i = 1;; ++i) {
    int done = 0;
    {
      const Library::Turn turn;
      if (requests.size() == 1 && statuses.empty()) {
        check(MPI_Test(requests.data(), &done, MPI_STATUS_IGNORE), "MPI_Test");
      } else {
        check_all(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                              statuses.empty() ? MPI_STATUSES_IGNORE : statuses.data()),
                  statuses);
      }
    }
    if (done) return Finish::kDone;
    if (stop.load(std::memory_order_acquire)) return Finish::kStopped;
    if (i % 16 == 0 && deadline.expired()) return Finish::kLate;
    patience.pause();
  }
}

// --- communicators ---

Communicator::Communicator(MPI_Comm handle) : handle_(handle) {
  const Library::Turn turn;
  check(MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

// MPI calls this collective, but expects it to be local: what is under way goes on.
Communicator::~Communicator() {
  if (handle_ == MPI_COMM_NULL || Library::ended()) return;
  const Library::Turn turn;
  MPI_Comm_free(&handle_);
}

Communicator Communicator::copy_of(MPI_Comm other, const Deadline& deadline) {
  static const std::atomic<bool> never{false};
  auto copy = std::make_shared<MPI_Comm>(MPI_COMM_NULL);  // written when it is done
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const Library::Turn turn;
    check(MPI_Comm_idup(other, copy.get(), &request), "MPI_Comm_idup");
  }
  if (finish({&request, 1}, deadline, never) != Finish::kDone) {
    Library::instance().abandon(request, copy);
    fail(ErrorKind::kTimeout,
         "Timed out waiting for the other ranks of the communicator; every one of them must make "
         "the group");
  }
  return Communicator(*copy);
}

int Communicator::rank() const {
  int rank = 0;
  const Library::Turn turn;
  check(MPI_Comm_rank(handle_, &rank), "MPI_Comm_rank");
  return rank;
}

int Communicator::size() const {
  int size = 0;
  const Library::Turn turn;
  check(MPI_Comm_size(handle_, &size), "MPI_Comm_size");
  return size;
}

}  // namespace convoy::mpi
