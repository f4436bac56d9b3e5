#include "launch/program.h"

#include <unistd.h>

#include <filesystem>

#include "base/concat.h"
#include "launch/text.h"

namespace convoy::launch {
namespace {

namespace fs = std::filesystem;

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}
bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

ProgramProblem not_executable(const fs::path& path) {
  if (is_folder(path)) {
    return {126, concat("convoy run: '", path.string(), "' is a folder, not a program")};
  }
  return {126, concat("convoy run: '", path.string(), "' is not executable; chmod +x it",
                      path.extension() == ".py" ? ", or run it with python3" : "")};
}

std::optional<ProgramProblem> check_path(const std::string& name, const fs::path& path) {
  if (!is_there(path)) {
    const auto folder = path.parent_path();
    return ProgramProblem{
        127,
        concat("convoy run: '", name, "' was not found",
               is_there(folder) ? "" : concat(" (there is no folder '", folder.string(), "')"))};
  }
  if (is_folder(path) || ::access(path.c_str(), X_OK) != 0) return not_executable(path);
  return std::nullopt;
}

}  // namespace

std::optional<ProgramProblem> check_program(const std::string& name, const std::string& search_path,
                                            const std::string& working_folder) {
  const fs::path base = working_folder.empty() ? fs::path(".") : fs::path(working_folder);
  if (!is_folder(base)) {
    return ProgramProblem{2,
                          concat("convoy run: --workdir '", working_folder, "' is not a folder")};
  }
  if (name.find('/') != std::string::npos) {
    return check_path(name,
                      working_folder.empty() ? fs::path(name) : (base / name).lexically_normal());
  }
  std::optional<ProgramProblem> unusable;
  for (const auto& folder : split(search_path, ':')) {
    const fs::path candidate = fs::path(folder.empty() ? "." : folder) / name;
    if (!is_there(candidate) || is_folder(candidate)) continue;
    if (::access(candidate.c_str(), X_OK) == 0) return std::nullopt;
    if (!unusable) unusable = not_executable(candidate);
  }
  if (unusable) return unusable;
  const bool here = is_there(base / name) && !is_folder(base / name);
  return ProgramProblem{
      127, concat("convoy run: program '", name, "' was not found in PATH",
                  here ? concat("; for the one in this folder write './", name, "'") : "")};
}

}  // namespace convoy::launch
