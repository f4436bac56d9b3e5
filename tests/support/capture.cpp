#include "support/capture.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>

#include "base/error.h"

namespace convoy::test {

StderrCapture::StderrCapture() : saved_(duplicate(STDERR_FILENO)) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC | O_NONBLOCK) < 0) fail_errno("making a pipe");
  read_end_.reset(ends[0]);
  const UniqueFd write_end(ends[1]);
  if (::dup2(write_end.get(), STDERR_FILENO) < 0) fail_errno("replacing stderr");
}

StderrCapture::~StderrCapture() { ::dup2(saved_.get(), STDERR_FILENO); }

const std::string& StderrCapture::text() {
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t n = ::read(read_end_.get(), buffer.data(), buffer.size());
    if (n <= 0) return text_;
    text_.append(buffer.data(), static_cast<std::size_t>(n));
  }
}

}  // namespace convoy::test
