#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace convoy {

// Memory of tensors that are to be shared before anybody knows which ones they are: while a thread
// is inside, the step allocator takes buffers of certain sizes from shared memory. A backward makes
// its gradients so, and temporaries of the same sizes, too, which are none the worse for it.
class SharedBirths {
 public:
  // Buffers of these many bytes.
  explicit SharedBirths(std::vector<std::size_t> sizes);
  ~SharedBirths() { leave(); }
  SharedBirths(const SharedBirths&) = delete;
  SharedBirths& operator=(const SharedBirths&) = delete;

  // From now on on this thread, until leave() on any thread. Nested ones: the last counts.
  void enter();
  void leave() noexcept;

  // --- of the allocator ---
  // nullptr: this thread is not inside, the size is another, there is no more shared memory, or the
  // process was forked off: such a child has private memory only.
  static void* allocate(std::size_t bytes);
  // False: it is not from here.
  static bool free(void* data) noexcept;

 private:
  struct Visit;

  const std::vector<std::size_t> sizes_;  // sorted
  std::shared_ptr<Visit> visit_;          // none: nobody is inside
};

}  // namespace convoy
