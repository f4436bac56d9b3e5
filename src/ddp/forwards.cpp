#include "ddp/forwards.h"

#include <algorithm>
#include <utility>

namespace convoy {

std::shared_ptr<ForwardFate> Forwards::begin(bool in_step, bool paused) {
  ++last_;
  auto fate = std::make_shared<ForwardFate>();
  fate->paused = in_step && paused;
  if (in_step && !paused) in_step_.emplace(last_, fate);
  std::erase_if(sinks_, [](const auto& sink) { return sink.expired(); });
  return fate;
}

void Forwards::visit(const Sink& sink, bool syncs) {
  if (!syncs) {
    in_step_.erase(sink.forward);
  } else if (sink.fate && sink.fate->paused) {
    in_step_.try_emplace(sink.forward, nullptr);
  }
}

std::vector<NodePtr> Forwards::waiting(const std::set<std::uint64_t>* of) const {
  std::vector<NodePtr> found;
  for (const auto& weak : sinks_) {
    auto sink = weak.lock();
    if (!sink || sink->visited) continue;
    if (of == nullptr || of->contains(sink->forward)) found.emplace_back(std::move(sink));
  }
  return found;
}

bool Forwards::comes_by_one() const {
  const auto found = waiting();
  return std::any_of(found.begin(), found.end(),
                     [](const NodePtr& sink) { return is_in_backward(*sink); });
}

void Forwards::drop_unvisited(const std::set<std::uint64_t>& visited) {
  std::erase_if(in_step_, [&](const auto& one) {
    return one.second && one.second.use_count() == 1 && !visited.contains(one.first);
  });
}

std::optional<std::uint64_t> Forwards::unwound(const std::set<std::uint64_t>& visited) const {
  for (const auto& [number, fate] : in_step_) {
    // Another output of it may live on.
    const bool is_gone = fate && fate->unwound && fate.use_count() == 1;
    if (is_gone && !visited.contains(number)) return number;
  }
  return std::nullopt;
}

}  // namespace convoy
