// Events of a ProcessGroup: what is told, and that the place of the call is the user's.
#include <gmock/gmock.h>

#include "base/concat.h"
#include "base/guarded.h"
#include "convoy/error.h"
#include "convoy/flight.h"
#include "group/fake_backend.h"
#include "group/support.h"

namespace convoy::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class EventsTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, EventsTest, rank_modes(), rank_mode_name);

ProcessGroup make_group(const Rank& r) {
  return ProcessGroup::from(make_backend(r), {.name = "world", .store = nullptr});
}

// "all_reduce #1 16 line 40".
std::string describe(const Event& event) {
  const std::string_view file = event.where.file ? event.where.file : "nowhere";
  EXPECT_TRUE(file == "nowhere" || file.ends_with("events_test.cpp")) << file;
  return concat(event.operation, " #", event.sequence, " ", event.bytes, " line ",
                event.where.line);
}

TEST_P(EventsTest, TellWhereTheCallWasMade) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r);
    Guarded<std::vector<std::string>> heard;
    auto handle = group.on_event([&](const Event& e) { heard.lock()->push_back(describe(e)); });
    const auto tensor = full(1, {4});
    const int other = 1 - r.id();
    const unsigned base = __LINE__;
    group.all_reduce(tensor);
    group.broadcast(tensor, {.root = 1});
    auto work = group.all_reduce_async(tensor.t());
    work.wait();
    group.all_gather(tensor);
    group.batch().send(tensor, other).recv(tensor, other).run();
    group.barrier();
    const auto lines = *heard.lock();
    EXPECT_THAT(lines, testing::SizeIs(7));
    EXPECT_EQ(lines[0], concat("all_reduce #1 16 line ", base + 1));
    EXPECT_EQ(lines[1], concat("broadcast #2 16 line ", base + 2));
    EXPECT_EQ(lines[2], concat("all_reduce #3 16 line ", base + 3));
    EXPECT_EQ(lines[3], concat("all_gather #4 32 line ", base + 5));
    EXPECT_THAT(lines, testing::IsSupersetOf({concat("send #1 16 line ", base + 6),
                                              concat("recv #2 16 line ", base + 6)}));
    EXPECT_EQ(lines.back(), concat("barrier #5 0 line ", base + 7));
    // What a library makes of its own calls is the user's line; what comes through c10d has none.
    const unsigned object = __LINE__ + 1;
    group.all_gather_object(std::string("abc"));
    Tensors tensors = {tensor};
    group.backend()->allreduce(tensors)->wait();
    const auto more = *heard.lock();
    EXPECT_THAT(more[7], HasSubstr(concat("line ", object)));
    EXPECT_THAT(more[8], HasSubstr(concat("line ", object)));
    EXPECT_EQ(more.back(), "all_reduce #8 16 line 0");
    handle.remove();
    group.barrier();
    EXPECT_EQ(heard.lock()->size(), more.size());
    EXPECT_THAT(flight_record(), HasSubstr(concat("events_test.cpp\", \"line\": ", object)));
  });
}

TEST(Events, TellOfFailures) {
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = make_group(r);
    std::string heard;
    const auto handle = group.on_event([&](const Event& event) {
      ASSERT_TRUE(event.error);
      heard = text_of([&] { std::rethrow_exception(event.error); });
    });
    EXPECT_THROW(group.all_reduce(full(1, {r.id() + 1})), Error);
    EXPECT_THAT(heard, HasSubstr("ranks disagree"));
  });
}

TEST(Events, OfAForeignBackendAreRefused) {
  RankGroup(1, RankMode::kThreads).run([](Rank& r) {
    const auto group = ProcessGroup::from(c10::make_intrusive<FakeBackend>(make_backend(r)));
    EXPECT_THAT(text_of([&] { static_cast<void>(group.on_event([](const Event&) {})); }),
                HasSubstr("backend \"fake\" does not report its operations"));
  });
}

}  // namespace
}  // namespace convoy::test
