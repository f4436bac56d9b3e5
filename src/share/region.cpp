#include "share/region.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>

#include "base/error.h"
#include "os/segment_copy.h"

namespace convoy::share {
namespace {

std::uint64_t next_serial() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Region::Region(Kind kind, Segment::Key key) : kind_(kind), key_(key), serial_(next_serial()) {}

Region::~Region() {
  if (unmap_) ::munmap(data_, bytes_);
}

std::shared_ptr<Region> Region::create_pool(std::size_t bytes) {
  return make_pool(Segment::create(bytes, "share", Segment::Warm::kYes));
}

std::shared_ptr<Region> Region::create_pool_with(std::size_t bytes,
                                                 std::span<const std::byte> content) {
  return make_pool(create_segment_with(bytes, "share", Book::head_bytes(bytes), content));
}

std::shared_ptr<Region> Region::make_pool(Segment segment) {
  auto region = std::shared_ptr<Region>(new Region(Kind::kPool, segment.key()));
  region->data_ = segment.data();
  region->bytes_ = segment.size();
  region->own_ = true;
  region->book_ =
      Book::create(segment.data(), segment.size(), BookHead::kOwned, own_process_word());
  region->segment_ = std::move(segment);
  return region;
}

std::shared_ptr<Region> Region::adopt(UniqueFd fd, std::size_t bytes, Kind kind) {
  if (kind == Kind::kOutside) return adopt_outside(std::move(fd), bytes);
  // Page tables are filled as tensors are used: most of a large pool may never be looked at here.
  Segment segment = Segment::adopt(std::move(fd), bytes);
  auto region = std::shared_ptr<Region>(new Region(kind, segment.key()));
  if (kind == Kind::kPool) {
    region->book_ = Book::open(segment.data(), bytes);
    if (region->book_.head().kind != BookHead::kOwned) {
      fail(ErrorKind::kInvalidArgument, "memory that is not a pool was passed as one: refused");
    }
  }
  region->data_ = segment.data();
  region->bytes_ = bytes;
  region->segment_ = std::move(segment);
  return region;
}

std::shared_ptr<Region> Region::adopt_outside(UniqueFd fd, std::size_t bytes) {
  struct stat info {};
  if (::fstat(fd.get(), &info) < 0) fail_errno("looking at memory of another process");
  const auto there = static_cast<std::uint64_t>(std::max<off_t>(info.st_size, 0));
  if (!S_ISREG(info.st_mode) || bytes == 0 || bytes % kBookPage != 0 ||
      bytes > (there + kBookPage - 1) / kBookPage * kBookPage) {
    fail(ErrorKind::kInvalidArgument, "memory of ", bytes, " bytes was passed as a file of ", there,
         ": refused");
  }
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) fail_errno("mapping ", bytes, " bytes of another process's memory");
  auto region = std::shared_ptr<Region>(new Region(Kind::kOutside, Segment::key_of(fd.get())));
  region->data_ = static_cast<std::byte*>(memory);
  region->bytes_ = bytes;
  region->unmap_ = true;
  region->fd_ = std::move(fd);
  return region;
}

std::shared_ptr<Region> Region::borrow(UniqueFd fd, std::byte* data, std::size_t bytes, Kind kind) {
  auto region = std::shared_ptr<Region>(new Region(kind, Segment::key_of(fd.get())));
  region->fd_ = std::move(fd);
  region->data_ = data;
  region->bytes_ = bytes;
  region->own_ = true;
  return region;
}

std::shared_ptr<Region> Region::named(Segment::Key key, std::byte* data, std::size_t bytes,
                                      std::string path) {
  auto region = std::shared_ptr<Region>(new Region(Kind::kNamed, key));
  region->data_ = data;
  region->bytes_ = bytes;
  region->unmap_ = true;
  region->path_ = std::move(path);
  region->book_ = Book(data);
  return region;
}

}  // namespace convoy::share
