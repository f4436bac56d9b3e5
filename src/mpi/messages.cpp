#include "mpi/messages.h"

#include <algorithm>
#include <limits>

#include "base/loop.h"
#include "base/thread.h"
#include "mpi/medium.h"
#include "mpi/types.h"

namespace convoy::mpi {

using coll::Transfer;

namespace {

std::size_t elements(const Transfer& transfer) {
  return transfer.bytes / coll::size_of(transfer.type);
}

// What MPI calls a tag may be smaller than what users do.
std::uint64_t largest_tag(MPI_Comm communicator) {
  void* value = nullptr;
  int found = 0;
  const Library::Turn turn;
  MPI_Comm_get_attr(communicator, MPI_TAG_UB, &value, &found);
  return found ? static_cast<std::uint64_t>(*static_cast<int*>(value)) : 32767;  // the least of MPI
}

// How long a receive that was cancelled may take to end: it is local, unless it has just begun.
constexpr std::chrono::milliseconds kCancel(100);

}  // namespace

MpiMessages::MpiMessages(MpiMedium& medium)
    : medium_(medium), tags_(largest_tag(medium.communicator())) {}

std::string MpiMessages::describe(const Transfer& transfer) const {
  return concat(
      transfer.sends ? "send of " : "recv of ",
      coll::describe_elements(transfer.bytes, transfer.type), transfer.sends ? " to " : " from ",
      transfer.peer < 0 ? "any rank" : concat("rank ", transfer.peer), ", tag ", transfer.tag,
      ", group \"", medium_.name(), "\", rank ", medium_.rank(), " of ", medium_.size(), ": ");
}

MpiMessages::Posted MpiMessages::post(Transfer& transfer) {
  if (transfer.tag > tags_) {
    fail(ErrorKind::kUnsupported, describe(transfer), "this MPI has tags up to ", tags_);
  }
  if (elements(transfer) > static_cast<std::size_t>(std::numeric_limits<int>::max())) {
    fail(ErrorKind::kUnsupported, describe(transfer),
         "MPI counts elements with an int; send it in parts");
  }
  Posted posted{&transfer, MPI_REQUEST_NULL};
  const int count = static_cast<int>(elements(transfer));
  const int tag = static_cast<int>(transfer.tag);
  const MPI_Datatype type = datatype(transfer.type);
  const Library::Turn turn;
  const int code = transfer.sends ? MPI_Isend(transfer.data, count, type, transfer.peer, tag,
                                              medium_.communicator(), &posted.request)
                                  : MPI_Irecv(transfer.data, count, type,
                                              transfer.peer < 0 ? MPI_ANY_SOURCE : transfer.peer,
                                              tag, medium_.communicator(), &posted.request);
  if (code != MPI_SUCCESS) check(code, describe(transfer));
  return posted;
}

bool MpiMessages::test(Posted& posted) {
  Transfer& transfer = *posted.transfer;
  int done = 0, received = 0;
  MPI_Status status;
  int code = MPI_SUCCESS;
  {
    const Library::Turn turn;
    code = MPI_Test(&posted.request, &done, &status);
    if (code == MPI_SUCCESS && done && !transfer.sends) {
      MPI_Get_count(&status, datatype(transfer.type), &received);
      transfer.source = status.MPI_SOURCE;
    }
  }
  const auto refuse = [&](ErrorKind kind, const std::string& text) {
    transfer.error = std::make_exception_ptr(Error(kind, describe(transfer) + text));
  };
  if (code != MPI_SUCCESS) {
    refuse(error_kind(code), concat("the message does not fit, or got lost: ", error_text(code)));
    return true;
  }
  if (!done) return false;
  if (!transfer.sends && static_cast<std::size_t>(std::max(received, 0)) != elements(transfer)) {
    refuse(ErrorKind::kInvalidArgument,
           concat("rank ", transfer.source, " sent ", received, " elements"));
  }
  return true;
}

// A receive is taken back; a send cannot be, and keeps its buffer.
void MpiMessages::give_up(Posted& posted, const std::exception_ptr& why) {
  posted.transfer->error = why;
  if (posted.request == MPI_REQUEST_NULL || Library::ended()) return;
  if (!posted.transfer->sends) {
    static const std::atomic<bool> never{false};
    {
      const Library::Turn turn;
      MPI_Cancel(&posted.request);
    }
    try {
      if (mpi::finish({&posted.request, 1}, Deadline::after(kCancel), never) == Finish::kDone) {
        return;
      }
    } catch (const Error&) {  // it has ended, too
      return;
    }
  }
  medium_.abandon(posted.request);
}

std::exception_ptr MpiMessages::trouble() const {
  const bool closing = medium_.closing().load(std::memory_order_acquire);
  if (!closing && !medium_.broken()) [[likely]]
    return nullptr;
  const auto who = concat("message, group \"", medium_.name(), "\", rank ", medium_.rank(), " of ",
                          medium_.size(), ": ");
  if (closing) {
    return std::make_exception_ptr(
        Error(ErrorKind::kPeerLost, who + "the group was closed on this rank"));
  }
  const auto [kind, cause] = medium_.cause();
  return std::make_exception_ptr(
      Error(kind, concat(who, cause, "; the group is broken: make a new one")));
}

// Then the group is broken.
bool MpiMessages::late(const Posted& posted) {
  const Transfer& transfer = *posted.transfer;
  if (!transfer.deadline.expired()) return false;
  medium_.record_failure(
      ErrorKind::kTimeout,
      concat(describe(transfer), "Timed out waiting; ",
             transfer.peer < 0 ? std::string("no rank has sent it")
                               : concat("rank ", transfer.peer, " has not ",
                                        transfer.sends ? "received it" : "sent it")));
  return true;
}

void MpiMessages::run(std::span<Transfer> transfers) {
  const Library::Inside inside;
  if (const auto why = trouble()) std::rethrow_exception(why);
  static const bool crowded = is_crowded();
  std::vector<Posted> posted;
  posted.reserve(transfers.size());
  std::exception_ptr failure;
  try {
    for (Transfer& transfer : transfers) posted.push_back(post(transfer));
  } catch (const Error&) {
    failure = std::current_exception();
  }
  Patience patience(crowded);
  for (int i = 1; !failure && !posted.empty(); ++i) {
    const auto done = std::erase_if(posted, [&](Posted& one) { return test(one); });
    if (posted.empty()) break;
    if (i % 16 == 0) {
      for (const Posted& one : posted) {
        if (late(one)) break;
      }
      failure = trouble();
    }
    if (done == 0) patience.pause();
  }
  for (Posted& one : posted) give_up(one, failure);
  if (failure) std::rethrow_exception(failure);
  for (const Transfer& transfer : transfers) {
    if (transfer.error) std::rethrow_exception(transfer.error);
  }
}

void MpiMessages::start(std::span<const std::shared_ptr<Transfer>> transfers) {
  Lock lock(mutex_);
  // First: what MPI has been given cannot be taken back for want of a thread.
  if (!worker_.joinable() && !closed_) {
    worker_ = start_thread([this, alive = medium_.shared_from_this()] { work(); });
  }
  std::exception_ptr failure;
  for (const auto& transfer : transfers) {
    if (!failure) failure = trouble();
    transfer->self = transfer;
    try {
      const Library::Inside inside;
      if (!failure) pending_.push_back(post(*transfer));
    } catch (const Error&) {
      failure = std::current_exception();
    }
    if (!failure) continue;
    transfer->error = failure;
    finish(*transfer);
  }
  callbacks_.run(lock);
  lock.unlock();
  started_.notify_all();
}

void MpiMessages::finish(Transfer& transfer) {
  transfer.done = true;
  callbacks_.add(transfer);
  const auto keep = std::move(transfer.self);  // from now on a Work, if anyone, has it
}

void MpiMessages::progress() {
  std::exception_ptr failure;
  try {
    const Library::Inside inside;
    std::erase_if(pending_, [&](Posted& one) {
      if (!test(one)) return false;
      finish(*one.transfer);
      return true;
    });
    for (const Posted& one : pending_) {
      if (late(one)) break;
    }
    failure = trouble();
  } catch (const Error&) {  // MPI ends
    failure = std::current_exception();
  }
  if (!failure) return;
  for (Posted& one : pending_) {
    give_up(one, failure);
    finish(*one.transfer);
  }
  pending_.clear();
}

bool MpiMessages::wait(const Transfer& transfer, const Deadline& deadline) {
  static const bool crowded = is_crowded();
  Patience patience(crowded);
  Lock lock(mutex_);
  while (!transfer.done) {
    progress();
    callbacks_.run(lock);
    if (transfer.done) break;
    if (deadline.expired()) return false;
    lock.unlock();
    patience.pause();
    lock.lock();
  }
  if (transfer.error) std::rethrow_exception(transfer.error);
  return true;
}

bool MpiMessages::is_done(const Transfer& transfer) {
  Lock lock(mutex_);
  if (!transfer.done) progress();
  const bool done = transfer.done;
  callbacks_.run(lock);
  return done;
}

// For asynchronous transfers, whether or not somebody waits for them. Is not eager: who is in a
// hurry waits.
void MpiMessages::work() {
  set_thread_name("convoy-mpi");
  Lock lock(mutex_);
  while (!closed_) {
    started_.wait(lock, [&] { return closed_ || !pending_.empty(); });
    Patience patience(true);
    while (!closed_ && !pending_.empty()) {
      progress();
      callbacks_.run(lock);
      lock.unlock();
      patience.pause();
      lock.lock();
    }
  }
}

void MpiMessages::close() {
  medium_.close();
  {
    Lock lock(mutex_);
    closed_ = true;
    if (!pending_.empty()) progress();  // they fail
    callbacks_.run(lock);
  }
  started_.notify_all();
  coll::end_thread(worker_);
}

}  // namespace convoy::mpi
