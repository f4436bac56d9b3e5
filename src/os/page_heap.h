#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

namespace convoy {

// A run of pages of a PageHeap.
struct Span {
  enum class Use : std::uint8_t { kFree, kWhole, kSlab };

  std::byte* begin = nullptr;
  std::size_t pages = 0;
  Use use = Use::kFree;
  std::size_t warm = 0;  // of a free one: bytes that may have memory behind them

  // Of a slab, by its owner (see MemoryPool): objects of one size, those that are free in a list.
  std::size_t size_class = 0;
  std::size_t taken = 0;
  void* free_objects = nullptr;
  Span* previous = nullptr;
  Span* next = nullptr;

  std::size_t bytes() const;
};

// Private memory in runs of pages, cut from address ranges that are reserved far larger than what
// is used and ask for huge pages: freed runs join their neighbours and stay warm. First touch costs
// twenty times a copy, and a tenth of that with huge pages. Not thread-safe but for find(): its
// owner locks.
class PageHeap {
 public:
  static constexpr std::size_t kPageBits = 14;
  static constexpr std::size_t kPage = std::size_t{1} << kPageBits;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;

  PageHeap() = default;
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;
  ~PageHeap();

  // The smallest free run that suffices, or new memory. `use` is not kFree. Throws kResource if the
  // system gives no more, or if more is asked for than the machine has.
  Span* allocate(std::size_t bytes, Span::Use use);
  void free(Span* span);

  // The span that an address handed out lies in: for a slab any address of it, else its first byte.
  // nullptr: not from here. From any thread.
  Span* find(const void* address) const;

  // Gives the memory of free runs back to the system; returns the bytes. The addresses stay.
  std::size_t trim();

  std::size_t used_bytes() const { return used_; }    // in spans that are not free
  std::size_t cached_bytes() const { return warm_; }  // in free spans, at most
  std::size_t peak_bytes() const { return peak_; }    // most that used and cached were together

 private:
  // Two levels over the 47 bits of an address that user space has. Entries are written under the
  // owner's lock before a pointer into the span is handed out; whoever has such a pointer sees
  // them.
  static constexpr std::size_t kLeafBits = 17;
  static constexpr std::size_t kRootBits = 47 - kPageBits - kLeafBits;
  using Leaf = std::array<std::atomic<Span*>, std::size_t{1} << kLeafBits>;

  // Reserved addresses, of which those below `top` are in spans. One page more is reserved and
  // never used, so that spans of two ranges do not join.
  struct Range {
    std::byte* begin;
    std::byte* top;
    std::byte* end;
  };
  struct BySize {
    bool operator()(const Span* a, const Span* b) const;
  };

  Span* extend(std::size_t bytes);
  void reserve(std::size_t bytes);
  Span* take(Span* span, std::size_t pages, Span::Use use);
  void add_free(Span* span);
  void remove_free(Span* span);
  Span* neighbour(const std::byte* address) const;
  void map(const Span& span, Span* value);
  void set_entry(const std::byte* address, Span* value);

  std::array<std::atomic<Leaf*>, std::size_t{1} << kRootBits> root_{};
  std::vector<Range> ranges_;
  std::set<Span*, BySize> free_;
  std::size_t used_ = 0;
  std::size_t warm_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace convoy
