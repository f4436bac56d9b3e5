#include "coll/workers.h"

#include "base/log.h"
#include "base/loop.h"
#include "base/thread.h"

namespace convoy::coll {
namespace {

constexpr std::uint32_t kStop = 0xffffffff;

}  // namespace

Workers::~Workers() {
  if (!helpers_.empty()) round_.store_and_wake(kStop);
}

void Workers::start() {
  helpers_.reserve(static_cast<std::size_t>(threads_ - 1));
  try {
    for (int i = 1; i < threads_; ++i) {
      helpers_.push_back(start_thread<std::jthread>([this, i] { work(i); }));
    }
  } catch (const Error& error) {
    log_warn("large operations use ", helpers_.size() + 1, " of ", threads_,
             " threads: ", error.what());
  }
  started_ = true;
}

void Workers::work(int index) {
  set_thread_name("convoy-reduce");
  for (std::uint32_t seen = 0;;) {
    wait_until(round_, WaitPolicy{}, Deadline::never(),
               [seen](std::uint32_t round) { return round != seen; });
    seen = round_.value.load(std::memory_order_acquire);
    if (seen == kStop) return;
    (*part_)(index);
    done_.value.fetch_add(1, std::memory_order_seq_cst);
    done_.wake();
  }
}

void Workers::run(const std::function<void(int)>& part) {
  if (threads_ == 1) return part(0);
  if (!started_) start();
  part_ = &part;
  done_.value.store(0, std::memory_order_relaxed);
  // kStop is never reached by counting: skip it.
  const std::uint32_t next = round_.value.load(std::memory_order_relaxed) + 1;
  round_.store_and_wake(next == kStop ? 1 : next);
  part(0);
  const auto helpers = static_cast<std::uint32_t>(helpers_.size());
  for (int i = static_cast<int>(helpers) + 1; i < threads_; ++i) part(i);  // could not be started
  wait_until(done_, WaitPolicy{}, Deadline::never(),
             [helpers](std::uint32_t done) { return done == helpers; });
}

}  // namespace convoy::coll
