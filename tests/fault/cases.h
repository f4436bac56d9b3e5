#pragma once

#include <chrono>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "convoy/deadline.h"
#include "convoy/store.h"

namespace convoy::fault {

// How a system call may fail, and what that must not spoil.
struct Fault {
  enum class Demand {
    kErrorOrSuccess,
    kSuccess,  // it means "try again", or what was asked for is not needed
  };

  const char* call;
  int error;  // or CONVOY_INJECT_PART
  Demand demand = Demand::kErrorOrSuccess;
  bool lasting = false;  // also tried: every call fails from then on (no descriptors are left)
};
const std::vector<Fault>& all_faults();
std::string to_string(const Fault& fault);

// One run: the calls of the fault's name that fail, from 1; times < 0: all from then on.
struct Case {
  Fault fault;
  long first = 1;
  long times = 1;
};
std::string to_string(const Case& one);

// What a rank's function gets.
struct Turn {
  int rank = 0;
  std::shared_ptr<Store> store;  // its keys are fresh
  Deadline deadline;
};

// Two ranks that do something together, and check every value that they get: anything but an Error
// that they throw is a finding.
struct Scenario {
  const char* name;
  void (*run)(const Turn& turn);
  // What of the memory that the process keeps for later is still in use, when all is over; empty:
  // nothing. May be asked again.
  std::string (*held)() = nullptr;
  bool processes = false;  // each rank a process, else both are threads of one
  int victim = 0;          // the rank whose calls fail, if they are processes
};
std::string name_of(const Scenario& scenario);
inline void PrintTo(const Scenario& scenario, std::ostream* out) { *out << name_of(scenario); }
// For values that are not what they must be.
[[noreturn]] void wrong(const std::string& what);

enum class Extent {
  kSample,  // a deterministic choice that takes seconds
  kAll,
};

struct Findings {
  int runs = 0;
  int failed_calls = 0;  // runs in which the fault was met
  int errors = 0;        // runs that ended with an Error
  std::vector<std::string> texts;
};
// Runs the scenario undisturbed and counts its calls; then once for each case, in processes of its
// own, forked from this one, which must have one thread. In each run the ranks do it twice, the
// second time undisturbed: that must succeed. Findings are crashes, hangs, wrong values, other
// exceptions than Error, errors where the fault must not matter, a core that is kept busy while
// ranks wait, and what is left behind that the undisturbed run does not leave.
Findings examine(const Scenario& scenario, Extent extent);
// The same in this process, one case after the other, with both ranks as threads: for what cannot
// be forked. A crash or a hang is this process's.
Findings examine_here(const Scenario& scenario);

// Cases whose text has $CONVOY_TEST_CASE in it; all without that. For looking at one.
std::vector<Case> wanted(std::vector<Case> cases);

// For examinations of another kind: which cases there are if a call is made so often.
std::vector<Case> cases_for(const Fault& fault, long count);
// Those of the sample.
std::vector<Case> sample_of(const std::vector<Case>& cases, std::size_t most);

}  // namespace convoy::fault
