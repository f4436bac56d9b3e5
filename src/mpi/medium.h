#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/guarded.h"
#include "coll/medium.h"
#include "coll/report.h"
#include "mpi/library.h"
#include "mpi/messages.h"
#include "mpi/module.h"

namespace convoy::mpi {

// One rank of a group over MPI. Small collectives are MPI's own non-blocking ones, tested to their
// end on the thread that runs them. Large ones are its blocking ones, which take half the time or
// less, after all ranks have met: the deadline is that of the meeting. (Not in a host program whose
// MPI lets only one thread in at a time.) Results are those of shared memory: floats of 8 and 16
// bits are summed in f32 by our kernels; others in the order that MPI chooses.
//
// MPI cannot take back a collective. One that fails, by its deadline or by close(), is left to MPI
// with its buffers, and the group is broken on this rank; others find out by their own deadlines.
class MpiMedium final : public coll::Medium,
                        public Stoppable,
                        public std::enable_shared_from_this<MpiMedium> {
 public:
  // `control` carries what must not meet users' messages. Both belong to it.
  static std::shared_ptr<MpiMedium> make(Communicator data, Communicator control,
                                         const MediumOptions& options);
  ~MpiMedium() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }
  MPI_Comm communicator() const { return data_.get(); }
  const Communicator& control() const { return control_; }

  void run(const coll::Call& call, std::uint64_t number) override;
  coll::Messages& messages() override { return messages_; }

  void abort(const std::string& why) noexcept override;
  void close() noexcept override {
    closing_.store(true, std::memory_order_release);
    stop_.store(true, std::memory_order_release);
  }
  void stop() noexcept override;

  std::optional<ErrorKind> failure() const override;
  bool broken() const override { return broken_.load(std::memory_order_acquire); }
  std::vector<int> lost_ranks() const override { return {}; }
  std::vector<int> late_ranks() override { return *late_.lock(); }
  std::uint64_t last_completed() const override {
    return completed_.load(std::memory_order_acquire);
  }
  bool holds_buffers() const override { return holds_.load(std::memory_order_acquire); }

  // --- of its messages ---
  const std::atomic<bool>& closing() const { return closing_; }
  // The first cause counts.
  void record_failure(ErrorKind kind, const std::string& cause) noexcept;
  std::pair<ErrorKind, std::string> cause() const;
  void abandon(MPI_Request request, std::shared_ptr<void> memory = nullptr);

 private:
  using Scratch = std::shared_ptr<std::vector<std::byte>>;
  struct Running {
    const coll::Call& call;
    std::uint64_t number;
  };
  // A call's memory as MPI takes it: one buffer in, one out.
  struct Buffers {
    std::byte* input;
    std::byte* output;
    bool in_place;  // the input is the output, or the own part of it, or the other way round
  };

  // A buffer cut among the ranks, in elements. MPI reads them until an operation has ended.
  struct Parts {
    std::vector<int> counts;
    std::vector<int> offsets;
  };

  // Messages go without asking up to here: Open MPI's limit on one host is 4 KB, its header
  // included. Longer blocks are swapped in pieces.
  static constexpr std::size_t kEagerBytes = 3072;
  static constexpr std::size_t kMostPieces = 2;
  static constexpr std::size_t kMostSwapped = kMostPieces * kEagerBytes;
  static constexpr int kFewRanks = 8;

  MpiMedium(Communicator data, Communicator control, const MediumOptions& options, bool may_wait);

  coll::Speaker speaker(const Running& running) const {
    return {running.call.signature.op, running.number, name_, rank_, size_};
  }
  void check_failed(const Running& running) const;
  void compare(const Running& running);
  [[noreturn]] void fail_run(const Running& running, ErrorKind kind, const std::string& cause);

  // `outcome` is not kDone.
  [[noreturn]] void fail_unfinished(const Running& running, Finish outcome);

  // Begins an operation by start(request) and brings it to its end.
  template <class Start>
  void complete(const Running& running, const Start& start);
  // The same for an operation of so many bytes on every rank; whole() does all of it at once.
  template <class Start, class Whole>
  void complete(const Running& running, std::size_t bytes, const Start& start, const Whole& whole);
  // Returns when every rank has come.
  void meet_all(const Running& running);
  // For few ranks: each sends its block of `blocks` (one of `bytes`, at most kMostSwapped, for
  // every rank) to all others. The blocks are work_'s, or empty.
  void swap_blocks(const Running& running, std::byte* blocks, std::size_t bytes);
  void monitored_barrier(const Running& running);
  void leave_to_mpi(MPI_Request request);  // with the scratch memory and the parts

  // --- memory (buffers.cpp) ---
  std::byte* scratch(Scratch& which, std::size_t bytes);
  Buffers open(const coll::Call& call);
  void write_back(const coll::Call& call, const Buffers& buffers);
  int to_count(const Running& running, std::size_t elements) const;

  // --- combine.cpp, move.cpp ---
  void combine(const Running& running);
  void exchange(const Running& running, const Buffers& buffers);
  void combine_in_pairs(const Running& running, const Buffers& buffers);
  void combine_slices(const Running& running, const Buffers& buffers);
  void combine_piece(const Running& running, const std::byte* input, std::byte* output,
                     std::size_t count);
  void collect_slice(const Running& running, const std::byte* input, const Parts& out,
                     std::size_t bytes);
  void reduce_slice(const Running& running, std::size_t count, std::byte* target);
  // Valid until the next run().
  const Parts& parts(const Running& running, std::span<const std::uint64_t> counts);
  const Parts& slices(const Running& running, std::size_t count);
  void move(const Running& running);
  void broadcast(const Running& running, const Buffers& buffers);

  const Communicator data_;
  const Communicator control_;
  const int rank_;
  const int size_;
  const std::string name_;
  const bool checks_;
  const bool may_wait_;  // the same on all ranks
  std::atomic<bool> closing_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> stop_{false};  // one of the two
  std::atomic<bool> holds_{false};
  std::atomic<std::uint64_t> completed_{0};
  struct Cause {
    ErrorKind kind;
    std::string text;
  };
  mutable Guarded<std::optional<Cause>> cause_;
  Guarded<std::vector<int>> late_;
  // Of run(). Shared with what is abandoned.
  Scratch input_, output_, work_;
  std::shared_ptr<std::deque<Parts>> parts_;
  MpiMessages messages_;
};

// Brings these ranks of the communicator together: all send a word to the first of them, which then
// sends one to each. `tag` tells meetings of different ranks apart.
struct Meeting {
  MPI_Comm communicator;
  const std::vector<int>& ranks;
  int tag;
};
// Returns who has not come by the deadline (on the first of the ranks; on others the first, if it
// has not answered): nobody is what it should be. nullopt: `stop` was set.
std::optional<std::vector<int>> meet(const Meeting& meeting, const Deadline& deadline,
                                     const std::atomic<bool>& stop);

}  // namespace convoy::mpi
