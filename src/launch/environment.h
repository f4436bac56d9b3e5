#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "launch/options.h"

namespace convoy::launch {

using Environment = std::map<std::string, std::string>;

// What all ranks of a job have in common.
struct JobContext {
  std::string id;
  std::string error_folder;  // where TORCHELASTIC_ERROR_FILE points
  std::string master_address = "127.0.0.1";
  std::uint16_t master_port = 0;
  int cores = 1;
};

// Our own environment.
Environment current_environment();
// Variables that only the launcher can know; --env may not set them.
bool is_set_per_rank(const std::string& name);

std::string error_file_path(const JobContext& job, int rank);

// The environment of one rank: `inherited`, below it tuning defaults where nothing is set, above it
// torchrun's variables and ours, above all --env.
Environment rank_environment(const Environment& inherited, const RunOptions& options,
                             const JobContext& job, int rank);
// "NAME=value" for SpawnOptions.
std::vector<std::string> to_list(const Environment& environment);

// A TCP port that nobody listens on right now. For MASTER_PORT: torch's own store listens on it if
// a rank asks for one; the launcher does not.
std::uint16_t pick_free_port();

}  // namespace convoy::launch
