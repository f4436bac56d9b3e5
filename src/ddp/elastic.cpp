#include "convoy/elastic.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "coll/group.h"
#include "convoy/backend.h"
#include "os/file.h"
#include "store/server.h"

namespace convoy::elastic {
namespace {

using std::chrono::milliseconds;

// For one attempt to meet newcomers, who may be dead by then.
constexpr milliseconds kAttempt(10'000);

// A step is repeated so often though nobody has died.
constexpr int kRepeats = 3;

// Keys, below "elastic/":
//   tickets        how many have asked to join
//   asked          changes when somebody waits
//   waiting/<id>   somebody waits with this ticket
//   assign/<id>    what becomes of it: "<epoch> <size>", or "over"
//   epoch          how often members have changed
//   meeting/<n>/   where those of epoch n meet
//   over           training has ended
class ElasticRank {
 public:
  ElasticRank(const Model& model, const Options& options)
      : model_(model),
        options_(options),
        store_(with_prefix(options.store, "elastic")),
        group_(model.group()) {}

  std::uint64_t run(const std::function<bool(std::uint64_t)>& step) {
    if (options_.joins) {
      if (!wait_to_join()) return 0;
      tell();
    } else if (group_.size() < options_.min_size) {
      change();
    }
    for (;;) {
      try {
        const bool more = step(next_);
        ++next_;
        if (!more) {
          end();
          return next_;
        }
        if (options_.look_every != 0 && next_ % options_.look_every == 0 && somebody_waits()) {
          change();
        }
      } catch (const Error& e) {
        if (e.kind() != ErrorKind::kPeerLost) throw;
        const int before = group_.size();
        const auto failed = std::exchange(failed_, next_);
        if (failed != next_) unharmed_ = 0;
        if (unharmed_ == kRepeats) throw;
        log_warn("step ", next_, ": ", e.what(), "; going on with the ranks that are left");
        shrink();
        if (group_.size() == before) ++unharmed_;
        change();
      }
    }
  }

 private:
  std::vector<std::string> waiting() const { return store_->keys("waiting/"); }

  // Collective.
  bool somebody_waits() const {
    const at::Tensor some = at::zeros({1}, at::kByte);
    if (group_.rank() == 0 && !waiting().empty()) some.fill_(1);
    group_.broadcast(some);
    return some.item<std::uint8_t>() != 0;
  }

  void shrink() {
    group_ = group_.shrink({.timeout = options_.timeout});
    changed_ = true;
  }

  // Of those in group_, who live as far as they know: until all of them are in one group with whom
  // they have taken in.
  void change() {
    const auto deadline = Deadline::after(options_.timeout);
    for (;;) {
      try {
        if (try_change(deadline)) break;
      } catch (const Error& e) {
        if (e.kind() != ErrorKind::kPeerLost || deadline.expired()) throw;
        log_warn("while members change: ", e.what());
        shrink();
      }
    }
    tell();
  }

  bool try_change(const Deadline& deadline) {
    const Invitation invitation = invite(deadline);
    const int newcomers = invitation.newcomers;
    if (newcomers == 0) {
      if (changed_) move_to(group_);
      changed_ = false;
      return true;
    }
    // Whether it works is decided by those who were there before; a newcomer goes on only if all
    // of them do.
    std::optional<ProcessGroup> all;
    const at::Tensor fine = at::ones({1}, at::kByte);
    try {
      all = meet(invitation.epoch, group_.size() + newcomers);
      move_to(*all);
    } catch (const Error& e) {
      log_warn("members could not take in ", newcomers, " others: ", e.what());
      fine.zero_();
    }
    changed_ = true;
    group_.all_reduce(fine, {.op = ReduceOp::kMin});
    if (fine.item<std::uint8_t>() == 0) {
      if (all) leave_out_newcomers(*all, deadline);
      if (deadline.expired()) {
        fail(ErrorKind::kTimeout, "elastic: the members could not take in new ones within ",
             options_.timeout.count(), " ms");
      }
      return false;
    }
    const ProcessGroup before = std::exchange(group_, *all);
    group_.barrier();
    changed_ = false;
    return true;
  }

  // They may ask again. One that hangs must not go on later, in the middle of an operation with the
  // members' memory. (Who has not got as far as a group has not begun one.)
  void leave_out_newcomers(const ProcessGroup& all, const Deadline& deadline) const {
    all.abort();
    const auto* const together = dynamic_cast<ConvoyBackend*>(all.backend().get());
    const auto* const members = dynamic_cast<ConvoyBackend*>(group_.backend().get());
    if (together == nullptr || members == nullptr) return;
    together->group().settle(deadline);
    together->group().fence(members->group().processes(), deadline, coll::Group::Spare::kQuiet);
  }

  struct Invitation {
    std::int64_t epoch = 0;
    int newcomers = 0;
  };
  // Rank 0 calls those who wait; all members hear of it. Collective.
  Invitation invite(const Deadline& deadline) {
    const at::Tensor told = at::zeros({2}, at::kLong);
    auto* const numbers = told.mutable_data_ptr<std::int64_t>();
    if (group_.rank() == 0) {
      try {
        const auto tickets = wait_for_enough(deadline);
        numbers[1] = static_cast<std::int64_t>(tickets.size());
        if (!tickets.empty()) {
          numbers[0] = store_->add("epoch", 1);
          for (const std::string& key : tickets) {
            store_->erase(key);
            store_->set("assign" + key.substr(key.find('/')),
                        concat(numbers[0], " ", group_.size() + tickets.size()));
          }
        }
      } catch (const Error& e) {
        log_error(e.what());
        numbers[1] = -1;
      }
    }
    group_.broadcast(told, {.timeout = 2 * options_.timeout});  // the root may wait
    if (numbers[1] < 0) {
      fail(ErrorKind::kTimeout, "elastic: ", group_.size(), " members are left, ",
           options_.min_size, " are needed, and nobody has joined in time");
    }
    return {numbers[0], static_cast<int>(numbers[1])};
  }

  std::vector<std::string> wait_for_enough(const Deadline& deadline) const {
    for (std::uint64_t seen = 0;;) {
      auto tickets = waiting();
      if (group_.size() + static_cast<int>(tickets.size()) >= options_.min_size) return tickets;
      seen = store_->watch("asked", seen, deadline).version;
    }
  }

  // Collective among members and newcomers.
  ProcessGroup meet(std::int64_t epoch, int size) const {
    const auto limit = std::min(kAttempt, options_.timeout);
    auto all = group_.merge(with_prefix(store_, concat("meeting/", epoch)), size,
                            {.name = concat("elastic ", epoch), .timeout = limit});
    all.barrier();
    all.set_timeout(group_.timeout());
    return all;
  }

  // Collective in `group`.
  void move_to(const ProcessGroup& group) {
    model_.update(group);
    const at::Tensor all =
        group.all_gather(at::full({1}, static_cast<std::int64_t>(next_), at::kLong));
    next_ = static_cast<std::uint64_t>(all.max().item<std::int64_t>());
  }

  void tell() const {
    log_info("elastic: ", group_.size(), " members, step ", next_);
    if (options_.on_change) options_.on_change({group_, next_});
  }

  // False: it is over.
  bool wait_to_join() {
    const auto deadline = Deadline::after(options_.timeout);
    for (;;) {
      const std::string id = std::to_string(store_->add("tickets", 1));
      store_->set("waiting/" + id, "");
      store_->add("asked", 1);
      // Who ends it says so first, and then looks who waits.
      if (store_->try_get("over")) return false;
      const std::string answer = wait_for_answer(id, deadline);
      if (answer == "over") return false;
      std::istringstream text(answer);
      std::int64_t epoch = 0;
      int size = 0;
      text >> epoch >> size;
      try {
        const auto all = meet(epoch, size);
        move_to(all);
        all.barrier();
        group_ = all;
        return true;
      } catch (const Error& e) {
        if (deadline.expired()) throw;
        log_warn("elastic: was not taken in, and asks again: ", e.what());
      }
    }
  }

  std::string wait_for_answer(const std::string& id, const Deadline& deadline) const {
    try {
      return store_->get("assign/" + id, deadline);
    } catch (const Error& e) {
      store_->erase("waiting/" + id);  // nobody is to be called who does not come
      throw Error(e.kind(), concat("elastic: this process was not taken in: ", e.what()));
    }
  }

  void end() const {
    if (group_.rank() != 0) return;
    store_->set("over", "");
    for (const std::string& key : waiting()) {
      store_->erase(key);
      store_->set("assign" + key.substr(key.find('/')), "over");
    }
  }

  const Model& model_;
  const Options& options_;
  const std::shared_ptr<Store> store_;
  ProcessGroup group_;                   // of the members; before this process is one: its own
  bool changed_ = false;                 // the model is in another one
  std::optional<std::uint64_t> failed_;  // the last step that did
  int unharmed_ = 0;                     // so often though nobody had died
  std::uint64_t next_ = 0;               // step
};

void check(const Options& options, const ProcessGroup& group) {
  const auto refuse = [](const auto&... text) {
    fail(ErrorKind::kInvalidArgument, "elastic: ", text...);
  };
  if (!options.store) refuse("members need a store");
  if (options.timeout <= milliseconds::zero())
    refuse("timeout must be > 0 ms, got ", options.timeout.count());
  if (options.joins && group.size() != 1) {
    refuse("a member that joins must come with a group of 1 rank, got ", group.size());
  }
}

}  // namespace

std::uint64_t run(const Model& model, const Options& options,
                  const std::function<bool(std::uint64_t step)>& step) {
  check(options, model.group());
  return ElasticRank(model, options).run(step);
}

struct StoreHost::Impl {
  TempFolder folder{"convoy-store", TempFolder::Killed::kSwept};
  StoreServer server;
  std::string path;
};

StoreHost::StoreHost() : impl_(std::make_unique<Impl>()) {
  impl_->path = impl_->server.listen(impl_->folder.path(), "socket");
}
StoreHost::~StoreHost() = default;
const std::string& StoreHost::path() const { return impl_->path; }

}  // namespace convoy::elastic
