#include "launch/environment.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.h"
#include "base/unique_fd.h"
#include "launch/tuning.h"
#include "os/flight_recorder.h"
#include "store/server.h"

namespace convoy::launch {
namespace {

constexpr std::array<std::string_view, 15> kPerRank = {"RANK",
                                                       "LOCAL_RANK",
                                                       "WORLD_SIZE",
                                                       "ROLE_RANK",
                                                       "LOCAL_WORLD_SIZE",
                                                       "ROLE_WORLD_SIZE",
                                                       "GROUP_RANK",
                                                       "GROUP_WORLD_SIZE",
                                                       "TORCHELASTIC_ERROR_FILE",
                                                       "CONVOY_JOB_ID",
                                                       "CONVOY_STORE_FD",
                                                       "CONVOY_FLIGHT_FD",
                                                       "CONVOY_RENDEZVOUS",
                                                       "TORCHELASTIC_USE_AGENT_STORE",
                                                       "TORCHELASTIC_RUN_ID"};

}  // namespace

Environment current_environment() {
  Environment result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text = *entry;
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return result;
}

bool is_set_per_rank(const std::string& name) {
  for (const auto known : kPerRank) {
    if (name == known) return true;
  }
  return false;
}

std::string error_file_path(const JobContext& job, int rank) {
  return concat(job.error_folder, "/rank-", rank, ".error.json");
}

Environment rank_environment(const Environment& inherited, const RunOptions& options,
                             const JobContext& job, int rank) {
  Environment result = inherited;
  // A launcher that is itself a rank must not hand on its own connection.
  result.erase(kStoreFdVariable);
  result.erase(flight::kFlightFdVariable);
  if (options.tune) {
    const auto is_set = [&](const std::string& name) {
      return inherited.contains(name) ||
             std::any_of(options.environment.begin(), options.environment.end(),
                         [&](const auto& given) { return given.first == name; });
    };
    for (const auto& [name, value] : tuned_variables(job.cores, options.ranks, is_set)) {
      result.emplace(name, value);
    }
  }
  const std::string r = std::to_string(rank);
  const std::string n = std::to_string(options.ranks);
  const Environment ours = {
      {"RANK", r},
      {"LOCAL_RANK", r},
      {"ROLE_RANK", r},
      {"WORLD_SIZE", n},
      {"LOCAL_WORLD_SIZE", n},
      {"ROLE_WORLD_SIZE", n},
      {"ROLE_NAME", "default"},
      {"GROUP_RANK", "0"},
      {"GROUP_WORLD_SIZE", "1"},
      {"MASTER_ADDR", job.master_address},
      {"MASTER_PORT", std::to_string(job.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", "0"},
      {"TORCHELASTIC_MAX_RESTARTS", "0"},
      {"TORCHELASTIC_RUN_ID", job.id},
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"TORCHELASTIC_ERROR_FILE", error_file_path(job, rank)},
      {"CONVOY_JOB_ID", job.id},
      // The four that env:// reads, by which Python's knows that nobody has
      // changed them since.
      {"CONVOY_RENDEZVOUS", concat(r, "/", n, "@", job.master_address, ":", job.master_port)}};
  for (const auto& [name, value] : ours) result.insert_or_assign(name, value);
  for (const auto& [name, value] : options.environment) result.insert_or_assign(name, value);
  return result;
}

std::vector<std::string> to_list(const Environment& environment) {
  std::vector<std::string> list;
  list.reserve(environment.size());
  for (const auto& [name, value] : environment) list.push_back(concat(name, "=", value));
  return list;
}

std::uint16_t pick_free_port() {
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) fail_errno("making a TCP socket to find a free port for MASTER_PORT");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  if (::bind(fd.get(), raw, length) < 0 || ::getsockname(fd.get(), raw, &length) < 0) {
    fail_errno("finding a free port for MASTER_PORT on 127.0.0.1");
  }
  return ntohs(address.sin_port);
}

}  // namespace convoy::launch
