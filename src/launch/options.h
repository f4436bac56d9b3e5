#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace convoy::launch {

enum class StdinMode {
  kNone,  // ranks read /dev/null
  kAll,   // every rank reads all of it
  kRank,  // one rank reads it, the others /dev/null
};

// What `convoy run` was asked to do.
struct RunOptions {
  int ranks = 1;
  std::vector<std::string> program;  // with its arguments; never empty
  std::string job_id;                // empty: a random one
  std::string working_folder;        // empty: ours
  std::vector<std::pair<std::string, std::string>> environment;
  std::chrono::nanoseconds grace = std::chrono::seconds(5);
  std::optional<std::chrono::nanoseconds> timeout;
  StdinMode stdin_mode = StdinMode::kNone;
  int stdin_rank = 0;                  // kRank only
  std::string log_folder;              // empty: no files
  std::string trace;                   // file for a Chrome trace; empty: none
  std::optional<std::set<int>> shown;  // on the terminal; nullopt: all
  bool prefix = true;
  bool tune = true;
  bool pin = false;
};

struct DoctorOptions {
  bool json = false;
};

struct RecordOptions {
  std::string job;     // its name, or a process's number; empty: list them
  std::string folder;  // empty: to standard output
  std::string trace;   // file for a Chrome trace; empty: none
  int last = 20;       // operations of each rank
  bool json = false;
};

struct CommandLine {
  enum class Command { kText, kRun, kDoctor, kRecord };
  Command command = Command::kText;
  std::string text;  // kText: help or version, for stdout
  RunOptions run;
  DoctorOptions doctor;
  RecordOptions record;
};

// The most ranks that one launcher starts: what its store serves.
inline constexpr int kMaxRanks = 4096;

// `arguments` without the program's own name; `cores` is what `-n auto` means. Throws
// kInvalidArgument with the one line that helps.
CommandLine parse_command_line(const std::vector<std::string>& arguments, int cores);

}  // namespace convoy::launch
