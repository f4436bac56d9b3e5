#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "agent/call.h"
#include "agent/companion.h"
#include "transport/endpoint.h"

namespace convoy::agent {

// Those of other layers who hear of what happens to an agent. They come before it meets anybody; it
// is constant from then on, so all threads read it without a lock. None is called under a lock.
struct Listeners {
  using Letter = std::function<void(const Worker&, std::span<const std::byte> body,
                                    std::vector<Part>&& parts)>;

  std::map<transport::LetterKind, Letter> letters;
  std::function<void(WorkerId)> admitted;
  std::function<void()> stranger;
  std::vector<std::function<void(const Worker&, const Error&)>> lost;
  std::vector<std::shared_ptr<Companion>> companions;

  // --- all companions ---

  void tell_gone(const Worker& worker, const std::string& why) const noexcept {
    for (const auto& companion : companions) companion->gone(worker, why);
  }
  void tell_closed() const noexcept {
    for (const auto& companion : companions) companion->closed();
  }
  void finish() const {
    for (const auto& companion : companions) companion->finish();
  }
  bool are_idle() const {
    return std::all_of(companions.begin(), companions.end(),
                       [](const auto& companion) { return companion->idle(); });
  }
  std::uint64_t activity() const {
    std::uint64_t sum = 0;
    for (const auto& companion : companions) sum += companion->activity();
    return sum;
  }
};

}  // namespace convoy::agent
