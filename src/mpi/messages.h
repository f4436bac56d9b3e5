#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "coll/messages.h"
#include "mpi/library.h"

namespace convoy::mpi {

class MpiMedium;

// Messages as MPI's own: Isend and Irecv, tested by whoever waits, and by a thread for asynchronous
// ones.
class MpiMessages final : public coll::Messages {
 public:
  explicit MpiMessages(MpiMedium& medium);
  ~MpiMessages() override { close(); }

  // There is no shorter way.
  bool try_send(const coll::Transfer&) override { return false; }
  bool try_receive(coll::Transfer&) override { return false; }
  void run(std::span<coll::Transfer> transfers) override;
  void start(std::span<const std::shared_ptr<coll::Transfer>> transfers) override;
  bool wait(const coll::Transfer& transfer, const Deadline& deadline) override;
  bool is_done(const coll::Transfer& transfer) override;
  void settle() override {}  // ranks do not see each other's memory
  void close() override;

 private:
  using Lock = coll::Callbacks::Lock;
  struct Posted {
    coll::Transfer* transfer;
    MPI_Request request;
  };

  Posted post(coll::Transfer& transfer);
  // Tests it; true if it is done, well or not.
  bool test(Posted& posted);
  void give_up(Posted& posted, const std::exception_ptr& why);
  std::exception_ptr trouble() const;
  bool late(const Posted& posted);
  void progress();
  void finish(coll::Transfer& transfer);
  void work();
  std::string describe(const coll::Transfer& transfer) const;

  MpiMedium& medium_;
  const std::uint64_t tags_;  // the largest
  std::mutex mutex_;
  std::condition_variable started_;
  // Guarded by mutex_:
  std::vector<Posted> pending_;  // asynchronous ones
  coll::Callbacks callbacks_;
  bool closed_ = false;
  std::thread worker_;
};

}  // namespace convoy::mpi
