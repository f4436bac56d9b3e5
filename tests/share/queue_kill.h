#pragma once

#include <functional>
#include <string>

#include "convoy/queue.h"
#include "support.h"

namespace convoy::share::test {

// Rank 0 makes the objects; the others get them by name.
template <class T>
T meet_at(const Rank& r, const std::string& name, const std::function<T()>& make) {
  if (r.id() != 0) return T(open(name, r.deadline()));
  T made = make();
  offer(made, name);
  return made;
}

inline Queue meet_queue(const Rank& r, const QueueOptions& options = {}) {
  return meet_at<Queue>(r, "queue", [&] { return Queue(options); });
}

// A survivor and victims use a queue, and the victims are killed.
void run_queue_kills(int victims, unsigned seed);

}  // namespace convoy::share::test
