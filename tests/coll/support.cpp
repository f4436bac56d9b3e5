#include <algorithm>

#include "os/flight_recorder.h"
#include "support/leak_oracle.h"
#include "transport/shm/fabric.h"

namespace convoy::coll::test {
namespace {

using convoy::test::Holding;
using convoy::test::HoldingKind;
using convoy::test::LeakOracle;

// The Fabric lives as long as the process: its thread and listener are there before every test, and
// what it holds for peers and in its arena is not a test's.
[[maybe_unused]] const bool kRegistered = [] {
  LeakOracle::warm_up([] {
    shm::Fabric::instance();
    flight::Recorder::instance();
  });
  LeakOracle::ignore([](const Holding& holding) {
    if (holding.kind == HoldingKind::kMapping || holding.kind == HoldingKind::kDescriptor) {
      if (holding.key.find("convoy:arena") != std::string::npos) return true;
    }
    if (holding.kind != HoldingKind::kDescriptor) return false;
    const auto held = shm::Fabric::instance().descriptors();
    return std::find(held.begin(), held.end(), static_cast<int>(holding.number)) != held.end();
  });
  return true;
}();

}  // namespace
}  // namespace convoy::coll::test
