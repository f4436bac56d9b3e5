#pragma once

#include <chrono>

#include "convoy/backend.h"

namespace convoy::python {

// ConvoyBackend as Python holds it. Its end waits for a thread that may be in a Python callback, so
// it lets go of the interpreter's lock first, whoever drops the last reference: a Python object, a
// ProcessGroup or DDP's reducer.
class PythonBackend final : public ConvoyBackend {
 public:
  using ConvoyBackend::ConvoyBackend;

  // Collective; the caller does not hold the interpreter's lock.
  static c10::intrusive_ptr<PythonBackend> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  const c10::intrusive_ptr<Options>& options);

  // The last reference is gone. Called because the list of all backends holds a weak one.
  void release_resources() override;

 protected:
  c10::intrusive_ptr<c10d::Backend> make(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      const c10::intrusive_ptr<Options>& options) const override {
    return create(store, rank, size, options);
  }
};

// After deaths: the group of those who live, which all of them call. Collective among them; see
// ProcessGroup::shrink(). The caller does not hold the interpreter's lock.
c10::intrusive_ptr<PythonBackend> shrink(const c10::intrusive_ptr<c10d::Backend>& backend,
                                         const c10::intrusive_ptr<c10d::Store>& store,
                                         std::chrono::milliseconds timeout);

// Ends all backends of the process: what is pending fails, their threads are joined. For the exit
// of the interpreter, after which a callback could no longer run.
void shutdown_all();

}  // namespace convoy::python
