// Backend "mpi": the suites of the other backends under mpirun, and what is its own.
#include "convoy/mpi.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <thread>

#include "base/concat.h"
#include "convoy/error.h"
#include "convoy/init.h"
#include "group/launched_ranks.h"
#include "group/support.h"
#include "os/file.h"
#include "store/server.h"
#include "support/programs.h"

namespace convoy::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

// Whether there is an MPI to test: the module was built, and mpirun is here.
bool has_mpi() {
  return std::filesystem::exists(sibling_program("../lib/libconvoy_mpi.so")) && on_path("mpirun");
}

// A test that starts this program under mpirun must not run there itself: it would never end.
#define CONVOY_NEEDS_MPI()                                   \
  if (under_mpi()) GTEST_SKIP() << "this one starts mpirun"; \
  if (!has_mpi()) GTEST_SKIP() << "no MPI on this host, or built without"

std::vector<std::string> mpirun(int ranks, std::vector<std::string> program) {
  program.insert(program.begin(), {"mpirun", "-n", std::to_string(ranks), "--oversubscribe"});
  return program;
}

// The tests of a program whose names end in Mpi, with four processes.
void expect_suite_passes(const std::string& program) {
  const TempFolder folder("mpi");
  StoreServer server;
  const auto socket = server.listen(folder.path(), "store");
  const auto result =
      run_one(mpirun(4, {sibling_program(program), "--gtest_filter=*Mpi", "--gtest_brief=1"}),
              {{kMpiStoreVariable, socket}});
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_EQ(times_in(result.output, "[  PASSED  ]"), 4) << result.output;
  EXPECT_EQ(times_in(result.output, "[  PASSED  ] 0 tests"), 0) << result.output;
}

TEST(MpiTest, BackendSuites) {
  CONVOY_NEEDS_MPI();
  expect_suite_passes("group_backend_test");
}

TEST(MpiTest, ProcessGroupSuites) {
  CONVOY_NEEDS_MPI();
  expect_suite_passes("group_process_group_test");
}

// What only MPI has: MpiRanksTest below.
TEST(MpiTest, OwnSuite) {
  CONVOY_NEEDS_MPI();
  expect_suite_passes("group_mpi_test");
}

// A host with its own main, communicator and loop; and thread levels.
TEST(MpiTest, HostProgram) {
  CONVOY_NEEDS_MPI();
  for (const auto& [level, ranks] : {std::pair("multiple", 3), std::pair("serialized", 2)}) {
    const auto result = run_one(mpirun(ranks, {sibling_program("mpi_host"), level}));
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_THAT(result.output, HasSubstr(concat(ranks, " ranks: "))) << level;
  }
  const auto refused = run_one(mpirun(1, {sibling_program("mpi_host"), "funneled"}));
  EXPECT_NE(refused.code, 0);
  EXPECT_THAT(refused.output, AllOf(HasSubstr("MPI_THREAD_FUNNELED"),
                                    HasSubstr("MPI_Init_thread with MPI_THREAD_MULTIPLE")));
}

// One program for every launcher, with backend mpi instead: MPI is initialised and ended by us.
TEST(MpiTest, InitWithoutAnyMpiInTheProgram) {
  CONVOY_NEEDS_MPI();
  const auto result = run_one(mpirun(2, {sibling_program("all_reduce"), "mpi"}));
  EXPECT_EQ(result.code, 0) << result.output;
  // Started by somebody else, MPI sees one rank only.
  const auto alone =
      run_one({sibling_program("convoy"), "run", "-n", "2", sibling_program("all_reduce"), "mpi"});
  EXPECT_NE(alone.code, 0);
  EXPECT_THAT(alone.output,
              AllOf(HasSubstr("of 1, but convoy run says rank"), HasSubstr("mpirun")));
  // The launcher ends the other rank, maybe in the middle of MPI_Init: its folder is Open MPI's.
  for (const auto& entry : std::filesystem::directory_iterator(std::getenv("TMPDIR"))) {
    if (entry.path().filename().string().starts_with("ompi.")) {
      std::filesystem::remove_all(entry.path());
    }
  }
}

TEST(MpiTest, OptionsAreCheckedBeforeAnything) {
  EXPECT_THAT(text_of([] { new_group("mpi", {.options = {{"threads", "2"}}}); }),
              AllOf(HasSubstr("no option \"threads\""), HasSubstr("check, compare_shapes, name")));
  EXPECT_THAT(text_of([] { new_group("mpi", {.options = {{"check", "maybe"}}}); }),
              HasSubstr("neither true nor false"));
  EXPECT_THAT(text_of([] { new_group("mpi", {.device = c10::Device("cuda:0")}); }),
              HasSubstr("works on CPU tensors"));
}

// --- under mpirun ---

class MpiRanksTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, MpiRanksTest,
                         testing::ValuesIn(under_mpi() ? std::vector{RankMode::kMpi}
                                                       : std::vector<RankMode>()),
                         rank_mode_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MpiRanksTest);

ProcessGroup make_group(const Rank& r, const std::string& name, bool check = false) {
  return new_group("mpi", {.timeout = 30s,
                           .store = r.store(),
                           .rank = r.id(),
                           .size = r.size(),
                           .name = name,
                           .options = {{"check", check ? "true" : "false"}}});
}

// Bits of every kind: overflows, infinities, NaN, subnormals; half of the floats everyday numbers.
at::Tensor any_values(at::ScalarType type, std::int64_t n, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  const auto size = static_cast<std::int64_t>(c10::elementSize(type));
  auto bits = at::randint(0, 256, {n * size}, generator, at::kByte).view(type);
  if (type == at::kBool) return bits.view(at::kByte).remainder(2).to(at::kBool);
  if (!at::isFloatingType(type) && !at::isComplexType(type)) return bits;
  const auto plain = at::randn({n}, generator).mul(100).to(type);
  const auto chosen = at::arange(n).remainder(2).eq(0);
  return at::where(chosen, bits.to(at::isComplexType(type) ? at::kComplexDouble : at::kDouble),
                   plain.to(at::isComplexType(type) ? at::kComplexDouble : at::kDouble))
      .to(type);
}

at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), {static_cast<std::int64_t>(tensor.nbytes())}, at::kByte);
}

// Whatever the size, and so the way that an operation takes: MPI's own sums of small integers wrap
// or saturate, and those of floats are in an order of its own.
TEST_P(MpiRanksTest, SameBitsAsSharedMemory) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto mpi = make_group(r, "mpi");
    const auto shared = new_group(
        "convoy",
        {.timeout = 30s, .store = r.store(), .rank = r.id(), .size = r.size(), .name = "shared"});
    using enum at::ScalarType;
    for (const auto type :
         {Float, Double, Half, BFloat16, Float8_e4m3fn, Float8_e5m2, Char, Short, Int, Long, Byte,
          UInt16, UInt32, UInt64, Bool, ComplexFloat, ComplexDouble}) {
      const bool floats = at::isFloatingType(type), complex = at::isComplexType(type);
      for (const std::int64_t n : {7, 1009, 5000, 100'001}) {
        const auto mine = any_values(type, n, static_cast<std::uint64_t>(n + r.id()));
        const auto all = any_values(type, 4 * n, static_cast<std::uint64_t>(2 * n + r.id()));
        for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin,
                              ReduceOp::kMax, ReduceOp::kBxor}) {
          if (op == ReduceOp::kAvg && type == Bool) continue;
          if (complex && (op == ReduceOp::kMin || op == ReduceOp::kMax)) continue;
          if (op == ReduceOp::kBxor && (floats || complex)) continue;
          SCOPED_TRACE(concat(c10::toString(type), " ", n, " ", static_cast<int>(op)));
          auto a = mine.clone(), b = mine.clone();
          mpi.all_reduce(a, {.op = op});
          shared.all_reduce(b, {.op = op});
          ASSERT_TRUE(at::equal(bytes_of(a), bytes_of(b)));
          std::memcpy(a.data_ptr(), mine.data_ptr(), mine.nbytes());
          mpi.reduce(a, {.root = 2, .op = op});
          ASSERT_TRUE(r.id() != 2 || at::equal(bytes_of(a), bytes_of(b)));
          auto part = at::empty({n}, type), same = at::empty({n}, type);
          mpi.reduce_scatter_single(part, all, {.op = op});
          shared.reduce_scatter_single(same, all, {.op = op});
          ASSERT_TRUE(at::equal(bytes_of(part), bytes_of(same)));
        }
      }
    }
  });
}

// NaN wins in min and max, as everywhere; MPI leaves that open.
TEST_P(MpiRanksTest, NotANumber) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "nan");
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
      for (const auto op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kSum}) {
        auto tensor = full(r.id() == 1 ? std::nan("") : r.id(), {3}, type);
        group.all_reduce(tensor, {.op = op});
        EXPECT_TRUE(at::isnan(tensor).all().item<bool>()) << type;
      }
    }
  });
}

// The group of the whole job, without a store; parts of it need none either.
TEST_P(MpiRanksTest, WorldAndItsParts) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto world = new_group("mpi");
    EXPECT_EQ(world.size(), 4);
    EXPECT_EQ(world.rank(), r.id());
    EXPECT_EQ(world.store(), nullptr);
    EXPECT_EQ(world.local_size(), 4);
    const auto half = world.split_by(r.id() / 2);
    EXPECT_EQ(half.backend_name(), "mpi");
    auto tensor = full(r.id(), {5});
    half.all_reduce(tensor);
    expect_equal(tensor, full(r.id() < 2 ? 1 : 5, {5}));
    const auto twice = half.split_by(0, -half.rank());
    EXPECT_EQ(twice.rank(), 1 - half.rank());
    EXPECT_THAT(text_of([&] { world.shrink(); }), HasSubstr("does not report dead ranks"));
    EXPECT_THAT(text_of([&] { world.merge(r.store(), 8); }), HasSubstr("not \"mpi\""));
    const auto memory = world.allocate({4, 3}, at::kBFloat16);
    EXPECT_EQ(memory.scalar_type(), at::kBFloat16);
    memory.fill_(1);
    world.all_reduce(memory);
    expect_equal(memory, full(4, {4, 3}, at::kBFloat16));
    world.barrier();
  });
}

// A deadline breaks the group on this rank, and says what MPI knows. Buffers stay until the end.
TEST_P(MpiRanksTest, DeadlinesAndAborts) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto late = make_group(r, "late");
    if (r.id() == 0) {
      EXPECT_THAT(
          text_of([&] { late.all_reduce(full(1, {300'000}), {.timeout = 50ms}); }),
          AllOf(HasSubstr("all_reduce #1, group \"late\", rank 0 of 2"), HasSubstr("Timed out ")));
      EXPECT_THAT(text_of([&] { late.barrier(); }),
                  AllOf(HasSubstr("barrier #2"), HasSubstr("the group is broken")));
    }
    const auto message = make_group(r, "message");
    if (r.id() == 0) {
      auto never = full(0, {3});
      EXPECT_THAT(text_of([&] { message.recv(never, 1, {.timeout = 50ms}); }),
                  AllOf(HasSubstr("recv of 3 x f32 from rank 1"), HasSubstr("Timed out ")));
    }
    const auto aborted = make_group(r, "aborted");
    if (r.id() == 1) {
      const auto pending = aborted.all_reduce_async(full(1, {4}));
      aborted.abort();
      EXPECT_THAT(text_of([&] { pending.wait(); }), HasSubstr("rank 1 aborted the group"));
    }
    const auto monitored = make_group(r, "monitored");
    if (r.id() == 0) {
      EXPECT_THAT(text_of([&] { monitored.monitored_barrier({.timeout = 50ms}); }),
                  HasSubstr("Ranks 1 failed to pass monitoredBarrier in 50 ms"));
    }
    r.barrier();
    // Others go on.
    const auto last = make_group(r, "last");
    auto tensor = full(1, {4});
    last.all_reduce(tensor);
    expect_equal(tensor, full(2, {4}));
  });
}

TEST_P(MpiRanksTest, MessagesThatDoNotFit) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "fit");
    if (r.id() == 0) {
      group.send(full(1, {4}), 1);
      group.send(full(1, {2}), 1);
      EXPECT_THROW(group.send(full(1, {2}), 7), Error);
    } else {
      auto three = full(0, {3});
      EXPECT_THAT(text_of([&] { group.recv(three, 0); }), HasSubstr("does not fit"));
      EXPECT_THAT(text_of([&] { group.recv(three, 0); }), HasSubstr("rank 0 sent 2 elements"));
    }
    group.barrier();
  });
}

// Also without the option check: small operations that differ are errors, not other numbers.
TEST_P(MpiRanksTest, OperationsThatDiffer) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto lengths = make_group(r, "lengths that differ");
    auto tensor = full(1, {r.id() == 0 ? 4 : 2});
    EXPECT_THAT(text_of([&] { lengths.all_reduce(tensor); }),
                HasSubstr(r.id() == 0 ? "rank 1 sent 8 bytes, not 16" : "MPI_ERR_TRUNCATE"));
    const auto kinds = make_group(r, "kinds that differ");
    if (r.id() == 0) {
      EXPECT_THAT(text_of([&] { kinds.all_reduce(tensor); }),
                  HasSubstr("rank 1 sent 0 bytes, not 16"));
    } else {
      EXPECT_THAT(text_of([&] { kinds.barrier(); }), HasSubstr("MPI_ERR_TRUNCATE"));
    }
    expect_equal(tensor, full(1, tensor.sizes()));
  });
}

// Around the lengths where one message, two, or MPI's own collective are used.
TEST_P(MpiRanksTest, LengthsWhereTheWayChanges) {
  RankGroup(4, GetParam()).run([](Rank& r) {
    const auto group = make_group(r, "lengths");
    for (const int64_t bytes : {0, 4, 3072, 3076, 4096, 6144, 6148, 65536}) {
      const auto base = at::arange(bytes / 4, at::kFloat);
      const auto sum = base * (1 + r.id());
      group.all_reduce(sum);
      expect_equal(sum, base * 10);
      group.barrier();
    }
  });
}

// Several threads, several groups, all kinds of operations at once.
TEST_P(MpiRanksTest, ManyAtOnce) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    std::vector<ProcessGroup> groups;
    for (int i = 0; i < 3; ++i) groups.push_back(make_group(r, concat("many", i), true));
    std::vector<std::jthread> threads;
    for (const auto& group : groups) {
      threads.emplace_back([&group, &r] {
        for (int i = 0; i < 30; ++i) {
          auto a = full(r.id(), {1 + 997 * i}), b = full(0, {3});
          const auto sum = group.all_reduce_async(a);
          const auto sent = group.send_async(full(r.id(), {3}), (r.id() + 1) % 3);
          EXPECT_EQ(group.recv(b, (r.id() + 2) % 3), (r.id() + 2) % 3);
          sum.wait();
          sent.wait();
          expect_equal(a, full(3, a.sizes()));
          expect_equal(b, full((r.id() + 2) % 3, {3}));
        }
      });
    }
  });
}

}  // namespace
}  // namespace convoy::test
