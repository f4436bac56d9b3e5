// The extension convoy._C: ConvoyBackend as a class of torch.distributed.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "convoy/allocator.h"
#include "convoy/c10d_store.h"
#include "convoy/error.h"
#include "convoy/flight.h"
#include "convoy/group.h"
#include "convoy/version.h"
#include "convoy/window.h"
#include "processes.h"
#include "python_backend.h"
#include "python_ddp.h"
#include "python_reducer.h"
#include "queue.h"
#include "rpc_session.h"
#include "seconds.h"
#include "sharded_optimizer.h"
#include "share.h"
#include "torch_rpc.h"

namespace py = pybind11;

namespace convoy::python {
namespace {

using Options = ConvoyBackend::Options;

// convoy.Error with its kind. The class is Python's, so that it can have torch's as its base.
void raise_as_python(const Error& error) {
  const py::object type = py::module_::import("convoy._error").attr("Error");
  const py::object value = type(error.what(), std::string(to_string(error.kind())));
  PyErr_SetObject(type.ptr(), value.ptr());
}

// Names what is wrong, and what there is, as new_group() of C++ does.
[[noreturn]] void refuse_options(const py::kwargs& given) {
  constexpr const char* kKnown = "threads (int), read_private (bool), compare_shapes (bool)";
  std::string unknown;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "threads" || name == "read_private" || name == "compare_shapes") continue;
    unknown += (unknown.empty() ? "\"" : ", \"") + name + "\"";
  }
  if (!unknown.empty()) {
    throw py::type_error("backend \"convoy\" has no option " + unknown + "; it has: " + kKnown);
  }
  throw py::type_error(std::string("options of backend \"convoy\" are given by name: ") + kKnown +
                       "; got " + py::repr(given).cast<std::string>());
}

c10::intrusive_ptr<c10d::Store> rank_store() {
  auto store = launcher_store();
  return store ? to_c10d(std::move(store)) : nullptr;
}

py::dict stats_as_dict() {
  const auto stats = allocator_stats();
  using namespace pybind11::literals;
  return py::dict("used_bytes"_a = stats.used_bytes, "cached_bytes"_a = stats.cached_bytes,
                  "peak_bytes"_a = stats.peak_bytes, "allocations"_a = stats.allocations,
                  "refills"_a = stats.refills);
}

void bind_window(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<Window>(module, "Window")
      .def("rank", &Window::rank)
      .def("size", &Window::size)
      .def("at", &Window::at, py::arg("rank"))
      .def("put", &Window::put, py::arg("rank"), py::arg("tensor"), py::arg("offset") = 0, unlocked)
      .def(
          "fence", [](const Window& self) { self.fence(); }, unlocked)
      .def("signal", &Window::signal, py::arg("rank"))
      .def(
          "wait_signal",
          [](const Window& self, int rank, double timeout) {
            self.wait_signal(rank, deadline_of(timeout));
          },
          py::arg("rank"), py::arg("timeout") = 300.0, unlocked);
  module.def(
      "window",
      [](const c10::intrusive_ptr<c10d::Backend>& backend, const at::Tensor& tensor) {
        return ProcessGroup::from(backend).window(tensor);
      },
      py::arg("backend"), py::arg("tensor"), unlocked);
}

}  // namespace
}  // namespace convoy::python

PYBIND11_MODULE(_C, module) {
  using namespace convoy::python;
  py::module_::import("torch.distributed.rpc");  // the base classes

  // Not only for this module: torch's own functions throw our errors.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): it wants a function of this type
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const convoy::Error& error) {
      raise_as_python(error);
    }
  });

  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(module, "Options")
      .def(py::init([](int threads, bool read_private, std::optional<bool> compare_shapes) {
             auto options = c10::make_intrusive<Options>();
             options->threads = threads;
             options->read_private = read_private;
             if (compare_shapes) options->compare_shapes = *compare_shapes;
             return options;
           }),
           py::kw_only(), py::arg("threads") = 1, py::arg("read_private") = true,
           py::arg("compare_shapes") = py::none())
      // What does not fit comes here.
      .def(py::init([](const py::args&, const py::kwargs& given) -> c10::intrusive_ptr<Options> {
        refuse_options(given);
      }))
      .def_readwrite("threads", &Options::threads)
      .def_readwrite("read_private", &Options::read_private)
      .def_readwrite("compare_shapes", &Options::compare_shapes)
      .def("__copy__", [](const Options& self) { return c10::make_intrusive<Options>(self); });

  py::class_<PythonBackend, c10d::Backend, c10::intrusive_ptr<PythonBackend>>(module,
                                                                              "ConvoyBackend")
      .def(py::init(&PythonBackend::create), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("options") = c10::make_intrusive<Options>(),
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("options", &PythonBackend::getBackendOptions);

  module.def("shrink", &shrink, py::arg("backend"), py::arg("store"), py::arg("timeout"),
             py::call_guard<py::gil_scoped_release>());
  module.def("launcher_store", &rank_store, py::call_guard<py::gil_scoped_release>());
  add_reducer(module);
  add_ddp(module);
  add_sharded_optimizer(module);
  module.def("install_allocator", &convoy::install_allocator);
  module.def("install_allocator_if_asked", &convoy::install_allocator_if_asked);
  module.def("uninstall_allocator", &convoy::uninstall_allocator);
  module.def("is_allocator_installed", &convoy::is_allocator_installed);
  module.def("allocator_stats", &stats_as_dict);
  module.def("trim_allocator", &convoy::trim_allocator, py::call_guard<py::gil_scoped_release>());
  module.def("shutdown_all", &shutdown_all, py::call_guard<py::gil_scoped_release>());
  bind_window(module);
  module.def("flight_record", &convoy::flight_record, py::call_guard<py::gil_scoped_release>());
  module.def("write_flight_record", &convoy::write_flight_record, py::arg("folder"),
             py::call_guard<py::gil_scoped_release>());
  bind_queue(module);
  bind_share(module);
  bind_processes(module);
  bind_torch_rpc(module);
  bind_rpc(module);
  module.attr("__version__") = convoy::version();
}
