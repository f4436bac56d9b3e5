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

namespace {

std::map<int, std::string> all_ended() noexcept {
  if (!std::getenv(kStoreFdVariable)) return {};
  try {
    const auto store = launcher_store();
    return store ? parse_ended(store->try_get(kEndedKey).value_or(""))
                 : std::map<int, std::string>{};
  } catch (const std::exception&) {
    return {};  // the launcher, or this process's connection to it, is gone: others tell that
  }
}

}  // namespace

std::map<int, std::string> ended_ranks(int rank, int size) noexcept {
  if (!says("RANK", rank) || !says("WORLD_SIZE", size)) return {};
  return all_ended();
}

std::map<int, std::string> ended_ranks(int rank, std::span<const int> ranks) noexcept {
  const auto at = static_cast<std::size_t>(rank);
  if (at >= ranks.size() || !says("RANK", ranks[at])) return {};
  const auto all = all_ended();
  std::map<int, std::string> ended;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto found = all.find(ranks[r]);
    if (found != all.end()) ended.emplace(static_cast<int>(r), found->second);
  }
  return ended;
}

std::string ended_in_job() noexcept {
  std::string text;
  for (const auto& [rank, how] : all_ended()) {
    text += concat(text.empty() ? "; of this job rank " : ", rank ", rank, " ", how);
  }
  return text;
}

}  // namespace convoy
