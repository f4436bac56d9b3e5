// What comes from outside when a program is started: rendezvous URLs, the variables of launchers,
// and the error files that ranks leave. Refused with kInvalidArgument, or in range.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "convoy/error.h"
#include "group/launch_environment.h"
#include "group/rendezvous_url.h"
#include "launch/error_file.h"
#include "launch/json.h"

namespace {

using namespace convoy;

void require(bool condition) {
  if (!condition) std::abort();
}

template <class Function>
void refused_or(Function function) {
  try {
    function();
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::kInvalidArgument);
    require(std::string_view(error.what()).find('\n') == std::string_view::npos);
  }
}

void fuzz_url(std::string_view text) {
  refused_or([&] {
    const auto url = parse_rendezvous_url(std::string(text));
    if (url.given.rank) require(*url.given.rank >= 0);
    if (url.given.size) require(*url.given.size >= 1);
    if (url.scheme == RendezvousUrl::Scheme::kFile) require(url.path.starts_with('/'));
    if (url.scheme == RendezvousUrl::Scheme::kTcp) require(!url.endpoint.host.empty());
  });
}

// "NAME=value" lines; a digit in the place of a name stands for one that launchers use.
void fuzz_environment(std::string_view text) {
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "TORCHELASTIC_RUN_ID",
                                           "TORCHELASTIC_RESTART_COUNT",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_TASKS_PER_NODE",
                                           "SLURM_NODEID",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID",
                                           "OMPI_COMM_WORLD_RANK",
                                           "PMI_RANK",
                                           "PMI_SIZE",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "PET_NNODES",
                                           "PET_NODE_RANK",
                                           "GROUP_RANK",
                                           "TORCHELASTIC_USE_AGENT_STORE",
                                           "PET_MASTER_ADDR",
                                           "PET_MASTER_PORT",
                                           "CONVOY_STORE_FD"};
  Variables variables;
  while (!text.empty()) {
    const auto line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (line.empty()) continue;
    const auto index = static_cast<unsigned char>(line[0]);
    const auto equals = line.find('=');
    if (equals != std::string_view::npos && equals > 1) {
      variables[std::string(line.substr(0, equals))] = line.substr(equals + 1);
    } else {
      variables[kNames[index % std::size(kNames)]] = line.substr(1);
    }
  }
  for (const bool ours : {false, true}) {
    refused_or([&] {
      const auto self = read_launch_environment(variables, {}, ours);
      require(self.size >= 1 && self.rank >= 0 && self.rank < self.size);
      require(self.local_size >= 1 && self.local_rank >= 0 && self.local_rank < self.local_size);
      meeting_place(self, variables);
    });
  }
  refused_or([&] {
    const auto master = read_master(variables);
    if (master) require(!to_string(*master).empty());
  });
}

void fuzz_tasks(std::string_view text) {
  for (const int node : {0, 1, 7, 1 << 20}) {
    if (const auto tasks = tasks_on_node(std::string(text), node)) require(*tasks >= 0);
  }
  if (const auto number = parse_whole(text)) {
    require(text.find_first_not_of("-+0123456789") == std::string_view::npos);
  }
}

void fuzz_error_file(std::string_view text) {
  if (const auto message = launch::parse_error_text(text)) {
    require(!message->empty() && message->size() <= 2100);
  }
  launch::Json::parse(text);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 4) {
    case 0: fuzz_url(text); break;
    case 1: fuzz_environment(text); break;
    case 2: fuzz_tasks(text); break;
    default: fuzz_error_file(text); break;
  }
  return 0;
}
