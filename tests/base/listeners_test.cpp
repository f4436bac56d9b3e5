#include "base/listeners.h"

#include <gtest/gtest.h>

#include <future>

#include "base/call_scope.h"
#include "convoy/error.h"

namespace convoy {
namespace {

Event event(std::uint64_t sequence) {
  Event one;
  one.operation = "barrier";
  one.sequence = sequence;
  return one;
}

TEST(Listeners, HearUntilTheyAreRemoved) {
  const auto listeners = std::make_shared<Listeners>();
  std::vector<std::uint64_t> first, second;
  auto one = listeners->add([&](const Event& e) { first.push_back(e.sequence); });
  {
    const auto two = listeners->add([&](const Event& e) { second.push_back(e.sequence); });
    listeners->tell(event(1));
  }
  listeners->tell(event(2));
  one.remove();
  one.remove();
  EXPECT_FALSE(one);
  EXPECT_FALSE(listeners->any());
  listeners->tell(event(3));
  EXPECT_EQ(first, (std::vector<std::uint64_t>{1, 2}));
  EXPECT_EQ(second, (std::vector<std::uint64_t>{1}));
}

TEST(Listeners, AHandleMayOutliveThemAndMove) {
  auto listeners = std::make_shared<Listeners>();
  int calls = 0;
  EventHandle kept = listeners->add([&](const Event&) { ++calls; });
  EventHandle moved = std::move(kept);
  listeners->tell(event(1));
  moved = EventHandle();  // removes
  listeners->tell(event(2));
  EXPECT_EQ(calls, 1);
  moved = listeners->add([&](const Event&) { ++calls; });
  listeners.reset();
  moved.remove();
  EXPECT_EQ(calls, 1);
}

TEST(Listeners, ACallbackMayRemoveItselfAndThrow) {
  const auto listeners = std::make_shared<Listeners>();
  int calls = 0;
  EventHandle handle = listeners->add([&](const Event&) {
    ++calls;
    handle.remove();
    throw Error(ErrorKind::kInternal, "thrown on purpose");
  });
  listeners->tell(event(1));
  listeners->tell(event(2));
  EXPECT_EQ(calls, 1);
}

// Whoever removes may destroy what the callback uses.
TEST(Listeners, RemovingWaitsForACallUnderWay) {
  const auto listeners = std::make_shared<Listeners>();
  std::promise<void> entered, leave;
  std::atomic<bool> over{false};
  EventHandle handle = listeners->add([&](const Event&) {
    entered.set_value();
    leave.get_future().wait();
    over = true;
  });
  std::thread teller([&] { listeners->tell(event(1)); });
  entered.get_future().wait();
  std::thread remover([&] {
    handle.remove();
    EXPECT_TRUE(over);
  });
  leave.set_value();
  remover.join();
  teller.join();
}

TEST(Listeners, RefuseAnEmptyCallback) {
  const auto listeners = std::make_shared<Listeners>();
  EXPECT_THROW(static_cast<void>(listeners->add(nullptr)), Error);
}

// A function as users see ours.
unsigned line_of(const CallSite& where = CallSite::current()) {
  const CallScope scope(where);
  const auto inner = [](const CallSite& library = CallSite::current()) {
    const CallScope deeper(library);
    return current_call_site().line;
  };
  return inner();
}

TEST(CallScope, TheOutermostPlaceCounts) {
  EXPECT_EQ(current_call_site().file, nullptr);
  EXPECT_EQ(line_of(), unsigned{__LINE__});
  EXPECT_EQ(current_call_site().file, nullptr);
  const auto here = CallSite::current();
  EXPECT_STREQ(here.file, __FILE__);
  EXPECT_STREQ(here.function, __func__);
}

}  // namespace
}  // namespace convoy
