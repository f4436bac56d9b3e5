#include "os/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/unique_fd.h"
#include "os/fork_guard.h"

namespace convoy {

std::optional<std::string> read_file(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  std::string text;
  std::array<char, 4096> buffer;
  for (;;) {
    const ssize_t n = ::read(fd.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return std::nullopt;
    if (n == 0) return text;
    text.append(buffer.data(), static_cast<std::size_t>(n));
  }
}

void write_file(const std::string& path, std::string_view text, unsigned mode) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode));
  if (!fd) fail_errno("writing ", path);
  // The mode above counts for a new file only. An old one may be open to others.
  struct stat info {};
  if (::fstat(fd.get(), &info) < 0) fail_errno("writing ", path);
  if (S_ISREG(info.st_mode) && (info.st_mode & 07777) != mode && ::fchmod(fd.get(), mode) < 0) {
    fail_errno("setting the mode of ", path);
  }
  while (!text.empty()) {
    const ssize_t n = ::write(fd.get(), text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail_errno("writing ", path);
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

TempFolder::TempFolder(const std::string& prefix) : generation_(fork_generation()) {
  const char* base = std::getenv("TMPDIR");
  path_ = concat(base && *base ? base : "/tmp", "/", prefix, ".XXXXXX");
  if (!::mkdtemp(path_.data())) fail_errno("making a temporary folder ", path_);
}

TempFolder::~TempFolder() {
  // A forked child destroys its copy of this object; the folder belongs to the parent.
  if (fork_generation() != generation_) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace convoy
