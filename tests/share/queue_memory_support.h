#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "share/queue_memory.h"
#include "support/deadlines.h"
#include "support/expect_error.h"
#include "support/rank_group.h"
#include "support/segment_address.h"

namespace convoy::share::test {

using convoy::test::address_of;
using convoy::test::at_once;
using convoy::test::expect_error;
using convoy::test::Rank;
using convoy::test::RankGroup;
using convoy::test::RankMode;
using convoy::test::segment_at;
using convoy::test::soon;

inline QueueMemory::Settle no_settle() {
  return [](std::string_view, std::atomic<std::uint32_t>&) {};
}

inline bool put(QueueMemory& queue, const std::string& item, const Deadline& deadline) {
  QueueMemory::Hands hands(queue, 1);
  const std::string_view view = item;
  return queue.put({&view, 1}, queue.epoch(), hands, {}, deadline).items == 1;
}

inline std::optional<std::string> get(QueueMemory& queue, const Deadline& deadline) {
  const auto items = queue.take(1, deadline);
  if (items.empty()) return std::nullopt;
  queue.finish(items[0]);
  return items[0].bytes;
}

// Leaves, so that nothing of it stays in the memory.
struct Queue : QueueMemory {
  using QueueMemory::QueueMemory;
  ~Queue() { leave(); }
};

}  // namespace convoy::share::test
