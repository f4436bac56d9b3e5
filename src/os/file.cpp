#include "os/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/unique_fd.h"
#include "os/fork_guard.h"
#include "os/process.h"

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

namespace {

// Whose a temporary folder is stands in its name: "<prefix>.<pid>-<start time>-<domain>.XXXXXX", in
// hexadecimal digits. A process that is killed leaves it behind, and a later one removes it.
struct Owner {
  std::uint64_t pid = 0;
  std::uint64_t start_time = 0;
  std::uint64_t domain = 0;

  // nullopt: others could not tell whether this process runs.
  static std::optional<Owner> self() {
    try {
      const std::uint64_t domain = process_domain();
      if (domain == 0) return std::nullopt;
      // Paths of sockets must be short: a part of the domain is enough to tell two apart.
      return Owner{static_cast<std::uint64_t>(::getpid()), own_start_time(),
                   (domain ^ (domain >> 32)) & 0xffffff};
    } catch (const Error&) {
      return std::nullopt;
    }
  }
  std::string to_string() const {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "%" PRIx64 "-%" PRIx64 "-%" PRIx64, pid, start_time,
                  domain);
    return text.data();
  }
  static std::optional<Owner> parse(std::string_view text) {
    Owner owner;
    const char* at = text.data();
    const char* const end = at + text.size();
    for (std::uint64_t* number : {&owner.pid, &owner.start_time, &owner.domain}) {
      if (number != &owner.pid) {
        if (at == end || *at != '-') return std::nullopt;
        ++at;
      }
      const auto [rest, error] = std::from_chars(at, end, *number, 16);
      if (error != std::errc()) return std::nullopt;
      at = rest;
    }
    return at == end ? std::optional(owner) : std::nullopt;
  }
};

// Removes what processes of this user that are dead have left; best effort.
void sweep_folders(const std::string& base, const std::string& prefix, const Owner& self) noexcept {
  constexpr int kMostEntries = 10'000;  // a folder that is full of others' files
  try {
    std::error_code error;
    std::filesystem::directory_iterator it(base, error);
    for (int i = 0; !error && i < kMostEntries && it != std::filesystem::directory_iterator();
         it.increment(error), ++i) {
      const std::string name = it->path().filename().string();
      const std::size_t begin = prefix.size() + 1;
      const std::size_t end = name.rfind('.');
      if (!name.starts_with(prefix + ".") || end == std::string::npos || end <= begin) continue;
      const auto owner = Owner::parse(std::string_view(name).substr(begin, end - begin));
      if (!owner || owner->domain != self.domain) continue;
      if (liveness_of(static_cast<pid_t>(owner->pid), owner->start_time) != Liveness::kDead)
        continue;
      struct stat info {};
      if (::lstat(it->path().c_str(), &info) < 0 || info.st_uid != ::geteuid()) continue;
      std::error_code ignored;
      std::filesystem::remove_all(it->path(), ignored);
    }
  } catch (const std::exception&) {  // memory ran out: next time
  }
}

}  // namespace

TempFolder::TempFolder(const std::string& prefix, Killed killed) : generation_(fork_generation()) {
  const char* const set = std::getenv("TMPDIR");
  const std::string base = set && *set ? set : "/tmp";
  std::string owner;
  if (const auto self = killed == Killed::kSwept ? Owner::self() : std::nullopt) {
    base_ = base;
    prefix_ = prefix;
    sweep_folders(base, prefix, *self);
    // Sockets in the folder need a short path (108 bytes with their own name): rather a folder that
    // a killed process leaves behind than none.
    constexpr std::size_t kMostPath = 96;
    owner = self->to_string() + ".";
    if (base.size() + prefix.size() + owner.size() + sizeof "/.XXXXXX" > kMostPath) owner.clear();
  }
  path_ = concat(base, "/", prefix, ".", owner, "XXXXXX");
  if (!::mkdtemp(path_.data())) fail_errno("making a temporary folder ", path_);
}

TempFolder::~TempFolder() {
  // A forked child destroys its copy of this object; the folder belongs to the parent.
  if (fork_generation() != generation_) return;
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
  if (prefix_.empty()) return;
  if (const auto self = Owner::self()) sweep_folders(base_, prefix_, *self);
}

}  // namespace convoy
