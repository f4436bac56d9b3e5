#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <stdexcept>
#include <utility>

namespace convoy::python {

inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

// A Python object that threads without the interpreter's lock may copy and drop.
inline std::shared_ptr<pybind11::object> held(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* kept) {
            // At the end of the interpreter other threads cannot have its lock any more.
            if (!PyGILState_Check() && interpreter_ends()) return;
            const pybind11::gil_scoped_acquire gil;
            delete kept;
          }};
}

// With the lock, for threads that have it or not. What Python raises becomes a std::runtime_error:
// the exception itself must not leave the lock.
template <class Function>
auto call_python(Function&& function) {
  const pybind11::gil_scoped_acquire gil;
  try {
    return std::forward<Function>(function)();
  } catch (const pybind11::error_already_set& error) {
    throw std::runtime_error(error.what());
  }
}

}  // namespace convoy::python
