#pragma once

#include <optional>
#include <string>

namespace convoy::launch {

// Why a program cannot be started: the line to print and the exit status a shell would give.
struct ProgramProblem {
  int exit_code = 0;  // 127: not found; 126: found, but cannot be executed
  std::string line;
};

// Looks before anything is started. `search_path` is PATH; a relative name with a slash counts from
// `working_folder` (empty: ours), which is where the ranks run.
std::optional<ProgramProblem> check_program(const std::string& name, const std::string& search_path,
                                            const std::string& working_folder);

}  // namespace convoy::launch
