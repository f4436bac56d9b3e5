#include "group/launch_claims.h"

#include <algorithm>
#include <string_view>

namespace convoy {

const std::string* VariableReader::find(const std::string& name) const {
  const auto found = variables_.find(name);
  return found == variables_.end() || found->second.empty() ? nullptr : &found->second;
}

std::string VariableReader::value(const std::string& name) const {
  const std::string* text = find(name);
  return text ? *text : std::string();
}

std::string VariableReader::shown(const std::string& name) const {
  return concat(name, "=", value(name));
}

std::optional<int> VariableReader::number(const std::string& name) const {
  const std::string* text = find(name);
  if (!text) return std::nullopt;
  const auto parsed = parse_whole(*text);
  if (!parsed) {
    fail_environment(name, "=", in_quotes(*text), " is not a number; set it to one, or unset it");
  }
  return parsed;
}

std::optional<Claim> VariableReader::claim(const std::string& launcher,
                                           const std::string& rank_name,
                                           const std::string& size_name) const {
  if (!find(rank_name) && !find(size_name)) return std::nullopt;
  const auto rank = given_.rank ? given_.rank : number(rank_name);
  const auto size = given_.size ? given_.size : number(size_name);
  if (!rank || !size) {
    fail_environment(rank && given_.rank   ? concat("rank ", *rank, " is given")
                     : size && given_.size ? concat("size ", *size, " is given")
                                           : concat(shown(rank ? rank_name : size_name), " is set"),
                     " but ", rank ? size_name : rank_name, " is not; ", kSetAll,
                     "; or unset it for a group of one");
  }
  const std::string text =
      concat(given_.rank ? concat("rank ", *rank, " (given)") : shown(rank_name), " ",
             given_.size ? concat("size ", *size, " (given)") : shown(size_name));
  if (*size < 1 || *rank < 0 || *rank >= *size) {
    fail_environment(text, " do not go together: ranks are numbered from 0 to size - 1");
  }
  return Claim{.launcher = launcher, .text = text, .rank = *rank, .size = *size};
}

void VariableReader::add_local(Claim& claim, const std::string& rank_name,
                               const std::string& size_name) const {
  const auto rank = number(rank_name);
  const auto size = number(size_name);
  const bool plausible = (!rank || (*rank >= 0 && *rank < claim.size)) &&
                         (!size || (*size >= 1 && *size <= claim.size)) &&
                         (!rank || !size || *rank < *size);
  if (!plausible) {
    if (given_.rank || given_.size) return;  // they speak of another job than the caller
    fail_environment(rank ? shown(rank_name) + " " : "", size ? shown(size_name) + " " : "",
                     "cannot be, with ", claim.text, "; correct or unset them");
  }
  claim.local_rank = rank;
  claim.local_size = size;
}

std::optional<Claim> torch_claim(const VariableReader& reader) {
  const bool torchrun = reader.find("TORCHELASTIC_RUN_ID") != nullptr;
  auto claim = reader.claim(torchrun ? "torchrun" : "environment", "RANK", "WORLD_SIZE");
  if (claim) reader.add_local(*claim, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  return claim;
}

namespace {

// PET_X is torchrun's option --x. They describe the host's agent, not a rank; with one process a
// host the two are the same.
std::optional<Claim> pet_claim(const VariableReader& reader) {
  if (!reader.find("PET_NNODES") && !reader.find("PET_NODE_RANK")) return std::nullopt;
  if (reader.find("LOCAL_RANK") && reader.find("RANK")) return std::nullopt;  // somebody counted
  const std::string processes = reader.value("PET_NPROC_PER_NODE");
  if (!processes.empty() && processes != "1") {
    fail_environment("PET_NPROC_PER_NODE=", in_quotes(processes),
                     " asks for several processes on each host, but this one was not started by "
                     "torchrun; start it as `torchrun --no-python program`, or set "
                     "PET_NPROC_PER_NODE=1");
  }
  const std::string hosts = reader.value("PET_NNODES");
  const auto colon = hosts.find(':');
  if (colon != std::string::npos && hosts.substr(0, colon) != hosts.substr(colon + 1)) {
    fail_environment("PET_NNODES=", in_quotes(hosts),
                     " is a range, which only torchrun can settle; start the program as `torchrun "
                     "--no-python program`, or set PET_NNODES to a number");
  }
  // "2:2" is 2.
  const Variables plain = {{"PET_NNODES", hosts.substr(0, colon)},
                           {"PET_NODE_RANK", reader.value("PET_NODE_RANK")}};
  auto claim =
      VariableReader(plain, reader.given()).claim("environment", "PET_NODE_RANK", "PET_NNODES");
  if (!claim) return std::nullopt;
  claim->local_rank = 0;
  claim->local_size = 1;
  claim->one_host = claim->size == 1;
  return claim;
}

std::optional<Claim> open_mpi_claim(const VariableReader& reader) {
  auto claim = reader.claim("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  if (!claim) return std::nullopt;
  reader.add_local(*claim, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  claim->one_host = claim->local_size == claim->size;
  // The first two number the job and may come again; the third is random, in versions below 5.
  for (const char* name :
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_precondition_transports"}) {
    if (reader.find(name)) claim->job += concat(" ", reader.shown(name));
  }
  return claim;
}

std::optional<Claim> pmi_claim(const VariableReader& reader) {
  auto claim = reader.claim("MPICH", "PMI_RANK", "PMI_SIZE");
  if (!claim) return std::nullopt;
  reader.add_local(*claim, "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
  claim->one_host = claim->local_size == claim->size;
  return claim;
}

// Only inside a step that srun started. The batch script and the shell of salloc have many of the
// same variables, but they are alone: their steps have names, or numbers at the end of 32 bits.
std::optional<Claim> slurm_claim(const VariableReader& reader) {
  if (!parse_whole(reader.value("SLURM_STEP_ID")) || !reader.find("SLURM_PROCID")) {
    return std::nullopt;
  }
  const char* const size_name =
      reader.find("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  auto claim = reader.claim("Slurm", "SLURM_PROCID", size_name);
  reader.add_local(*claim, "SLURM_LOCALID", "");
  const auto hosts =
      reader.number(reader.find("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES");
  claim->local_size = tasks_on_node(reader.value("SLURM_STEP_TASKS_PER_NODE"),
                                    reader.number("SLURM_NODEID").value_or(0));
  if (hosts == 1) claim->local_size = claim->size;
  claim->one_host = claim->local_size == claim->size;
  // What was asked for, not what was done: a step may be smaller than its job.
  if (!claim->local_size) claim->local_size = reader.number("SLURM_NTASKS_PER_NODE");
  if (claim->local_size > claim->size) claim->local_size.reset();
  claim->job = concat("Slurm ", reader.value("SLURM_JOB_ID"), ".", reader.value("SLURM_STEP_ID"),
                      " restart ", reader.value("SLURM_RESTART_COUNT"));
  return claim;
}

// Where nothing depends on what a launcher says, garbage of its is no error.
template <class Function>
std::optional<Claim> if_sound(bool tolerant, Function function, const VariableReader& reader) {
  try {
    return function(reader);
  } catch (const Error&) {
    if (!tolerant) throw;
    return std::nullopt;
  }
}

void require_agreement(const Claim& a, const Claim& b) {
  if (a.agrees_with(b)) return;
  fail_environment("two launchers left variables that disagree: ", a.text, " (", a.launcher,
                   ") and ", b.text, " (", b.launcher,
                   "); unset those that are not meant, or give rank and size yourself");
}

}  // namespace

std::vector<Claim> all_claims(const VariableReader& reader) {
  const bool tolerant = reader.given().complete();
  std::vector<Claim> claims;
  const auto add = [&](std::optional<Claim> claim) {
    if (claim) claims.push_back(std::move(*claim));
  };
  add(if_sound(tolerant, torch_claim, reader));
  // torchrun is always the innermost: hosts' agents may themselves be ranks of mpirun or srun.
  const bool torchrun = !claims.empty() && claims[0].launcher == "torchrun";
  if (!torchrun) add(if_sound(tolerant, pet_claim, reader));
  add(if_sound(tolerant || torchrun, open_mpi_claim, reader));
  add(if_sound(tolerant || torchrun, pmi_claim, reader));
  if (!tolerant && !torchrun) {
    for (std::size_t i = 1; i < claims.size(); ++i) require_agreement(claims[0], claims[i]);
  }
  // Slurm is the outermost: mpirun and others start their own helpers with srun, whose variables
  // the ranks inherit. It counts where it agrees, and where there is nobody else.
  add(if_sound(tolerant || !claims.empty(), slurm_claim, reader));
  return claims;
}

}  // namespace convoy
