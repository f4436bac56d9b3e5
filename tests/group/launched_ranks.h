#pragma once

#include <string>
#include <vector>

#include "group/launch_environment.h"

namespace convoy::test {

// One program to run, in an environment that has nothing of a launcher.
struct Program {
  std::vector<std::string> arguments;
  Variables variables = {};  // added
};
struct ProgramResult {
  int code = -1;  // as a shell shows it
  std::string output;
};

// All at once, each to its end. A program that does not end within a minute is killed.
std::vector<ProgramResult> run_programs(const std::vector<Program>& programs);
ProgramResult run_one(std::vector<std::string> arguments, Variables variables = {});
// True if a shell finds a program of this name.
bool on_path(const std::string& name);

std::string probe_program();
// rendezvous_probe with these words; see there.
Program probe(std::vector<std::string> words, Variables variables = {});

// A TCP port that nobody listens on right now.
int free_port();

// Fails the test unless each rank of the results (in the order of ranks) came to `meetings`
// meetings of all, found the right sum and ended well.
void expect_met(const std::vector<ProgramResult>& results, const std::string& launcher,
                int meetings = 1);
// How often `part` is in `text`.
int times_in(const std::string& text, const std::string& part);

}  // namespace convoy::test
