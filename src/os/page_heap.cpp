#include "os/page_heap.h"

#include <sys/mman.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <functional>

#include "base/error.h"

namespace convoy {
namespace {

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t machine_bytes() {
  struct sysinfo info {};
  if (::sysinfo(&info) != 0) return std::size_t{1} << 40;
  return (std::size_t{info.totalram} + info.totalswap) * info.mem_unit;
}

[[noreturn]] void fail_memory(std::size_t bytes, std::size_t used, std::size_t machine) {
  fail(ErrorKind::kResource, "the step allocator cannot get ", bytes, " bytes more (", used,
       " in use; the machine has ", machine, "); free tensors, or use smaller batches");
}

// Before more is taken from the system, free runs that do not fit may keep as much as is in use, or
// this: then they are given back.
constexpr std::size_t kLeastCached = std::size_t{256} << 20;

}  // namespace

std::size_t Span::bytes() const { return pages * PageHeap::kPage; }

bool PageHeap::BySize::operator()(const Span* a, const Span* b) const {
  if (a->pages != b->pages) return a->pages < b->pages;
  return std::less<>()(a->begin, b->begin);
}

PageHeap::~PageHeap() {
  for (const Range& range : ranges_) {
    for (const std::byte* at = range.begin; at < range.top;) {
      Span* const span = neighbour(at);
      at += span->bytes();
      delete span;
    }
    ::munmap(range.begin, static_cast<std::size_t>(range.end - range.begin) + kPage);
  }
  for (auto& leaf : root_) delete leaf.load(std::memory_order_relaxed);
}

Span* PageHeap::allocate(std::size_t bytes, Span::Use use) {
  if (bytes > SIZE_MAX / 2) fail_memory(bytes, used_, machine_bytes());
  const std::size_t pages = round_up(std::max<std::size_t>(bytes, 1), kPage) / kPage;
  Span wanted;
  wanted.pages = pages;
  const auto found = free_.lower_bound(&wanted);
  Span* const span = found != free_.end() ? *found : extend(pages * kPage);
  remove_free(span);
  return take(span, pages, use);
}

Span* PageHeap::take(Span* span, std::size_t pages, Span::Use use) {
  if (span->pages > pages) {
    auto* const rest = new Span;
    rest->begin = span->begin + pages * kPage;
    rest->pages = span->pages - pages;
    rest->warm = std::min(span->warm, rest->bytes());  // nobody knows which part was touched
    span->pages = pages;
    add_free(rest);
  }
  span->use = use;
  used_ += span->bytes();
  peak_ = std::max(peak_, used_ + warm_);
  map(*span, span);
  return span;
}

void PageHeap::free(Span* span) {
  used_ -= span->bytes();
  if (span->use == Span::Use::kSlab) map(*span, nullptr);
  span->warm = span->bytes();
  const auto join = [](Span* first, Span* second) {
    first->pages += second->pages;
    first->warm += second->warm;
    delete second;
    return first;
  };
  if (Span* const after = neighbour(span->begin + span->bytes());
      after != nullptr && after->use == Span::Use::kFree) {
    remove_free(after);
    span = join(span, after);
  }
  if (Span* const before = neighbour(span->begin - 1);
      before != nullptr && before->use == Span::Use::kFree) {
    remove_free(before);
    span = join(before, span);
  }
  add_free(span);
}

Span* PageHeap::find(const void* address) const {
  return neighbour(static_cast<const std::byte*>(address));
}

std::size_t PageHeap::trim() {
  const std::vector<Span*> spans(free_.begin(), free_.end());
  std::size_t released = 0;
  for (Span* const span : spans) {
    if (span->warm == 0 || ::madvise(span->begin, span->bytes(), MADV_DONTNEED) != 0) continue;
    released += span->warm;
    warm_ -= span->warm;
    span->warm = 0;
  }
  return released;
}

// The new memory as a free span.
Span* PageHeap::extend(std::size_t bytes) {
  const std::size_t machine = machine_bytes();
  if (bytes > machine || used_ > machine - bytes) fail_memory(bytes, used_, machine);
  if (warm_ > std::max(kLeastCached, used_)) trim();
  const auto room = [&](const Range& range) {
    return static_cast<std::size_t>(range.end - range.top) >= bytes;
  };
  auto range = std::find_if(ranges_.begin(), ranges_.end(), room);
  if (range == ranges_.end()) {
    reserve(bytes);
    range = std::prev(ranges_.end());
  }
  // A run that is free up to the top grows.
  Span* span = range->top == range->begin ? nullptr : neighbour(range->top - 1);
  if (span != nullptr && span->use == Span::Use::kFree) {
    remove_free(span);
    bytes -= span->bytes();
  } else {
    span = new Span;
    span->begin = range->top;
  }
  // Whole huge pages: the next ones come out of the rest of this one.
  const auto left = static_cast<std::size_t>(range->end - range->top);
  const std::size_t growth = std::min(round_up(bytes, kHugePage), left);
  span->pages += growth / kPage;
  range->top += growth;
  add_free(span);
  return span;
}

// Addresses cost nothing: enough for all of the machine, so that runs can join.
void PageHeap::reserve(std::size_t bytes) {
  const std::size_t machine = machine_bytes();
  const std::size_t least = round_up(bytes + kPage, kHugePage);
  for (std::size_t size = 2 * machine;; size /= 2) {
    size = std::max(round_up(size, kHugePage), least);
    void* const got = ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) {
      if (size == least) fail_memory(bytes, used_, machine);
      continue;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(got);
    const std::size_t before = round_up(address, kHugePage) - address;
    auto* const begin = static_cast<std::byte*>(got) + before;
    if (before != 0) ::munmap(got, before);
    if (before != kHugePage) ::munmap(begin + size, kHugePage - before);
    ::madvise(begin, size, MADV_HUGEPAGE);  // where the kernel has none: small ones
    ranges_.push_back({begin, begin, begin + size - kPage});
    return;
  }
}

void PageHeap::add_free(Span* span) {
  span->use = Span::Use::kFree;
  map(*span, span);
  free_.insert(span);
  warm_ += span->warm;
}

void PageHeap::remove_free(Span* span) {
  free_.erase(span);
  warm_ -= span->warm;
}

Span* PageHeap::neighbour(const std::byte* address) const {
  const auto page = reinterpret_cast<std::uintptr_t>(address) >> kPageBits;
  const std::size_t top = page >> kLeafBits;
  if (top >= root_.size()) return nullptr;
  const Leaf* const leaf = root_[top].load(std::memory_order_acquire);
  if (leaf == nullptr) return nullptr;
  return (*leaf)[page % leaf->size()].load(std::memory_order_acquire);
}

// Slabs are found from any of their pages, other spans from both ends.
void PageHeap::map(const Span& span, Span* value) {
  if (span.use == Span::Use::kSlab) {
    for (std::size_t page = 0; page < span.pages; ++page) {
      set_entry(span.begin + page * kPage, value);
    }
    return;
  }
  set_entry(span.begin, value);
  set_entry(span.begin + span.bytes() - kPage, value);
}

void PageHeap::set_entry(const std::byte* address, Span* value) {
  const auto page = reinterpret_cast<std::uintptr_t>(address) >> kPageBits;
  auto& leaf = root_[page >> kLeafBits];
  if (leaf.load(std::memory_order_relaxed) == nullptr) {
    leaf.store(new Leaf{}, std::memory_order_release);
  }
  (*leaf.load(std::memory_order_relaxed))[page % std::tuple_size_v<Leaf>].store(
      value, std::memory_order_release);
}

}  // namespace convoy
