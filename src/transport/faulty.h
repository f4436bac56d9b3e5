#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "transport/endpoint.h"

namespace convoy::transport {

// What may happen to letters of some kinds. Chances are in a million, and are drawn for each letter
// from the seed, the remote (by the order in which they were met) and the number of the letter to
// it: the same letters meet the same fate in every run. The first that is drawn counts.
struct Fault {
  LetterKind first_kind = 0;
  LetterKind last_kind = 0xffff;
  std::uint32_t drop = 0;
  std::uint32_t duplicate = 0;  // it arrives twice
  std::uint32_t reorder = 0;    // the next one overtakes it
  std::uint32_t delay = 0;      // it leaves later, others overtake it
  std::uint32_t cut = 0;        // the connection ends: both sides hear lost()
  std::chrono::nanoseconds most_delay = std::chrono::milliseconds(2);
};

struct Faults {
  std::uint64_t seed = 0;
  std::vector<Fault> rules = {};  // the first one for a letter's kind is its
};

// An endpoint whose letters meet faults on their way out: for tests of protocols, ours and users'.
// To have them both ways, give each side one. `make` gives the endpoint in it, which delivers to
// the inbox that it is given. Letters that are not dropped stay whole.
std::unique_ptr<Endpoint> make_faulty(Inbox& inbox, const Faults& faults,
                                      const std::function<std::unique_ptr<Endpoint>(Inbox&)>& make);

}  // namespace convoy::transport
