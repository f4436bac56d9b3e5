#pragma once

#include <string>

#include "base/unique_fd.h"

namespace convoy::test {

// Takes what this process writes to stderr (descriptor 2) while it lives. At most what a pipe
// holds (64 KiB) between two calls of text().
class StderrCapture {
 public:
  StderrCapture();
  StderrCapture(const StderrCapture&) = delete;
  StderrCapture& operator=(const StderrCapture&) = delete;
  ~StderrCapture();

  // All that was written so far.
  const std::string& text();

 private:
  UniqueFd read_end_;
  UniqueFd saved_;
  std::string text_;
};

}  // namespace convoy::test
