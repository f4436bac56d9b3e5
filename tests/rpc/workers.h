#pragma once

#include <functional>
#include <string>

#include "convoy/rpc.h"
#include "support/rank_group.h"

namespace convoy::rpc::test {

inline std::string name_of(int rank) { return "worker" + std::to_string(rank); }

inline SessionOptions options_of(const convoy::test::Rank& r) {
  return {.rank = r.id(), .size = r.size(), .store = r.store()};
}

// Runs a function as n workers, with a session each.
inline void run_workers(int n, const std::function<void(Session&, int rank)>& function,
                        const SessionOptions& more = {},
                        convoy::test::RankMode mode = convoy::test::RankMode::kThreads) {
  convoy::test::RankGroup(n, mode).run([&](convoy::test::Rank& r) {
    SessionOptions options = more;
    options.rank = r.id();
    options.size = r.size();
    options.store = r.store();
    Session session(options);
    function(session, r.id());
    session.shutdown();
  });
}

}  // namespace convoy::rpc::test
