#include <gtest/gtest.h>

#include <cstdlib>

#include "os/file.h"
#include "support/leak_oracle.h"
#include "support/main.h"
#include "support/rank_child.h"
#include "support/rank_group.h"
#include "support/stack_dump.h"

namespace convoy::test {

int test_main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  install_stack_dump();
  if (is_rank_process()) return run_rank_program();
  // What MPI opens and leaves is not ours to judge.
  if (under_mpi()) return RUN_ALL_TESTS();
  // The dying half of a death test: ends by a signal, so it must not own anything.
  if (!GTEST_FLAG_GET(internal_run_death_test).empty()) return RUN_ALL_TESTS();
  // A folder of its own lets the oracle see what is left in it, whatever runs beside this program.
  const TempFolder temporary("convoy-test");
  ::setenv("TMPDIR", temporary.path().c_str(), 1);
  // What has a name in the file system goes there too. Ranks have TMPDIRs of their own and inherit
  // this one.
  ::setenv("CONVOY_SHARE_FOLDER", temporary.path().c_str(), 1);
  tag_descendants();
  install_group_counter();
  LeakOracle::install();
  return RUN_ALL_TESTS();
}

}  // namespace convoy::test
