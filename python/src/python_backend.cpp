#include "python_backend.h"

#include <Python.h>

#include <algorithm>
#include <mutex>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "convoy/c10d_store.h"
#include "convoy/group.h"

namespace convoy::python {
namespace {

using Weak = c10::weak_intrusive_ptr<PythonBackend>;

struct Registry {
  std::mutex mutex;
  std::vector<Weak> backends;
};

// Never destroyed: backends may end after main.
Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

// Lets go of the interpreter's lock, where this thread has it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* const state_;
};

}  // namespace

c10::intrusive_ptr<PythonBackend> PythonBackend::create(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const c10::intrusive_ptr<Options>& options) {
  auto backend = c10::make_intrusive<PythonBackend>(store, rank, size, options);
  const std::lock_guard lock(registry().mutex);
  registry().backends.emplace_back(backend);
  return backend;
}

void PythonBackend::release_resources() {
  const WithoutGil without;
  shutdown();
  // With the list's reference gone, the object is destroyed when this returns.
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().backends,
                [this](const Weak& weak) { return weak._unsafe_get_target() == this; });
}

// The survivors make one more group, which is Python's.
c10::intrusive_ptr<PythonBackend> shrink(const c10::intrusive_ptr<c10d::Backend>& backend,
                                         const c10::intrusive_ptr<c10d::Store>& store,
                                         std::chrono::milliseconds timeout) {
  const auto old = ProcessGroup::from(backend, {.store = from_c10d(store)});
  const auto made = old.shrink({.timeout = timeout});
  auto options = c10::make_intrusive<ConvoyBackend::Options>(made.timeout());
  options->group_name = made.name();
  if (const auto* own = dynamic_cast<const ConvoyBackend*>(backend.get())) {
    options->compare_shapes = own->compares_shapes();
  }
  return PythonBackend::create(
      c10::make_intrusive<c10d::PrefixStore>("python", to_c10d(made.store())), made.rank(),
      made.size(), options);
}

void shutdown_all() {
  std::vector<c10::intrusive_ptr<PythonBackend>> alive;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& weak : registry().backends) {
      if (auto backend = weak.lock()) alive.push_back(std::move(backend));
    }
  }
  for (const auto& backend : alive) backend->shutdown();
}

}  // namespace convoy::python
