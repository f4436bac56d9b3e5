#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "os/page_heap.h"

namespace convoy {

// Private memory of this process for buffers that come and go: what is freed stays warm and is
// handed out again. Sizes up to kMostSmall come in classes an eighth apart (at most an eighth is
// wasted, above the 64 bytes that all are aligned to) from slabs, through a cache of every thread;
// larger ones are runs of pages. Thread-safe. In a forked child it goes on with the child's copy.
class MemoryPool {
 public:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kMostSmall = std::size_t{128} << 10;
  // What a thread's cache keeps at most.
  static constexpr std::size_t kMostCached = std::size_t{2} << 20;

  // The pool of the process; never destroyed: buffers may be freed after everything else.
  static MemoryPool& instance();

  // Aligned to kAlignment, not cleared; of 0 bytes: nullptr. Throws kResource.
  void* allocate(std::size_t bytes);
  // Of any thread; nullptr is nothing. What is not from here is a CONVOY_CHECK failure.
  void free(void* data);
  bool owns(const void* data) const;
  // What was really set aside for a buffer.
  std::size_t size_of(const void* data) const;

  // Gives what is free to the system, the calling thread's cache included; returns the bytes.
  std::size_t trim();

  struct Stats {
    std::size_t used_bytes = 0;    // in buffers, and in caches of threads
    std::size_t cached_bytes = 0;  // free, with memory behind it
    std::size_t peak_bytes = 0;    // most that both were together
    std::uint64_t allocations = 0;
    std::uint64_t refills = 0;  // of threads' caches: small allocations that took a lock
  };
  Stats stats() const;

 private:
  static constexpr std::size_t kClasses = 72;

  struct Object {
    Object* next;
  };
  struct List {
    Object* first = nullptr;
    std::size_t count = 0;
    void push(Object* object);
    Object* pop();
  };
  struct SizeClass {
    Span* partial = nullptr;  // slabs with free objects
    std::size_t spare = 0;    // of them: those with nothing else; one is kept
    std::size_t free_bytes = 0;
  };
  class ThreadCache;

  MemoryPool();

  static std::size_t class_of(std::size_t bytes);
  static std::size_t class_size(std::size_t size_class);
  // Objects that move between a thread's cache and the slabs at once.
  static std::size_t batch_of(std::size_t size_class);

  ThreadCache* cache();
  void take(std::size_t size_class, List& into, std::size_t count);
  void give(std::size_t size_class, List& from, std::size_t count);
  void new_slab(std::size_t size_class);
  void drop_spare(Span* slab);
  std::mutex& mutex_of(std::size_t size_class) const {
    return class_mutexes_[size_class % class_mutexes_.size()];
  }
  void lock_all();
  void unlock_all();

  std::array<std::size_t, kClasses> slab_bytes_{};
  // Of class c: number c % 16. Few enough for a fork to hold them all.
  mutable std::array<std::mutex, 16> class_mutexes_;
  std::array<SizeClass, kClasses> classes_;
  mutable std::mutex heap_mutex_;  // after a class's
  PageHeap heap_;
  mutable std::mutex caches_mutex_;  // first of all
  ThreadCache* caches_ = nullptr;
  std::uint64_t large_allocations_ = 0;  // with heap_mutex_
  std::uint64_t ended_allocations_ = 0;  // of threads that ended, with caches_mutex_
  std::uint64_t ended_refills_ = 0;
};

}  // namespace convoy
