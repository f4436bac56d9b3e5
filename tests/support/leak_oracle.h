#pragma once

#include <chrono>
#include <compare>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "convoy/deadline.h"

namespace convoy::test {

enum class HoldingKind {
  kDescriptor,
  kMapping,  // of a memfd or a file in /dev/shm, which outlives its descriptor
  kThread,
  kChild,       // running or not yet reaped
  kStray,       // a process some test started, whose parent is gone
  kSharedFile,  // in /dev/shm, with this run's tag in its name
  kTempFile,    // in this test program's TMPDIR
};

// Something that a test must give back.
struct Holding {
  HoldingKind kind;
  long number;       // descriptor, thread id, process id, mapped bytes; 0 for files
  std::string key;   // equal holdings have equal kind, number and key
  std::string note;  // for the reader

  friend bool operator==(const Holding& a, const Holding& b) {
    return a.kind == b.kind && a.number == b.number && a.key == b.key;
  }
  friend std::strong_ordering operator<=>(const Holding& a, const Holding& b);
  std::string to_string() const;
};

enum class LeakScope {
  kProcess,  // what this process holds, and its TMPDIR: for a rank, beside which other ranks run
  kMachine,  // also files in /dev/shm and stray processes, of this run only
};

// Sorted. Leaves out what LeakOracle::ignore() names.
std::vector<Holding> take_holdings(LeakScope scope);

struct LeakDiff {
  std::vector<Holding> gained;
  std::vector<Holding> lost;  // descriptors and mappings only: whoever closed them did not own them

  bool empty() const { return gained.empty() && lost.empty(); }
  std::string to_string() const;
};

LeakDiff difference(const std::vector<Holding>& before, const std::vector<Holding>& after);

// How long a test's threads and processes may take to leave /proc; CONVOY_TEST_SETTLE_MS.
std::chrono::milliseconds settle_time();
// Looks again until nothing differs or the deadline passes: a joined thread, a killed process
// leaves /proc a little later.
LeakDiff settled_difference(const std::vector<Holding>& before, LeakScope scope,
                            const Deadline& deadline);

// Kills and reaps the processes in `diff`, so that one leaking test does not disturb the next.
void end_processes(const LeakDiff& diff);

// Fails every test (and test suite) after which this process holds other things than before.
// Installed by the test main.
class LeakOracle {
 public:
  // Things that live as long as the process and are made on first use (a Fabric): call from a
  // global initialiser or a SetUpTestSuite. Exempts what the predicate accepts...
  static void ignore(std::function<bool(const Holding&)> predicate);
  // ...or makes them before the first test, so that they are there before and after.
  static void warm_up(std::function<void()> function);

  // Appends the listener to GoogleTest's; the warm-ups run when the program starts.
  static void install();
  // In a rank's process, which has no listener.
  static void run_warm_ups();
};

// Marks this process and all its descendants with a tag of this run, so that strays are found;
// called by the test main.
void tag_descendants();

// Of a file that a test wants to have in /dev/shm. The tag is part of the name: other programs use
// that folder too (Python's semaphores), so the oracle looks at no other files in it. What Convoy
// itself puts there by default is in TMPDIR in tests, by CONVOY_SHARE_FOLDER.
std::string shared_file_path(std::string_view name);

}  // namespace convoy::test
