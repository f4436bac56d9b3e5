#include "share/named.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include "base/error.h"
#include "base/log.h"
#include "share/pool.h"

namespace convoy::share {
namespace {

std::string hex(std::uint64_t number) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(number));
  return text.data();
}

// The number in "p-<number>" or "t-<number>-...".
std::uint64_t number_in(const std::string& name) {
  return name.size() < 18 ? 0 : std::strtoull(name.substr(2, 16).c_str(), nullptr, 16);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  DIR* const open = ::opendir(folder.c_str());
  if (!open) return names;
  while (const dirent* item = ::readdir(open)) names.emplace_back(item->d_name);
  ::closedir(open);
  return names;
}

std::byte* map_file(int fd, std::size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) fail_errno("mapping ", bytes, " bytes of a file of shared memory");
  return static_cast<std::byte*>(memory);
}

void allocate_file(int fd, std::size_t bytes, const std::string& path) {
  while (::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) < 0) {
    if (errno == EINTR) continue;
    const int code = errno;
    ::unlink(path.c_str());
    fail(ErrorKind::kResource, "making ", bytes, " bytes of shared memory in ", path, ": ",
         errno_text(code),
         "; the strategy kDescriptor needs no room in that folder, and CONVOY_SHARE_FOLDER names "
         "another");
  }
}

}  // namespace

NamedFolder::NamedFolder() {
  const char* const base = std::getenv("CONVOY_SHARE_FOLDER");
  folder_ = concat(base && *base ? base : "/dev/shm", "/convoy-", ::geteuid());
}

std::string NamedFolder::lock_path(std::uint64_t number) const {
  return concat(folder_, "/p-", hex(number));
}

void NamedFolder::make_folder() {
  if (::mkdir(folder_.c_str(), 0700) < 0 && errno != EEXIST) {
    fail_errno("making the folder ", folder_, " for shared memory");
  }
  struct stat info {};
  if (::lstat(folder_.c_str(), &info) < 0) {
    if (errno == ENOENT) return;  // its last user has just removed it: the caller tries again
    fail_errno("looking at folder ", folder_);
  }
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() || (info.st_mode & 077) != 0) {
    fail(ErrorKind::kInvalidArgument, "folder ", folder_,
         " is not safe for shared memory: it must be a folder of user ", ::geteuid(),
         " with mode 0700");
  }
}

void NamedFolder::lock_number() {
  if (!left_files_) number_ = 0;
  while (number_ == 0) number_ = random_u64() & ~Book::kTakingOver;
  const std::string path = lock_path(number_);
  // A sweeper may take a file for stale before it is locked, and the folder may go with its last
  // user: what counts is a locked file that is still there.
  for (int attempt = 0; attempt < 100; ++attempt) {
    make_folder();
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd && errno == ENOENT) continue;
    if (!fd) fail_errno("making ", path);
    while (::flock(fd.get(), LOCK_EX) < 0) {
      if (errno != EINTR) fail_errno("locking ", path);
    }
    struct stat there {};
    struct stat here {};
    if (::stat(path.c_str(), &there) == 0 && ::fstat(fd.get(), &here) == 0 &&
        there.st_ino == here.st_ino) {
      lock_ = std::move(fd);
      return;
    }
  }
  fail(ErrorKind::kInternal, "the file ", path, " vanished again and again");
}

bool NamedFolder::is_alive(std::uint64_t number) {
  if (number == number_) return true;
  const std::string path = lock_path(number);
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  // Only a file that is not there, or that nobody has locked, is proof.
  if (!fd) return errno != ENOENT;
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) < 0) return true;
  ::unlink(path.c_str());
  return false;
}

void NamedFolder::drop_dead(const Book& book) noexcept {
  for (int i = 0; i < kMostHolders; ++i) {
    const std::uint64_t number = book.slot(i);
    if (number != 0 && !is_alive(number)) book.drop_slot(i, number, number_);
  }
}

int NamedFolder::claim_slot(const Book& book) {
  enter();
  return book.claim_slot(number_, [this](std::uint64_t number) { return !is_alive(number); });
}

bool NamedFolder::is_stale(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) < 0) return false;
  if (info.st_size == 0) return true;
  const auto bytes = static_cast<std::size_t>(info.st_size);
  std::byte* const memory = map_file(fd.get(), bytes);
  bool stale = true;
  try {
    const Book book = Book::open(memory, bytes);
    drop_dead(book);
    for (int i = 0; i < kMostHolders; ++i) stale = stale && book.slot(i) == 0;
  } catch (const Error&) {
    // Its maker died before it was complete.
  }
  ::munmap(memory, bytes);
  return stale;
}

void NamedFolder::sweep() {
  for (const std::string& name : names_in(folder_)) {
    if (name.starts_with("p-")) is_alive(number_in(name));  // removes it if not
  }
  for (const std::string& name : names_in(folder_)) {
    if (!name.starts_with("t-") || is_alive(number_in(name))) continue;
    const std::string path = concat(folder_, "/", name);
    try {
      if (!is_stale(path)) continue;
      log_info("removed ", path, ": no process holds it");
      ::unlink(path.c_str());
    } catch (const Error& error) {
      log_warn("looking at ", path, ": ", error.what());
    }
  }
}

void NamedFolder::enter() {
  if (lock_) return;
  lock_number();
  sweep();
}

std::shared_ptr<Region> NamedFolder::create(std::size_t bytes) {
  enter();
  const std::size_t size = Pool::region_bytes_for(bytes);
  const std::string path = concat(folder_, "/t-", hex(number_), "-", next_++);
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd) fail_errno("making ", path);
  allocate_file(fd.get(), size, path);
  try {
    const Segment::Key key = Segment::key_of(fd.get());
    std::byte* const memory = map_file(fd.get(), size);
    Book::create(memory, size, BookHead::kNamed, number_);
    return Region::named(key, memory, size, path);
  } catch (...) {
    ::unlink(path.c_str());  // nobody else knows of it yet
    throw;
  }
}

std::shared_ptr<Region> NamedFolder::open(const std::string& path, const Find& known,
                                          const Found& made) {
  const std::string front = folder_ + "/t-";
  if (!path.starts_with(front) || path.find('/', front.size()) != std::string::npos) {
    fail(ErrorKind::kInvalidArgument, "a handle names the file ", in_quotes(path),
         ", which is not in this user's folder ", folder_, ": refused");
  }
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd && errno == ENOENT) {
    fail(ErrorKind::kPeerLost, "the tensor in ", path,
         " no longer exists: all processes that had it have ended or dropped it");
  }
  if (!fd) fail_errno("opening ", path);
  struct stat info {};
  if (::fstat(fd.get(), &info) < 0) fail_errno("looking at ", path);
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid() || info.st_size <= 0) {
    fail(ErrorKind::kInvalidArgument, path, " is not a file of shared memory: refused");
  }
  if (auto region = known(Segment::key_of(fd.get()))) return region;
  enter();
  const auto bytes = static_cast<std::size_t>(info.st_size);
  std::byte* const memory = map_file(fd.get(), bytes);
  auto region = Region::named(Segment::key_of(fd.get()), memory, bytes, path);
  if (Book::open(memory, bytes).head().kind != BookHead::kNamed) {
    fail(ErrorKind::kInvalidArgument, path, " is not a file of shared memory: refused");
  }
  made(region);
  return region;
}

void NamedFolder::leave(const Region& region, bool ended) noexcept {
  if (ended) ::unlink(region.path().c_str());
  left_files_ = left_files_ || !ended;
  --in_use_;
  rest();
}

void NamedFolder::rest() noexcept {
  if (in_use_ > 0 || !lock_) return;
  ::unlink(lock_path(number_).c_str());
  lock_.reset();
  ::rmdir(folder_.c_str());  // fails while others are in it
}

}  // namespace convoy::share
