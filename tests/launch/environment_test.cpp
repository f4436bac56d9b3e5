#include "launch/environment.h"

#include <gtest/gtest.h>

namespace convoy::launch {
namespace {

JobContext context() {
  return {.id = "job", .error_folder = "/errors", .master_port = 1234, .cores = 8};
}

TEST(RankEnvironment, LaysLayersOverEachOther) {
  RunOptions options;
  options.ranks = 4;
  options.environment = {{"MASTER_PORT", "29500"}, {"MINE", "yes"}};
  const auto result = rank_environment({{"RANK", "77"},
                                        {"MASTER_PORT", "1"},
                                        {"OMP_NUM_THREADS", "5"},
                                        {"HOME", "/home/me"},
                                        {"CONVOY_STORE_FD", "9"}},
                                       options, context(), 2);
  EXPECT_EQ(result.at("RANK"), "2");                 // ours over the inherited one
  EXPECT_EQ(result.at("MASTER_PORT"), "29500");      // --env over ours
  EXPECT_EQ(result.at("OMP_NUM_THREADS"), "5");      // the user's over the tuned one
  EXPECT_FALSE(result.contains("MKL_NUM_THREADS"));  // libtorch would prefer it
  EXPECT_EQ(result.at("HOME"), "/home/me");
  EXPECT_EQ(result.at("CONVOY_RENDEZVOUS"), "2/4@127.0.0.1:1234");  // as the launcher meant it
  EXPECT_EQ(result.at("MINE"), "yes");
  EXPECT_EQ(result.at("TORCHELASTIC_ERROR_FILE"), "/errors/rank-2.error.json");
  EXPECT_FALSE(result.contains("CONVOY_STORE_FD"));  // of a launcher above us
}

TEST(RankEnvironment, ThreadsOfTheCommandLineCountToo) {
  RunOptions options;
  options.ranks = 4;
  options.environment = {{"OMP_NUM_THREADS", "3"}};
  const auto result = rank_environment({}, options, context(), 0);
  EXPECT_EQ(result.at("OMP_NUM_THREADS"), "3");
  EXPECT_FALSE(result.contains("MKL_NUM_THREADS"));
}

TEST(RankEnvironment, NoTuneAddsNothing) {
  RunOptions options;
  options.ranks = 4;
  options.tune = false;
  const auto result = rank_environment({}, options, context(), 0);
  EXPECT_FALSE(result.contains("OMP_NUM_THREADS"));
  EXPECT_FALSE(result.contains("MKL_NUM_THREADS"));
  EXPECT_FALSE(result.contains("THP_MEM_ALLOC_ENABLE"));
}

TEST(RankEnvironment, KnowsWhatOnlyTheLauncherMaySet) {
  EXPECT_TRUE(is_set_per_rank("RANK"));
  EXPECT_TRUE(is_set_per_rank("CONVOY_STORE_FD"));
  EXPECT_FALSE(is_set_per_rank("MASTER_PORT"));
  EXPECT_FALSE(is_set_per_rank("HOME"));
}

TEST(RankEnvironment, PicksAPortThatCanBeBound) { EXPECT_GT(pick_free_port(), 1023); }

}  // namespace
}  // namespace convoy::launch
