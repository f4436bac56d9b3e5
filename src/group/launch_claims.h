#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "group/launch_environment.h"

namespace convoy {

inline constexpr const char* kSetAll =
    "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in every rank, or start it with `convoy "
    "run`, torchrun, mpirun or srun";

template <class... Parts>
[[noreturn]] void fail_environment(const Parts&... parts) {
  fail(ErrorKind::kInvalidArgument, "rendezvous: ", parts...);
}

// What one launcher's variables say.
struct Claim {
  std::string launcher;
  std::string text;  // the variables as they were found: "RANK=1 WORLD_SIZE=4"
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank = std::nullopt;
  std::optional<int> local_size = std::nullopt;
  bool one_host = false;
  std::string job = {};

  bool agrees_with(const Claim& other) const { return rank == other.rank && size == other.size; }
};

// Looks variables up. Keeps references to both arguments.
class VariableReader {
 public:
  VariableReader(const Variables& variables, const GivenRank& given)
      : variables_(variables), given_(given) {}

  const GivenRank& given() const { return given_; }
  // nullptr: not set. Empty counts as not set: pod templates leave such variables behind.
  const std::string* find(const std::string& name) const;
  // Empty: not set.
  std::string value(const std::string& name) const;
  // "NAME=value"
  std::string shown(const std::string& name) const;
  std::optional<int> number(const std::string& name) const;

  // nullopt if the launcher left neither variable.
  std::optional<Claim> claim(const std::string& launcher, const std::string& rank_name,
                             const std::string& size_name) const;
  void add_local(Claim& claim, const std::string& rank_name, const std::string& size_name) const;

 private:
  const Variables& variables_;
  const GivenRank& given_;
};

std::optional<Claim> torch_claim(const VariableReader& reader);
// Of all launchers, the most specific first. Checks that those agree that must.
std::vector<Claim> all_claims(const VariableReader& reader);

}  // namespace convoy
