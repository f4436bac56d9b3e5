#include "mpi/medium.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include "mpi/complete.h"

namespace convoy::mpi {

using coll::OpKind;

namespace {

// On the control communicator; splits have others.
constexpr int kSwapTag = 0;
constexpr int kBarrierTag = 1;  // of a meeting

std::vector<int> everyone(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// Ranks of one group may have been initialised differently, and must call the same.
bool all_may_wait(MPI_Comm communicator, const Deadline& deadline) {
  struct Answers {
    int mine = Library::may_wait() ? 1 : 0, least = 0;
  };
  const auto answers = std::make_shared<Answers>();  // MPI's for as long as it is under way
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const Library::Turn turn;
    check(MPI_Iallreduce(&answers->mine, &answers->least, 1, MPI_INT, MPI_MIN, communicator,
                         &request),
          "MPI");
  }
  const std::atomic<bool> never{false};
  if (finish({&request, 1}, deadline, never) != Finish::kDone) {
    Library::instance().abandon(request, answers);
    fail(ErrorKind::kTimeout, "making a group over MPI: timed out waiting for other ranks");
  }
  return answers->least != 0;
}

}  // namespace

std::shared_ptr<MpiMedium> MpiMedium::make(Communicator data, Communicator control,
                                           const MediumOptions& options) {
  const bool may_wait = all_may_wait(data.get(), Deadline::after(options.timeout));
  std::shared_ptr<MpiMedium> medium(
      new MpiMedium(std::move(data), std::move(control), options, may_wait));
  Library::instance().stop_at_end(medium);
  return medium;
}

MpiMedium::MpiMedium(Communicator data, Communicator control, const MediumOptions& options,
                     bool may_wait)
    : data_(std::move(data)),
      control_(std::move(control)),
      rank_(data_.rank()),
      size_(data_.size()),
      name_(options.name),
      checks_(options.check),
      may_wait_(may_wait),
      messages_(*this) {}

MpiMedium::~MpiMedium() = default;

void MpiMedium::run(const coll::Call& call, std::uint64_t number) {
  const Running running{call, number};
  check_failed(running);
  const Library::Inside inside;
  if (parts_) parts_->clear();
  if (size_ > 1 && checks_) compare(running);
  switch (call.signature.op) {
    case OpKind::kBarrier: meet_all(running); break;
    case OpKind::kMonitoredBarrier: monitored_barrier(running); break;
    case OpKind::kAllReduce:
    case OpKind::kReduce:
    case OpKind::kReduceScatter:
    case OpKind::kReduceScatterV: combine(running); break;
    case OpKind::kNone: fail(ErrorKind::kInternal, "no operation");
    default: move(running);
  }
  completed_.store(number, std::memory_order_release);
}

// As shared memory does for every operation: all ranks see all calls, and all find the same
// difference.
void MpiMedium::compare(const Running& running) {
  const auto n = static_cast<std::size_t>(size_);
  // Through memory that can be left to MPI.
  const auto gather = [&](const void* mine, void* all, std::size_t bytes) {
    std::byte* const from = scratch(input_, bytes);
    std::byte* const to = scratch(output_, n * bytes);
    std::memcpy(from, mine, bytes);
    complete(running, [&](MPI_Request* request) {
      return MPI_Iallgather(from, static_cast<int>(bytes), MPI_BYTE, to, static_cast<int>(bytes),
                            MPI_BYTE, data_.get(), request);
    });
    std::memcpy(all, to, n * bytes);
  };
  // What goes into an error goes along: a rank that has given up cannot be asked afterwards.
  struct Told {
    coll::Signature signature;
    std::array<char, 224> shapes{};  // ends with 0

    coll::Called called() const { return coll::Called::parse(signature, shapes.data()); }
  };
  Told told{running.call.signature};
  coll::describe_call(running.call).copy(told.shapes.data(), told.shapes.size() - 1);
  std::vector<Told> all(n);
  gather(&told, all.data(), sizeof(Told));
  if (std::any_of(all.begin(), all.end(),
                  [&](const Told& one) { return !(one.signature == all[0].signature); })) {
    std::vector<coll::Called> calls;
    for (const Told& one : all) calls.push_back(one.called());
    coll::fail_signatures(speaker(running), std::move(calls));
  }
  if (!coll::has_table(running.call.signature.op)) return;
  const auto& lists = *running.call.lists;
  std::vector<std::uint64_t> mine(lists.send), tables(2 * n * n);
  mine.insert(mine.end(), lists.receive.begin(), lists.receive.end());
  gather(mine.data(), tables.data(), 2 * n * sizeof(std::uint64_t));
  for (std::size_t s = 0; s < n; ++s) {
    for (std::size_t t = 0; t < n; ++t) {
      const auto sent = tables[2 * n * s + t], expected = tables[2 * n * t + n + s];
      if (sent == expected) continue;
      coll::fail_counts(speaker(running), running.call.signature.type,
                        {static_cast<int>(s), static_cast<int>(t), sent, expected});
    }
  }
}

// Empty messages take less time than MPI's non-blocking barrier.
void MpiMedium::meet_all(const Running& running) {
  if (size_ <= kFewRanks) return swap_blocks(running, nullptr, 0);
  complete(running, [&](MPI_Request* request) { return MPI_Ibarrier(data_.get(), request); });
}

void MpiMedium::swap_blocks(const Running& running, std::byte* blocks, std::size_t bytes) {
  constexpr std::size_t kMost = std::size_t{2} * kMostPieces * kFewRanks;
  std::array<MPI_Request, kMost> requests;
  std::array<MPI_Status, kMost> statuses;
  std::array<int, kMost> lengths;
  std::size_t begun = 0;
  // Parts of it may be under way.
  const auto leave = [&] {
    for (std::size_t i = 0; i < begun; ++i) {
      if (requests[i] != MPI_REQUEST_NULL) abandon(requests[i], work_);
    }
    work_ = nullptr;
  };
  const auto block = [&](int rank) { return blocks + static_cast<std::size_t>(rank) * bytes; };
  Finish outcome = Finish::kDone;
  try {
    {
      const Library::Turn turn;
      std::size_t done = 0;
      do {
        const std::size_t piece = std::min(kEagerBytes, bytes - done);
        const int length = static_cast<int>(piece);
        for (int r = 0; r < size_; ++r) {
          if (r == rank_) continue;
          check(MPI_Irecv(block(r) + done, length, MPI_BYTE, r, kSwapTag, control_.get(),
                          &requests[begun]),
                "MPI_Irecv");
          lengths[begun++] = length;
          check(MPI_Isend(block(rank_) + done, length, MPI_BYTE, r, kSwapTag, control_.get(),
                          &requests[begun]),
                "MPI_Isend");
          ++begun;
        }
        done += piece;
      } while (done < bytes);
    }
    outcome =
        finish({requests.data(), begun}, running.call.deadline, stop_, {statuses.data(), begun});
  } catch (const Error& error) {
    leave();
    fail_run(running, error.kind(), error.what());
  }
  if (outcome != Finish::kDone) [[unlikely]] {
    leave();
    fail_unfinished(running, outcome);
  }
  // MPI is content with messages that are too short. Of each pair the first is a receive.
  for (std::size_t i = 0; i < begun; i += 2) {
    int received = 0;
    MPI_Get_count(&statuses[i], MPI_BYTE, &received);
    if (received == lengths[i]) [[likely]]
      continue;
    fail_run(running, ErrorKind::kInvalidArgument,
             concat("rank ", statuses[i].MPI_SOURCE, " sent ", received, " bytes, not ", lengths[i],
                    ": ranks do not call the same operation; option check tells more"));
  }
}

void MpiMedium::monitored_barrier(const Running& running) {
  const auto all = everyone(size_);
  std::optional<std::vector<int>> late;
  try {
    late = meet({control_.get(), all, kBarrierTag}, running.call.deadline, stop_);
  } catch (const Error& error) {
    fail_run(running, error.kind(), error.what());
  }
  if (!late) check_failed(running);
  if (late->empty()) return;
  if (rank_ == 0) *late_.lock() = *late;
  std::string text = "Timed out waiting";
  for (const int r : *late) {
    text += concat("; rank ", r, rank_ == 0 ? " has not called it" : " has not answered");
  }
  fail_run(running, ErrorKind::kTimeout, text);
}

// --- failing ---

void MpiMedium::check_failed(const Running& running) const {
  if (closing_.load(std::memory_order_acquire)) {
    fail(ErrorKind::kPeerLost, operation_prefix(speaker(running)),
         "the group was closed on this rank meanwhile");
  }
  if (!broken()) return;
  const auto [kind, why] = cause();
  throw Error(kind, concat(operation_prefix(speaker(running)), why,
                           "; the group is broken: make a new one"));
}

void MpiMedium::fail_run(const Running& running, ErrorKind kind, const std::string& why) {
  record_failure(kind, why);
  const auto [first_kind, first] = cause();
  throw Error(first_kind, operation_prefix(speaker(running)) + first);
}

void MpiMedium::fail_unfinished(const Running& running, Finish outcome) {
  if (outcome == Finish::kStopped) check_failed(running);
  fail_run(running, ErrorKind::kTimeout,
           concat("Timed out waiting for other ranks; MPI cannot tell which ones "
                  "(monitored_barrier does); last completed #",
                  running.number - 1));
}

void MpiMedium::record_failure(ErrorKind kind, const std::string& why) noexcept {
  {
    auto recorded = cause_.lock();
    if (!*recorded) recorded->emplace(Cause{kind, why});
  }
  broken_.store(true, std::memory_order_release);
  stop_.store(true, std::memory_order_release);
}

std::pair<ErrorKind, std::string> MpiMedium::cause() const {
  auto recorded = cause_.lock();
  return {(*recorded)->kind, (*recorded)->text};
}

std::optional<ErrorKind> MpiMedium::failure() const {
  auto recorded = cause_.lock();
  if (!*recorded) return std::nullopt;
  return (*recorded)->kind;
}

// Others are not told: MPI has no way that needs no call of theirs.
void MpiMedium::abort(const std::string& why) noexcept {
  record_failure(ErrorKind::kPeerLost, concat("rank ", rank_, " aborted the group: ", why));
}

void MpiMedium::stop() noexcept {
  close();
  messages_.close();
}

void MpiMedium::abandon(MPI_Request request, std::shared_ptr<void> memory) {
  holds_.store(true, std::memory_order_release);
  Library::instance().abandon(request, std::move(memory));
}

void MpiMedium::leave_to_mpi(MPI_Request request) {
  struct All {
    std::array<Scratch, 3> memory;
    std::shared_ptr<std::deque<Parts>> parts;
  };
  abandon(request, std::make_shared<All>(All{{input_, output_, work_}, parts_}));
  input_ = output_ = work_ = nullptr;
  parts_ = nullptr;
}

// --- meetings ---

namespace {

// Empty messages of a meeting, to or from others.
struct Words {
  bool sends;
  std::vector<MPI_Request> requests = {};

  // What is not done: receives are taken back, sends go their way.
  ~Words() {
    for (MPI_Request& request : requests) {
      if (request == MPI_REQUEST_NULL || Library::ended()) continue;
      const Library::Turn turn;
      if (!sends) MPI_Cancel(&request);
      MPI_Request_free(&request);
    }
  }
};

// Each by itself, so that it is known which are done.
Finish finish_each(Words& words, const Deadline& deadline, const std::atomic<bool>& stop) {
  static const bool crowded = is_crowded();
  Patience patience(crowded);
  for (int i = 1;; ++i) {
    bool all = true;
    for (MPI_Request& request : words.requests) {
      if (request == MPI_REQUEST_NULL) continue;
      int done = 0;
      const Library::Turn turn;
      check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
      all &= done != 0;
    }
    if (all) return Finish::kDone;
    if (stop.load(std::memory_order_acquire)) return Finish::kStopped;
    if (i % 16 == 0 && deadline.expired()) return Finish::kLate;
    patience.pause();
  }
}

}  // namespace

std::optional<std::vector<int>> meet(const Meeting& meeting, const Deadline& deadline,
                                     const std::atomic<bool>& stop) {
  int me = 0;
  {
    const Library::Turn turn;
    check(MPI_Comm_rank(meeting.communicator, &me), "MPI_Comm_rank");
  }
  const auto begin = [&](Words& words, int peer, int tag) {
    MPI_Request& request = words.requests.emplace_back(MPI_REQUEST_NULL);
    const MPI_Comm comm = meeting.communicator;
    const Library::Turn turn;
    check(words.sends ? MPI_Isend(nullptr, 0, MPI_BYTE, peer, tag, comm, &request)
                      : MPI_Irecv(nullptr, 0, MPI_BYTE, peer, tag, comm, &request),
          "a meeting of ranks");
  };
  const int first = meeting.ranks.front();
  const int come = 2 * meeting.tag, answer = come + 1;
  Words sent{true}, received{false};
  if (me != first) {
    begin(sent, first, come);
    begin(received, first, answer);
    const auto outcome = finish_each(received, deadline, stop);
    if (outcome == Finish::kStopped) return std::nullopt;
    return outcome == Finish::kDone ? std::vector<int>() : std::vector<int>{first};
  }
  std::vector<int> others, late;
  for (const int rank : meeting.ranks) {
    if (rank != me) others.push_back(rank);
  }
  for (const int rank : others) begin(received, rank, come);
  if (finish_each(received, deadline, stop) == Finish::kStopped) return std::nullopt;
  for (std::size_t i = 0; i < others.size(); ++i) {
    if (received.requests[i] != MPI_REQUEST_NULL) late.push_back(others[i]);
  }
  if (!late.empty()) return late;
  for (const int rank : others) begin(sent, rank, answer);
  return late;
}

}  // namespace convoy::mpi
