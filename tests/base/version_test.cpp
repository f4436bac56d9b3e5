#include "convoy/version.h"

#include <gtest/gtest.h>

namespace convoy {
namespace {

TEST(VersionTest, LibraryAndHeaderAgree) {
  EXPECT_EQ(std::string(version()), std::to_string(CONVOY_VERSION_MAJOR) + "." +
                                        std::to_string(CONVOY_VERSION_MINOR) + "." +
                                        std::to_string(CONVOY_VERSION_PATCH));
}

}  // namespace
}  // namespace convoy
