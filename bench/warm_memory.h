#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace bench {

// Memory whose pages are there, and huge where the kernel gives them.
class WarmMemory {
 public:
  explicit WarmMemory(std::size_t bytes) {
    bytes = (bytes + kHuge - 1) / kHuge * kHuge;
    data_ = static_cast<std::byte*>(std::aligned_alloc(kHuge, bytes));
    if (!data_) {
      std::fprintf(stderr, "bench: no memory\n");
      std::exit(1);
    }
    ::madvise(data_, bytes, MADV_HUGEPAGE);
    std::memset(data_, 1, bytes);
  }
  WarmMemory(const WarmMemory&) = delete;
  WarmMemory& operator=(const WarmMemory&) = delete;
  ~WarmMemory() { std::free(data_); }
  std::byte* data() const { return data_; }

 private:
  static constexpr std::size_t kHuge = std::size_t{2} << 20;
  std::byte* data_;
};

}  // namespace bench
