// ProcessGroup: other members. After deaths the store is where the living meet: the group itself
// can carry nothing any more.
#include <ATen/Functions.h>

#include <algorithm>
#include <sstream>

#include "base/concat.h"
#include "base/error.h"
#include "base/log.h"
#include "coll/group.h"
#include "group/process_group_impl.h"

namespace convoy {
namespace {

using std::chrono::milliseconds;

// Between two looks at who has died.
constexpr milliseconds kSlice(20);
// For making the group once all have come; a rank that dies in the middle costs this at most.
constexpr milliseconds kAttempt(10'000);

std::vector<int> living(const ConvoyBackend& backend) {
  const auto lost = backend.lost_ranks();
  std::vector<int> ranks;
  for (int r = 0; r < backend.getSize(); ++r) {
    if (std::find(lost.begin(), lost.end(), r) == lost.end()) ranks.push_back(r);
  }
  return ranks;
}

bool lost_any(const ConvoyBackend& backend, const std::vector<int>& ranks) {
  for (const int lost : backend.lost_ranks()) {
    if (std::find(ranks.begin(), ranks.end(), lost) != ranks.end()) return true;
  }
  return false;
}

// What one attempt to make a group of `ranks` needs. All keys are this attempt's own.
struct Attempt {
  const ConvoyBackend& old;
  std::vector<int> ranks;
  std::shared_ptr<Store> store;
  std::string name;
  milliseconds timeout;  // of the new group
};

// False: one of the ranks died before all had come.
bool meet(const Attempt& attempt, const Deadline& deadline) {
  const auto key = [](int rank) { return concat("here/", rank); };
  attempt.store->set(key(attempt.old.getRank()), "");
  std::vector<std::string> keys;
  for (const int rank : attempt.ranks) keys.push_back(key(rank));
  for (;;) {
    if (attempt.store->check(keys)) return true;
    if (lost_any(attempt.old, attempt.ranks)) return false;
    if (deadline.expired()) {
      std::vector<int> missing;
      for (const int rank : attempt.ranks) {
        const std::string one[] = {key(rank)};
        if (!attempt.store->check(one)) missing.push_back(rank);
      }
      fail(ErrorKind::kTimeout, "shrink to group \"", attempt.name, "\", rank ",
           attempt.old.getRank(), " of ", attempt.old.getSize(),
           ": Timed out waiting; these ranks live and have not called it: ", join_ranks(missing),
           "; every survivor must call shrink");
    }
    try {
      attempt.store->wait(keys, std::min(Deadline::after(kSlice), deadline));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kTimeout) throw;
    }
  }
}

// Only one set of survivors may go on, and kill the rest: the first that has met, unless another
// one comes out of it by deaths.
void claim(const Attempt& attempt, Store& keys) {
  const std::string mine = join_ranks(attempt.ranks);
  const std::string claimed = keys.compare_set("survivors", "", mine);
  if (claimed == mine) return;
  std::istringstream text(claimed);
  for (std::string rank; std::getline(text, rank, ',');) {
    if (std::find(attempt.ranks.begin(), attempt.ranks.end(), std::stoi(rank)) !=
        attempt.ranks.end()) {
      return;
    }
  }
  fail(ErrorKind::kInvalidArgument, "shrink to group \"", attempt.name, "\", rank ",
       attempt.old.getRank(), " of ", attempt.old.getSize(), ": these ranks wanted to go on as ",
       mine, ", but ", claimed,
       " do so already; one group cannot shrink to two, use split for that");
}

// No process of the old group that is not in the new one can write into this one's memory any more.
void fence(const Attempt& attempt, const Deadline& deadline) {
  coll::Group& group = attempt.old.group();
  const auto all = group.processes();
  std::vector<Id> members;
  for (const int rank : attempt.ranks) members.push_back(all[static_cast<std::size_t>(rank)]);
  group.fence(members, deadline);
}

// nullptr: one of the ranks died meanwhile. The barrier makes all of them agree whether it is made.
c10::intrusive_ptr<ConvoyBackend> make(const Attempt& attempt, const Deadline& deadline) {
  const auto mine = std::find(attempt.ranks.begin(), attempt.ranks.end(), attempt.old.getRank());
  const auto limit =
      std::min<milliseconds>(kAttempt, std::chrono::ceil<milliseconds>(deadline.remaining()));
  auto options = c10::make_intrusive<ConvoyBackend::Options>(limit);
  options->group_name = attempt.name;
  options->compare_shapes = attempt.old.compares_shapes();
  options->ended = attempt.old.ended_among(attempt.ranks);
  try {
    auto backend = c10::make_intrusive<ConvoyBackend>(
        with_prefix(attempt.store, "backend"), static_cast<int>(mine - attempt.ranks.begin()),
        static_cast<int>(attempt.ranks.size()), options);
    c10d::BarrierOptions now;
    now.asyncOp = false;
    backend->barrier(now);
    backend->setTimeout(attempt.timeout);
    return backend;
  } catch (const Error& error) {
    if (!lost_any(attempt.old, attempt.ranks)) throw;
    log_info("shrink: another rank was lost on the way: ", error.what());
    return nullptr;
  }
}

}  // namespace

ProcessGroup ProcessGroup::shrink(const SplitOptions& options) const {
  return shrink(std::vector<int>(), options);
}

ProcessGroup ProcessGroup::shrink(const std::vector<int>& survivors,
                                  const SplitOptions& options) const {
  if (!impl().shares_memory()) {
    fail(ErrorKind::kUnsupported, impl().head("shrink"), "backend \"", backend_name(),
         "\" does not report dead ranks; make a new group");
  }
  if (!impl().store) {
    fail(ErrorKind::kInvalidArgument, impl().head("shrink"),
         "the group has no store for survivors to meet");
  }
  if (!survivors.empty()) check_ranks(impl().head("shrink"), survivors, size());
  if (!survivors.empty() &&
      std::find(survivors.begin(), survivors.end(), rank()) == survivors.end()) {
    fail(ErrorKind::kInvalidArgument, impl().head("shrink"), "rank ", rank(),
         " is not among the survivors ", join_ranks(survivors));
  }
  impl().backend->abort();  // nobody can complete anything in the old group
  const auto timeout = options.timeout == milliseconds::zero() ? this->timeout() : options.timeout;
  const auto deadline = Deadline::after(timeout);
  // Before others hear that this rank has come: they may use their memory again after that.
  impl().own->group().settle(deadline);
  const int epoch = ++impl().shrinks;
  const auto keys = with_prefix(impl().store, concat("shrink/", epoch));
  const auto name = options.name.empty() ? concat(this->name(), "-", epoch) : options.name;
  for (;;) {
    const auto ranks = survivors.empty() ? living(*impl().own) : survivors;
    const auto store = with_prefix(keys, join_ranks(ranks));
    const Attempt one{*impl().own, ranks, store, name, timeout};
    if (meet(one, deadline)) {
      claim(one, *keys);
      fence(one, deadline);
      if (auto backend = make(one, deadline)) {
        return from(std::move(backend),
                    {.name = name, .store = with_prefix(store, "groups"), .timeout = timeout});
      }
    }
    if (!survivors.empty()) {
      fail(ErrorKind::kPeerLost, impl().head("shrink"), "of the survivors ", join_ranks(survivors),
           " these are gone: ", join_ranks(impl().own->lost_ranks()));
    }
  }
}

ProcessGroup ProcessGroup::merge(const std::shared_ptr<Store>& meeting, int size,
                                 const SplitOptions& options) const {
  impl().check_process("merge");
  if (!impl().shares_memory()) {
    fail(ErrorKind::kUnsupported, impl().head("merge"),
         "only groups of backend \"convoy\" can be merged, not \"", backend_name(), "\"");
  }
  if (!meeting)
    fail(ErrorKind::kInvalidArgument, impl().head("merge"),
         "no store was given for the ranks to meet in");
  if (size < this->size()) {
    fail(ErrorKind::kInvalidArgument, impl().head("merge"), "size must be at least ", this->size(),
         ", the size of this group, got ", size);
  }
  const auto first = at::zeros({1}, at::kLong);
  if (rank() == 0) first.fill_(meeting->add("convoy/merge/ranks", this->size()) - this->size());
  broadcast(first);
  const auto mine = first.item<std::int64_t>() + rank();
  if (mine >= size) {
    fail(ErrorKind::kInvalidArgument, impl().head("merge"), "more than the ", size,
         " ranks came that this one was told of");
  }
  const auto timeout = options.timeout == milliseconds::zero() ? this->timeout() : options.timeout;
  auto made = c10::make_intrusive<ConvoyBackend::Options>(timeout);
  made->group_name = options.name.empty() ? "merged" : options.name;
  made->compare_shapes = impl().own->compares_shapes();
  auto backend = c10::make_intrusive<ConvoyBackend>(with_prefix(meeting, "convoy/merge/backend"),
                                                    static_cast<int>(mine), size, made);
  return from(std::move(backend), {.name = made->group_name,
                                   .store = with_prefix(meeting, "convoy/merge/groups"),
                                   .timeout = timeout});
}

}  // namespace convoy
