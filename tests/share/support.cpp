#include <algorithm>

#include "share/depot.h"
#include "support/leak_oracle.h"

namespace convoy::share::test {
namespace {

using convoy::test::Holding;
using convoy::test::HoldingKind;
using convoy::test::LeakOracle;

// The pool lives as long as the process, and so do mappings of peers that live; that no block of
// either stays in use is what the tests look at themselves.
[[maybe_unused]] const bool kRegistered = [] {
  LeakOracle::ignore([](const Holding& holding) {
    if (holding.kind == HoldingKind::kMapping || holding.kind == HoldingKind::kDescriptor) {
      if (holding.key.find("convoy:share") != std::string::npos) return true;
    }
    if (holding.kind != HoldingKind::kDescriptor) return false;
    const auto held = Depot::instance().descriptors();
    return std::find(held.begin(), held.end(), static_cast<int>(holding.number)) != held.end();
  });
  return true;
}();

}  // namespace
}  // namespace convoy::share::test
