#include "launch/error_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "os/file.h"

namespace convoy::launch {
namespace {

TEST(ErrorFile, ReadsWhatTorchWrites) {
  EXPECT_EQ(parse_error_text(R"({"message": {"message": "ValueError: no", "extraInfo": {
      "py_callstack": "Traceback", "timestamp": "1700000000"}}})"),
            "ValueError: no");
}

TEST(ErrorFile, ReadsAPlainMessage) {
  EXPECT_EQ(parse_error_text(R"({"message": "it broke"})"), "it broke");
}

TEST(ErrorFile, SaysNothingWhereThereIsNothing) {
  for (const char* text : {"", "not json", "{}", "[]", R"({"message": 3})", R"({"message": ""})",
                           R"({"message": {"other": "x"}})"}) {
    EXPECT_FALSE(parse_error_text(text)) << text;
  }
}

TEST(ErrorFile, CutsALongMessage) {
  const auto message = parse_error_text("{\"message\": \"" + std::string(100000, 'x') + "\"}");
  ASSERT_TRUE(message);
  EXPECT_EQ(message->size(), 2000U);
}

TEST(ErrorFile, LooksOnlyAtSmallRegularFiles) {
  const TempFolder folder("launch-test");
  const std::string path = folder.path() + "/error.json";
  EXPECT_FALSE(read_error_file(path));
  write_file(path, R"({"message": "it broke"})");
  EXPECT_EQ(read_error_file(path), "it broke");
  write_file(path, "{\"message\": \"" + std::string(2 << 20, 'x') + "\"}");
  EXPECT_FALSE(read_error_file(path));
  const std::string pipe = folder.path() + "/pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_FALSE(read_error_file(pipe));  // and does not block
}

}  // namespace
}  // namespace convoy::launch
