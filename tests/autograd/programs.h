#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "convoy/autograd.h"

namespace convoy::autograd::programs {

// Random programs of calls, each of which follows from its seed: 2 to 4 workers compute with their
// parameters, call each other, nested and in cycles, with one tensor or several, use some results
// and drop others, work in place and on views. Gradients of what comes out are those of one
// process.

// How many letters were sent while faults happen, and how many of them were lost, by what they call
// or answer: "expand", "answer to expand".
struct Sent {
  std::uint64_t all = 0;
  std::uint64_t lost = 0;
};
using SentLetters = std::map<std::string, Sent>;

// In a simulated world. Faulty: letters of the backward passes, and those that end contexts, are
// dropped, doubled and delayed, and workers crash; a pass is exact then, or fails with a worker's
// name, changes nothing and leaves nothing behind.
SentLetters run_simulated(std::uint64_t first_seed, std::uint64_t count, bool faulty);

// What contexts and passes send, and none of which was lost.
std::vector<std::string> never_lost(const SentLetters& letters);

// As worker 0 of a session whose other workers only serve.
void run_as_root(const rpc::Session& session, std::uint64_t first_seed, std::uint64_t count);

}  // namespace convoy::autograd::programs
