#pragma once

#include <map>
#include <span>
#include <string>

#include "os/process.h"

namespace convoy {

// What `convoy run` tells its ranks of those that have ended: a key of its store to which it
// appends a line for each, so that nobody waits for a rank that will never come.
inline constexpr const char* kEndedKey = "convoy/ended";
std::string ended_line(int rank, const ExitStatus& status);
// By rank: "exited with exit code 0". Lines that are none are left out.
std::map<int, std::string> parse_ended(const std::string& text);

// The ranks that have ended of the job that this process is a rank of, if it is rank `rank` of
// `size` of one that `convoy run` started. Otherwise, and if that cannot be asked, none.
std::map<int, std::string> ended_ranks(int rank, int size) noexcept;
// The same for a group of some of its ranks: rank r of the group is `ranks[r]` of the job. By rank
// of the group; none if this process is not ranks[rank].
std::map<int, std::string> ended_ranks(int rank, std::span<const int> ranks) noexcept;
// Of the whole job, for people: "; of this job rank 3 was killed by ...", or nothing.
std::string ended_in_job() noexcept;

}  // namespace convoy
