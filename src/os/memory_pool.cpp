#include "os/memory_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include "base/error.h"

namespace convoy {
namespace {

constexpr std::size_t kLinear = 512;  // up to here classes are kAlignment apart
constexpr std::size_t kLinearClasses = kLinear / MemoryPool::kAlignment;
constexpr std::size_t kObjectsOfASlab = 8;  // at least

// Counters have one writer, the thread that owns them; others read. Relaxed: nothing hangs on them.
void count_one(std::atomic<std::uint64_t>& counter) {
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

}  // namespace

// Lists of free objects of one thread, which alone touches them.
class MemoryPool::ThreadCache {
 public:
  explicit ThreadCache(MemoryPool& pool) : pool_(pool) {
    const std::scoped_lock lock(pool_.caches_mutex_);
    next = pool_.caches_;
    if (next != nullptr) next->previous = this;
    pool_.caches_ = this;
  }
  ThreadCache(const ThreadCache&) = delete;
  ThreadCache& operator=(const ThreadCache&) = delete;
  ~ThreadCache() {
    flush();
    const std::scoped_lock lock(pool_.caches_mutex_);
    pool_.ended_allocations_ += allocations.load(std::memory_order_relaxed);
    pool_.ended_refills_ += refills.load(std::memory_order_relaxed);
    (previous != nullptr ? previous->next : pool_.caches_) = next;
    if (next != nullptr) next->previous = previous;
  }

  void* allocate(std::size_t size_class) {
    List& list = lists_[size_class];
    if (list.first == nullptr) {
      pool_.take(size_class, list, batch_of(size_class));
      bytes_ += list.count * class_size(size_class);
      count_one(refills);
    }
    count_one(allocations);
    bytes_ -= class_size(size_class);
    return list.pop();
  }

  void free(std::size_t size_class, void* data) {
    List& list = lists_[size_class];
    list.push(static_cast<Object*>(data));
    bytes_ += class_size(size_class);
    if (list.count > 2 * batch_of(size_class)) give(size_class, batch_of(size_class));
    if (bytes_ > kMostCached) {
      for (std::size_t each = 0; each < kClasses; ++each) give(each, (lists_[each].count + 1) / 2);
    }
  }

  void flush() {
    for (std::size_t each = 0; each < kClasses; ++each) give(each, lists_[each].count);
  }

  ThreadCache* previous = nullptr;  // with caches_mutex_
  ThreadCache* next = nullptr;
  std::atomic<std::uint64_t> allocations = 0;
  std::atomic<std::uint64_t> refills = 0;

 private:
  void give(std::size_t size_class, std::size_t count) {
    if (count == 0) return;
    bytes_ -= count * class_size(size_class);
    pool_.give(size_class, lists_[size_class], count);
  }

  MemoryPool& pool_;
  std::array<List, kClasses> lists_{};
  std::size_t bytes_ = 0;
};

void MemoryPool::List::push(Object* object) {
  object->next = first;
  first = object;
  ++count;
}

MemoryPool::Object* MemoryPool::List::pop() {
  Object* const object = first;
  first = object->next;
  --count;
  return object;
}

MemoryPool& MemoryPool::instance() {
  static MemoryPool* const pool = [] {
    auto* const made = new MemoryPool;
    // A child of fork() has one thread: whoever held a lock is not there to open it.
    pthread_atfork([] { instance().lock_all(); }, [] { instance().unlock_all(); },
                   [] { instance().unlock_all(); });
    return made;
  }();
  return *pool;
}

MemoryPool::MemoryPool() {
  static_assert(kClasses == kLinearClasses + 8 * std::bit_width(kMostSmall / kLinear - 1));
  for (std::size_t each = 0; each < kClasses; ++each) {
    // As many pages as waste least at the end, of one to two times the fewest.
    const std::size_t size = class_size(each);
    const std::size_t fewest = (kObjectsOfASlab * size + PageHeap::kPage - 1) / PageHeap::kPage;
    std::size_t best = fewest;
    for (std::size_t pages = fewest; pages <= 2 * fewest; ++pages) {
      const auto waste = [&](std::size_t p) { return p * PageHeap::kPage % size; };
      if (waste(pages) * best < waste(best) * pages) best = pages;
    }
    slab_bytes_[each] = best * PageHeap::kPage;
  }
}

std::size_t MemoryPool::class_of(std::size_t bytes) {
  if (bytes <= kLinear) return (bytes + kAlignment - 1) / kAlignment - 1;
  // 2^power < bytes <= 2^(power + 1), cut into eight.
  const auto power = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 1;
  const std::size_t eighth = std::size_t{1} << (power - 3);
  const std::size_t doubling = power - (std::bit_width(kLinear) - 1);
  return kLinearClasses + doubling * 8 + (bytes - 1 - (std::size_t{1} << power)) / eighth;
}

std::size_t MemoryPool::class_size(std::size_t size_class) {
  if (size_class < kLinearClasses) return (size_class + 1) * kAlignment;
  const std::size_t base = kLinear << ((size_class - kLinearClasses) / 8);
  return base + base / 8 * ((size_class - kLinearClasses) % 8 + 1);
}

std::size_t MemoryPool::batch_of(std::size_t size_class) {
  return std::clamp<std::size_t>((std::size_t{64} << 10) / class_size(size_class), 2, 32);
}

// nullptr while the thread ends and its cache is gone: then the slabs are used directly.
MemoryPool::ThreadCache* MemoryPool::cache() {
  enum class State : std::uint8_t { kNone, kThere, kGone };
  thread_local State state = State::kNone;
  thread_local ThreadCache* mine = nullptr;
  if (state == State::kThere) [[likely]]
    return mine;
  if (state == State::kGone) return nullptr;
  struct AtExit {
    ~AtExit() {
      state = State::kGone;
      delete mine;
    }
  };
  thread_local AtExit at_exit;
  static_cast<void>(at_exit);
  mine = new ThreadCache(*this);
  state = State::kThere;
  return mine;
}

void* MemoryPool::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  if (bytes > kMostSmall) {
    const std::scoped_lock lock(heap_mutex_);
    ++large_allocations_;
    return heap_.allocate(bytes, Span::Use::kWhole)->begin;
  }
  const std::size_t size_class = class_of(bytes);
  if (ThreadCache* const mine = cache()) return mine->allocate(size_class);
  List one;
  take(size_class, one, 1);
  return one.first;
}

void MemoryPool::free(void* data) {
  if (data == nullptr) return;
  Span* const span = heap_.find(data);
  CONVOY_CHECK(span != nullptr, "freeing memory that is not of the pool");
  if (span->use == Span::Use::kWhole) {
    const std::scoped_lock lock(heap_mutex_);
    return heap_.free(span);
  }
  if (ThreadCache* const mine = cache()) return mine->free(span->size_class, data);
  List one;
  one.push(static_cast<Object*>(data));
  give(span->size_class, one, 1);
}

bool MemoryPool::owns(const void* data) const { return heap_.find(data) != nullptr; }

std::size_t MemoryPool::size_of(const void* data) const {
  const Span* const span = heap_.find(data);
  CONVOY_CHECK(span != nullptr, "memory that is not of the pool");
  return span->use == Span::Use::kWhole ? span->bytes() : class_size(span->size_class);
}

// With the lock of the class: one more slab with free objects.
void MemoryPool::new_slab(std::size_t size_class) {
  SizeClass& mine = classes_[size_class];
  Span* slab = nullptr;
  {
    const std::scoped_lock lock(heap_mutex_);
    slab = heap_.allocate(slab_bytes_[size_class], Span::Use::kSlab);
  }
  const std::size_t size = class_size(size_class);
  List objects;
  for (std::size_t at = slab_bytes_[size_class] / size; at-- > 0;) {
    objects.push(reinterpret_cast<Object*>(slab->begin + at * size));
  }
  slab->size_class = size_class;
  slab->taken = 0;
  slab->free_objects = objects.first;
  slab->previous = nullptr;
  slab->next = mine.partial;
  if (mine.partial != nullptr) mine.partial->previous = slab;
  mine.partial = slab;
  ++mine.spare;
  mine.free_bytes += objects.count * size;
}

void MemoryPool::take(std::size_t size_class, List& into, std::size_t count) {
  SizeClass& mine = classes_[size_class];
  const std::scoped_lock lock(mutex_of(size_class));
  for (std::size_t i = 0; i < count; ++i) {
    if (mine.partial == nullptr) {
      if (i > 0) return;  // one is enough: no new slab for the rest
      new_slab(size_class);
    }
    Span* const slab = mine.partial;
    auto* const object = static_cast<Object*>(slab->free_objects);
    slab->free_objects = object->next;
    if (slab->taken++ == 0) --mine.spare;
    mine.free_bytes -= class_size(size_class);
    if (slab->free_objects == nullptr) {
      mine.partial = slab->next;
      if (mine.partial != nullptr) mine.partial->previous = nullptr;
    }
    into.push(object);
  }
}

void MemoryPool::give(std::size_t size_class, List& from, std::size_t count) {
  SizeClass& mine = classes_[size_class];
  const std::scoped_lock lock(mutex_of(size_class));
  for (; count > 0; --count) {
    Object* const object = from.pop();
    Span* const slab = heap_.find(object);
    if (slab->free_objects == nullptr) {
      slab->previous = nullptr;
      slab->next = mine.partial;
      if (mine.partial != nullptr) mine.partial->previous = slab;
      mine.partial = slab;
    }
    object->next = static_cast<Object*>(slab->free_objects);
    slab->free_objects = object;
    mine.free_bytes += class_size(size_class);
    if (--slab->taken == 0 && ++mine.spare > 1) drop_spare(slab);
  }
}

// With the lock of the class: the slab goes back to the heap.
void MemoryPool::drop_spare(Span* slab) {
  SizeClass& mine = classes_[slab->size_class];
  (slab->previous != nullptr ? slab->previous->next : mine.partial) = slab->next;
  if (slab->next != nullptr) slab->next->previous = slab->previous;
  --mine.spare;
  const std::size_t size = class_size(slab->size_class);
  mine.free_bytes -= slab_bytes_[slab->size_class] / size * size;
  const std::scoped_lock lock(heap_mutex_);
  heap_.free(slab);
}

std::size_t MemoryPool::trim() {
  if (ThreadCache* const mine = cache()) mine->flush();
  for (std::size_t each = 0; each < kClasses; ++each) {
    const std::scoped_lock lock(mutex_of(each));
    for (Span* slab = classes_[each].partial; slab != nullptr && classes_[each].spare > 0;) {
      Span* const next = slab->next;
      if (slab->taken == 0) drop_spare(slab);
      slab = next;
    }
  }
  const std::scoped_lock lock(heap_mutex_);
  return heap_.trim();
}

MemoryPool::Stats MemoryPool::stats() const {
  Stats stats;
  {
    const std::scoped_lock lock(caches_mutex_);
    stats.allocations = ended_allocations_;
    stats.refills = ended_refills_;
    for (const ThreadCache* each = caches_; each != nullptr; each = each->next) {
      stats.allocations += each->allocations.load(std::memory_order_relaxed);
      stats.refills += each->refills.load(std::memory_order_relaxed);
    }
  }
  std::size_t free_in_slabs = 0;
  for (std::size_t each = 0; each < kClasses; ++each) {
    const std::scoped_lock lock(mutex_of(each));
    free_in_slabs += classes_[each].free_bytes;
  }
  const std::scoped_lock lock(heap_mutex_);
  stats.allocations += large_allocations_;
  stats.used_bytes = heap_.used_bytes() - std::min(free_in_slabs, heap_.used_bytes());
  stats.cached_bytes = heap_.cached_bytes() + free_in_slabs;
  stats.peak_bytes = heap_.peak_bytes();
  return stats;
}

void MemoryPool::lock_all() {
  caches_mutex_.lock();
  for (std::mutex& each : class_mutexes_) each.lock();
  heap_mutex_.lock();
}

void MemoryPool::unlock_all() {
  heap_mutex_.unlock();
  for (std::mutex& each : class_mutexes_) each.unlock();
  caches_mutex_.unlock();
}

}  // namespace convoy
