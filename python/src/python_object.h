#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <stdexcept>
#include <utility>

namespace convoy::python {

// A Python object that threads without the interpreter's lock may copy and drop.
inline std::shared_ptr<pybind11::object> held(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* kept) {
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
