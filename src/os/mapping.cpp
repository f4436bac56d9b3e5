#include "os/mapping.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <charconv>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <sstream>
#include <string>

#include "base/error.h"
#include "os/file.h"

namespace convoy {
namespace {

// PROCMAP_QUERY of Linux 6.11; Debian 12's headers do not have it.
struct ProcmapQuery {
  std::uint64_t size = sizeof(ProcmapQuery);
  std::uint64_t query_flags = 0;
  std::uint64_t query_addr = 0;
  std::uint64_t vma_start = 0;
  std::uint64_t vma_end = 0;
  std::uint64_t vma_flags = 0;
  std::uint64_t vma_page_size = 0;
  std::uint64_t vma_offset = 0;
  std::uint64_t inode = 0;
  std::uint32_t dev_major = 0;
  std::uint32_t dev_minor = 0;
  std::uint32_t vma_name_size = 0;
  std::uint32_t build_id_size = 0;
  std::uint64_t vma_name_addr = 0;
  std::uint64_t build_id_addr = 0;
};
static_assert(sizeof(ProcmapQuery) == 104);
constexpr std::uint64_t kVmaWritable = 2;
constexpr std::uint64_t kVmaShared = 8;

std::optional<Mapping> find_in_text(std::uint64_t address) {
  const auto text = read_file("/proc/self/maps");
  if (!text) fail_errno("reading /proc/self/maps");
  std::istringstream lines(*text);
  for (std::string line; std::getline(lines, line);) {
    std::uint64_t begin = 0, end = 0, offset = 0, inode = 0;
    unsigned major = 0, minor = 0;
    char access[5] = {};
    const int found =
        std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &begin,
                    &end, access, &offset, &major, &minor, &inode);
    if (found != 7 || address < begin || address >= end) continue;
    return Mapping{.begin = reinterpret_cast<std::byte*>(begin),
                   .bytes = static_cast<std::size_t>(end - begin),
                   .shared = access[3] == 's',
                   .writable = access[1] == 'w',
                   .file_offset = offset,
                   .device = ::makedev(major, minor),
                   .inode = inode};
  }
  return std::nullopt;
}

// A descriptor of our own for the same open file, if it is that file and can be written.
UniqueFd try_descriptor(const Mapping& mapping, UniqueFd fd) {
  struct stat info {};
  if (!fd || ::fstat(fd.get(), &info) < 0 || info.st_dev != mapping.device ||
      info.st_ino != mapping.inode || !S_ISREG(info.st_mode) ||
      (::fcntl(fd.get(), F_GETFL) & O_ACCMODE) != O_RDWR) {
    return {};
  }
  return fd;
}

UniqueFd another(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

}  // namespace

std::optional<Mapping> mapping_of(const void* address) {
  const UniqueFd maps(::open("/proc/self/maps", O_RDONLY | O_CLOEXEC));
  if (!maps) fail_errno("opening /proc/self/maps");
  ProcmapQuery query;
  query.query_addr = reinterpret_cast<std::uint64_t>(address);
  if (::ioctl(maps.get(), _IOWR('f', 17, ProcmapQuery), &query) < 0) {
    if (errno == ENOENT) return std::nullopt;
    return find_in_text(query.query_addr);  // an older kernel
  }
  return Mapping{.begin = reinterpret_cast<std::byte*>(query.vma_start),
                 .bytes = static_cast<std::size_t>(query.vma_end - query.vma_start),
                 .shared = (query.vma_flags & kVmaShared) != 0,
                 .writable = (query.vma_flags & kVmaWritable) != 0,
                 .file_offset = query.vma_offset,
                 .device = ::makedev(query.dev_major, query.dev_minor),
                 .inode = query.inode};
}

UniqueFd descriptor_of(const Mapping& mapping, int known) {
  if (known >= 0) {
    if (auto fd = try_descriptor(mapping, another(known))) return fd;
  }
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    // Looked at before a duplicate is made: that of a socket or a lock would be felt.
    struct stat info {};
    const std::string name = entry->path().filename();
    int number = -1;
    std::from_chars(name.data(), name.data() + name.size(), number);
    if (number < 0 || ::fstat(number, &info) < 0 || info.st_dev != mapping.device ||
        info.st_ino != mapping.inode) {
      continue;
    }
    if (auto fd = try_descriptor(mapping, another(number))) return fd;
  }
  // By its name, where it has one.
  const std::string path =
      concat("/proc/self/map_files/", std::hex, reinterpret_cast<std::uint64_t>(mapping.begin), "-",
             reinterpret_cast<std::uint64_t>(mapping.begin) + mapping.bytes);
  std::error_code none;
  const auto target = std::filesystem::read_symlink(path, none);
  if (none) return {};
  return try_descriptor(mapping, UniqueFd(::open(target.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW)));
}

}  // namespace convoy
