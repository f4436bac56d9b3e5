// Ranks compare the shapes of the tensors that they combine or pass on, not only how many elements
// they have.
#include <gmock/gmock.h>

#include "group/support.h"

namespace convoy::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Sizes = std::vector<std::int64_t>;

class ShapesTest : public testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, ShapesTest, rank_modes(), rank_mode_name);

ProcessGroup world_of(const Rank& r, const BackendOptions& options = {}) {
  return new_group("convoy", {.timeout = std::chrono::seconds(30),
                              .store = r.store(),
                              .rank = r.id(),
                              .size = r.size(),
                              .name = "world",
                              .options = options});
}

struct ShapedOperation {
  const char* name;
  std::function<void(const ProcessGroup&, const Sizes&)> run;
};

Tensors tensors_of(const Sizes& sizes, int n = 3) {
  Tensors list;
  for (int i = 0; i < n; ++i) list.push_back(at::ones(sizes));
  return list;
}

std::vector<ShapedOperation> shaped_operations() {
  return {
      {"all_reduce", [](auto& g, auto& s) { g.all_reduce(at::ones(s)); }},
      {"all_reduce in group memory",
       [](auto& g, auto& s) { g.all_reduce(g.allocate(s).fill_(1)); }},
      {"all_reduce_async", [](auto& g, auto& s) { g.all_reduce_async(at::ones(s)).wait(); }},
      {"all_reduce_coalesced",
       [](auto& g, auto& s) { g.all_reduce_coalesced({at::ones({5}), at::ones(s)}); }},
      {"reduce", [](auto& g, auto& s) { g.reduce(at::ones(s)); }},
      {"broadcast", [](auto& g, auto& s) { g.broadcast(at::ones(s)); }},
      {"all_gather", [](auto& g, auto& s) { g.all_gather(tensors_of(s), at::ones(s)); }},
      {"all_gather_single",
       [](auto& g, auto& s) { g.all_gather_single(at::ones({18}), at::ones(s)); }},
      {"all_gather of one", [](auto& g, auto& s) { g.all_gather(at::ones(s)); }},
      {"gather",
       [](auto& g, auto& s) { g.gather(g.rank() == 0 ? tensors_of(s) : Tensors(), at::ones(s)); }},
      {"scatter",
       [](auto& g, auto& s) { g.scatter(at::ones(s), g.rank() == 0 ? tensors_of(s) : Tensors()); }},
      {"reduce_scatter", [](auto& g, auto& s) { g.reduce_scatter(at::ones(s), tensors_of(s)); }},
      {"reduce_scatter_single",
       [](auto& g, auto& s) { g.reduce_scatter_single(at::ones({2}), at::ones(s)); }},
      {"all_to_all", [](auto& g, auto& s) { g.all_to_all(tensors_of(s), tensors_of(s)); }},
  };
}

TEST_P(ShapesTest, EqualCountsOfOtherShapesAreAnError) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = world_of(r);
    const Sizes mine = r.id() == 2 ? Sizes{3, 2} : Sizes{2, 3};
    for (const auto& operation : shaped_operations()) {
      EXPECT_THAT(text_of([&] { operation.run(group, mine); }),
                  AllOf(HasSubstr("ranks disagree"), HasSubstr("[2, 3]"), HasSubstr("[3, 2]"),
                        HasSubstr("rank 2"), HasSubstr("no data was touched"),
                        HasSubstr("compare_shapes = false")))
          << operation.name;
      const auto x = at::ones({4});
      group.all_reduce(x);
      expect_equal(x, full(3, {4}));  // the group goes on
    }
  });
}

TEST_P(ShapesTest, BothShapesAreNamedWithTheirRanks) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = world_of(r);
    EXPECT_THAT(text_of([&] { group.all_reduce(at::ones(r.id() == 1 ? Sizes{6, 1} : Sizes{6})); }),
                AllOf(HasSubstr("rank 0 called all_reduce(6 x f32, sum) on a tensor of shape [6]"),
                      HasSubstr("rank 1 called all_reduce(6 x f32, sum) on a tensor of shape "
                                "[6, 1]")));
    EXPECT_THAT(text_of([&] { group.all_reduce(at::ones(r.id() == 1 ? Sizes{} : Sizes{1})); }),
                AllOf(HasSubstr("shape [1]"), HasSubstr("shape []")));
    Tensors outputs = tensors_of({2, 2});
    if (r.id() == 2) outputs[1] = at::ones({4});
    EXPECT_THAT(text_of([&] { group.all_gather(outputs, at::ones({2, 2})); }),
                HasSubstr("rank 1 sends a tensor of shape [2, 2] to rank 2, which expects a tensor "
                          "of shape [4]"));
    // Other differences are named as before.
    EXPECT_THAT(text_of([&] { group.all_reduce(at::ones({r.id() + 1})); }),
                AllOf(HasSubstr("1 x f32"), HasSubstr("2 x f32"), HasSubstr("same calls")));
    group.barrier();
  });
}

// Of tensors that travel as bytes.
TEST_P(ShapesTest, TypesOfWhatIsGatheredTogether) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto backend = make_backend(r);
    Tensors inputs = {r.id() == 0 ? at::ones({2}, at::kInt) : at::ones({2}, at::kFloat)};
    Tensors outputs = {at::ones({4}, inputs[0].options())};
    EXPECT_THAT(text_of([&] {
                  backend->allgather_into_tensor_coalesced(outputs, inputs, {.asyncOp = false});
                }),
                AllOf(HasSubstr("ranks disagree"), HasSubstr("types")));
    backend->barrier();
  });
}

TEST_P(ShapesTest, OnlyCountsIfTheGroupSaysSo) {
  RankGroup(3, GetParam()).run([](Rank& r) {
    const auto group = world_of(r, {{"compare_shapes", "false"}});
    const Sizes mine = r.id() == 2 ? Sizes{3, 2} : Sizes{2, 3};
    for (const auto& operation : shaped_operations()) operation.run(group, mine);
    const auto x = at::ones(mine);
    group.all_reduce(x);
    expect_equal(x, full(3, mine));
    const auto part = *group.split({0, 1, 2});
    part.all_reduce(x);  // as its parent
    expect_equal(x, full(9, mine));
  });
}

TEST_P(ShapesTest, OneSettingForAllRanks) {
  RankGroup(2, GetParam()).run([](Rank& r) {
    const auto group = world_of(r, {{"compare_shapes", r.id() == 0 ? "true" : "false"}});
    EXPECT_THAT(text_of([&] { group.all_reduce(at::ones({2})); }),
                HasSubstr("compare_shapes (CONVOY_COMPARE_SHAPES) must be the same"));
    EXPECT_THAT(text_of([&] { group.all_gather(tensors_of({2}, 2), at::ones({2})); }),
                HasSubstr("compare_shapes (CONVOY_COMPARE_SHAPES) must be the same"));
    group.barrier();
  });
}

TEST(ShapesEnvironmentTest, Variable) {
  const auto run = [](const char* value, auto check) {
    RankGroup(2, RankMode::kProcesses,
              {.environment = {std::string("CONVOY_COMPARE_SHAPES=") + value}})
        .run([&](Rank& r) { check(r); });
  };
  run("0", [](Rank& r) {
    const auto x = at::ones(r.id() == 0 ? Sizes{2, 3} : Sizes{3, 2});
    world_of(r).all_reduce(x);
    EXPECT_EQ(x.sum().item<double>(), 12);
  });
  run("1", [](Rank& r) {
    const auto group = world_of(r);
    EXPECT_THAT(text_of([&] { group.all_reduce(at::ones({2 + r.id(), 3 - r.id()})); }),
                HasSubstr("ranks disagree"));
    // What a group says counts more.
    const auto other = new_group("convoy", {.store = r.store(),
                                            .rank = r.id(),
                                            .size = 2,
                                            .name = "other",
                                            .options = {{"compare_shapes", "false"}}});
    other.all_reduce(at::ones({2 + r.id(), 3 - r.id()}));
  });
  run("maybe", [](Rank& r) {
    EXPECT_THAT(text_of([&] { world_of(r); }),
                HasSubstr("CONVOY_COMPARE_SHAPES is \"maybe\", neither 0 nor 1"));
  });
}

}  // namespace
}  // namespace convoy::test
