// Making groups: the registry, new_group, scopes, and init() under real launchers.
#include "convoy/init.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <thread>

#include "base/concat.h"
#include "convoy/error.h"
#include "group/fake_backend.h"
#include "group/launched_ranks.h"
#include "group/support.h"
#include "os/file.h"
#include "support/programs.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

GroupConfig config_of(const Rank& r, const std::string& name = "") {
  return {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = r.size(), .name = name};
}

class NewGroupTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, NewGroupTest, rank_modes(), rank_mode_name);

TEST_P(NewGroupTest, OneStoreManyGroups) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto first = new_group("convoy", config_of(r));
    const auto second = new_group("convoy", config_of(r));
    EXPECT_EQ(first.name(), "group-1");
    EXPECT_EQ(second.name(), "group-2");
    EXPECT_NE(first, second);
    auto tensor = full(r.id(), {2});
    const auto work = first.all_reduce_async(tensor);
    second.barrier();
    work.wait();
    expect_equal(tensor, full(3, {2}));
    auto with_options = config_of(r, "tuned");
    with_options.options = {{"threads", "2"}, {"read_private", "false"}};
    const auto tuned = new_group("convoy", with_options);
    EXPECT_EQ(tuned.name(), "tuned");
    EXPECT_EQ(tuned.timeout(), 30s);
    tuned.all_reduce(at::ones({1'000'000}));
    EXPECT_EQ(tuned.split_by(r.id() == 1).size(), r.id() == 1 ? 1 : 2);
    // The same name again is another group; what one rank got wrong does not count.
    if (r.id() == 1) {
      auto wrong = config_of(r, "tuned");
      wrong.device = c10::Device("cuda:0");
      EXPECT_THROW(new_group("convoy", wrong), Error);
      wrong.device = c10::DeviceType::CPU;
      wrong.options = {{"threads", "x"}};
      EXPECT_THROW(new_group("convoy", wrong), Error);
    }
    for (int again = 0; again < 3; ++again) {
      auto same = full(r.id(), {5});
      new_group("convoy", config_of(r, "tuned")).all_reduce(same);
      expect_equal(same, full(3, {5}));
    }
  });
}

// Groups that several threads make at the same time, in whatever order.
TEST_P(NewGroupTest, FromSeveralThreads) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      const int which = r.id() == 0 ? i : 3 - i;
      threads.emplace_back([&r, which] {
        const auto group = new_group("convoy", config_of(r, concat("of thread ", which)));
        for (int round = 0; round < 20; ++round) {
          auto tensor = full(which * (r.id() + 1), {100});
          group.all_reduce(tensor);
          expect_equal(tensor, full(3 * which, {100}));
        }
      });
    }
  });
}

// More ranks than cores.
TEST_P(NewGroupTest, ManyRanks) {
  RankGroup(8, GetParam()).run([](Rank& r) {
    const auto group = new_group("convoy", config_of(r));
    auto tensor = full(1, {10'000});
    group.all_reduce(tensor);
    expect_equal(tensor, full(8, {10'000}));
    const auto half = group.split_by(r.id() % 2);
    EXPECT_EQ(half.all_gather_object(std::to_string(r.id())).size(), 4u);
  });
}

TEST(NewGroupTest, Errors) {
  const GroupConfig alone{.store = make_local_store(), .rank = 0, .size = 1};
  const auto refused = [](const auto& matcher, const std::string& backend,
                          const GroupConfig& config) {
    EXPECT_THAT(text_of([&] { new_group(backend, config); }), matcher);
  };
  refused(AllOf(HasSubstr("no backend \"convoi\""), HasSubstr("convoy")), "convoi", alone);
  refused(AllOf(HasSubstr("Gloo's headers"), HasSubstr("ProcessGroup::from")), "gloo", alone);
  refused(AllOf(HasSubstr("no way to make it"), HasSubstr("ProcessGroup::from")), "nccl", alone);
  auto config = alone;
  config.options = {{"thread", "2"}};
  refused(AllOf(HasSubstr("no option \"thread\""), HasSubstr("read_private, threads")), "convoy",
          config);
  config.options = {{"threads", "many"}};
  refused(HasSubstr("\"many\", not a number"), "convoy", config);
  config.options = {{"read_private", "maybe"}};
  refused(HasSubstr("neither true nor false"), "convoy", config);
  config = alone;
  config.rank = 1;
  refused(HasSubstr("from 0 to size - 1, got rank 1 of 1"), "convoy", config);
  config.rank.reset();
  refused(HasSubstr("say .rank and .size"), "convoy", config);
  config = alone;
  config.device = c10::Device("cuda:0");
  refused(HasSubstr("works on CPU tensors; asked for device cuda:0"), "convoy", config);
  // A rank that does not come is named.
  config = alone;
  config.size = 2;
  config.timeout = 50ms;
  refused(HasSubstr("did not come by the deadline: 1"), "convoy", config);
  EXPECT_THAT(text_of([] { current_group(); }), HasSubstr("convoy::init() has not been called"));
}

// Nothing set, nobody else: a group of one.
TEST(NewGroupTest, Alone) {
  const auto group = new_group("convoy");
  EXPECT_EQ(group.size(), 1);
  auto tensor = full(3, {2, 3}).t();
  group.all_reduce(tensor, {.op = ReduceOp::kAvg});
  expect_equal(tensor, full(3, {3, 2}));
  EXPECT_THAT(group.all_gather_object(std::string("me")), ElementsAre("me"));
  EXPECT_EQ(group.split_by(5).size(), 1);
  group.batch().send(full(1, {2}), 0).recv(tensor = at::zeros({2}), 0).run();
  expect_equal(tensor, full(1, {2}));
}

TEST(RegistryTest, OwnBackends) {
  static std::atomic<int> made = 0;
  const auto factory = [](const std::shared_ptr<Store>& store, int rank, int size,
                          std::chrono::milliseconds timeout, c10::Device,
                          const BackendOptions& options) -> c10::intrusive_ptr<c10d::Backend> {
    if (options.contains("nothing")) return nullptr;
    ++made;
    return c10::make_intrusive<FakeBackend>(c10::make_intrusive<ConvoyBackend>(
        store, rank, size, c10::make_intrusive<ConvoyBackend::Options>(timeout)));
  };
  register_backend("mine", factory, {"nothing"});
  EXPECT_THAT(text_of([&] { register_backend("mine", factory); }),
              AllOf(HasSubstr("\"mine\" is registered already"), HasSubstr("convoy, mine")));
  EXPECT_THAT(text_of([&] { register_backend("convoy", factory); }), HasSubstr("already"));
  EXPECT_THAT(text_of([&] { register_backend("", factory); }), HasSubstr("empty"));
  EXPECT_THAT(text_of([&] { register_backend("other", nullptr); }), HasSubstr("no factory"));
  EXPECT_THAT(backend_names(), ElementsAre("convoy", "mine", "mpi"));
  RankGroup(2, RankMode::kThreads).run([](Rank& r) {
    const auto group = new_group("mine", config_of(r));
    EXPECT_EQ(group.backend_name(), "fake");
    EXPECT_EQ(group.timeout(), 30s);
    auto tensor = full(1, {2});
    group.all_reduce(tensor);
    expect_equal(tensor, full(2, {2}));
  });
  EXPECT_EQ(made, 2);
  GroupConfig config{.store = make_local_store(), .rank = 0, .size = 1};
  config.options = {{"nothing", ""}};
  EXPECT_THAT(text_of([&] { new_group("mine", config); }), HasSubstr("returned nullptr"));
}

// test_context_manager
TEST(GroupScopeTest, NestsAndIsRestored) {
  const GroupConfig alone{.store = make_local_store(), .rank = 0, .size = 1};
  const auto outer = new_group("convoy", alone), inner = new_group("convoy", alone);
  {
    const GroupScope scope(outer);
    EXPECT_EQ(current_group(), outer);
    try {
      const GroupScope nested(inner);
      EXPECT_EQ(current_group(), inner);
      std::jthread([] { EXPECT_THROW(current_group(), Error); }).join();  // the thread's own affair
      throw std::runtime_error("out");
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(current_group(), outer);
    EXPECT_THROW(const GroupScope none{ProcessGroup()}, Error);
    EXPECT_EQ(current_group(), outer);
  }
  EXPECT_THROW(current_group(), Error);
}

// --- init() in the example, under real launchers ---

std::string example_line(int rank, int size) {
  std::string squares;
  for (int r = 0; r < size; ++r) squares += concat(r ? " " : "", r * r);
  const bool last_alone = rank == size - 1 && rank % 2 == 0;
  return concat("rank ", rank, " of ", size, ": ones ", size, ", average ", (size + 1) / 2,
                ", squares ", squares, ", pair of ", last_alone ? 1 : 2, " adds up to ",
                last_alone ? rank : 2 * (rank / 2 * 2) + 1, "\n");
}

void expect_example_runs(std::vector<std::string> launcher, int size) {
  launcher.push_back(sibling_program("all_reduce"));
  const TempFolder folder("init");  // torchrun leaves its own behind
  const auto result = run_one(launcher, {{"TMPDIR", folder.path()}});
  EXPECT_EQ(result.code, 0) << result.output;
  for (int rank = 0; rank < size; ++rank) {
    EXPECT_THAT(result.output, HasSubstr(example_line(rank, size)));
  }
}

TEST(InitTest, Alone) { expect_example_runs({}, 1); }

TEST(InitTest, ConvoyRun) { expect_example_runs({sibling_program("convoy"), "run", "-n", "3"}, 3); }

TEST(InitTest, Mpirun) {
  if (!on_path("mpirun")) GTEST_SKIP() << "no mpirun on this host";
  expect_example_runs({"mpirun", "-n", "3", "--oversubscribe"}, 3);
}

TEST(InitTest, Torchrun) {
  if (::access(CONVOY_TORCHRUN, X_OK) != 0) GTEST_SKIP() << "no " << CONVOY_TORCHRUN;
  expect_example_runs({CONVOY_TORCHRUN, "--no-python", "--standalone", "--nproc-per-node", "3"}, 3);
}

// The last one in this file: the group stays the process's.
TEST(InitTest, APlainCallReturnsTheGroupThatIsThere) {
  const auto world = init({.timeout = 40s});
  EXPECT_EQ(init(), world);
  EXPECT_EQ(init({.timeout = 40s}), world);
  EXPECT_EQ(init().timeout(), 40s);
  EXPECT_THAT(text_of([] { init({.timeout = 41s}); }), HasSubstr("made with other options"));
}

}  // namespace
}  // namespace convoy::test
