#include "group/launch_environment.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "group/launch_claims.h"

namespace convoy {
namespace {

void take_claims(LaunchEnvironment& result, const std::vector<Claim>& claims) {
  const Claim& first = claims[0];
  result.launcher = first.launcher;
  result.rank = first.rank;
  result.size = first.size;
  Claim merged = first;
  for (const auto& claim : claims) {
    if (!claim.agrees_with(first)) continue;
    if (!merged.local_rank) merged.local_rank = claim.local_rank;
    if (!merged.local_size) merged.local_size = claim.local_size;
    if (merged.job.empty()) merged.job = claim.job;
    merged.one_host = merged.one_host || claim.one_host;
  }
  // Of two claims, which may count differently: then the size is not known.
  if (merged.local_rank && merged.local_size && *merged.local_rank >= *merged.local_size) {
    merged.local_size.reset();
  }
  result.local_size = merged.local_size.value_or(first.size);
  // Where only the size is known, ranks are placed host by host, as launchers do.
  result.local_rank = merged.local_rank.value_or(first.rank % result.local_size);
  result.one_host = merged.one_host;
  result.job = merged.job;
}

void take_given(LaunchEnvironment& result, const VariableReader& reader, const GivenRank& given) {
  // Rank 0 may also be a program of one rank that has called MPI_Init.
  if (!given.rank && !given.size && reader.find("PMIX_RANK") && reader.value("PMIX_RANK") != "0") {
    fail_environment(reader.shown("PMIX_RANK"),
                     " says that this is one of several ranks, but not of how many; ", kSetAll);
  }
  if (given.rank.has_value() != given.size.has_value()) {
    fail_environment(given.rank ? concat("rank ", *given.rank) : concat("size ", *given.size),
                     " is given, but neither ", given.rank ? "a size" : "a rank",
                     " nor a launcher's variables; give both");
  }
  result.rank = result.local_rank = given.rank.value_or(0);
  result.size = result.local_size = given.size.value_or(1);
}

}  // namespace

std::string to_string(const Endpoint& endpoint) {
  const bool v6 = endpoint.host.find(':') != std::string::npos;
  return concat(v6 ? "[" : "", endpoint.host, v6 ? "]:" : ":", endpoint.port);
}

std::optional<int> parse_whole(std::string_view text) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end) return std::nullopt;
  return number;
}

std::optional<int> tasks_on_node(const std::string& list, int node) {
  std::string_view rest = list;
  int first = 0;  // node of the current entry
  while (!rest.empty() && node >= 0) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    const auto bracket = entry.find("(x");
    int repeats = 1;
    if (bracket != std::string_view::npos) {
      if (!entry.ends_with(')')) return std::nullopt;
      const auto times = parse_whole(entry.substr(bracket + 2, entry.size() - bracket - 3));
      if (!times || *times < 1 || *times > 1'000'000) return std::nullopt;
      repeats = *times;
    }
    const auto tasks = parse_whole(entry.substr(0, bracket));
    if (!tasks || *tasks < 1) return std::nullopt;
    if (node - first < repeats) return tasks;
    first += repeats;
  }
  return std::nullopt;
}

Variables current_variables() {
  Variables result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string_view::npos) {
      result.emplace(text.substr(0, equals), text.substr(equals + 1));
    }
  }
  return result;
}

LaunchEnvironment read_launch_environment(const Variables& variables, const GivenRank& given,
                                          bool launched_by_us) {
  const VariableReader reader(variables, given);
  LaunchEnvironment result;
  std::vector<Claim> claims;
  if (launched_by_us) {
    if (auto claim = torch_claim(reader)) claims.push_back(std::move(*claim));
  } else {
    claims = all_claims(reader);
  }
  if (claims.empty()) {
    take_given(result, reader, given);
  } else {
    take_claims(result, claims);
  }
  if (result.size < 1 || result.rank < 0 || result.rank >= result.size) {
    fail_environment("rank ", result.rank, " of ", result.size,
                     " cannot be: ranks are numbered from 0 to size - 1");
  }
  if (launched_by_us) {
    result.launcher = "convoy run";
    result.one_host = true;
    return result;
  }
  result.agent_store = reader.value("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.restart = reader.value("TORCHELASTIC_RESTART_COUNT");
  return result;
}

std::optional<Endpoint> read_master(const Variables& variables) {
  const GivenRank nothing;
  const VariableReader reader(variables, nothing);
  for (const char* prefix : {"MASTER_", "PET_MASTER_"}) {
    const std::string host_name = concat(prefix, "ADDR");
    const std::string port_name = concat(prefix, "PORT");
    const std::string* host = reader.find(host_name);
    const auto port = reader.number(port_name);
    if (!host && !port) continue;
    if (!host || !port) {
      fail_environment(reader.shown(host ? host_name : port_name), " is set but ",
                       host ? port_name : host_name,
                       " is not; set both: where rank 0 listens, an address of its host");
    }
    if (*port < 1 || *port > 65535) {
      fail_environment(reader.shown(port_name), " is not a port: it must be from 1 to 65535");
    }
    return Endpoint{*host, static_cast<std::uint16_t>(*port)};
  }
  return std::nullopt;
}

MeetingPlace meeting_place(const LaunchEnvironment& environment, const Variables& variables) {
  if (environment.launcher == "convoy run") return MeetingPlace::kLauncherStore;
  if (environment.size == 1) return MeetingPlace::kAlone;
  if (read_master(variables)) return MeetingPlace::kTcp;
  if (environment.one_host && !environment.job.empty()) return MeetingPlace::kJobSocket;
  fail_environment("rank ", environment.rank, " of ", environment.size, " (", environment.launcher,
                   ") cannot find the others: MASTER_ADDR and MASTER_PORT are not set",
                   environment.launcher == "environment" || environment.launcher == "none"
                       ? ""
                       : ", and not all ranks are known to run on this host",
                   "; set both to an address of rank 0's host and a free port there",
                   environment.launcher == "Slurm"
                       ? ": MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
                       : "");
}

}  // namespace convoy
