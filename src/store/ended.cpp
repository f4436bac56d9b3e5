#include "store/ended.h"

#include <charconv>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "base/concat.h"
#include "convoy/error.h"
#include "convoy/store.h"
#include "store/server.h"

namespace convoy {
namespace {

bool says(const char* variable, int number) {
  const char* const value = std::getenv(variable);
  return value && std::string_view(value) == std::to_string(number);
}

}  // namespace

std::string ended_line(int rank, const ExitStatus& status) {
  return concat(rank, " ", status.signal != 0 ? "was killed by " : "exited with ",
                status.to_string(), "\n");
}

std::map<int, std::string> parse_ended(const std::string& text) {
  std::map<int, std::string> ended;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    int rank = -1;
    const char* const end = line.data() + line.size();
    const auto [rest, error] = std::from_chars(line.data(), end, rank);
    if (error != std::errc() || rank < 0 || rest == end || *rest != ' ') continue;
    ended.emplace(rank, std::string(rest + 1, end));
  }
  return ended;
}

std::map<int, std::string> ended_ranks(int rank, int size) noexcept {
  if (!std::getenv(kStoreFdVariable) || !says("RANK", rank) || !says("WORLD_SIZE", size)) return {};
  try {
    const auto store = launcher_store();
    return store ? parse_ended(store->try_get(kEndedKey).value_or(""))
                 : std::map<int, std::string>{};
  } catch (const std::exception&) {
    return {};  // the launcher, or this process's connection to it, is gone: others tell that
  }
}

}  // namespace convoy
