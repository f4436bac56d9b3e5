#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "os/flight_log.h"

namespace convoy::flight {

// The records of a job, as PyTorch's flight recorder has them (version 2.10 of its form). As JSON:
// all operations of one rank; `job` has all ranks' logs, by which members of groups are told.
std::string to_json(const Log& log, const std::vector<Log>& job);
// As a pickle, which is what torchfrtrace reads: only collectives, and only those that the ranks'
// records have in common (torchfrtrace would take the others for missing).
std::string to_pickle(const Log& log, const std::vector<Log>& job);
// Both for every rank: folder/rank_<r> and folder/<r>.json. The folder is made if it is missing.
// Throws.
void write_dumps(const std::string& folder, const std::vector<Log>& job);

// "12 us", "1.2 ms", "3.2 s".
std::string short_time(std::chrono::nanoseconds time);
// "all_reduce #41 of group "world", 256 x f32, completed in 1.2 ms, 3.2 s ago, train.cpp:40".
std::string describe_line(const Log& log, const Entry& entry, std::chrono::nanoseconds now);
// What the rank did last: lines of at most `most` operations, oldest first. Failures before
// `since` are left out: the program has gone on.
std::vector<std::string> last_operations(const Log& log, std::size_t most,
                                         std::chrono::nanoseconds now,
                                         std::chrono::nanoseconds since = {});
// Who of the others waits for this rank, which is alive and has not come: lines such as
// "ranks 0, 3 in all_reduce #42 of group "world" (train.cpp:40)".
std::vector<std::string> who_waits_for(const Log& log, const std::vector<Log>& job);
// Of a rank that has ended, perhaps in the midst of it: who waited for something that it has not
// done. What failed before `since` did so for another reason.
std::vector<std::string> who_waited_for(const Log& log, const std::vector<Log>& job,
                                        std::chrono::nanoseconds since);

}  // namespace convoy::flight
