#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/concat.h"
#include "convoy/deadline.h"
#include "convoy/share.h"
#include "os/file.h"
#include "share/depot.h"
#include "support/deadlines.h"
#include "support/expect_error.h"
#include "support/rank_group.h"

namespace convoy::share::test {

using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using convoy::test::soon;

// Nothing of the pool is in use, and nothing of others'. Waits for peers that let go of it a little
// later.
inline void expect_nothing_held() {
  const auto limit = Deadline::after(std::chrono::seconds(20));
  Depot::Stats stats;
  do {
    stats = Depot::instance().stats();
    if (stats.blocks == 0 && stats.foreign == 0) return;
    ::sched_yield();
  } while (!limit.expired());
  ADD_FAILURE() << stats.blocks << " blocks of the pool are in use, " << stats.abandoned
                << " of them elsewhere, and " << stats.foreign << " of others";
}

// The names in the folder of the strategy kFile that begin so. Every test program has a folder of
// its own, which its ranks share: others run at the same time.
inline std::vector<std::string> files(std::string_view front = "") {
  std::vector<std::string> found;
  std::error_code gone;
  const std::string folder = concat(std::getenv("CONVOY_SHARE_FOLDER"), "/convoy-", ::geteuid());
  for (const auto& entry : std::filesystem::directory_iterator(folder, gone)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(front)) found.push_back(name);
  }
  return found;
}

// Every test ends with nothing shared, in each process of it.
class ShareTest : public testing::Test {
 protected:
  void TearDown() override { expect_nothing_held(); }
};

// A channel between ranks 0 and 1 of a test.
inline Channel meet(const Rank& r, const std::string& name = "channel", int server = 0) {
  if (r.id() == server) {
    const TempFolder folder("share");
    const auto listener = listen(folder.path() + "/s");
    r.store()->set(name, listener.path());
    return listener.accept(r.deadline());
  }
  return connect(r.store()->get(name, r.deadline()), r.deadline());
}

// Rank 0 runs one function and rank 1 the other, each with an end of a channel, as processes.
template <class First, class Second>
void run_pair(First first, Second second) {
  RankGroup(2, RankMode::kProcesses).run([&](Rank& r) {
    {
      const Channel channel = meet(r);
      if (r.id() == 0) {
        first(channel);
      } else {
        second(channel);
      }
      r.barrier();
    }
    r.barrier();
    expect_nothing_held();
  });
}

}  // namespace convoy::share::test
