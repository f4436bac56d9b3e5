// Disagreements and deaths, as they come through tensors: every operation, both forms.
#include <gmock/gmock.h>

#include "base/concat.h"
#include "convoy/error.h"
#include "convoy/init.h"
#include "group/support.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

// One operation of n elements of a type.
struct Operation {
  const char* name;
  const char* called;  // by errors
  std::function<void(const ProcessGroup&, int64_t n, c10::ScalarType)> run;
  std::function<Work(const ProcessGroup&, int64_t n, c10::ScalarType)> begin;
};

void PrintTo(const Operation& operation, std::ostream* out) { *out << operation.name; }

Tensors list_of(const ProcessGroup& group, int64_t n, c10::ScalarType type) {
  Tensors list;
  for (int r = 0; r < group.size(); ++r) list.push_back(full(1, {n}, type));
  return list;
}

const Operation kOperations[] = {
    {"all_reduce", "all_reduce",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.all_reduce(full(1, {n}, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.all_reduce_async(full(1, {n}, type));
     }},
    {"all_reduce_coalesced", "all_reduce",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.all_reduce_coalesced({full(1, {n}, type), full(1, {3}, type)});
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.all_reduce_coalesced_async({full(1, {n}, type), full(1, {3}, type)});
     }},
    {"reduce", "reduce",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.reduce(full(1, {n}, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.reduce_async(full(1, {n}, type));
     }},
    {"broadcast", "broadcast",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.broadcast(full(1, {n}, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.broadcast_async(full(1, {n}, type));
     }},
    {"all_gather_v", "all_gather_v",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.all_gather(list_of(group, n, type), full(1, {n}, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.all_gather_async(list_of(group, n, type), full(1, {n}, type));
     }},
    {"all_gather", "all_gather",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.all_gather_single(full(1, {group.size(), n}, type), full(1, {n}, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.all_gather_single_async(full(1, {group.size(), n}, type), full(1, {n}, type));
     }},
    {"gather_v", "gather_v",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.gather(group.rank() == 0 ? list_of(group, n, type) : Tensors(), full(1, {n}, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.gather_async(group.rank() == 0 ? list_of(group, n, type) : Tensors(),
                                 full(1, {n}, type));
     }},
    {"scatter_v", "scatter_v",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.scatter(full(1, {n}, type), group.rank() == 0 ? list_of(group, n, type) : Tensors());
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.scatter_async(full(1, {n}, type),
                                  group.rank() == 0 ? list_of(group, n, type) : Tensors());
     }},
    {"reduce_scatter_v", "reduce_scatter_v",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.reduce_scatter(full(1, {n}, type), list_of(group, n, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.reduce_scatter_async(full(1, {n}, type), list_of(group, n, type));
     }},
    {"reduce_scatter", "reduce_scatter",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.reduce_scatter_single(full(1, {n}, type), full(1, {group.size(), n}, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.reduce_scatter_single_async(full(1, {n}, type),
                                                full(1, {group.size(), n}, type));
     }},
    {"all_to_all_v", "all_to_all_v",
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       group.all_to_all(list_of(group, n, type), list_of(group, n, type));
     },
     [](const ProcessGroup& group, int64_t n, c10::ScalarType type) {
       return group.all_to_all_async(list_of(group, n, type), list_of(group, n, type));
     }},
};

ProcessGroup make_group(const Rank& r, const std::string& name) {
  return new_group(
      "convoy",
      {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = r.size(), .name = name});
}

class EachOperation : public testing::TestWithParam<Operation> {};
INSTANTIATE_TEST_SUITE_P(All, EachOperation, testing::ValuesIn(kOperations),
                         [](const auto& instance) { return std::string(instance.param.name); });

// Both sides are told what both sides did, and the group goes on.
TEST_P(EachOperation, DisagreementsAreNamed) {
  RankGroup(2, RankMode::kThreads).run([operation = GetParam()](Rank& r) {
    const auto group = make_group(r, "world");
    const auto error_of = [&](int64_t n, c10::ScalarType type) {
      const auto work = operation.begin(group, n, type);
      const auto text = text_of([&] { work.wait(); });
      EXPECT_NE(work.error(), nullptr);
      EXPECT_THAT(text_of([&] { operation.run(group, n, type); }), HasSubstr("disagree"));
      return text;
    };
    const auto both = AllOf(HasSubstr(operation.called), HasSubstr("disagree"), HasSubstr("world"));
    EXPECT_THAT(error_of(5 + r.id(), at::kFloat), both);
    EXPECT_THAT(error_of(1000 + 3000 * r.id(), at::kFloat), both);
    EXPECT_THAT(error_of(6, r.id() == 0 ? at::kFloat : at::kInt),
                AllOf(both, HasSubstr("f32"), HasSubstr("i32")));
    operation.begin(group, 7, at::kFloat).wait();
    // Another operation on the other side.
    const auto other = r.id() == 0 ? operation.begin(group, 2, at::kFloat) : group.barrier_async();
    EXPECT_THAT(text_of([&] { other.wait(); }),
                AllOf(HasSubstr(operation.called), HasSubstr("barrier")));
    group.barrier();
  });
}

// A rank that dies while the others are in it, or wait for it, is named with its signal; later
// calls fail at once.
TEST_P(EachOperation, AKilledRankIsNamed) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([operation = GetParam()](Rank& r) {
    const auto group = make_group(r, "world");
    operation.begin(group, 50'000, at::kFloat).wait();
    r.mark("looping");
    const auto dead = AllOf(HasSubstr("rank 1 (pid "), HasSubstr("SIGKILL"));
    EXPECT_THAT(text_of([&] {
                  for (;;) operation.begin(group, 50'000, at::kFloat).wait();
                }),
                dead);
    EXPECT_THAT(text_of([&] { operation.begin(group, 3, at::kFloat).wait(); }),
                HasSubstr("rank 1"));
    EXPECT_THAT(text_of([&] { operation.run(group, 3, at::kFloat); }), HasSubstr("rank 1"));
    EXPECT_THAT(text_of([&] { group.barrier(); }), HasSubstr("rank 1"));
    r.store()->set(concat("told/", r.id()), "");
  });
  ranks.wait_mark("looping");
  ranks.kill(1, SIGKILL);
  for (const int r : {0, 2}) ranks.store()->get(concat("told/", r), Deadline::after(20s));
  ranks.join();
}

// A rank that is gone before the others begin, in the middle of messages and of a split.
TEST(GroupFaultTest, DeathsElsewhere) {
  RankGroup ranks(3, RankMode::kProcesses);
  ranks.start([](Rank& r) {
    const auto group = make_group(r, "world");
    const auto pair = group.split({0, 2});  // does not know the rank that dies
    auto tensor = full(0, {100'000});
    r.mark("here");
    if (r.id() == 1) {
      for (;;) group.recv(tensor, 1, {.tag = 99});  // from itself: never
    }
    EXPECT_THAT(text_of([&] { group.recv(tensor, 1); }), HasSubstr("rank 1 (pid "));
    EXPECT_THAT(text_of([&] { group.send_object(std::string(100'000, 'x'), 1); }),
                HasSubstr("rank 1"));
    EXPECT_THAT(text_of([&] { group.split_by(0); }), HasSubstr("rank 1"));
    EXPECT_THAT(text_of([&] { group.all_gather_object(std::string("x")); }), HasSubstr("rank 1"));
    tensor.fill_(1);
    pair->all_reduce(tensor);
    expect_equal(tensor, full(2, {100'000}));
    r.store()->set(concat("told/", r.id()), "");
  });
  ranks.wait_mark("here");
  ranks.kill(1, SIGKILL);
  for (const int r : {0, 2}) ranks.store()->get(concat("told/", r), Deadline::after(20s));
  ranks.join();
}

}  // namespace
}  // namespace convoy::test
