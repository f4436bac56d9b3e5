#include "os/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "os/machine.h"
#include "os/segment_copy.h"

#ifndef MFD_NOEXEC_SEAL  // Linux 6.3; glibc 2.36 does not name it
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_COLLAPSE  // Linux 6.1
#define MADV_COLLAPSE 25
#endif

namespace convoy {
namespace {

std::size_t round_to_pages(std::size_t size) {
  return (size + page_size() - 1) / page_size() * page_size();
}

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

int make_memfd(const std::string& label) {
  const std::string name = "convoy:" + label.substr(0, 200);  // memfd_create takes 249 bytes
  int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) {
    fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  }
  if (fd < 0) fail_errno("making shared memory");
  return fd;
}

// Asks before it takes: the kernel would hand out pages until it kills somebody for memory, and
// would answer a size above the file size limit with a deadly signal.
void require_room(std::size_t size) {
  constexpr std::size_t kWorthAsking = std::size_t{16} << 20;  // asking costs as much as 1 MiB
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      size > limit.rlim_cur) {
    fail(ErrorKind::kResource, "shared memory segment of ", size,
         " bytes: the limit on file sizes is ", limit.rlim_cur, " (raise it with ulimit -f)");
  }
  if (size < kWorthAsking) return;
  const std::uint64_t room = memory_state().headroom();
  if (size > room) {
    fail(ErrorKind::kResource, "shared memory segment of ", size, " bytes: only ", room,
         " bytes of memory are available");
  }
}

// In pieces: a signal that interrupts fallocate undoes all of that call, so a program with a
// profiler's timer would never get a large segment at one go.
void allocate(int fd, std::size_t begin, std::size_t size) {
  std::size_t piece = std::size_t{64} << 20;
  for (std::size_t done = begin; done < size;) {
    const std::size_t length = std::min(piece, size - done);
    if (fallocate(fd, 0, static_cast<off_t>(done), static_cast<off_t>(length)) == 0) {
      done += length;
    } else if (errno == EINTR) {
      piece = std::max(piece / 2, page_size());
    } else {
      fail(ErrorKind::kResource, "allocating ", size,
           " bytes of shared memory: ", errno_text(errno));
    }
  }
}

void seal(int fd) {
  if (fcntl(fd, F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) < 0) fail_errno("sealing shared memory");
}

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Addresses for `size` bytes. For many of them at a multiple of a huge page, if there are enough:
// elsewhere the kernel can map small pages only, even of a file that has huge ones.
void* reserve(std::size_t size) {
  size = round_to_pages(size);
  const auto get = [](std::size_t bytes) {
    return mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  };
  if (size >= kHugePage) {
    if (void* const got = get(size + kHugePage); got != MAP_FAILED) {
      const std::size_t past = reinterpret_cast<std::uintptr_t>(got) % kHugePage;
      const std::size_t before = past == 0 ? 0 : kHugePage - past;
      auto* const begin = static_cast<std::byte*>(got) + before;
      if (before != 0) munmap(got, before);
      munmap(begin + size, kHugePage - before);
      return begin;
    }
  }
  void* const got = get(size);
  if (got == MAP_FAILED) fail_errno("mapping ", size, " bytes of shared memory");
  return got;
}

// Over what is at `place`.
std::byte* map_at(void* place, int fd, std::size_t size, Segment::Warm warm) {
  const int flags = MAP_SHARED | MAP_FIXED | (warm == Segment::Warm::kYes ? MAP_POPULATE : 0);
  void* const memory = mmap(place, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    munmap(place, size);
    errno = error;
    fail_errno("mapping ", size, " bytes of shared memory");
  }
  return static_cast<std::byte*>(memory);
}

std::byte* map(int fd, std::size_t size, Segment::Warm warm) {
  return map_at(reserve(size), fd, size, warm);
}

// Huge pages for a new one, which has no pages yet. The kernel makes one of an extent of which any
// page is there, and clears the rest: one page of each, then, and not all of them, which it would
// have to copy. What it cannot make (it is older than 6.1, it must not, or has no huge page left)
// stays empty. It gives them also where transparent_hugepage/shmem_enabled is "never", the default:
// that is about those that nobody has asked for.
void take_huge_pages(int fd, std::byte* memory, std::size_t size) {
  const std::size_t whole = size / kHugePage * kHugePage;
  for (std::size_t at = 0; at < whole; at += kHugePage) {
    while (fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(page_size())) != 0) {
      if (errno != EINTR) return;
    }
  }
  madvise(memory, whole, MADV_COLLAPSE);
}

// Fills new memory with a copy, huge page by huge page, in the way that was quicker lately.
//
// By writing to the file: the kernel takes small pages and copies into them, without clearing them
// and without a page fault each. Or into a huge page: the kernel makes one of an extent of which
// only the first small page exists, and clears it; that is the quickest of all where a huge page is
// free and slow where the kernel must make room for one, or a virtual machine's host must.
class Filler {
 public:
  Filler(int fd, std::byte* memory, std::span<const std::byte> content, std::size_t at)
      : fd_(fd), memory_(memory), content_(content), at_(at) {}

  void fill() {
    for (std::size_t done = 0; done < content_.size();) {
      const std::size_t place = at_ + done;
      const std::size_t in_extent = kHugePage - place % kHugePage;
      const std::size_t length = std::min(in_extent, content_.size() - done);
      const auto piece = content_.subspan(done, length);
      if (length < kHugePage) {
        write(place, piece);
      } else {
        fill_extent(place, piece);
      }
      done += length;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  void fill_extent(std::size_t place, std::span<const std::byte> piece) {
    // What is not used becomes cheaper with time, so that it is tried again.
    constexpr double kFading = 0.98;
    const bool huge = collapses_ && huge_cost_ <= write_cost_;
    const auto start = Clock::now();
    if (!huge || !copy_to_huge_page(place, piece)) write(place, piece);
    const double cost = std::chrono::duration<double>(Clock::now() - start).count();
    (huge ? huge_cost_ : write_cost_) = cost;
    (huge ? write_cost_ : huge_cost_) *= kFading;
  }

  bool copy_to_huge_page(std::size_t place, std::span<const std::byte> piece) {
    const auto first = static_cast<off_t>(place);
    if (fallocate(fd_, 0, first, static_cast<off_t>(page_size())) != 0 ||
        madvise(memory_ + place, kHugePage, MADV_COLLAPSE) != 0) {
      collapses_ = false;  // it is older than Linux 6.1, or has none left
      return false;
    }
    std::memcpy(memory_ + place, piece.data(), piece.size());
    return true;
  }

  void write(std::size_t place, std::span<const std::byte> piece) const {
    while (!piece.empty()) {
      const auto n = ::pwrite(fd_, piece.data(), piece.size(), static_cast<off_t>(place));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        fail(ErrorKind::kResource, "copying ", content_.size(),
             " bytes into shared memory: ", errno_text(n < 0 ? errno : ENOSPC));
      }
      place += static_cast<std::size_t>(n);
      piece = piece.subspan(static_cast<std::size_t>(n));
    }
  }

  const int fd_;
  std::byte* const memory_;
  const std::span<const std::byte> content_;
  const std::size_t at_;
  bool collapses_ = true;
  // Seconds of the last extent. Each way is tried once, the one that cannot disappoint first.
  double write_cost_ = 0;
  double huge_cost_ = 1e-9;
};

}  // namespace

Segment create_segment_with(std::size_t size, const std::string& label, std::size_t at,
                            std::span<const std::byte> content) {
  CONVOY_CHECK(at % page_size() == 0 && at <= size && content.size() <= size - at);
  require_room(size);
  size = round_to_pages(size);
  UniqueFd fd(make_memfd(label));
  if (ftruncate(fd.get(), static_cast<off_t>(size)) < 0) fail_errno("making shared memory");
  if (at > 0) allocate(fd.get(), 0, at);
  allocate(fd.get(), at + round_to_pages(content.size()), size);
  std::byte* const memory = map(fd.get(), size, Segment::Warm::kNo);
  struct Unmap {
    std::byte* memory;
    std::size_t size;
    ~Unmap() { munmap(memory, size); }
  };
  {
    const Unmap unmap{memory, size};
    Filler(fd.get(), memory, content, at).fill();
  }
  seal(fd.get());
  return Segment::adopt(std::move(fd), size);
}

std::size_t page_size() {
  static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

Segment Segment::create(std::size_t size, const std::string& label, Warm warm) {
  if (size == 0) {
    fail(ErrorKind::kInvalidArgument, "a shared memory segment needs at least one byte");
  }
  require_room(size);
  size = round_to_pages(size);
  UniqueFd fd(make_memfd(label));
  if (warm == Warm::kYes && size >= kHugePage) {
    if (ftruncate(fd.get(), static_cast<off_t>(size)) < 0) fail_errno("making shared memory");
    // Mapped only for this: page tables are filled when all is there.
    std::byte* const memory = map(fd.get(), size, Warm::kNo);
    take_huge_pages(fd.get(), memory, size);
    munmap(memory, size);
  }
  allocate(fd.get(), 0, size);
  seal(fd.get());
  std::byte* data = map(fd.get(), size, warm);
  return {std::move(fd), data, size};
}

Segment Segment::adopt(UniqueFd fd, std::size_t size, Warm warm) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals) {
    fail(ErrorKind::kInvalidArgument, "descriptor ", fd.get(),
         " is not shared memory sealed against resizing: refused");
  }
  // Found before anything is mapped over addresses: before Linux 6.12 that would not undo itself.
  if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0) {
    fail(ErrorKind::kInvalidArgument, "descriptor ", fd.get(),
         " is shared memory sealed against writing: refused");
  }
  struct stat info {};
  if (fstat(fd.get(), &info) < 0) fail_errno("reading the size of shared memory");
  if (size == 0 || static_cast<std::uint64_t>(info.st_size) != size) {
    fail(ErrorKind::kInvalidArgument, "shared memory of ", info.st_size, " bytes where ", size,
         " were announced: refused");
  }
  std::byte* data = map(fd.get(), size, warm);
  return {std::move(fd), data, size};
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    if (data_) munmap(data_, size_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Segment::~Segment() {
  if (data_) munmap(data_, size_);
}

Segment::Key Segment::key() const { return key_of(fd_.get()); }

Segment::Key Segment::key_of(int fd) {
  struct stat info {};
  if (fstat(fd, &info) < 0) fail_errno("reading the identity of shared memory");
  return {static_cast<std::uint64_t>(info.st_dev), static_cast<std::uint64_t>(info.st_ino)};
}

}  // namespace convoy
